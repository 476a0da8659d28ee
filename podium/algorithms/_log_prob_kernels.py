"""The passes over logits behind `TiledLogProbs`, in Triton: each reads a tile of raw logits once."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from podium.algorithms._chunked_log_probs import LogitTransform

_BLOCK = 4096
_BLOCK_OF_SUMS = 2048


@triton.jit
def _shaped(raw, BIAS, column, inside, before, after, HAS_BIAS: tl.constexpr, CAPPED: tl.constexpr):
    """Transformed logits, in fp32: `raw * before`, or `after * tanh(raw * before)`."""
    if HAS_BIAS:
        raw += tl.load(BIAS + column, mask=inside, other=0.0).to(tl.float32)
    raw = raw * before
    if CAPPED:
        raw = (2.0 / (1.0 + tl.exp(-2.0 * raw)) - 1.0) * after
    return raw


@triton.jit(do_not_specialize=["first", "columns"])
def _statistics(
    RAW, BIAS, TARGETS, LARGEST, TOTAL, WEIGHTED, PICKED, first, columns, before, after,
    HAS_BIAS: tl.constexpr, CAPPED: tl.constexpr, WITH_ENTROPY: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """One program a token. Its running maximum, sum of exponentials, and sum of exponentials times logits."""
    row = tl.program_id(0).to(tl.int64)
    RAW += row * columns
    # Each lane has sums of its own until the end: a reduction in every round costs more than a second exponential.
    # They start below any logit that is finite, and not at infinity, whose difference to itself is none.
    largest = tl.full([BLOCK], -1e30, tl.float32)
    total = tl.zeros([BLOCK], tl.float32)
    weighted = tl.zeros([BLOCK], tl.float32)
    for start in range(0, columns, BLOCK):
        at = start + tl.arange(0, BLOCK)
        inside = at < columns
        raw = tl.load(RAW + at, mask=inside, other=0.0).to(tl.float32)
        z = _shaped(raw, BIAS, first + at, inside, before, after, HAS_BIAS, CAPPED)
        z = tl.where(inside, z, -1e30)
        most = tl.maximum(largest, z)
        old = tl.exp(largest - most)
        e = tl.where(inside, tl.exp(z - most), 0.0)
        total = total * old + e
        if WITH_ENTROPY:
            weighted = weighted * old + e * z
        largest = most
    before_largest = tl.load(LARGEST + row)
    most_of_all = tl.maximum(tl.max(largest, 0), before_largest)
    share = tl.exp(largest - most_of_all)
    kept = tl.exp(before_largest - most_of_all)
    tl.store(LARGEST + row, most_of_all)
    tl.store(TOTAL + row, tl.load(TOTAL + row) * kept + tl.sum(total * share, 0))
    if WITH_ENTROPY:
        tl.store(WEIGHTED + row, tl.load(WEIGHTED + row) * kept + tl.sum(weighted * share, 0))
    target = tl.load(TARGETS + row) - first
    if (target >= 0) & (target < columns):
        raw = tl.load(RAW + target).to(tl.float32)
        tl.store(PICKED + row, _shaped(raw, BIAS, first + target, target >= 0, before, after, HAS_BIAS, CAPPED))


@triton.jit(do_not_specialize=["first", "columns"])
def _gradient(
    RAW, BIAS, TARGETS, NORMALISER, UPSTREAM, ENTROPY, OF_ENTROPY, first, columns, before, after, slope,
    HAS_BIAS: tl.constexpr, CAPPED: tl.constexpr, WITH_ENTROPY: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Programs: (token, block of columns). The gradient with respect to the raw logits, in their place."""
    row = tl.program_id(0).to(tl.int64)
    at = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = at < columns
    RAW += row * columns
    raw = tl.load(RAW + at, mask=inside, other=0.0).to(tl.float32)
    z = _shaped(raw, BIAS, first + at, inside, before, after, HAS_BIAS, CAPPED)
    log_p = z - tl.load(NORMALISER + row)
    p = tl.exp(log_p)
    upstream = tl.load(UPSTREAM + row)
    grad = tl.where(at == tl.load(TARGETS + row) - first, upstream, 0.0) - upstream * p
    if WITH_ENTROPY:
        grad -= p * (log_p + tl.load(ENTROPY + row)) * tl.load(OF_ENTROPY + row)
    if CAPPED:
        t = z / after
        grad *= 1.0 - t * t
    tl.store(RAW + at, (grad * slope).to(RAW.dtype.element_ty), mask=inside)


def _factors(transform: LogitTransform) -> tuple[float, float]:
    """(`before`, `after`) of `_shaped`."""
    if transform.softcap is None:
        return transform.scale / transform.temperature, 1.0
    return transform.scale / transform.softcap, transform.softcap / transform.temperature


class Statistics:
    """What the tiles of the vocabulary add up to, for each of N tokens."""

    def __init__(self, targets: Tensor, with_entropy: bool) -> None:
        self.targets = targets
        new = torch.zeros(4, len(targets), dtype=torch.float32, device=targets.device)
        self.largest, self.total, self.picked, weighted = new
        self.largest.fill_(-1e30)
        self.weighted = weighted if with_entropy else None

    def add(self, raw: Tensor, first: int, bias: Tensor | None, transform: LogitTransform) -> None:
        """Raw logits `[N, C]` of the vocabulary from token `first` on."""
        before, after = _factors(transform)
        if not len(raw):
            return
        _statistics[(len(raw),)](
            raw, raw if bias is None else bias, self.targets, self.largest, self.total,
            self.total if self.weighted is None else self.weighted, self.picked, first, raw.shape[1], before, after,
            HAS_BIAS=bias is not None, CAPPED=transform.softcap is not None, WITH_ENTROPY=self.weighted is not None,
            BLOCK=_BLOCK_OF_SUMS, num_warps=4,
        )  # fmt: skip

    def results(self) -> tuple[Tensor, Tensor, Tensor | None]:
        """Log-probs of the targets, log-normalisers, entropies: `[N]`, fp32."""
        normaliser = self.largest + self.total.log()
        entropy = None if self.weighted is None else normaliser - self.weighted / self.total
        return self.picked - normaliser, normaliser, entropy


def gradient_(
    raw: Tensor,
    first: int,
    bias: Tensor | None,
    transform: LogitTransform,
    targets: Tensor,
    normaliser: Tensor,
    upstream: Tensor,
    with_entropy: tuple[Tensor, Tensor] | None,
) -> None:
    """Raw logits `[N, C]` into the gradient with respect to them, given those of log-probs and (entropy, its gradient)."""
    before, after = _factors(transform)
    entropy, of_entropy = with_entropy if with_entropy is not None else (upstream, upstream)
    block = min(_BLOCK, triton.next_power_of_2(raw.shape[1]))
    if not len(raw):
        return
    _gradient[(len(raw), triton.cdiv(raw.shape[1], block))](
        raw, raw if bias is None else bias, targets, normaliser, upstream, entropy, of_entropy, first, raw.shape[1],
        before, after, transform.scale / transform.temperature,
        HAS_BIAS=bias is not None, CAPPED=transform.softcap is not None, WITH_ENTROPY=with_entropy is not None,
        BLOCK=block, num_warps=4,
    )  # fmt: skip
