"""Attention over sequences packed end to end in one row, for training and scoring; a shared prompt is there once.

On CUDA in 16 bits this is one variable-length kernel. Elsewhere (a CPU, fp32, soft-capped scores) the runs are put into
buckets of like length, each bucket padded to its longest, and each bucket is one call. No `[N, N]` mask exists.
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
from podium.models import cudnn_attention
from podium.models.shared_attention import SharedPromptAttention, make_layout

# A bucket takes sequences down to this share of its longest: the work on padding, quadratic in the length, stays under 2x.
_SHORTEST_SHARE = 0.71
# Below so many tokens one more call costs more than the padding.
_FREE_PADDING = 16


@dataclass(frozen=True)
class _Bucket:
    """`rows` runs padded to `longest` tokens, each after a prompt of its own choice among `prompts`, padded to `before`.

    `prompt_of_row [rows]` says which; `before_lengths [rows]` how long it really is. `before` 0: nothing comes before.
    """

    rows: int
    longest: int
    before: int
    prompts: int
    prompt_of_row: Tensor
    before_lengths: Tensor

    @property
    def ragged_before(self) -> bool:
        return self.before > 0 and int(self.before_lengths.min()) < self.before


@dataclass(frozen=True)
class _Buckets:
    """Where each token of the row goes: all buckets, padded and laid one after another, are P places.

    `places [P]`: the row's token at each place (padding repeats its run's last token: under a causal mask no real query
    sees it); `back [N]`: the place of each token; `before_places [Q]`: the same for the prompts of each bucket, once each
    (padding is masked).
    """

    places: Tensor
    back: Tensor
    before_places: Tensor
    buckets: list[_Bucket]

    @property
    def shapes(self) -> list[tuple[int, int]]:
        """(rows, padded length) of each bucket."""
        return [(bucket.rows, bucket.longest) for bucket in self.buckets]

    @property
    def is_row(self) -> bool:
        """All sequences have one length and nothing is shared: the row is the one bucket as it stands."""
        return len(self.buckets) == 1 and not len(self.before_places) and len(self.places) == len(self.back)

    def to(self, device: torch.device) -> _Buckets:
        return _Buckets(self.places.to(device), self.back.to(device), self.before_places.to(device), self.buckets)


def make_buckets(lengths: Tensor, parents: Tensor | None = None) -> _Buckets:
    """Sorts runs of the given `lengths [R]` (all positive, on the CPU) into buckets of like length.

    Runs that go on from others (`parents [R]`, -1 for none) are also sorted by the length of what they go on from.
    """
    parents = torch.full_like(lengths, -1) if parents is None else parents
    before = torch.where(parents < 0, 0, lengths[parents.clamp(min=0)])
    starts = torch.cumsum(lengths, 0) - lengths
    buckets: list[_Bucket] = []
    places, before_places, back = [], [], torch.empty(int(lengths.sum()), dtype=torch.int64)
    base = 0
    for alike in classes_of_like_size(before, torch.arange(len(lengths))):
        for rows in classes_of_like_size(lengths, alike):
            longest, reach = int(lengths[rows[0]]), int(before[rows].max())
            places.append(_padded(starts[rows], lengths[rows], longest))
            real = (torch.arange(longest) < lengths[rows, None]).flatten()
            back[places[-1][real]] = base + real.nonzero()[:, 0]
            base += len(places[-1])
            trunks, of_row = torch.unique(parents[rows], return_inverse=True)
            if reach:
                before_places.append(_padded(starts[trunks], lengths[trunks], reach))
            buckets.append(_Bucket(len(rows), longest, reach, len(trunks), of_row, before[rows]))
    nothing = torch.empty(0, dtype=torch.int64)
    return _Buckets(torch.cat(places), back, torch.cat([nothing, *before_places]), buckets)


def classes_of_like_size(sizes: Tensor, rows: Tensor) -> list[Tensor]:
    """Cuts `rows`, sorted by falling size, where a size is much below the first of its class. Size 0 is a class of its own."""
    ordered, order = torch.sort(sizes[rows], descending=True, stable=True)
    values, out, first = ordered.tolist(), [], 0
    while first < len(values):
        least = min(_SHORTEST_SHARE * values[first], values[first] - _FREE_PADDING)
        least = max(least, 1) if values[first] else 0
        count = sum(value >= least for value in values[first:])
        out.append(rows[order[first : first + count]])
        first += count
    return out


def _padded(starts: Tensor, lengths: Tensor, longest: int) -> Tensor:
    """Places of runs `[b]`, each padded to `longest` with its last token: `[b * longest]`."""
    return (starts[:, None] + torch.minimum(torch.arange(longest), lengths[:, None] - 1)).flatten()


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
    """`AttentionContext` of one row `[1, N]` that holds runs of `lengths [R]`, each causal within itself.

    A run with a parent (`parents [R]`, -1 for none) also sees all of its parent, which has none: a shared prompt.

    Make one for each forward pass: what depends on the lengths alone is computed once, for all layers. `calls` counts the
    layers that came, so that a model which never asked can be told from one that did.
    """

    lengths: Tensor
    parents: Tensor | None = None
    calls: int = 0
    _kept: dict[Any, Any] = field(default_factory=dict, repr=False)

    def __post_init__(self) -> None:
        self.lengths = self.lengths.to("cpu", torch.int64)
        if self.parents is not None:
            self.parents = self.parents.to("cpu", torch.int64) if bool((self.parents >= 0).any()) else None
        self._whole = self.lengths  # what the last token of each run sees
        if self.parents is not None:
            self._whole = self.lengths + torch.where(self.parents < 0, 0, self.lengths[self.parents.clamp(min=0)])

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
        if sliding_window is not None and sliding_window >= int(self._whole.max()):
            sliding_window = None
        sixteen_bits = query.dtype in (torch.bfloat16, torch.float16)
        if query.is_cuda and sixteen_bits and softcap is None and query.shape[-1] == value.shape[-1] <= 256:
            return self._variable_length(query, key, value, scaling, sliding_window)
        return self._bucketed(query, key, value, scaling, sliding_window, softcap)

    # ------------------------------------------------------------------ one kernel (CUDA, 16 bits)

    def _variable_length(self, query: Tensor, key: Tensor, value: Tensor, scaling: float, window: int | None) -> Tensor:
        from torch.nn.attention.varlen import varlen_attn

        starts, longest = self._keep("starts", lambda: _starts(self.lengths, query.device))
        key_starts, most = self._keep("key starts", lambda: _starts(self._whole, query.device))
        # (left, 0) is causal with `left` tokens before one's own; -1 is no limit. The last query stands at the last key.
        left = -1 if window is None else window - 1
        # `squeeze`, not `[0]`: the backward pass of an index fills and copies.
        q, k, v = (x.squeeze(0).transpose(0, 1) for x in (query, key, value))
        if self.parents is None and window is None and cudnn_attention.fits(q, k):
            layout = self._keep("cudnn", lambda: cudnn_attention.make_layout(self.lengths, query.device))
            if layout is not None:
                return cudnn_attention.CudnnAttention.apply(q, k, v, layout, scaling).unsqueeze(0)
        if self.parents is not None and window is None:
            shared = self._keep("shared", lambda: make_layout(self.lengths, self.parents, query.device))
            if shared is not None:
                return SharedPromptAttention.apply(q, k, v, shared, scaling).unsqueeze(0)
        if self.parents is not None:
            places = self._keep("key places", lambda: self._key_places().to(query.device))
            k, v = k.index_select(0, places), v.index_select(0, places)
        out = varlen_attn(q, k, v, starts, key_starts, longest, most, scale=scaling, window_size=(left, 0), **_grouped(q, k))
        assert isinstance(out, Tensor)
        return out.unsqueeze(0)

    def _key_places(self) -> Tensor:
        """The tokens that each run sees, run by run: its parent's, then its own."""
        assert self.parents is not None
        starts = (torch.cumsum(self.lengths, 0) - self.lengths).tolist()
        lengths, parts = self.lengths.tolist(), []
        for run, parent in enumerate(self.parents.tolist()):
            for part in (parent, run) if parent >= 0 else (run,):
                parts.append(torch.arange(starts[part], starts[part] + lengths[part]))
        return torch.cat(parts)

    # ------------------------------------------------------------------ buckets (anywhere)

    def _bucketed(
        self, query: Tensor, key: Tensor, value: Tensor, scaling: float, window: int | None, softcap: float | None
    ) -> Tensor:
        made: _Buckets = self._keep(query.device, lambda: make_buckets(self.lengths, self.parents).to(query.device))
        if made.is_row:
            q, k, v = (x[0].unflatten(1, made.shapes[0]).transpose(0, 1) for x in (query, key, value))
            out = self._one(0, made.buckets[0], q, k, v, scaling, window, softcap)
            return out.transpose(1, 2).flatten(0, 1)[None]
        q, k, v = (_ToBuckets.apply(x[0].transpose(0, 1), made.places, made.back) for x in (query, key, value))
        if len(made.before_places):
            shared = [x[0].transpose(0, 1).index_select(0, made.before_places) for x in (key, value)]
        parts, at, before = [], 0, 0
        for number, bucket in enumerate(made.buckets):
            shape = (bucket.rows, bucket.longest)
            end = at + bucket.rows * bucket.longest
            own = [x[at:end].unflatten(0, shape) for x in (q, k, v)]
            if bucket.before:
                stop = before + bucket.prompts * bucket.before
                of_row = self._keep((number, query.device), lambda bucket=bucket: bucket.prompt_of_row.to(query.device))
                for i, x in enumerate(shared, start=1):
                    prompts = x[before:stop].unflatten(0, (bucket.prompts, bucket.before)).index_select(0, of_row)
                    own[i] = torch.cat([prompts, own[i]], 1)
                before = stop
            out = self._one(number, bucket, *_heads_first(own), scaling, window, softcap)
            parts.append(out.transpose(1, 2).flatten(0, 1))
            at = end
        return _FromBuckets.apply(torch.cat(parts), made.back)[None]

    def _one(
        self,
        number: int,
        bucket: _Bucket,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        scaling: float,
        window: int | None,
        softcap: float | None,
    ) -> Tensor:
        """One bucket: `q [b, H, T, D]` over `k`, `v` `[b, K, before + T, D]` -> `[b, H, T, D]`."""
        if softcap is not None:
            return _softcapped(q, k, v, self._mask(number, bucket, window, q.device), scaling, softcap)
        causal = not bucket.before and (window is None or window >= bucket.longest)
        mask = None if causal else self._additive(number, bucket, window, q)
        # A CPU shares key/value heads within the kernel; CUDA's fp32 kernel wants them copied, else it keeps [T, T] scores.
        if q.is_cuda and q.shape[1] != k.shape[1]:
            k, v = (x.repeat_interleave(q.shape[1] // x.shape[1], 1) for x in (k, v))
        return F.scaled_dot_product_attention(
            q, k, v, attn_mask=mask, is_causal=causal, scale=scaling, enable_gqa=q.shape[1] != k.shape[1]
        )

    def _mask(self, number: int, bucket: _Bucket, window: int | None, device: torch.device) -> Tensor:
        """Bool `[b or 1, 1, T, before + T]`: which keys each query sees: its prompt's and its run's up to itself, as far as
        the window reaches. One row stands for all where their prompts have one length.
        """

        def make() -> Tensor:
            before = (bucket.before_lengths if bucket.ragged_before else bucket.before_lengths[:1])[:, None, None]
            own, prompt = torch.arange(bucket.longest), torch.arange(bucket.before)
            to_own = own[:, None] >= own
            to_prompt = (prompt < before).expand(-1, bucket.longest, -1)
            if window is not None:
                to_own &= own[:, None] - own < window
                to_prompt = to_prompt & (before + own[:, None] - prompt < window)
            seen = torch.cat([to_prompt, to_own.expand(len(before), -1, -1)], 2)
            return seen[:, None].to(device)

        return self._keep(("mask", number, window, device), make)

    def _additive(self, number: int, bucket: _Bucket, window: int | None, query: Tensor) -> Tensor:
        """The mask as 0 and -inf: a bool one would be turned into that in every layer."""

        def make() -> Tensor:
            seen = self._mask(number, bucket, window, query.device)
            return torch.zeros(seen.shape, dtype=query.dtype, device=query.device).masked_fill_(~seen, float("-inf"))

        return self._keep(("additive", number, window, query.device, query.dtype), make)

    def _keep(self, key: Any, make: Any) -> Any:
        if key not in self._kept:
            self._kept[key] = make()
        return self._kept[key]


def _starts(lengths: Tensor, device: torch.device) -> tuple[Tensor, int]:
    """Borders `[R + 1]` int32 on the device, and the longest."""
    starts = torch.zeros(len(lengths) + 1, dtype=torch.int32)
    torch.cumsum(lengths, 0, out=starts[1:])
    return starts.to(device), int(lengths.max())


def _heads_first(tensors: list[Tensor]) -> tuple[Tensor, Tensor, Tensor]:
    q, k, v = (x.transpose(1, 2) for x in tensors)
    return q, k, v


def _softcapped(query: Tensor, key: Tensor, value: Tensor, mask: Tensor, scaling: float, softcap: float) -> Tensor:
    """Attention whose scores pass `softcap * tanh(scores / softcap)` (Gemma 2): `[s, H, T, D]`, K key/value heads.

    `mask` is bool, `[s or 1, 1, T, L]`.
    """
    grouped = query.unflatten(1, (key.shape[1], -1))
    scores = grouped @ (key * (scaling / softcap)).unsqueeze(2).transpose(-1, -2)
    scores = (scores.tanh() * softcap).masked_fill(~mask.unsqueeze(2), float("-inf"))
    weights = scores.softmax(-1, dtype=torch.float32).to(value.dtype)
    return (weights @ value.unsqueeze(2)).flatten(1, 2)


@cache
def _has_grouped_flag() -> bool:
    """torch 2.11's kernel shares key/value heads unasked; later ones want to be told."""
    from torch.nn.attention.varlen import varlen_attn

    return "enable_gqa" in inspect.signature(varlen_attn).parameters


def _grouped(query: Tensor, key: Tensor) -> dict[str, Any]:
    return {"enable_gqa": True} if query.shape[1] != key.shape[1] and _has_grouped_flag() else {}
