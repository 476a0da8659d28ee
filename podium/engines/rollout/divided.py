"""Tensor parallel generation: from a model to the part of it that one of several ranks generates with.

The rules are those of training (`engines/train/tensor_parallel.py`): queries, keys, values, gate and up are cut by columns, the
products after them by rows; embedding, norms and the LM head are whole. Every rank computes all logits from the same
hidden states. With a divided head they would have to be gathered, which for a large batch takes longer than reading the rest
of the head (by arithmetic: 256 rows of a 152k vocabulary in bf16 are 78 MB to send; half of a 7B's head is 545 MB to read).
"""

from __future__ import annotations

import copy
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from podium.core.errors import ModelError
from podium.core.ranks import Ranks
from podium.engines.layout import ModelParallel
from podium.engines.train.tensor_parallel import PER_HEAD, check_divides, cuts_of, decoder_layers, split_of
from podium.models.adapters import adapter_layers
from podium.models.divided import SummedLinear, TensorRanks
from podium.models.lm_head import base_of

WHERE = "resource_pool.rollout.parallel"


class DividedModel:
    """What a rank's part of a model is made from: the module without its numbers, and the shapes of all tensors.

    Args:
        model: a whole `transformers` causal LM (it may be on the meta device), before an engine cuts it.
        size: ranks that share one copy.

    Raises:
        ConfigError: heads or widths do not divide by `size`.
        ModelError: the model has an adapter, is quantised, or has layers of unknown names.
    """

    def __init__(self, model: Any, size: int) -> None:
        self.size = size
        _check(model, size)
        self.module = without_numbers(model)
        self.tied = _tied(model)
        self.shapes = {name: (tuple(p.shape), p.dtype) for name, p in model.named_parameters()}
        self._narrow()

    def _narrow(self) -> None:
        """The module as each rank has it; each has as many heads as any other."""
        if self.size == 1:
            return
        config = self.module.config.get_text_config()
        config.head_dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
        config.num_key_value_heads = getattr(config, "num_key_value_heads", None) or config.num_attention_heads
        for field in ("num_attention_heads", "num_key_value_heads", "intermediate_size"):
            setattr(config, field, getattr(config, field) // self.size)

    def join(self, ranks: TensorRanks, tensors: Mapping[str, Tensor]) -> Any:
        """The module over these tensors: this rank's part of each, by the names of `shapes`. They are not copied."""
        module = self.module
        for layer in decoder_layers(base_of(module)) if self.size > 1 else ():  # type: ignore[union-attr]
            for name, cut in cuts_of(layer).items():
                linear: Any = layer.get_submodule(name)
                if cut == "rows":
                    summed = SummedLinear(linear.in_features // self.size, linear.out_features, linear.bias is not None, ranks)
                    layer.set_submodule(name, summed.train(linear.training))
                else:
                    linear.out_features //= self.size
        for name, tensor in tensors.items():
            parameter = nn.Parameter(tensor, requires_grad=False)
            for same in self.tied[name]:
                place, _, last = same.rpartition(".")
                setattr(module.get_submodule(place), last, parameter)
        return module


def can_be_laid_out(model: Any) -> bool:
    """Whether a model can have a generation side apart from the module that trains (see `DividedModel`, of any size)."""
    plain = isinstance(model, PreTrainedModel) and not adapter_layers(model)
    return plain and all(p.is_floating_point() for p in model.parameters())


def tensor_layout(shapes: Mapping[str, tuple[tuple[int, ...], torch.dtype]], size: int, copies: int) -> Any:
    """Where each part is, with consecutive ranks for each of `copies` copies."""
    return ModelParallel(tensor=size, data=copies).layout(shapes, split_of)


def without_numbers(model: nn.Module) -> Any:
    """A copy of a module with its parameters on the meta device, and a config of its own; buffers are there."""
    with torch.no_grad():
        memo: dict[int, Any] = {id(p): nn.Parameter(p.detach().to("meta"), requires_grad=False) for p in model.parameters()}
    return copy.deepcopy(model, memo)


def _check(model: Any, size: int) -> None:
    check_divides(model.config, Ranks(tensor=size), WHERE)
    if adapter_layers(model):
        raise ModelError(
            "a model with a LoRA adapter is not cut by tensor parallelism",
            where=f"{WHERE}.tensor",
            remedy="leave resource_pool.rollout out: each rank generates from whole weights",
        )
    if size == 1:
        return
    layers = decoder_layers(base_of(model))
    if layers is None:
        raise ModelError(f"{type(model).__name__} has no list of layers that could be cut", where=f"{WHERE}.tensor")
    config = model.config.get_text_config()
    width = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    for layer in layers:
        cuts_of(layer, f"{WHERE}.tensor")
        for name, parameter in layer.named_parameters():
            if name.split(".")[-2] in PER_HEAD and parameter.numel() != width:
                raise ModelError(f"'{name}' normalises all heads together, which are on several ranks", where=f"{WHERE}.tensor")
    odd = next((name for name, p in model.named_parameters() if not p.is_floating_point()), None)
    if odd is not None:
        raise ModelError(f"'{odd}' is quantised, and quantised weights are not cut", where=f"{WHERE}.tensor")


def _tied(model: nn.Module) -> dict[str, list[str]]:
    """Every name of a parameter, by its first one."""
    first: dict[int, str] = {}
    names: dict[str, list[str]] = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        names.setdefault(first.setdefault(id(parameter), name), []).append(name)
    return names
