"""One forward pass of the paged engine: which tokens, where their keys go, and what they see.

A pass is the attention context of the model's modules (`AttentionContext`), and what `FusedForward` calls.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from types import ModuleType
from typing import Any, Protocol

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import PreTrainedModel

from podium.core.errors import ModelError
from podium.engines.rollout.native.paged_cache import PagedCache, RowState, to_device
from podium.engines.rollout.native.paged_scheduler import Start
from podium.engines.rollout.native.sharing import Shared
from podium.models.divided import TensorRanks
from podium.models.fused import FusedLayer, FusedModel
from podium.models.packed_attention import PackedAttention


@dataclass(frozen=True)
class Piece:
    """Tokens `start..end` of a text whose pages are `pages`; what stands before is in the cache."""

    tokens: tuple[int, ...]
    pages: list[int]
    start: int
    end: int


def passes_of(starts: list[Start], tokens: int) -> Iterator[tuple[list[tuple[int, Piece]], list[tuple[int, int]]]]:
    """Cuts what is to compute into passes of at most `tokens`.

    Yields for each pass (number of the start, piece), and (place among the pieces, number of the start) of those that end.
    """
    pieces: list[tuple[int, Piece]] = []
    final: list[tuple[int, int]] = []
    room = tokens
    for i, start in enumerate(starts):
        at = start.known
        while at < len(start.text):
            end = min(len(start.text), at + room)
            pieces.append((i, Piece(start.text, start.rows[0].pages, at, end)))
            if end == len(start.text):
                final.append((len(pieces) - 1, i))
            room -= end - at
            at = end
            if not room:
                yield pieces, final
                pieces, final, room = [], [], tokens
    if pieces:
        yield pieces, final


def copies_of(starts: list[Start], size: int) -> tuple[list[int], list[int]]:
    """Pages to copy, from and to: the last one of a text, where it is not full, is each row's own."""
    pairs = [
        (start.rows[0].pages[len(start.text) // size], row.pages[len(start.text) // size])
        for start in starts
        if len(start.text) % size
        for row in start.rows[1:]
    ]
    return [source for source, _ in pairs], [target for _, target in pairs]


class DecodePass:
    """One new token for each of the first `rows` rows of the state. Nothing here asks the device for a number."""

    def __init__(
        self, ops: ModuleType, cache: PagedCache, state: RowState, rows: int, splits: int, shared: Shared | None = None
    ) -> None:
        self.ops, self.cache, self.splits, self.shared = ops, cache, splits, shared
        self.table = state.table[:rows]
        self.ids = state.token[:rows]
        self.positions, self.places, self.counts = ops.decode_places(
            state.length[:rows], state.active[:rows], self.table, cache.page_size
        )
        self.form = (rows, 1)

    def rotate_and_attend(self, index: int, layer: FusedLayer, model: FusedModel, qkv: Tensor) -> Tensor:
        """`qkv [B, (H + 2K) D]` -> `[B, H D]`."""
        q, _ = self.ops.rotate_and_store(
            qkv, model.rotary, self.positions, self.places, self.cache, index, layer.norms, model.eps, model.heads, keep=False
        )
        return self._decode(q, index, model.scaling, layer.window, None).flatten(1)

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
        index = _layer(module, key, value, self.cache)
        self.ops.store(key[:, :, 0], value[:, :, 0], self.places, self.cache, index)
        return self._decode(query[:, :, 0], index, scaling, sliding_window, softcap)[:, None]

    def _decode(self, query: Tensor, index: int, scaling: float, window: int | None, softcap: float | None) -> Tensor:
        return self.ops.decode_attention(
            query, self.cache, index, self.table, self.counts,
            scaling=scaling, splits=self.splits, window=window, softcap=softcap, shared=None if window else self.shared,
        )  # fmt: skip


class PrefillPass:
    """The tokens of several pieces in one row; each sees its own text up to itself."""

    def __init__(self, ops: ModuleType, cache: PagedCache, pieces: list[Piece], device: torch.device) -> None:
        self.ops, self.cache, self.pieces = ops, cache, pieces
        self.lengths = [piece.end - piece.start for piece in pieces]
        positions = np.concatenate([np.arange(piece.start, piece.end) for piece in pieces])
        self.ids = to_device(np.array([t for p in pieces for t in p.tokens[p.start : p.end]], dtype=np.int64), device)
        self.positions = to_device(positions, device)
        self.places = to_device(np.concatenate([self._places(p.pages, p.start, p.end) for p in pieces]), device)
        self.last = to_device(np.cumsum(self.lengths) - 1, device)
        self.form = (1, len(positions))
        self.packed: PackedAttention | None = None
        if not any(piece.start for piece in pieces):
            self.packed = PackedAttention(torch.tensor(self.lengths))
        else:
            seen = np.concatenate([self._places(p.pages, 0, p.end) for p in pieces])
            self.seen_page = to_device(seen // cache.page_size, device)
            self.seen_token = to_device(seen % cache.page_size, device)
            self.ends = [piece.end for piece in pieces]
            self.borders = to_device(np.cumsum([0, *self.lengths]).astype(np.int32), device)
            self.key_borders = to_device(np.cumsum([0, *self.ends]).astype(np.int32), device)

    def _places(self, pages: list[int], start: int, end: int) -> np.ndarray:
        at, size = np.arange(start, end), self.cache.page_size
        return np.array(pages, dtype=np.int64)[at // size] * size + at % size

    def rotate_and_attend(self, index: int, layer: FusedLayer, model: FusedModel, qkv: Tensor) -> Tensor:
        """`qkv [N, (H + 2K) D]` -> `[N, H D]`."""
        q, k = self.ops.rotate_and_store(
            qkv, model.rotary, self.positions, self.places, self.cache, index, layer.norms, model.eps, model.heads, keep=True
        )
        v = qkv.view(len(qkv), -1, model.width)[:, -model.kv_heads :]
        return self._attend(nn.Identity(), index, q, k, v, model.scaling, layer.window, None).flatten(1)

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
        index = _layer(module, key, value, self.cache)
        q, k, v = (x[0].transpose(0, 1) for x in (query, key, value))
        self.ops.store(k, v, self.places, self.cache, index)
        return self._attend(module, index, q, k, v, scaling, sliding_window, softcap)[None]

    def _attend(
        self, module: nn.Module, index: int, q: Tensor, k: Tensor, v: Tensor, scaling: float, window: int | None,
        softcap: float | None,
    ) -> Tensor:  # fmt: skip
        """`[N, H, D]` over `[N, K, D]`, and over the cache where a piece has something before it -> `[N, H, D]`."""
        if self.packed is not None:
            rows = (x.transpose(0, 1)[None] for x in (q, k, v))
            return self.packed.attend(module, *rows, scaling=scaling, sliding_window=window, softcap=softcap)[0]
        assert self.cache.pages is not None
        layer = self.cache.pages[:, index]
        k, v = (layer[self.seen_page, pair, :, self.seen_token] for pair in (0, 1))  # [sum of ends, K, D]
        if q.is_cuda and q.dtype in (torch.bfloat16, torch.float16) and softcap is None and q.shape[-1] <= 256:
            return self._one_kernel(q, k, v, scaling, window)
        outs = [
            _over_past(*piece, scaling, window, softcap)
            for piece in zip(q.split(self.lengths), k.split(self.ends), v.split(self.ends), strict=True)
        ]
        return torch.cat(outs)

    def _one_kernel(self, q: Tensor, k: Tensor, v: Tensor, scaling: float, window: int | None) -> Tensor:
        from torch.nn.attention.varlen import varlen_attn

        from podium.models.packed_attention import _grouped

        left = -1 if window is None else window - 1
        longest, most = max(self.lengths), max(self.ends)
        borders = (self.borders, self.key_borders)
        out = varlen_attn(q, k, v, *borders, longest, most, scale=scaling, window_size=(left, 0), **_grouped(q, k))
        assert isinstance(out, Tensor)
        return out


class MixedPass:
    """A decode step and a prefill pass in one: the weights are read once for both. For `FusedForward` only."""

    def __init__(self, decode: DecodePass, prefill: PrefillPass) -> None:
        self.decode, self.prefill, self.rows = decode, prefill, len(decode.ids)
        self.ids = torch.cat([decode.ids, prefill.ids])
        self.positions = torch.cat([decode.positions, prefill.positions])

    def rotate_and_attend(self, index: int, layer: FusedLayer, model: FusedModel, qkv: Tensor) -> Tensor:
        """`qkv [B + N, (H + 2K) D]` -> `[B + N, H D]`."""
        parts = ((self.decode, qkv[: self.rows]), (self.prefill, qkv[self.rows :]))
        return torch.cat([step.rotate_and_attend(index, layer, model, part) for step, part in parts])


def _over_past(q: Tensor, k: Tensor, v: Tensor, scaling: float, window: int | None, softcap: float | None) -> Tensor:
    """One piece: `q [n, H, D]`, the last n of the `end` tokens in `k`, `v` `[end, K, D]`."""
    count, end, kv = len(q), len(k), k.shape[1]
    position, key = torch.arange(end - count, end, device=q.device)[:, None], torch.arange(end, device=q.device)
    seen = key <= position
    if window is not None:
        seen &= key > position - window
    q, k, v = (x.transpose(0, 1) for x in (q, k, v))
    k, v = (x.repeat_interleave(len(q) // kv, 0) for x in (k, v))
    if softcap is None:
        return F.scaled_dot_product_attention(q, k, v, attn_mask=seen, scale=scaling).transpose(0, 1)
    scores = (torch.tanh(q @ k.transpose(1, 2) * (scaling / softcap)) * softcap).masked_fill(~seen, float("-inf"))
    return (scores.softmax(-1, dtype=torch.float32).to(v.dtype) @ v).transpose(0, 1)


def _layer(module: nn.Module, key: Tensor, value: Tensor, cache: PagedCache) -> int:
    """The layer's number. Raises ModelError where its keys and values (`[R, K, N, D]`) do not have the cache's shape."""
    index: Any = module.layer_idx
    layers, _, kv_heads, _, width = cache.shape
    if not (0 <= index < layers and key.shape[1] == value.shape[1] == kv_heads and key.shape[3] == value.shape[3] == width):
        raise ModelError(
            f"layer {index} has {key.shape[1]} key heads of width {key.shape[3]} and {value.shape[3]}; the cache has "
            f"{layers} layers of {kv_heads} heads of width {width}"
        )
    return index


# ------------------------------------------------------------------ running the model


class Step(Protocol):
    """The tokens of a pass and where they stand, `[N]`; it is the attention context of the model's modules."""

    ids: Tensor
    positions: Tensor
    form: tuple[int, int]
    """Rows and tokens of a row, as the modules get them."""

    def rotate_and_attend(self, index: int, layer: FusedLayer, model: FusedModel, qkv: Tensor) -> Tensor:
        """`qkv [N, (H + 2K) D]` of a layer -> `[N, H D]`."""
        ...


class ModuleForward:
    """The model's own modules, whatever they are; attention alone is Podium's."""

    def __init__(self, base: PreTrainedModel) -> None:
        self.base = base

    def refresh(self) -> None:
        """Nothing is kept of the parameters' values."""

    def __call__(self, step: Step) -> Tensor:
        """Last hidden states `[N, hidden]` of the pass's tokens."""
        ids, positions = step.ids.view(step.form), step.positions.view(step.form)
        out = self.base(input_ids=ids, position_ids=positions, use_cache=False, podium_context=step)
        return out.last_hidden_state.flatten(0, 1)


class FusedForward:
    """The same numbers with fewer and larger operations, for the layers that `models.fused` knows."""

    def __init__(self, model: FusedModel, ops: ModuleType, ranks: TensorRanks | None = None) -> None:
        self.model, self.ops, self.ranks = model, ops, ranks

    def refresh(self) -> None:
        """Takes the parameters' values of now, after an update wrote them."""
        self.model.refresh()

    def __call__(self, step: Step | MixedPass) -> Tensor:
        """Last hidden states `[N, hidden]` of the pass's tokens."""
        ops, eps = self.ops, self.model.eps
        x, residual = F.embedding(step.ids, self.model.embedding), None
        for index, layer in enumerate(self.model.layers):
            normed, residual = ops.add_rms_norm(x, residual, layer.input_norm, eps)
            qkv = layer.plus("qkv", F.linear(normed, layer.qkv, layer.qkv_bias), normed)
            heads = step.rotate_and_attend(index, layer, self.model, qkv)
            x = layer.plus("out", self._whole(heads, layer.out, layer.out_bias), heads)
            normed, residual = ops.add_rms_norm(x, residual, layer.post_norm, eps)
            activation = ops.silu_mul(layer.plus("gate_up", F.linear(normed, layer.gate_up), normed))
            x = layer.plus("down", self._whole(activation, layer.down, None), activation)
        return ops.add_rms_norm(x, residual, self.model.norm, eps)[0]

    def _whole(self, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        """A product that is summed over the ranks that have this copy of the model between them, where several have."""
        if self.ranks is None:
            return F.linear(x, weight, bias)
        out = self.ranks.sum(F.linear(x, weight))
        return out if bias is None else out + bias
