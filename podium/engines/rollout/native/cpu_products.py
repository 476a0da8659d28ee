"""Products of few rows with large weights on a CPU, as generation has them.

`PackedProducts`: oneDNN multiplies numbers that lie in blocks. Given a matrix as it is, its kernels (or MKL's) bring each
weight into that order at every call, which takes as long as multiplying 16 rows by it. Here a weight is packed once for each
version of it. One core with AVX512-BF16, `[16, 576] x [576, 1536]`: bf16 0.35 -> 0.21 ms, fp32 0.60 -> 0.36 ms.

`WideProducts`: a CPU that has no unit for 16-bit numbers multiplies them at a quarter of its fp32 rate or less. Here a few
rows of the weight at a time are widened into a buffer that stays in the core's cache, and multiplied in fp32; the result is
rounded to 16 bits once, as the 16-bit product's is. One core with AVX-512 and without AVX512-BF16,
`[64, 576] x [576, 1536]`: 3.9 -> 1.2 ms.
"""

from __future__ import annotations

import platform
from collections.abc import Callable
from functools import cache
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

# Fewer rows than this are not worth widening a weight.
_LEAST_ROWS = 4
# A smaller weight is not packed. A model with fewer parameters gains nothing: looking at each call takes as long.
_LEAST_WEIGHT, _LEAST_PARAMETERS = 1 << 16, 1 << 23
# Rows that a weight is packed for; the order is the same for all but a handful.
_PACKED_FOR = 16
# Numbers in the buffer of `WideProducts`: 1 MiB.
_BUFFER = 1 << 18
_KINDS = (torch.bfloat16, torch.float16)


def without_unit(dtype: torch.dtype) -> bool:
    """Whether this CPU is known to multiply numbers of this kind in software."""
    if dtype not in _KINDS or platform.machine() not in ("x86_64", "AMD64"):
        return False
    if dtype == torch.float16:
        return not torch.cpu._is_amx_fp16_supported()
    return not (torch.cpu._is_avx512_bf16_supported() or torch.cpu._is_amx_tile_supported())


@cache
def can_pack(dtype: torch.dtype) -> bool:
    """Whether oneDNN is there and gives the right product of packed weights of this kind."""
    if dtype not in (torch.float32, torch.bfloat16) or not torch.backends.mkldnn.is_available():
        return False
    x, weight = torch.ones(_LEAST_ROWS, 64, dtype=dtype), torch.arange(64.0).repeat(64, 1).tril().to(dtype)
    try:
        got = _product(x, torch.ops.mkldnn._reorder_linear_weight(weight, _PACKED_FOR), None)
    except (AttributeError, NotImplementedError, RuntimeError):  # another torch, or one built without it
        return False
    return torch.equal(got, F.linear(x, weight))


def products_for(model: nn.Module) -> Products:
    """The quickest linear layers for generation with this model on its device; on a GPU they are as they are."""
    parameter = next(model.parameters())
    if parameter.device.type != "cpu" or sum(p.numel() for p in model.parameters()) < _LEAST_PARAMETERS:
        return Products()
    if without_unit(parameter.dtype):
        return WideProducts()
    return PackedProducts(model) if can_pack(parameter.dtype) else Products()


class Products:
    """A context in which linear layers run; this one changes nothing. It can be entered again."""

    def __enter__(self) -> Any:
        return self

    def __exit__(self, *error: Any) -> None:
        return None

    def clear(self) -> None:
        """Gives its memory back."""

    @property
    def bytes(self) -> int:
        """Memory held, in bytes."""
        return 0


class PackedProducts(TorchFunctionMode, Products):
    """While it is on, linear layers multiply by packed weights: as much memory again, until `clear`. Without gradients.

    A weight is packed when it is first met. When a parameter of the model was changed or moved since (version counters and
    addresses tell), all are packed again.
    """

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self._parameters = list(model.parameters())
        self._mark: list[tuple[int, int]] = []
        self._memory: set[int] = set()
        # The weight stands beside what was made of it, so that no other object gets its id.
        self._packed: dict[int, tuple[Tensor, Tensor]] = {}

    def __enter__(self) -> Any:
        mark = [(p._version, p.data_ptr()) for p in self._parameters]
        if mark != self._mark:
            self._packed.clear()
            self._mark, self._memory = mark, {p.untyped_storage().data_ptr() for p in self._parameters}
        return super().__enter__()

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if func is F.linear and not kwargs:
            x, weight, *bias = args
            packed = self._pack(weight) if weight.dtype == x.dtype else None
            if packed is not None:
                return _product(x, packed, bias[0] if bias else None)
        return func(*args, **(kwargs or {}))

    def _pack(self, weight: Tensor) -> Tensor | None:
        """The weight packed; None for one that is too small, or is not the model's own (made anew from 4 bits, say)."""
        known = self._packed.get(id(weight))
        if known is not None:
            return known[1]
        if weight.numel() < _LEAST_WEIGHT or type(weight) not in (Tensor, nn.Parameter):
            return None
        if weight.untyped_storage().data_ptr() not in self._memory:
            return None
        packed: Tensor = torch.ops.mkldnn._reorder_linear_weight(weight.detach(), _PACKED_FOR)
        self._packed[id(weight)] = (weight, packed)
        return packed

    def clear(self) -> None:
        self._packed.clear()

    @property
    def bytes(self) -> int:
        return sum(weight.numel() * weight.element_size() for weight, _ in self._packed.values())


def _product(x: Tensor, packed: Tensor, bias: Tensor | None) -> Tensor:
    return torch.ops.mkldnn._linear_pointwise(x, packed, bias, "none", [], "")  # type: ignore[no-any-return]


class WideProducts(TorchFunctionMode, Products):
    """While it is on, linear layers of 16-bit CPU weights multiply by way of fp32. Without gradients."""

    def __init__(self) -> None:
        super().__init__()
        self._buffer = torch.empty(_BUFFER)

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if func is F.linear and not kwargs and _widens(*args[:2]):
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


def _widens(x: Tensor, weight: Tensor) -> bool:
    return weight.dtype in _KINDS and weight.dim() == 2 and x.numel() >= _LEAST_ROWS * weight.shape[1]
