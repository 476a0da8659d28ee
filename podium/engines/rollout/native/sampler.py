"""Drawing a token: from the logits, the sample's own seed and the token's position, and nothing else."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from podium.engines.base import SamplingParams

_BLOCK = 256
_CANDIDATES = 512
Truncation = tuple[Tensor, Tensor, Tensor]
_GAMMA = np.uint64(0x9E3779B97F4A7C15)


def uniforms(seeds: Sequence[int], positions: Sequence[int]) -> np.ndarray:
    """One number in (0, 1) for each (seed, position), float64: a counter-based generator, with no state.

    splitmix64 (Steele, Lea and Flood, "Fast splittable pseudorandom number generators", 2014): the seed is mixed
    first, so that neighbouring seeds do not give shifted copies of one stream; the position then counts.
    """
    seed = np.array([s & 0xFFFFFFFFFFFFFFFF for s in seeds], dtype=np.uint64)
    with np.errstate(over="ignore"):
        state = _mix(seed + _GAMMA) + (np.array(positions, dtype=np.uint64) + np.uint64(1)) * _GAMMA
        bits = _mix(state)
    # 48 bits and a half: never 0, and u * total never rounds up to total.
    return ((bits >> np.uint64(16)).astype(np.float64) + 0.5) * 2.0**-48


def _mix(z: np.ndarray) -> np.ndarray:
    z = (z ^ (z >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    z = (z ^ (z >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return z ^ (z >> np.uint64(31))


def device_uniforms(seeds: Tensor, positions: Tensor) -> Tensor:
    """`uniforms` of `[B]` int64 tensors, on their device: the same numbers, fp64."""
    gamma = _signed(int(_GAMMA))
    state = _mix_signed(seeds + gamma) + (positions + 1) * gamma
    return (_shifted(_mix_signed(state), 16).double() + 0.5) * 2.0**-48


def _mix_signed(z: Tensor) -> Tensor:
    z = (z ^ _shifted(z, 30)) * _signed(0xBF58476D1CE4E5B9)
    z = (z ^ _shifted(z, 27)) * _signed(0x94D049BB133111EB)
    return z ^ _shifted(z, 31)


def _shifted(z: Tensor, bits: int) -> Tensor:
    return (z >> bits) & ((1 << (64 - bits)) - 1)


def _signed(value: int) -> int:
    return value - (1 << 64) if value >> 63 else value


def truncate(weights: Tensor, top_k: Tensor, top_p: Tensor, min_p: Tensor) -> Tensor:
    """Zeroes the tokens that are not to be drawn.

    In this order, each over what the one before left: the `top_k` heaviest (0: all); the fewest heaviest whose share
    reaches `top_p` (Holtzman et al. 2020); those not lighter than `min_p` of the heaviest (Nguyen et al. 2024). The
    heaviest always stays. Among equals the lower token id counts as heavier.

    Args:
        weights: `[R, V]` fp32, not negative, need not add up to 1.
        top_k: `[R]` int64.
        top_p, min_p: `[R]` fp32.
    """
    vocabulary = weights.shape[-1]
    total = weights.sum(-1, dtype=torch.float64)
    # The heaviest few nearly always decide; where they do not, all are sorted.
    size = min(vocabulary, max(_CANDIDATES, int(top_k.max())))
    heaviest = weights.topk(size, -1).values
    kept = _count_kept(heaviest, total, top_k, top_p, min_p)
    if size < vocabulary and bool(((kept == size) & (top_k != size)).any()):
        heaviest = weights.sort(-1, descending=True).values
        kept = _count_kept(heaviest, total, top_k, top_p, min_p)
    return _heaviest(weights, heaviest, kept)


def _count_kept(heaviest: Tensor, total: Tensor, top_k: Tensor, top_p: Tensor, min_p: Tensor) -> Tensor:
    """How many of a row's heaviest weights `[R, C]`, in falling order, stay (`[R]`); each rule keeps the first so many."""
    limit = torch.where(top_k > 0, top_k, heaviest.shape[-1])[:, None]
    within = torch.arange(heaviest.shape[-1], device=heaviest.device) < limit
    upto = (heaviest * within).cumsum(-1, dtype=torch.float64)
    whole = torch.where(top_k > 0, upto[:, -1], total)[:, None]
    keep = within & ((upto - heaviest < top_p[:, None] * whole) | (top_p[:, None] >= 1))
    keep &= heaviest >= min_p[:, None] * heaviest[:, :1]
    return keep.sum(-1).clamp_(min=1)


def _heaviest(weights: Tensor, heaviest: Tensor, kept: Tensor) -> Tensor:
    """Each row's `kept` heaviest weights at their places, zeros elsewhere. Among equals, the lower ids."""
    least = heaviest.gather(-1, kept[:, None] - 1)
    equals = weights == least
    keep = weights >= least
    surplus = keep.sum(-1) - kept
    if bool((surplus > 0).any()):
        needed = equals.sum(-1) - surplus
        keep &= ~equals | (equals.cumsum(-1) <= needed[:, None])
    return weights * keep


class Sampler:
    """Draws by inverting the cumulated distribution at the sample's uniform number.

    The sums over blocks of 256 tokens are cumulated in fp64, and then the tokens of the block that is hit: two cheap
    passes instead of one over the vocabulary, and rounding that depends on the batch's shape moves the borders
    between tokens by little. A scratch buffer `[rows, vocabulary]` fp32 is kept between calls (`release` frees it).
    """

    def __init__(self) -> None:
        self._scratch: Tensor | None = None

    def release(self) -> None:
        self._scratch = None

    def __call__(
        self, logits: Tensor, seeds: Sequence[int], positions: Sequence[int], params: Sequence[SamplingParams]
    ) -> tuple[Tensor, Tensor]:
        """One token per row.

        Args:
            logits: `[B, V]`, any floating dtype.
            seeds, positions, params: one per row; `positions` count the response's tokens.

        Returns:
            Token ids `[B]` int64 and log-probs `[B]` fp32 (of the whole distribution at the row's temperature). A log-prob
            is not finite where the row's logits have NaN or +inf, or are all -inf.
        """
        rows, vocabulary = logits.shape
        device = logits.device
        greedy = torch.tensor([p.temperature == 0 for p in params], device=device)
        temperature = torch.tensor([p.temperature or 1.0 for p in params], device=device)
        scale = any(p.temperature not in (0, 1) for p in params)
        weights, top, likeliest = self._weights(logits, temperature, scale, bool(greedy.any()))
        blocks = weights.view(rows, -1, _BLOCK)
        sums = blocks.sum(-1).double()
        total = sums.sum(-1)
        cut = [i for i, p in enumerate(params) if p.temperature and (p.top_k or p.top_p < 1 or p.min_p)]
        if cut:
            weights[cut] = _truncated(weights[cut], [params[i] for i in cut])
            sums[cut] = blocks[cut].sum(-1).double()
        draws = torch.from_numpy(uniforms(seeds, positions)).to(device)
        picks = _invert(blocks, sums, draws).clamp_(max=vocabulary - 1)
        if likeliest is not None:
            picks = torch.where(greedy, likeliest, picks)
        chosen = logits.gather(-1, picks[:, None])[:, 0].float() / temperature
        return picks, (chosen.double() - top.double() - total.log()).float()

    def _weights(self, logits: Tensor, temperature: Tensor, scale: bool, greedy: bool) -> tuple[Tensor, Tensor, Tensor | None]:
        """exp(logits / temperature - their maximum) in the scratch buffer, zeros up to a whole block; the maximum and,
        where greedy rows ask for it, its place, each `[B]`.
        """
        rows, vocabulary = logits.shape
        width = -(-vocabulary // _BLOCK) * _BLOCK
        scratch = self._scratch
        if scratch is None or scratch.shape[0] < rows or scratch.shape[1] != width or scratch.device != logits.device:
            scratch = self._scratch = torch.zeros((rows, width), device=logits.device)
        weights = scratch[:rows]
        used = weights[:, :vocabulary]
        used.copy_(logits)
        if scale:
            used.div_(temperature[:, None])
        top = used.amax(-1, keepdim=True)
        likeliest = used.argmax(-1) if greedy else None
        used.sub_(top).exp_()
        return weights, top[:, 0], likeliest


def _truncated(weights: Tensor, params: list[SamplingParams]) -> Tensor:
    if not any(p.top_k or p.top_p < 1 for p in params):  # min_p alone needs no order
        floor = torch.tensor([p.min_p for p in params], device=weights.device)[:, None] * weights.amax(-1, keepdim=True)
        return weights * (weights >= floor)
    return truncate(
        weights,
        torch.tensor([p.top_k for p in params], device=weights.device),
        torch.tensor([p.top_p for p in params], device=weights.device),
        torch.tensor([p.min_p for p in params], device=weights.device),
    )


def _invert(blocks: Tensor, sums: Tensor, draws: Tensor) -> Tensor:
    """The token where the cumulated weight passes `draws * total`: first its block, then its place inside.

    Args:
        blocks: `[B, N, 256]` fp32 weights.
        sums: `[B, N]` fp64, those of the blocks.
        draws: `[B]` fp64 in (0, 1).
    """
    upto = sums.cumsum(-1)
    target = draws[:, None] * upto[:, -1:]
    block = _first_above(upto, target)
    # The share of the block that is left, not the rest itself: the block's own cumulated sum rounds otherwise.
    here = sums.gather(-1, block)
    share = (target - (upto.gather(-1, block) - here)) / here
    inside = blocks.gather(1, block[:, :, None].expand(-1, -1, blocks.shape[-1]))[:, 0].cumsum(-1, dtype=torch.float64)
    return (block * blocks.shape[-1] + _first_above(inside, share.clamp(0, 1) * inside[:, -1:]))[:, 0]


def _first_above(cumulated: Tensor, target: Tensor) -> Tensor:
    """The first index whose cumulated weight exceeds the target: one with weight. At the very end, the last with weight."""
    # (Clamped: among NaN the search runs past the end; such a row is an error that its log-prob tells.)
    last = torch.searchsorted(cumulated, cumulated[:, -1:].contiguous()).clamp_(max=cumulated.shape[-1] - 1)
    return torch.minimum(torch.searchsorted(cumulated, target.contiguous(), right=True), last)


def draw(scaled: Tensor, draws: Tensor, greedy: Tensor, truncation: Truncation | None = None) -> tuple[Tensor, Tensor]:
    """Tokens `[B]` and their log-probs (of the whole distribution), as `Sampler` draws them, wherever the logits are.

    Args:
        scaled: `[B, V]` fp32 logits over temperature.
        draws: `[B]` fp64 in (0, 1).
        greedy: `[B]` bool: take the likeliest instead.
        truncation: `top_k [B]` int64, `top_p`, `min_p` `[B]` fp32; None: all tokens may be drawn.
    """
    top = scaled.amax(-1, keepdim=True)
    weights = (scaled - top).exp()
    total = weights.sum(-1, dtype=torch.float64)
    kept = weights if truncation is None else truncate(weights, *truncation)
    width = -(-scaled.shape[-1] // _BLOCK) * _BLOCK
    blocks = torch.nn.functional.pad(kept, (0, width - scaled.shape[-1])).view(len(scaled), -1, _BLOCK)
    picks = _invert(blocks, blocks.sum(-1).double(), draws).clamp_(max=scaled.shape[-1] - 1)
    picks = torch.where(greedy, scaled.argmax(-1), picks)
    chosen = scaled.gather(-1, picks[:, None])[:, 0]
    return picks, (chosen.double() - top[:, 0].double() - total.log()).float()
