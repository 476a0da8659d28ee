# mypy: disable-error-code="no-untyped-def,no-untyped-call,untyped-decorator,import-untyped,import-not-found"

"""Top-k, top-p and min-p in Triton, without sorting and without the host. `sampler.truncate` says what they mean.

Top-k and top-p each keep the first so many tokens in falling order, so what they keep is: every logit above a floor, and
of those that equal it the first few by id. Floats are read as integers of the same order, and the floor is built from
the highest bit down: a bit stays set where enough lies at or above. 16 passes over a row in bf16, 32 in fp32; sums in fp64.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

_LEAST = tl.constexpr(-(1 << 31))
# The bits of a logit, widened to fp32, that may be set.
_BITS = {torch.bfloat16: 16, torch.float16: 19, torch.float32: 32}


@triton.jit
def kept(x, at, share_of_top, floor, last, min_p):
    """Which tokens `at` stay: their logits `x`, and their weights as shares of the heaviest."""
    return ((x > floor) | ((x == floor) & (at <= last))) & (share_of_top >= min_p)


@triton.jit
def _key(x):
    """An int32 of the same order as the fp32 number."""
    bits = tl.where(x == 0.0, 0.0, x).to(tl.int32, bitcast=True)  # -0 is 0
    return bits ^ ((bits >> 31) & 0x7FFFFFFF)


@triton.jit
def _above(ROW, least, temperature, top, vocabulary, BLOCK: tl.constexpr, WEIGH: tl.constexpr):
    """How many logits have a key of at least `least`, and the sum of their weights (fp64; 0 if not WEIGH)."""
    count = tl.zeros([BLOCK], tl.int32)
    weight = tl.zeros([BLOCK], tl.float64)
    for start in range(0, vocabulary, BLOCK):
        at = start + tl.arange(0, BLOCK)
        x = tl.load(ROW + at, mask=at < vocabulary, other=float("-inf")).to(tl.float32)
        inside = (at < vocabulary) & (_key(x) >= least)
        count += inside.to(tl.int32)
        if WEIGH:
            weight += tl.where(inside, tl.exp(x / temperature - top), 0.0).to(tl.float64)
    return tl.sum(count, 0), tl.sum(weight, 0)


@triton.jit
def _search(ROW, goal, temperature, top, vocabulary, BLOCK: tl.constexpr, BITS: tl.constexpr, WEIGH: tl.constexpr):
    """The highest key at or above which there is the goal: a weight (WEIGH), or a count."""
    found = tl.full((), _LEAST, tl.int64)
    step = tl.full((), 1 << 31, tl.int64)
    for _ in range(BITS):
        count, weight = _above(ROW, (found + step).to(tl.int32), temperature, top, vocabulary, BLOCK, WEIGH)
        have = count.to(tl.float64)
        if WEIGH:
            have = weight
        found = tl.where(have >= goal, found + step, found)
        step = step // 2
    # The bits below are alike in all logits: 0 in the number, so 1 in the key of a negative one.
    return tl.where(found < 0, found + ((1 << (32 - BITS)) - 1), found).to(tl.int32)


@triton.jit
def _equals(ROW, key, temperature, top, vocabulary, BLOCK: tl.constexpr):
    """(count, weight) of what lies above a key, and (count of all, weight of one) of what equals it."""
    over, heavier = _above(ROW, key + 1, temperature, top, vocabulary, BLOCK, True)
    count, _ = _above(ROW, key, temperature, top, vocabulary, BLOCK, False)
    value = (key ^ ((key >> 31) & 0x7FFFFFFF)).to(tl.float32, bitcast=True)
    return over, heavier, count - over, tl.exp(value / temperature - top).to(tl.float64)


@triton.jit
def _floor_kernel(
    LOGITS, WHICH, SLOTS, TEMPERATURE, TOP_K, TOP_P, TOP, FLOOR, LAST, vocabulary, blocks,
    BLOCK: tl.constexpr, BLOCKS: tl.constexpr, BITS: tl.constexpr,
):  # fmt: skip
    """One program a sample."""
    i = tl.program_id(0)
    slot = tl.load(SLOTS + i)
    temperature = tl.load(TEMPERATURE + slot)
    temperature = tl.where(temperature == 0.0, 1.0, temperature)
    top_k = tl.load(TOP_K + slot)
    top_p = tl.load(TOP_P + slot).to(tl.float64)
    ROW = LOGITS + tl.load(WHICH + i).to(tl.int64) * vocabulary
    b = tl.arange(0, BLOCKS)
    top = tl.max(tl.load(TOP + i * blocks + b, mask=b < blocks, other=float("-inf")), 0)
    limited = (top_k > 0) & (top_k < vocabulary)
    key = tl.full((), _LEAST, tl.int32)
    stay = tl.full((), 0, tl.float64)  # of those that equal the floor
    equal = tl.full((), 0, tl.int32)
    if limited:
        key = _search(ROW, top_k.to(tl.float64), temperature, top, vocabulary, BLOCK, BITS, False)
    if top_p < 1.0:
        if limited:
            over, heavier, equal, one = _equals(ROW, key, temperature, top, vocabulary, BLOCK)
            stay = top_k.to(tl.float64) - over.to(tl.float64)
            goal = top_p * (heavier + stay * one)
        else:
            _, whole = _above(ROW, key, temperature, top, vocabulary, BLOCK, True)
            goal = top_p * whole
        by_count = key
        key = _search(ROW, goal, temperature, top, vocabulary, BLOCK, BITS, True)
        over, heavier, equal, one = _equals(ROW, key, temperature, top, vocabulary, BLOCK)
        # The share counts what comes before a token, so the one that reaches the goal stays.
        few = tl.maximum(tl.ceil((goal - heavier) / one), 1.0)
        stay = tl.where(limited & (key == by_count), tl.minimum(stay, few), few)
    elif limited:
        over, heavier, equal, one = _equals(ROW, key, temperature, top, vocabulary, BLOCK)
        stay = top_k.to(tl.float64) - over.to(tl.float64)
    last = tl.full((), 2147483647, tl.int32)
    if stay < equal.to(tl.float64):
        last = _place(ROW, key, stay, vocabulary, BLOCK)
    value = (key ^ ((key >> 31) & 0x7FFFFFFF)).to(tl.float32, bitcast=True)
    tl.store(FLOOR + i, tl.where(limited | (top_p < 1.0), value, float("-inf")))
    tl.store(LAST + i, last)


@triton.jit
def _place(ROW, key, count, vocabulary, BLOCK: tl.constexpr):
    """The id of the `count`-th token whose logit has this key."""
    before = tl.full((), 0, tl.int32)
    last = tl.full((), -1, tl.int32)
    for start in range(0, vocabulary, BLOCK):
        at = start + tl.arange(0, BLOCK)
        x = tl.load(ROW + at, mask=at < vocabulary, other=float("-inf")).to(tl.float32)
        equal = ((at < vocabulary) & (_key(x) == key)).to(tl.int32)
        rank = before + tl.cumsum(equal, 0)
        last = tl.maximum(last, tl.max(tl.where((equal > 0) & (rank.to(tl.float64) <= count), at, -1), 0))
        before += tl.sum(equal, 0)
    return last


def find_floors(logits: Tensor, which: Tensor, slots: Tensor, state: Any, top: Tensor) -> tuple[Tensor, Tensor]:
    """For each of N samples the floor (fp32, a logit) and the last id that stays among those that equal it (int32).

    Args:
        logits, which, slots, state: as `sample`.
        top: `[N, blocks]` fp32, the largest logit over temperature in each block of the vocabulary.
    """
    count, vocabulary = len(which), logits.shape[1]
    floor = torch.empty(count, dtype=torch.float32, device=logits.device)
    last = torch.empty(count, dtype=torch.int32, device=logits.device)
    block = min(8192, triton.next_power_of_2(vocabulary))
    _floor_kernel[(count,)](
        logits, which, slots, state.temperature, state.top_k, state.top_p, top, floor, last, vocabulary, top.shape[1],
        BLOCK=block, BLOCKS=triton.next_power_of_2(top.shape[1]), BITS=_BITS[logits.dtype], num_warps=max(4, block // 512),
    )  # fmt: skip
    return floor, last


@triton.jit
def _kept_kernel(
    LOGITS, WHICH, SLOTS, TEMPERATURE, MIN_P, TOP, FLOOR, LAST, SUM, vocabulary, blocks,
    BLOCK: tl.constexpr, BLOCKS: tl.constexpr,
):  # fmt: skip
    """Programs: (sample, block of the vocabulary): the sum of what stays, relative to the block's largest."""
    i = tl.program_id(0)
    block = tl.program_id(1)
    slot = tl.load(SLOTS + i)
    temperature = tl.load(TEMPERATURE + slot)
    temperature = tl.where(temperature == 0.0, 1.0, temperature)
    b = tl.arange(0, BLOCKS)
    tops = tl.load(TOP + i * blocks + b, mask=b < blocks, other=float("-inf"))
    top = tl.max(tops, 0)
    peak = tl.max(tl.where(b == block, tops, float("-inf")), 0)
    at = block * BLOCK + tl.arange(0, BLOCK)
    row = tl.load(WHICH + i).to(tl.int64)
    x = tl.load(LOGITS + row * vocabulary + at, mask=at < vocabulary, other=float("-inf")).to(tl.float32)
    stays = kept(x, at, tl.exp(x / temperature - top), tl.load(FLOOR + i), tl.load(LAST + i), tl.load(MIN_P + slot))
    e = tl.exp(x / temperature - tl.where(peak == float("-inf"), 0.0, peak))
    tl.store(SUM + i * blocks + block, tl.sum(tl.where(stays, e, 0.0), 0))


def kept_sums(
    logits: Tensor, which: Tensor, slots: Tensor, state: Any, top: Tensor, floor: Tensor, last: Tensor, block: int
) -> Tensor:
    """`[N, blocks]` fp32: each block's exponentials of what stays, relative to the block's own largest."""
    count, blocks = top.shape
    total = torch.empty_like(top)
    _kept_kernel[(count, blocks)](
        logits, which, slots, state.temperature, state.min_p, top, floor, last, total, logits.shape[1], blocks,
        BLOCK=block, BLOCKS=triton.next_power_of_2(blocks), num_warps=4,
    )  # fmt: skip
    return total
