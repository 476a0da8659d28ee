"""The functions of `kernels` in torch alone: for a CPU, and to check the kernels against."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from podium.engines.rollout.native.sampler import device_uniforms, draw


def add_rms_norm(x: Tensor, residual: Tensor | None, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    total = x if residual is None else x + residual
    wide = total.float()
    wide = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + eps)
    return weight * wide.to(x.dtype), total


def silu_mul(gate_up: Tensor) -> Tensor:
    gate, up = gate_up.chunk(2, -1)
    return F.silu(gate) * up


def rotate_and_store(
    qkv: Tensor, rotary: Tensor, positions: Tensor, places: Tensor, cache: Any, layer: int, norms: tuple[Tensor, Tensor] | None,
    eps: float, heads: int, *, keep: bool,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    q, k, v = rotated(qkv, angles(rotary, positions, qkv.dtype), (heads, cache.kv_heads, cache.width), norms, eps)
    store(k, v, places, cache, layer)
    return q, k


def angles(rotary: Tensor, positions: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Cosines and sines of the positions, `[N, 1, D]` each; of the first half the sine is negative (`rotated`)."""
    cosine, sine = rotary[positions][:, None].to(dtype).chunk(2, -1)
    return torch.cat([cosine, cosine], -1), torch.cat([-sine, sine], -1)


def rotated(
    qkv: Tensor, angles: tuple[Tensor, Tensor], shape: tuple[int, int, int], norms: tuple[Tensor, Tensor] | None, eps: float
) -> tuple[Tensor, Tensor, Tensor]:
    """`qkv [N, (H + 2K) D]` (H, K, D: `shape`) -> queries `[N, H, D]` and keys `[N, K, D]`, both rotated, and values."""
    heads, kv, width = shape
    all_heads = qkv.view(len(qkv), -1, width)
    turned, v = all_heads[:, : heads + kv], all_heads[:, heads + kv :]
    if norms is not None:
        q, k = turned.split([heads, kv], 1)
        turned = torch.cat([add_rms_norm(q, None, norms[0], eps)[0], add_rms_norm(k, None, norms[1], eps)[0]], 1)
    turned = turned * angles[0] + turned.roll(width // 2, -1) * angles[1]
    return turned[:, :heads], turned[:, heads:], v


def store(keys: Tensor, values: Tensor, places: Tensor, cache: Any, layer: int) -> None:
    real = places >= 0
    page, token = places[real] // cache.page_size, places[real] % cache.page_size
    cache.pages[page, layer, 0, :, token] = keys[real]
    cache.pages[page, layer, 1, :, token] = values[real]


def decode_places(length: Tensor, active: Tensor, table: Tensor, page_size: int) -> tuple[Tensor, Tensor, Tensor]:
    on = active != 0
    at = torch.where(on, length, 0)
    page = table.gather(1, (at // page_size)[:, None])[:, 0].long()
    places = torch.where(on, page * page_size + at % page_size, -1)
    return at, places, torch.where(on, length + 1, 0).to(torch.int32)


def decode_attention(
    query: Tensor, cache: Any, layer: int, table: Tensor, counts: Tensor, *, scaling: float, splits: int,
    window: int | None = None, softcap: float | None = None, shared: Any = None,
) -> Tensor:  # fmt: skip
    """As `kernels.decode_attention`; every row reads all its keys, whatever is shared."""
    rows, heads, width = query.shape
    kv, longest = cache.kv_heads, int(counts.max())
    if not longest:
        return torch.zeros_like(query)
    pages = table[:, : -(-longest // cache.page_size)].long()
    # Places that a row does not use may name pages that are no more: its first page stands in for them.
    used = torch.arange(pages.shape[1], device=pages.device) * cache.page_size < counts[:, None]
    pages = torch.where(used, pages, torch.where(counts > 0, pages[:, 0], 0)[:, None])
    # [B, W, 2, K, P, D] -> [2, B, K, W P, D]
    found = cache.pages[:, layer][pages].permute(2, 0, 3, 1, 4, 5).flatten(3, 4)
    keys, values = found[0, :, :, :longest], found[1, :, :, :longest]
    at = torch.arange(longest, device=query.device)
    seen = at < counts[:, None]
    if window is not None:
        seen = seen & (at >= counts[:, None] - window)
    grouped = query.reshape(rows, kv, heads // kv, width)
    out = _attend(grouped, keys, values, seen[:, None, None], scaling, softcap)
    return torch.where((counts > 0)[:, None, None], out.reshape(rows, heads, width), 0)


def _attend(query: Tensor, key: Tensor, value: Tensor, seen: Tensor, scaling: float, softcap: float | None) -> Tensor:
    """`query [B, K, R, D]`, `key`, `value [B, K, L, D]`, `seen` bool -> `[B, K, R, D]`."""
    if softcap is None:
        return F.scaled_dot_product_attention(query, key, value, attn_mask=seen, scale=scaling)
    scores = torch.tanh(query @ key.transpose(-1, -2) * (scaling / softcap)) * softcap
    weights = scores.masked_fill(~seen, float("-inf")).softmax(-1, dtype=torch.float32)
    return weights.to(value.dtype) @ value


def sample(logits: Tensor, which: Tensor, slots: Tensor, state: Any, *, truncated: bool = False) -> None:
    """As `kernels.sample`."""
    on = state.active[slots] != 0
    which, slots = which[on], slots[on]
    if not len(slots):
        return
    temperature = state.temperature[slots]
    greedy = temperature == 0
    scaled = logits[which].float() / torch.where(greedy, 1.0, temperature)[:, None]
    length = state.length[slots] + 1
    uniforms = device_uniforms(state.seed[slots], length - state.first[slots])
    cut = (state.top_k[slots].long(), state.top_p[slots], state.min_p[slots]) if truncated else None
    tokens, scores = draw(scaled, uniforms, greedy, cut)
    written = state.written[slots]
    state.tokens_out[written, slots] = tokens
    state.scores_out[written, slots] = scores
    stopped = (state.stops[slots] == tokens[:, None]).any(-1)
    ended = stopped | (length + 1 >= state.limit[slots]) | ~scores.isfinite()
    state.token[slots], state.length[slots], state.written[slots] = tokens, length, written + 1
    state.active[slots] = (~ended).long()
