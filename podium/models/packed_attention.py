"""Attention over sequences packed end to end in one row, for training and scoring.

On CUDA in 16 bits this is one variable-length kernel. Elsewhere (a CPU, fp32, soft-capped scores) the sequences are put
into buckets of like length, each bucket padded to its longest, and each bucket is one call. No `[N, N]` mask exists.
"""

from __future__ import annotations

import inspect
from dataclasses import dataclass, field
from functools import cache
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from podium.core.errors import ModelError

# A bucket takes sequences down to this share of its longest: the work on padding, quadratic in the length, stays under 2x.
_SHORTEST_SHARE = 0.71
# Below so many tokens one more call costs more than the padding.
_FREE_PADDING = 16


@dataclass(frozen=True)
class _Buckets:
    """Where each token of the row goes: all buckets, padded and laid one after another, are P places.

    `places [P]`: the row's token at each place (padding repeats its sequence's last token: under a causal mask no real
    query sees it); `back [N]`: the place of each token; `shapes`: (sequences, padded length) of each bucket.
    """

    places: Tensor
    back: Tensor
    shapes: list[tuple[int, int]]

    @property
    def is_row(self) -> bool:
        """All sequences have one length: the row is the one bucket as it stands."""
        return len(self.shapes) == 1 and len(self.places) == len(self.back)

    def to(self, device: torch.device) -> _Buckets:
        return _Buckets(self.places.to(device), self.back.to(device), self.shapes)


def make_buckets(lengths: Tensor) -> _Buckets:
    """Sorts sequences of the given `lengths [S]` (all positive, on the CPU) into buckets of like length."""
    ends = torch.cumsum(lengths, 0)
    total = int(ends[-1])
    ordered, order = torch.sort(lengths, descending=True, stable=True)
    sizes = ordered.tolist()
    shapes: list[tuple[int, int]] = []
    places, back = [], torch.empty(total, dtype=torch.int64)
    first, base = 0, 0
    while first < len(sizes):
        longest = sizes[first]
        least = min(_SHORTEST_SHARE * longest, longest - _FREE_PADDING)
        count = sum(size >= least for size in sizes[first:])
        rows = order[first : first + count]
        within = torch.arange(longest)
        last = (lengths[rows] - 1)[:, None]
        places.append(((ends - lengths)[rows][:, None] + torch.minimum(within, last)).flatten())
        real = (within <= last).flatten()
        back[places[-1][real]] = base + real.nonzero()[:, 0]
        shapes.append((count, longest))
        first, base = first + count, base + count * longest
    return _Buckets(torch.cat(places), back, shapes)


class _ToBuckets(torch.autograd.Function):
    """`x[places]`. Padding gets no gradient, so the backward pass is a gather too (a scatter-add is many times slower)."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, places: Tensor, back: Tensor) -> Tensor:
        ctx.save_for_backward(back)
        return x.index_select(0, places)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        (back,) = ctx.saved_tensors
        return grad.index_select(0, back), None, None


class _FromBuckets(torch.autograd.Function):
    """`x[back]`; every place is read at most once, so its gradient is a copy."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, back: Tensor) -> Tensor:
        ctx.save_for_backward(back)
        ctx.places = x.shape[0]
        return x.index_select(0, back)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        (back,) = ctx.saved_tensors
        return grad.new_zeros(ctx.places, *grad.shape[1:]).index_copy_(0, back, grad), None


@dataclass
class PackedAttention:
    """`AttentionContext` of one row `[1, N]` that holds sequences of `lengths [S]`, each causal within itself.

    Make one for each forward pass: what depends on the lengths alone is computed once, for all layers. `calls` counts the
    layers that came, so that a model which never asked can be told from one that did.
    """

    lengths: Tensor
    calls: int = 0
    _kept: dict[Any, Any] = field(default_factory=dict, repr=False)

    def __post_init__(self) -> None:
        self.lengths = self.lengths.to("cpu", torch.int64)

    def attend(
        self,
        module: nn.Module,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        *,
        scaling: float,
        sliding_window: int | None = None,
        softcap: float | None = None,
    ) -> Tensor:
        """See `AttentionContext`: query `[1, H, N, D]`, key and value `[1, K, N, D]` -> `[1, N, H, D]`."""
        if getattr(module, "is_causal", True) is False:
            raise ModelError(
                f"{type(module).__name__} is not causal: each token sees those after it",
                remedy="use a causal language model",
            )
        self.calls += 1
        if sliding_window is not None and sliding_window >= int(self.lengths.max()):
            sliding_window = None
        sixteen_bits = query.dtype in (torch.bfloat16, torch.float16)
        if query.is_cuda and sixteen_bits and softcap is None and query.shape[-1] == value.shape[-1] <= 256:
            return self._variable_length(query, key, value, scaling, sliding_window)
        return self._bucketed(query, key, value, scaling, sliding_window, softcap)

    # ------------------------------------------------------------------ one kernel (CUDA, 16 bits)

    def _variable_length(self, query: Tensor, key: Tensor, value: Tensor, scaling: float, window: int | None) -> Tensor:
        from torch.nn.attention.varlen import varlen_attn

        starts, longest = self._keep("starts", lambda: self._starts(query.device))
        # (left, 0) is causal with `left` tokens before one's own; -1 is no limit.
        left = -1 if window is None else window - 1
        q, k, v = (x[0].transpose(0, 1) for x in (query, key, value))
        out = varlen_attn(q, k, v, starts, starts, longest, longest, scale=scaling, window_size=(left, 0), **_grouped(q, k))
        assert isinstance(out, Tensor)
        return out[None]

    def _starts(self, device: torch.device) -> tuple[Tensor, int]:
        starts = torch.zeros(len(self.lengths) + 1, dtype=torch.int32)
        torch.cumsum(self.lengths, 0, out=starts[1:])
        return starts.to(device), int(self.lengths.max())

    # ------------------------------------------------------------------ buckets (anywhere)

    def _bucketed(
        self, query: Tensor, key: Tensor, value: Tensor, scaling: float, window: int | None, softcap: float | None
    ) -> Tensor:
        buckets: _Buckets = self._keep(query.device, lambda: make_buckets(self.lengths).to(query.device))

        def one(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            if softcap is not None:
                return _softcapped(q, k, v, self._mask(q, window), scaling, softcap)
            mask = None if window is None or window >= q.shape[2] else self._mask(q, window)
            # A CPU shares key/value heads within the kernel; CUDA's fp32 kernel wants them copied, else it keeps [T, T] scores.
            if q.is_cuda and q.shape[1] != k.shape[1]:
                k, v = (x.repeat_interleave(q.shape[1] // x.shape[1], 1) for x in (k, v))
            return F.scaled_dot_product_attention(
                q, k, v, attn_mask=mask, is_causal=mask is None, scale=scaling, enable_gqa=q.shape[1] != k.shape[1]
            )

        if buckets.is_row:
            out = one(*(x[0].unflatten(1, buckets.shapes[0]).transpose(0, 1) for x in (query, key, value)))
            return out.transpose(1, 2).flatten(0, 1)[None]
        q, k, v = (_ToBuckets.apply(x[0].transpose(0, 1), buckets.places, buckets.back) for x in (query, key, value))
        parts, at = [], 0
        for shape in buckets.shapes:
            end = at + shape[0] * shape[1]
            part = one(*(x[at:end].unflatten(0, shape).transpose(1, 2) for x in (q, k, v)))
            parts.append(part.transpose(1, 2).flatten(0, 1))
            at = end
        return _FromBuckets.apply(torch.cat(parts), buckets.back)[None]

    def _mask(self, query: Tensor, window: int | None) -> Tensor:
        """Bool `[T, T]`: query i sees keys j with i - window < j <= i."""
        length = query.shape[2]

        def make() -> Tensor:
            seen = torch.ones(length, length, dtype=torch.bool, device=query.device).tril()
            return seen if window is None else seen.triu(1 - window)

        return self._keep((query.device, length, window), make)

    def _keep(self, key: Any, make: Any) -> Any:
        if key not in self._kept:
            self._kept[key] = make()
        return self._kept[key]


def _softcapped(query: Tensor, key: Tensor, value: Tensor, mask: Tensor, scaling: float, softcap: float) -> Tensor:
    """Attention whose scores pass `softcap * tanh(scores / softcap)` (Gemma 2): `[s, H, T, D]`, K key/value heads."""
    grouped = query.unflatten(1, (key.shape[1], -1))
    scores = grouped @ (key * (scaling / softcap)).unsqueeze(2).transpose(-1, -2)
    scores = (scores.tanh() * softcap).masked_fill(~mask, float("-inf"))
    weights = scores.softmax(-1, dtype=torch.float32).to(value.dtype)
    return (weights @ value.unsqueeze(2)).flatten(1, 2)


@cache
def _has_grouped_flag() -> bool:
    """torch 2.11's kernel shares key/value heads unasked; later ones want to be told."""
    from torch.nn.attention.varlen import varlen_attn

    return "enable_gqa" in inspect.signature(varlen_attn).parameters


def _grouped(query: Tensor, key: Tensor) -> dict[str, Any]:
    return {"enable_gqa": True} if query.shape[1] != key.shape[1] and _has_grouped_flag() else {}
