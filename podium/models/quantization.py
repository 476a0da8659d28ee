"""Frozen bases in 4 or 8 bits (QLoRA: Dettmers et al. 2023, arXiv:2305.14314), by bitsandbytes."""

from __future__ import annotations

import importlib.util
import logging
from typing import Any

import torch
from torch import Tensor, nn

from podium.core.errors import ConfigError, did_you_mean

KINDS = ("none", "4bit", "8bit")


def quantized_loading(kind: str, dtype: torch.dtype, device: str | torch.device) -> dict[str, Any]:
    """What `from_pretrained` takes to keep the weights of linear layers (the LM head excepted) in so many bits.

    `4bit`: NF4 with doubly quantised scales, products in `dtype`. `8bit`: LLM.int8 with the scale of each row of the input
    and no outlier columns: which columns those are depends on the other tokens of the batch, and a token's numbers would too.

    Raises ConfigError for an unknown kind, or without bitsandbytes.
    """
    if kind not in KINDS:
        raise ConfigError(f"unknown quantization '{kind}'", where="model.quantization", remedy=did_you_mean(kind, KINDS))
    if kind == "none":
        return {}
    if importlib.util.find_spec("bitsandbytes") is None:
        raise ConfigError(
            f"quantization={kind} needs the package bitsandbytes",
            where="model.quantization",
            remedy="pip install 'podium[lora]'",
        )
    from transformers import BitsAndBytesConfig

    if kind == "4bit":
        how = BitsAndBytesConfig(
            load_in_4bit=True,
            bnb_4bit_quant_type="nf4",
            bnb_4bit_use_double_quant=True,
            bnb_4bit_compute_dtype=dtype,
        )
    else:
        # It says of every product that its inputs are rounded to 16 bits.
        logging.getLogger("bitsandbytes.autograd._functions").setLevel(logging.ERROR)
        how = BitsAndBytesConfig(load_in_8bit=True, llm_int8_threshold=0.0)
    return {"quantization_config": how, "device_map": {"": str(device)}}


def is_quantised(module: nn.Module) -> bool:
    """Whether it is one of bitsandbytes' layers."""
    return type(module).__module__.startswith("bitsandbytes")


def keep_format(model: nn.Module) -> None:
    """Keeps 4-bit weights in the form they were made in.

    Where a CPU has AVX512-BF16, bitsandbytes rewrites a weight in place at the first pass in evaluation mode, for a kernel that
    computes in bf16 and has no gradient: a training pass after that would give the adapters below it none.
    """
    for module in model.modules():
        if hasattr(module, "support_avx512bf16_for_cpu"):
            module.support_avx512bf16_for_cpu = False  # type: ignore[assignment]


@torch.no_grad()
def dequantised(layer: Any) -> Tensor:
    """A layer's weight as floating-point numbers, whatever form it is kept in; of a quantised layer `[out, in]`."""
    if not is_quantised(layer):
        return layer.weight.detach()
    if hasattr(layer.weight, "quant_state"):
        from bitsandbytes.functional import dequantize_4bit

        return dequantize_4bit(layer.weight.data, layer.weight.quant_state)
    # The first pass moves the scales (the largest number of each row) from the weight to the layer.
    scale = layer.weight.SCB if layer.weight.SCB is not None else layer.state.SCB
    return layer.weight.data.float() * (scale.float() / 127)[:, None]
