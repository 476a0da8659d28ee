"""The two passes of the engine with a slot a sequence: prefill (packed prompts) and decode (one token a sequence).

Like those of the paged engine (`passes.py`) each is the attention context of the model's modules, and what `FusedForward`
calls.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from podium.engines.rollout.native.kv_cache import KVCache
from podium.engines.rollout.native.plain import angles, rotated
from podium.models.fused import FusedLayer, FusedModel
from podium.models.packed_attention import PackedAttention


class _Pass:
    """What both have: `ids`, `positions` `[N]` of the tokens."""

    ids: Tensor
    positions: Tensor
    _angles: tuple[Tensor, Tensor] | None = None

    def _rotated(self, layer: FusedLayer, model: FusedModel, qkv: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        if self._angles is None:
            self._angles = angles(model.rotary, self.positions, qkv.dtype)
        return rotated(qkv, self._angles, (model.heads, model.kv_heads, model.width), layer.norms, model.eps)


class PrefillAttention(_Pass):
    """Causal attention over packed sequences that also files every key and value in the cache.

    Args:
        cache: with room for them.
        texts: the sequences' tokens.
        slots: for each sequence the slots that get its keys and values (several for a group).
    """

    def __init__(self, cache: KVCache, texts: list[tuple[int, ...]], slots: list[list[int]], device: torch.device) -> None:
        self.cache = cache
        lengths = [len(text) for text in texts]
        self.ids = torch.tensor([token for text in texts for token in text]).to(device)
        self.positions = torch.cat([torch.arange(length) for length in lengths]).to(device)
        self.last = (torch.tensor(lengths).cumsum(0) - 1).to(device)
        self.form = (1, len(self.ids))
        self.packed = PackedAttention(torch.tensor(lengths, device=device))
        sources, places, start = [], [], 0
        for length, targets in zip(lengths, slots, strict=True):
            token = torch.arange(length)
            for slot in targets:
                sources.append(token + start)
                places.append(token + slot * cache.capacity)
            start += length
        self.sources, self.places = torch.cat(sources).to(device), torch.cat(places).to(device)

    def rotate_and_attend(self, index: int, layer: FusedLayer, model: FusedModel, qkv: Tensor) -> Tensor:
        """`qkv [N, (H + 2K) D]` -> `[N, H D]`."""
        q, k, v = self._rotated(layer, model, qkv)
        self.cache.write(index, self.places, k[self.sources], v[self.sources])
        rows = (x.transpose(0, 1)[None] for x in (q, k, v))
        out = self.packed.attend(nn.Identity(), *rows, scaling=model.scaling, sliding_window=layer.window)
        return out[0].flatten(1)

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
        keys, values = key[0].transpose(0, 1), value[0].transpose(0, 1)
        self.cache.write(_layer(module), self.places, keys[self.sources], values[self.sources])
        return self.packed.attend(module, query, key, value, scaling=scaling, sliding_window=sliding_window, softcap=softcap)


class DecodeAttention(_Pass):
    """Attention of B new tokens, each over its own slot of the cache.

    Queries that share a key head are its rows in one product, so keys and values are read as they lie: nothing is
    repeated or gathered. What all layers share (places, masks) is made once per step.

    Args:
        cache: with room for the new tokens.
        tokens: the new one of each row.
        lengths: each sequence's tokens with the new one; slot i belongs to row i.
        parts: row ranges (start, end) that attend together, up to the longest of their own lengths.
    """

    def __init__(
        self, cache: KVCache, tokens: list[int], lengths: list[int], parts: list[tuple[int, int]], device: torch.device
    ) -> None:
        self.cache = cache
        self.ids = torch.tensor(tokens).to(device)
        self.lengths = torch.tensor(lengths, device=device)
        self.positions = self.lengths - 1
        self.form = (len(tokens), 1)
        self.places = torch.arange(len(lengths), device=device) * cache.capacity + self.positions
        self.parts = [(start, end, min(lengths[start:end]), max(lengths[start:end])) for start, end in parts]
        self._bias: dict[tuple[int, int | None], Tensor | None] = {}

    def rotate_and_attend(self, index: int, layer: FusedLayer, model: FusedModel, qkv: Tensor) -> Tensor:
        """`qkv [B, (H + 2K) D]` -> `[B, H D]`."""
        q, k, v = self._rotated(layer, model, qkv)
        return self._attend(index, q, k, v, model.scaling, layer.window, None).flatten(1)

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
        out = self._attend(_layer(module), query[:, :, 0], key[:, :, 0], value[:, :, 0], scaling, sliding_window, softcap)
        return out[:, None]

    def _attend(
        self, index: int, query: Tensor, key: Tensor, value: Tensor, scaling: float, window: int | None, softcap: float | None
    ) -> Tensor:
        """`query [B, H, D]` over the cache with `key`, `value` `[B, K, D]` added to it -> `[B, H, D]`."""
        keys, values = self.cache.write(index, self.places, key, value)
        rows, heads, width = query.shape
        grouped = query.reshape(rows, key.shape[1], heads // key.shape[1], width)
        outs = []
        for start, end, shortest, longest in self.parts:
            # Of a window, what lies before the shortest sequence's is out of reach for all.
            first = max(0, shortest - window) if window else 0
            k = keys[start:end, first:longest].transpose(1, 2)
            v = values[start:end, first:longest].transpose(1, 2)
            bias = self._mask(start, end, first, shortest, longest, window, query.dtype)
            outs.append(_attend(grouped[start:end], k, v, bias, scaling, softcap))
        out = outs[0] if len(outs) == 1 else torch.cat(outs)
        return out.reshape(rows, heads, -1)

    def _mask(
        self, start: int, end: int, first: int, shortest: int, longest: int, window: int | None, dtype: torch.dtype
    ) -> Tensor | None:
        """Additive `[rows, 1, 1, L]`: 0 for what a row sees, -inf else; None where all see everything."""
        if shortest == longest:
            return None
        at = (start, window)
        if at not in self._bias:
            lengths = self.lengths[start:end, None]
            position = torch.arange(first, longest, device=lengths.device)
            unseen = position >= lengths
            if window:
                unseen |= position < lengths - window
            self._bias[at] = torch.zeros(unseen.shape, dtype=dtype, device=lengths.device).masked_fill_(unseen, float("-inf"))[
                :, None, None, :
            ]
        return self._bias[at]


def _attend(query: Tensor, key: Tensor, value: Tensor, bias: Tensor | None, scaling: float, softcap: float | None) -> Tensor:
    """`query [B, K, R, D]`, `key`, `value [B, K, L, D]` -> `[B, K, R, D]`."""
    if softcap is None:
        return F.scaled_dot_product_attention(query, key, value, attn_mask=bias, scale=scaling)
    scores = torch.matmul(query, key.transpose(-1, -2)) * scaling
    scores = torch.tanh(scores / softcap) * softcap
    if bias is not None:
        scores = scores + bias
    return torch.matmul(scores.softmax(-1, dtype=torch.float32).to(value.dtype), value)


def _layer(module: nn.Module) -> int:
    return module.layer_idx  # type: ignore[return-value]
