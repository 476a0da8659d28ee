# mypy: disable-error-code="no-untyped-def,no-untyped-call,untyped-decorator,import-untyped,import-not-found"

"""Drawing tokens in Triton, and moving the rows on. `plain.sample` is the same in torch.

Truncation (top-k, top-p, min-p) sorts nothing: what stays are the logits above a floor and the first few that equal it,
and the floor is found bit by bit, by counting and weighing what lies above (`truncate_kernels`).
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from podium.engines.rollout.native.truncate_kernels import find_floors, kept, kept_sums

_BLOCK = 2048


@triton.jit
def _mix(z):
    z = (z ^ (z >> 30)) * 0xBF58476D1CE4E5B9
    z = (z ^ (z >> 27)) * 0x94D049BB133111EB
    return z ^ (z >> 31)


@triton.jit
def _uniform(seed, position):
    """`sampler.uniforms` for one (seed, position): splitmix64, fp64 in (0, 1)."""
    gamma = tl.full((), 0x9E3779B97F4A7C15, tl.uint64)
    state = _mix(seed.to(tl.uint64) + gamma) + (position.to(tl.uint64) + 1) * gamma
    return ((_mix(state) >> 16).to(tl.int64).to(tl.float64) + 0.5) * 3.552713678800501e-15


@triton.jit
def _scan_kernel(LOGITS, WHICH, SLOTS, TEMPERATURE, TOP, SUM, BEST, vocabulary, blocks, BLOCK: tl.constexpr):
    """Programs: (sample, block of the vocabulary): the block's largest scaled logit, where, and its sum of exponentials."""
    i = tl.program_id(0)
    block = tl.program_id(1)
    temperature = tl.load(TEMPERATURE + tl.load(SLOTS + i))
    temperature = tl.where(temperature == 0.0, 1.0, temperature)
    at = block * BLOCK + tl.arange(0, BLOCK)
    row = tl.load(WHICH + i).to(tl.int64)
    x = tl.load(LOGITS + row * vocabulary + at, mask=at < vocabulary, other=float("-inf")).to(tl.float32)
    if temperature != 1.0:  # a division takes as long as all the rest
        x = x / temperature
    top = tl.max(x, 0)
    best = tl.min(tl.where(x == top, at, 2147483647), 0)
    shift = tl.where(top == float("-inf"), 0.0, top)
    tl.store(TOP + i * blocks + block, top)
    tl.store(SUM + i * blocks + block, tl.sum(tl.exp(x - shift), 0))
    tl.store(BEST + i * blocks + block, best)


@triton.jit
def _draw_kernel(
    LOGITS, WHICH, SLOTS, TEMPERATURE, TOP, SUM, BEST, KEPT, FLOOR, LAST, MIN_P, TOKEN, LENGTH, ACTIVE, WRITTEN, LIMIT, FIRST,
    SEED, STOPS, TOKENS_OUT, SCORES_OUT, vocabulary, blocks, slots, BLOCK: tl.constexpr, BLOCKS: tl.constexpr,
    STOPS_WIDTH: tl.constexpr, TRUNCATED: tl.constexpr,
):  # fmt: skip
    """One program a sample: draws, and moves its row on by a token. KEPT: as SUM, over the tokens that truncation keeps."""
    i = tl.program_id(0)
    slot = tl.load(SLOTS + i)
    if tl.load(ACTIVE + slot) != 0:
        row = tl.load(WHICH + i).to(tl.int64)
        raw = tl.load(TEMPERATURE + slot)
        temperature = tl.where(raw == 0.0, 1.0, raw)
        b = tl.arange(0, BLOCKS)
        tops = tl.load(TOP + i * blocks + b, mask=b < blocks, other=float("-inf"))
        sums = tl.load(SUM + i * blocks + b, mask=b < blocks, other=0.0)
        bests = tl.load(BEST + i * blocks + b, mask=b < blocks, other=2147483647)
        top = tl.max(tops, 0)
        likeliest = tl.min(tl.where(tops == top, bests, 2147483647), 0)
        scale = tl.exp(tl.where(tops == float("-inf"), tops, tops - top)).to(tl.float64)
        weights = sums.to(tl.float64) * scale
        total = tl.sum(weights, 0)
        if TRUNCATED:
            weights = tl.load(KEPT + i * blocks + b, mask=b < blocks, other=0.0).to(tl.float64) * scale
        upto = tl.cumsum(weights, 0)
        length = tl.load(LENGTH + slot) + 1
        target = _uniform(tl.load(SEED + slot), length - tl.load(FIRST + slot)) * tl.sum(weights, 0)
        last = tl.max(tl.where(weights > 0, b, 0), 0)
        block = tl.minimum(tl.min(tl.where((upto > target) & (weights > 0), b, BLOCKS), 0), last)
        here = tl.sum(tl.where(b == block, weights, 0.0), 0)
        before = tl.sum(tl.where(b == block, upto, 0.0), 0) - here
        peak = tl.sum(tl.where(b == block, tops, 0.0), 0)
        at = block * BLOCK + tl.arange(0, BLOCK)
        x = tl.load(LOGITS + row * vocabulary + at, mask=at < vocabulary, other=float("-inf")).to(tl.float32)
        e = tl.exp(x / temperature - peak).to(tl.float64)
        if TRUNCATED:
            share_of_top = tl.exp(x / temperature - top)
            stays = kept(x, at, share_of_top, tl.load(FLOOR + i), tl.load(LAST + i), tl.load(MIN_P + slot))
            e = tl.where(stays, e, 0.0)
        inner = tl.cumsum(e, 0)
        share = tl.minimum(tl.maximum((target - before) / here, 0.0), 1.0)
        goal = share * tl.sum(e, 0)
        final = tl.max(tl.where(e > 0, at, 0), 0)
        token = tl.minimum(tl.min(tl.where((inner > goal) & (e > 0), at, 2147483647), 0), final)
        token = tl.where(raw == 0.0, likeliest, token)
        token = tl.minimum(tl.maximum(token, 0), vocabulary - 1)
        chosen = tl.load(LOGITS + row * vocabulary + token).to(tl.float32) / temperature
        score = (chosen.to(tl.float64) - top.to(tl.float64) - tl.log(total)).to(tl.float32)
        written = tl.load(WRITTEN + slot)
        tl.store(TOKENS_OUT + written * slots + slot, token.to(tl.int64))
        tl.store(SCORES_OUT + written * slots + slot, score)
        stops = tl.load(STOPS + slot * STOPS_WIDTH + tl.arange(0, STOPS_WIDTH))
        stopped = tl.sum((stops == token).to(tl.int32), 0) > 0
        ended = stopped | (length + 1 >= tl.load(LIMIT + slot)) | (score - score != 0)
        tl.store(TOKEN + slot, token.to(tl.int64))
        tl.store(LENGTH + slot, length)
        tl.store(WRITTEN + slot, written + 1)
        tl.store(ACTIVE + slot, tl.where(ended, 0, 1).to(tl.int64))


def sample(logits: Tensor, which: Tensor, slots: Tensor, state: Any, *, truncated: bool = False) -> None:
    """Draws a token for each of N samples and moves its row of the state on (see `RowState`).

    The distribution is inverted at the sample's uniform number, as `Sampler` does: its block first, then the token.

    Args:
        logits: `[M, V]`, any floating dtype.
        which: `[N]` int64, each sample's row of `logits`.
        slots: `[N]` int64, its row of the state. A row that is not active is left alone.
        truncated: obey the rows' top-k, top-p and min-p. (False: none of them has any.)
    """
    count, vocabulary = len(which), logits.shape[1]
    blocks = triton.cdiv(vocabulary, _BLOCK)
    top = torch.empty(count, blocks, dtype=torch.float32, device=logits.device)
    total = torch.empty_like(top)
    best = torch.empty(count, blocks, dtype=torch.int32, device=logits.device)
    _scan_kernel[(count, blocks)](
        logits, which, slots, state.temperature, top, total, best, vocabulary, blocks, BLOCK=_BLOCK, num_warps=4
    )  # fmt: skip
    floor, last, stays = top, best, total
    if truncated:
        floor, last = find_floors(logits, which, slots, state, top)
        stays = kept_sums(logits, which, slots, state, top, floor, last, _BLOCK)
    _draw_kernel[(count,)](
        logits, which, slots, state.temperature, top, total, best, stays, floor, last, state.min_p, state.token, state.length,
        state.active, state.written, state.limit, state.first, state.seed, state.stops, state.tokens_out, state.scores_out,
        vocabulary, blocks, state.tokens_out.shape[1],
        BLOCK=_BLOCK, BLOCKS=triton.next_power_of_2(blocks), STOPS_WIDTH=state.stops.shape[1], TRUNCATED=truncated,
        num_warps=4,
    )  # fmt: skip
