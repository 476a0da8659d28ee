# mypy: disable-error-code="no-untyped-def,no-untyped-call,untyped-decorator,import-untyped,import-not-found"
# ruff: noqa: SIM108 (in a kernel a branch on a constant is decided when it is compiled)
"""Decode attention in Triton: one query a row over its pages; what a group's rows share is read once for all of them.

Three kernels. `_own_kernel`: a row's keys in parts (split-KV), or those after the shared start. `_shared_kernel`: the
shared start, all queries of a tile of rows as one product (cascade attention; Ye et al. 2024, FlashInfer's blog of
2024-02-02; Juravsky et al. 2024, "Hydragen"). Parts are merged by their log-sum-exp: few of them by the program of
`_own_kernel` that comes last, many by `_combine_kernel`.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from podium.engines.rollout.native.launch import after_previous, early

# Keys that one program works on at least.
_LEAST_PART = 256
# Parts that the last program of a row merges; more take it longer than a launch.
_MOST_MERGED = 4


@triton.jit
def _over_keys(
    q, ANCHOR, PAGES, base, start, end, page_stride, scaling, softcap,
    M: tl.constexpr, KV: tl.constexpr, D: tl.constexpr, PAGE: tl.constexpr, BLOCK: tl.constexpr, CAPPED: tl.constexpr,
    PRECISE: tl.constexpr,
):  # fmt: skip
    """`q [M, D]` over the keys start..end of the text whose pages stand at PAGES: the output, and the log-sum-exp (-inf
    where there is no key).
    """
    at_d = tl.arange(0, D)
    top = tl.full([M], float("-inf"), tl.float32)
    total = tl.zeros([M], tl.float32)
    acc = tl.zeros([M, D], tl.float32)
    for at in range(start, end, BLOCK):
        token = at + tl.arange(0, BLOCK)
        seen = token < end
        page = tl.load(PAGES + token // PAGE, mask=seen, other=0).to(tl.int64)
        place = base + page * page_stride + (token % PAGE) * D
        k = tl.load(ANCHOR + place[None, :] + at_d[:, None], mask=seen[None, :], other=0.0)
        if PRECISE:
            scores = tl.dot(q, k, input_precision="ieee") * scaling
        else:
            scores = tl.dot(q, k) * scaling
        if CAPPED:
            scores = softcap * (2.0 / (1.0 + tl.exp(-2.0 * scores / softcap)) - 1.0)
        scores = tl.where(seen[None, :], scores, float("-inf"))
        new_top = tl.maximum(top, tl.max(scores, 1))
        keep = tl.exp(top - new_top)
        p = tl.exp(scores - new_top[:, None])
        v = tl.load(ANCHOR + place[:, None] + KV * PAGE * D + at_d[None, :], mask=seen[:, None], other=0.0)
        if PRECISE:
            acc = acc * keep[:, None] + tl.dot(p, v, input_precision="ieee")
        else:
            acc = acc * keep[:, None] + tl.dot(p.to(v.dtype), v)
        total = total * keep + tl.sum(p, 1)
        top = new_top
    empty = total == 0
    acc = acc / tl.where(empty, 1.0, total)[:, None]
    return acc, tl.where(empty, float("-inf"), top + tl.log(tl.where(empty, 1.0, total)))


@triton.jit(do_not_specialize=["layer", "window"])
def _own_kernel(
    Q, ANCHOR, OFFSET, TABLE, COUNTS, SKIP, OUT, PARTS, LSE, ARRIVED, layer, page_stride, table_stride, sqb, sqh, scaling,
    softcap, window, KV: tl.constexpr, G: tl.constexpr, GP: tl.constexpr, D: tl.constexpr, PAGE: tl.constexpr,
    BLOCK: tl.constexpr, SPLITS: tl.constexpr, BEFORE: tl.constexpr, LEAST: tl.constexpr, CAPPED: tl.constexpr,
    WINDOW: tl.constexpr, PRECISE: tl.constexpr, MERGE: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    """Programs: (row, key/value head, split). The G queries that share a key head are the rows of one product.

    BEFORE: parts that `_shared_kernel` writes before these; a row then starts at its SKIP.
    MERGE: the program that comes last of a row and head merges its parts. ARRIVED counts them, and is zero again afterwards.
    """
    if BEFORE == 0:
        after_previous(EARLY)
    elif EARLY:
        # It runs beside `_shared_kernel`, whose programs let it start when all that was launched before them was written.
        tl.extra.cuda.gdc_launch_dependents()
    row = tl.program_id(0)
    kv = tl.program_id(1)
    split = tl.program_id(2)
    n = tl.load(COUNTS + row)
    first = 0
    if WINDOW:
        first = tl.maximum(n - window, 0)
    if BEFORE > 0:
        first = tl.minimum(tl.load(SKIP + row), n)
    blocks = tl.cdiv(n - first, BLOCK)
    share = tl.maximum(tl.cdiv(blocks, SPLITS), LEAST // BLOCK)
    start = first + split * share * BLOCK
    end = tl.minimum(start + share * BLOCK, n)
    at_g = tl.arange(0, GP)
    at_d = tl.arange(0, D)
    real = at_g[:, None] < G
    q = tl.load(Q + row.to(tl.int64) * sqb + (kv * G + at_g)[:, None] * sqh + at_d[None, :], mask=real, other=0.0)
    base = tl.multiple_of(tl.load(OFFSET), 8) + (layer * 2 * KV + kv) * (PAGE * D)
    acc, lse = _over_keys(
        q, ANCHOR, TABLE + row * table_stride, base, start, end, page_stride, scaling, softcap,
        M=GP, KV=KV, D=D, PAGE=PAGE, BLOCK=BLOCK, CAPPED=CAPPED, PRECISE=PRECISE,
    )  # fmt: skip
    if BEFORE + SPLITS == 1:
        to = (row.to(tl.int64) * KV * G + kv * G + at_g)[:, None] * D + at_d[None, :]
        tl.store(OUT + to, acc.to(OUT.dtype.element_ty), mask=real)
    else:
        heads = row.to(tl.int64) * KV * G + kv * G + at_g
        to = heads * (BEFORE + SPLITS) + BEFORE + split
        tl.store(PARTS + to[:, None] * D + at_d[None, :], acc, mask=real)
        tl.store(LSE + to, lse, mask=at_g < G)
        if BEFORE > 0 and EARLY:
            tl.extra.cuda.gdc_wait()  # the shared parts
        if MERGE:
            tl.debug_barrier()  # all of this program's stores, then the count
            if tl.atomic_add(ARRIVED + row * KV + kv, 1, sem="acq_rel") == SPLITS - 1:
                tl.store(ARRIVED + row * KV + kv, 0)
                shares = n > 0
                if BEFORE > 0:
                    shares = shares & (tl.load(SKIP + row) > 0)
                merged = _merge(PARTS, LSE, heads, at_g < G, at_d, shares, D=D, GP=GP, TOTAL=BEFORE + SPLITS, BEFORE=BEFORE)
                tl.store(OUT + heads[:, None] * D + at_d[None, :], merged.to(OUT.dtype.element_ty), mask=real)


@triton.jit
def _merge(
    PARTS, LSE, heads, real, at_d, shares, D: tl.constexpr, GP: tl.constexpr, TOTAL: tl.constexpr, BEFORE: tl.constexpr
):  # fmt: skip
    """The parts of these heads `[GP]`, weighed: `[GP, D]`. Of a row that shares nothing the first BEFORE were not written.

    Other programs wrote them just now: they are read where those wrote, not from this processor's own cache.
    """
    top = tl.full([GP], float("-inf"), tl.float32)
    for part in tl.static_range(TOTAL):
        there = real
        if part < BEFORE:
            there = real & shares
        top = tl.maximum(top, tl.load(LSE + heads * TOTAL + part, mask=there, other=float("-inf"), cache_modifier=".cg"))
    top = tl.where(top == float("-inf"), 0.0, top)
    total = tl.zeros([GP], tl.float32)
    acc = tl.zeros([GP, D], tl.float32)
    for part in tl.static_range(TOTAL):
        there = real
        if part < BEFORE:
            there = real & shares
        at = heads * TOTAL + part
        weight = tl.exp(tl.load(LSE + at, mask=there, other=float("-inf"), cache_modifier=".cg") - top)
        values = tl.load(PARTS + at[:, None] * D + at_d[None, :], mask=there[:, None], other=0.0, cache_modifier=".cg")
        acc += weight[:, None] * values
        total += weight
    return acc / tl.where(total == 0, 1.0, total)[:, None]


@triton.jit(do_not_specialize=["layer"])
def _shared_kernel(
    Q, ANCHOR, OFFSET, TABLE, TILES, KEYS, PARTS, LSE, layer, page_stride, table_stride, sqb, sqh, scaling, softcap,
    KV: tl.constexpr, G: tl.constexpr, GP: tl.constexpr, ROWS: tl.constexpr, D: tl.constexpr, PAGE: tl.constexpr,
    BLOCK: tl.constexpr, SPLITS: tl.constexpr, TOTAL: tl.constexpr, LEAST: tl.constexpr, CAPPED: tl.constexpr,
    PRECISE: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    """Programs: (tile, key/value head, split). A tile is up to ROWS rows whose first KEYS keys are the same pages."""
    after_previous(EARLY)
    tile = tl.program_id(0)
    kv = tl.program_id(1)
    split = tl.program_id(2)
    n = tl.load(KEYS + tile)
    if n > 0:
        share = tl.maximum(tl.cdiv(tl.cdiv(n, BLOCK), SPLITS), LEAST // BLOCK)
        start = split * share * BLOCK
        end = tl.minimum(start + share * BLOCK, n)
        at_m = tl.arange(0, ROWS * GP)
        at_d = tl.arange(0, D)
        row = tl.load(TILES + tile * ROWS + at_m // GP).to(tl.int64)
        head = kv * G + at_m % GP
        real = (row >= 0) & (at_m % GP < G)
        q = tl.load(Q + row[:, None] * sqb + head[:, None] * sqh + at_d[None, :], mask=real[:, None], other=0.0)
        base = tl.multiple_of(tl.load(OFFSET), 8) + (layer * 2 * KV + kv) * (PAGE * D)
        pages = TABLE + tl.load(TILES + tile * ROWS) * table_stride  # those of the tile's first row stand for all
        acc, lse = _over_keys(
            q, ANCHOR, pages, base, start, end, page_stride, scaling, softcap,
            M=ROWS * GP, KV=KV, D=D, PAGE=PAGE, BLOCK=BLOCK, CAPPED=CAPPED, PRECISE=PRECISE,
        )  # fmt: skip
        to = (row * (KV * G) + head) * TOTAL + split
        tl.store(PARTS + to[:, None] * D + at_d[None, :], acc, mask=real[:, None])
        tl.store(LSE + to, lse, mask=real)


@triton.jit
def _combine_kernel(
    PARTS, LSE, COUNTS, SKIP, OUT, HEADS: tl.constexpr, D: tl.constexpr, TOTAL: tl.constexpr, BEFORE: tl.constexpr,
    PADDED: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    """One program a row and head. Of a row that shares nothing, or sees nothing, the first BEFORE parts were not written."""
    after_previous(EARLY)
    at = tl.program_id(0).to(tl.int64)
    part = tl.arange(0, PADDED)
    there = part < TOTAL
    if BEFORE > 0:
        shares = (tl.load(SKIP + at // HEADS) > 0) & (tl.load(COUNTS + at // HEADS) > 0)
        there = there & ((part >= BEFORE) | shares)
    lse = tl.load(LSE + at * TOTAL + part, mask=there, other=float("-inf"))
    top = tl.max(lse, 0)
    weight = tl.exp(lse - tl.where(top == float("-inf"), 0.0, top))
    total = tl.sum(weight, 0)
    weight = weight / tl.where(total == 0, 1.0, total)
    at_d = tl.arange(0, D)
    parts = tl.load(PARTS + (at * TOTAL + part)[:, None] * D + at_d[None, :], mask=there[:, None], other=0.0)
    tl.store(OUT + at * D + at_d, tl.sum(parts * weight[:, None], 0).to(OUT.dtype.element_ty))


def decode_attention(
    query: Tensor, cache: Any, layer: int, table: Tensor, counts: Tensor, *, scaling: float, splits: int,
    window: int | None = None, softcap: float | None = None, shared: Any = None,
) -> Tensor:  # fmt: skip
    """Attention of one query a row over its pages: `[B, H, D]` -> `[B, H, D]`; zeros for a row that sees nothing.

    Args:
        table: `[B, W]` int32, each row's pages in order.
        counts: `[B]` int32, keys that each row sees.
        splits: parts of a row's keys that are worked on at once (a power of two).
        shared: which rows share their first pages (`sharing.Shared`), read once a tile; not with a window.
    """
    rows, heads, width = query.shape
    kv = cache.kv_heads
    group = heads // kv
    before = 0 if shared is None else shared.splits
    total = before + splits
    out = torch.empty(rows, heads, width, dtype=query.dtype, device=query.device)
    parts = lse = out
    if total > 1:
        parts = torch.empty(rows, heads, total, width, dtype=torch.float32, device=query.device)
        lse = torch.empty(rows, heads, total, dtype=torch.float32, device=query.device)
    merge = 1 < total <= _MOST_MERGED and rows * kv <= len(cache.arrived)
    common: dict[str, Any] = {
        "KV": kv, "G": group, "D": width, "PAGE": cache.page_size, "LEAST": _LEAST_PART, "CAPPED": softcap is not None,
        "PRECISE": query.dtype == torch.float32, **_form(width, query.dtype), **early(query.device),
    }  # fmt: skip
    numbers = (layer, cache.page_stride, table.stride(0), query.stride(0), query.stride(1), scaling, softcap or 0.0)
    skip = counts if shared is None else shared.tiles.skip
    if shared is not None:
        tiles = shared.tiles
        _shared_kernel[(shared.count, kv, before)](
            query, cache.anchor, cache.offset, table, tiles.rows, tiles.keys, parts, lse, *numbers,
            GP=max(triton.next_power_of_2(group), 16 // tiles.height), ROWS=tiles.height, SPLITS=before, TOTAL=total, **common,
        )  # fmt: skip
    _own_kernel[(rows, kv, splits)](
        query, cache.anchor, cache.offset, table, counts, skip, out, parts, lse, cache.arrived, *numbers, window or 0,
        GP=max(16, triton.next_power_of_2(group)), SPLITS=splits, BEFORE=before, WINDOW=window is not None,
        MERGE=merge, **common,
    )  # fmt: skip
    if total > 1 and not merge:
        padded = triton.next_power_of_2(total)
        _combine_kernel[(rows * heads,)](
            parts, lse, counts, skip, out, HEADS=heads, D=width, TOTAL=total, BEFORE=before, PADDED=padded,
            num_warps=max(1, min(4, padded * width // 2048)), **early(query.device),
        )  # fmt: skip
    return out


def _form(width: int, dtype: torch.dtype) -> dict[str, int]:
    """Keys of a block, and how its loop is compiled."""
    block = 32 if dtype == torch.float32 or width > 128 else 64 if width == 128 else 128
    return {"BLOCK": block, "num_warps": 4, "num_stages": 3}
