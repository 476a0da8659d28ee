# mypy: disable-error-code="no-untyped-def,no-untyped-call,untyped-decorator,import-untyped,import-not-found"
# ruff: noqa: SIM102 (in a kernel a branch on a constant is decided when it is compiled)
"""The layers' small operations in Triton; with decode attention and sampling, all that `plain` has in torch.

The cache's address is read from the device (`cache.offset`), so a captured graph stays valid when the cache is given back
and taken again elsewhere. Rounding follows the `transformers` modules: what they round to 16 bits is rounded here.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from podium.engines.rollout.native.attention_kernels import decode_attention
from podium.engines.rollout.native.launch import after_previous, early
from podium.engines.rollout.native.sample_kernels import sample

# ------------------------------------------------------------------ norm and activation


@triton.jit
def _norm_kernel(X, R, W, OUT, eps, width, HAS_RESIDUAL: tl.constexpr, BLOCK: tl.constexpr, EARLY: tl.constexpr):
    after_previous(EARLY)
    row = tl.program_id(0).to(tl.int64)
    at = tl.arange(0, BLOCK)
    inside = at < width
    kind = X.dtype.element_ty
    x = tl.load(X + row * width + at, mask=inside, other=0.0).to(tl.float32)
    if HAS_RESIDUAL:
        x += tl.load(R + row * width + at, mask=inside, other=0.0).to(tl.float32)
        x = x.to(kind).to(tl.float32)
        tl.store(R + row * width + at, x.to(kind), mask=inside)
    scale = 1.0 / tl.sqrt(tl.sum(x * x, 0) / width + eps)
    w = tl.load(W + at, mask=inside, other=0.0).to(tl.float32)
    tl.store(OUT + row * width + at, (w * (x * scale).to(kind).to(tl.float32)).to(kind), mask=inside)


def add_rms_norm(x: Tensor, residual: Tensor | None, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """RMSNorm of `x + residual` `[N, D]`, and that sum (in the place of `residual`; `x` itself where that is None)."""
    rows, width = x.shape
    out = torch.empty_like(x)
    block = triton.next_power_of_2(width)
    _norm_kernel[(rows,)](
        x,
        x if residual is None else residual,
        weight,
        out,
        eps,
        width,
        HAS_RESIDUAL=residual is not None,
        BLOCK=block,
        num_warps=min(16, max(1, block // 512)),
        **early(x.device),
    )
    return out, x if residual is None else residual


@triton.jit
def _silu_kernel(X, OUT, width, BLOCK: tl.constexpr, EARLY: tl.constexpr):
    after_previous(EARLY)
    row = tl.program_id(0).to(tl.int64)
    at = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = at < width
    kind = X.dtype.element_ty
    gate = tl.load(X + row * 2 * width + at, mask=inside, other=0.0).to(tl.float32)
    up = tl.load(X + row * 2 * width + width + at, mask=inside, other=0.0).to(tl.float32)
    act = (gate / (1.0 + tl.exp(-gate))).to(kind).to(tl.float32)
    tl.store(OUT + row * width + at, (act * up).to(kind), mask=inside)


def silu_mul(gate_up: Tensor) -> Tensor:
    """`silu(gate) * up` from `[N, 2 I]`: `[N, I]`."""
    rows, width = gate_up.shape[0], gate_up.shape[1] // 2
    out = gate_up.new_empty(rows, width)
    block = 2048 if width > 6144 else 1024
    _silu_kernel[(rows, triton.cdiv(width, block))](
        gate_up, out, width, BLOCK=block, num_warps=block // 256, **early(gate_up.device)
    )  # fmt: skip
    return out


# ------------------------------------------------------------------ rotary embedding and the cache


@triton.jit(do_not_specialize=["layer", "count"])
def _rotate_kernel(
    QKV, ROTARY, POSITIONS, PLACES, QNORM, KNORM, Q, K, ANCHOR, OFFSET, layer, page_stride, count, eps,
    HEADS: tl.constexpr, KV: tl.constexpr, D: tl.constexpr, PAGE: tl.constexpr, NORMED: tl.constexpr, ROWS: tl.constexpr,
    KEEP: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    """Programs: (block of tokens, head). Heads 0..H-1 are queries, then K keys, then K values."""
    after_previous(EARLY)
    token = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    head = tl.program_id(1)
    half = tl.arange(0, D // 2)
    inside = (token < count)[:, None]
    kind = QKV.dtype.element_ty
    at = token.to(tl.int64)[:, None] * ((HEADS + 2 * KV) * D) + head * D + half[None, :]
    low = tl.load(QKV + at, mask=inside, other=0.0).to(tl.float32)
    high = tl.load(QKV + at + D // 2, mask=inside, other=0.0).to(tl.float32)
    # Where they go is asked for now, so that no load waits for another.
    place = tl.load(PLACES + token, mask=token < count, other=-1)
    base = tl.multiple_of(tl.load(OFFSET), 8)
    if head < HEADS + KV:
        if NORMED:
            scale = 1.0 / tl.sqrt((tl.sum(low * low, 1) + tl.sum(high * high, 1)) / D + eps)
            W = QNORM
            if head >= HEADS:
                W = KNORM
            low = tl.load(W + half)[None, :].to(tl.float32) * (low * scale[:, None]).to(kind).to(tl.float32)
            high = tl.load(W + D // 2 + half)[None, :].to(tl.float32) * (high * scale[:, None]).to(kind).to(tl.float32)
            low, high = low.to(kind).to(tl.float32), high.to(kind).to(tl.float32)
        position = tl.load(POSITIONS + token, mask=token < count, other=0).to(tl.int64)
        cosine = tl.load(ROTARY + position[:, None] * D + half[None, :], mask=inside, other=0.0)
        sine = tl.load(ROTARY + position[:, None] * D + D // 2 + half[None, :], mask=inside, other=0.0)
        low, high = low * cosine - high * sine, high * cosine + low * sine
    if head < HEADS:
        q_to = token.to(tl.int64)[:, None] * (HEADS * D) + head * D + half[None, :]
        tl.store(Q + q_to, low.to(kind), mask=inside)
        tl.store(Q + q_to + D // 2, high.to(kind), mask=inside)
    else:
        pair = (head - HEADS) // KV  # 0: a key, 1: a value
        kv = (head - HEADS) % KV
        if KEEP:
            if pair == 0:
                k_to = token.to(tl.int64)[:, None] * (KV * D) + kv * D + half[None, :]
                tl.store(K + k_to, low.to(kind), mask=inside)
                tl.store(K + k_to + D // 2, high.to(kind), mask=inside)
        at_page = (place // PAGE) * page_stride + ((layer * 2 + pair) * KV + kv) * (PAGE * D) + (place % PAGE) * D
        there = inside & (place >= 0)[:, None]
        tl.store(ANCHOR + base + at_page[:, None] + half[None, :], low.to(kind), mask=there)
        tl.store(ANCHOR + base + at_page[:, None] + D // 2 + half[None, :], high.to(kind), mask=there)


def rotate_and_store(
    qkv: Tensor, rotary: Tensor, positions: Tensor, places: Tensor, cache: Any, layer: int, norms: tuple[Tensor, Tensor] | None,
    eps: float, heads: int, *, keep: bool,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """Norms and rotates queries and keys of `qkv [N, (H + 2K) D]`, and files keys and values in the cache.

    Args:
        positions, places: `[N]` int64; a place is page * size + token on it, -1 for none.
        keep: also return the keys.

    Returns:
        queries `[N, H, D]`, and the keys `[N, K, D]` (not filled where not `keep`).
    """
    count, width, kv = qkv.shape[0], cache.width, cache.kv_heads
    q = qkv.new_empty(count, heads, width)
    k = qkv.new_empty(count if keep else 1, kv, width)
    rows = 8  # many small programs take longer to start than to run
    q_norm, k_norm = norms if norms is not None else (qkv, qkv)
    _rotate_kernel[(triton.cdiv(count, rows), heads + 2 * kv)](
        qkv, rotary, positions, places, q_norm, k_norm, q, k, cache.anchor, cache.offset, layer, cache.page_stride, count, eps,
        HEADS=heads, KV=kv, D=width, PAGE=cache.page_size, NORMED=norms is not None, ROWS=rows, KEEP=keep,
        num_warps=4, **early(qkv.device),
    )  # fmt: skip
    return q, k


@triton.jit(do_not_specialize=["layer"])
def _store_kernel(
    K, V, PLACES, ANCHOR, OFFSET, layer, page_stride, skn, skh, svn, svh,
    KV: tl.constexpr, D: tl.constexpr, PAGE: tl.constexpr,
):  # fmt: skip
    token = tl.program_id(0).to(tl.int64)
    kv = tl.program_id(1)
    at = tl.arange(0, D)
    place = tl.load(PLACES + token)
    if place >= 0:
        base = tl.load(OFFSET)
        to = (place // PAGE) * page_stride + (layer * 2 * KV + kv) * (PAGE * D) + (place % PAGE) * D
        tl.store(ANCHOR + base + to + at, tl.load(K + token * skn + kv * skh + at))
        tl.store(ANCHOR + base + to + KV * PAGE * D + at, tl.load(V + token * svn + kv * svh + at))


def store(keys: Tensor, values: Tensor, places: Tensor, cache: Any, layer: int) -> None:
    """Files keys and values `[N, K, D]` (the last dimension dense) at `places [N]`."""
    _store_kernel[(keys.shape[0], cache.kv_heads)](
        keys, values, places, cache.anchor, cache.offset, layer, cache.page_stride,
        keys.stride(0), keys.stride(1), values.stride(0), values.stride(1),
        KV=cache.kv_heads, D=cache.width, PAGE=cache.page_size, num_warps=1,
    )  # fmt: skip


# ------------------------------------------------------------------ a decode step's places


@triton.jit
def _places_kernel(LENGTH, ACTIVE, TABLE, POSITIONS, PLACES, COUNTS, table_stride, PAGE: tl.constexpr):
    row = tl.program_id(0)
    active = tl.load(ACTIVE + row) != 0
    length = tl.load(LENGTH + row)
    page = tl.load(TABLE + row * table_stride + length // PAGE, mask=active, other=0).to(tl.int64)
    tl.store(POSITIONS + row, tl.where(active, length, 0))
    tl.store(PLACES + row, tl.where(active, page * PAGE + length % PAGE, -1))
    tl.store(COUNTS + row, tl.where(active, length + 1, 0).to(tl.int32))


def decode_places(length: Tensor, active: Tensor, table: Tensor, page_size: int) -> tuple[Tensor, Tensor, Tensor]:
    """For each row `[B]` of a decode step: the new token's position and place, int64, and how many keys it sees, int32.

    A row that is not active gets position 0, place -1, and sees nothing.
    """
    rows = len(length)
    positions, places = torch.empty_like(length), torch.empty_like(length)
    counts = torch.empty(rows, dtype=torch.int32, device=length.device)
    _places_kernel[(rows,)](
        length, active, table, positions, places, counts, table.stride(0), PAGE=page_size, num_warps=1
    )  # fmt: skip
    return positions, places, counts


__all__ = [
    "add_rms_norm",
    "decode_attention",
    "decode_places",
    "rotate_and_store",
    "sample",
    "silu_mul",
    "store",
]
