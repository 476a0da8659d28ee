"""Corrections for tokens that another policy sampled than the one that is trained: an importance weight, or leaving them out.

Even with the same weights, a rollout engine's numbers are not quite those of training; and a sample may be older than the
weights. With rho_t = exp(old_log_probs_t - rollout_log_probs_t), training's policy over the rollout's, a correction gives a
weight for each token's loss and a mask without what it leaves out.

    @correction("mine")
    def my_correction(old_log_probs, rollout_log_probs, mask, *, cap=2.0): ...

A function takes [B, T] tensors (`mask` bool: the trained tokens) and returns a `Corrected`. Every other parameter is a
setting with a default. Nothing here has a gradient. Only the policy's term is weighted; a token that is left out counts for
nothing, in the loss's denominators neither.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from podium.algorithms._lookup import look_up
from podium.algorithms._named import NamedFunction, register
from podium.algorithms.policy_losses import LARGEST_LOG_RATIO


@dataclass(frozen=True)
class Corrected:
    """What a correction made of a batch.

    `importance_weights` [B, T] fp32 (fp64 for fp64), 0 where nothing is trained on; `corrected_mask` [B, T] bool, within the
    mask that was given. `metrics` are pairs (sum, count) of scalar tensors, the number being sum / count:

    - `importance_weight`: mean weight of the tokens that are left;
    - `truncated`, `masked` or `rejected`: share of tokens, sequences, tokens, sequences that the correction touched;
    - `effective_sample_size`: (sum w)^2 / (n sum w^2) over all n tokens, w = 0 for one left out; 1 when all weights are equal;
    - `rollout_kl`: k1 estimate of KL(rollout, training) per token, in nats; `rollout_kl_k3`: the k3 estimate, never negative.
    """

    importance_weights: Tensor
    corrected_mask: Tensor
    metrics: dict[str, tuple[Tensor, Tensor]]


Correction = NamedFunction[Corrected]

CORRECTIONS: dict[str, Correction] = {}


def correction(name: str) -> Callable[[Callable[..., Corrected]], Callable[..., Corrected]]:
    """Register a function as the correction `name`; the function itself stays as it is.

    Raises `ValueError` for a name that is taken or a signature that doesn't fit.
    """
    return register(CORRECTIONS, name, "correction", tensors=3)


def find_correction(name: str) -> Correction:
    """The correction registered as `name`; `ValueError` with the nearest name if there is none."""
    return look_up(CORRECTIONS, name, "correction")


@correction("token_truncated")
def token_truncated(old_log_probs: Tensor, rollout_log_probs: Tensor, mask: Tensor, *, cap: float = 2.0) -> Corrected:
    """Truncated importance sampling, token by token: w_t = min(rho_t, cap); no token is left out.

    Ionides 2008; for this mismatch Yao et al. 2025, "Your efficient RL framework secretly brings you off-policy RL training"
    (TIS). Raises `ValueError` for shapes that differ or a cap that is not above 0.
    """
    _check_cap(cap)
    mask, log_ratio = _log_ratio(old_log_probs, rollout_log_probs, mask)
    ratio = log_ratio.exp()
    truncated = (ratio > cap) & mask
    return _corrected(ratio.clamp(max=cap), mask, mask, log_ratio, {"truncated": (truncated.sum(), mask.sum())})


@correction("sequence_truncated")
def sequence_truncated(old_log_probs: Tensor, rollout_log_probs: Tensor, mask: Tensor, *, cap: float = 2.0) -> Corrected:
    """Truncated importance sampling of whole sequences: w_t = min(prod_s rho_s, cap) at every token; none is left out.

    Unbiased up to the cap where the token's weight is not, and of far larger variance: the product moves with the length.
    Raises as `token_truncated`.
    """
    _check_cap(cap)
    mask, log_ratio = _log_ratio(old_log_probs, rollout_log_probs, mask)
    product = log_ratio.sum(dim=1, keepdim=True).clamp(-LARGEST_LOG_RATIO, LARGEST_LOG_RATIO).exp()
    rows = mask.any(dim=1)
    truncated = (product[:, 0] > cap) & rows
    weights = product.clamp(max=cap).expand_as(log_ratio)
    return _corrected(weights, mask, mask, log_ratio, {"truncated": (truncated.sum(), rows.sum())})


@correction("token_masked")
def token_masked(
    old_log_probs: Tensor, rollout_log_probs: Tensor, mask: Tensor, *, low: float = 0.5, high: float = 5.0
) -> Corrected:
    """Tokens whose rho_t lies outside [low, high] are left out; the others have the weight rho_t.

    IcePop (Ling team 2025, "Every step evolves", arXiv:2510.18855), with its bounds. There a token outside has the weight 0
    and still counts in the denominators. Raises `ValueError` for shapes that differ or bounds that are not around 1.
    """
    _check_band(low, high)
    mask, log_ratio = _log_ratio(old_log_probs, rollout_log_probs, mask)
    ratio = log_ratio.exp()
    kept = (ratio >= low) & (ratio <= high) & mask
    return _corrected(ratio, mask, kept, log_ratio, {"masked": ((mask & ~kept).sum(), mask.sum())})


@correction("sequence_rejected")
def sequence_rejected(
    old_log_probs: Tensor, rollout_log_probs: Tensor, mask: Tensor, *, low: float = 0.99, high: float = 1.01
) -> Corrected:
    """Sequences whose geometric mean of rho lies outside [low, high] are left out whole; the others have the weight 1.

    exp(mean_t log rho_t) and not the product, so that one band fits every length (Liu et al. 2025, "When speed kills
    stability"; verl's `seq_mean_k1`). Raises `ValueError` for shapes that differ or bounds that are not around 1.
    """
    _check_band(low, high)
    mask, log_ratio = _log_ratio(old_log_probs, rollout_log_probs, mask)
    rows = mask.any(dim=1)
    mean = (log_ratio.sum(dim=1) / mask.sum(dim=1).clamp(min=1)).exp()
    rejected = ((mean < low) | (mean > high)) & rows
    kept = mask & ~rejected[:, None]
    return _corrected(torch.ones_like(log_ratio), mask, kept, log_ratio, {"rejected": (rejected.sum(), rows.sum())})


def _check_cap(cap: float) -> None:
    if not cap > 0:
        raise ValueError(f"cap must be above 0: the largest importance weight; got {cap}.")


def _check_band(low: float, high: float) -> None:
    if not 0 <= low <= 1 <= high:
        raise ValueError(f"Need 0 <= low <= 1 <= high: the ratio of equal policies is 1; got low={low}, high={high}.")


def _log_ratio(old_log_probs: Tensor, rollout_log_probs: Tensor, mask: Tensor) -> tuple[Tensor, Tensor]:
    """The mask as bool, and log rho, 0 outside it; held within +-LARGEST_LOG_RATIO so that nothing overflows."""
    if mask.dim() != 2 or not (old_log_probs.shape == rollout_log_probs.shape == mask.shape):
        shapes = [list(x.shape) for x in (old_log_probs, rollout_log_probs, mask)]
        raise ValueError(f"old_log_probs, rollout_log_probs and mask must all be [B, T]; got {shapes}.")
    mask = mask.bool()
    dtype = torch.promote_types(torch.promote_types(old_log_probs.dtype, rollout_log_probs.dtype), torch.float32)
    difference = old_log_probs.detach().to(dtype) - rollout_log_probs.detach().to(dtype)
    return mask, difference.masked_fill(~mask, 0.0).clamp(-LARGEST_LOG_RATIO, LARGEST_LOG_RATIO)


def _corrected(
    weights: Tensor, mask: Tensor, kept: Tensor, log_ratio: Tensor, touched: dict[str, tuple[Tensor, Tensor]]
) -> Corrected:
    weights = weights.masked_fill(~kept, 0.0)
    total, squares, count = weights.sum(), weights.square().sum(), mask.sum()
    metrics = {
        "importance_weight": (total, kept.sum()),
        **touched,
        # No token left at all is an effective size of 0.
        "effective_sample_size": (total.square() / squares.clamp(min=torch.finfo(squares.dtype).tiny), count),
        "rollout_kl": (-log_ratio.sum(), count),
        "rollout_kl_k3": ((log_ratio.exp() - 1 - log_ratio).sum(), count),
    }
    return Corrected(weights, kept, metrics)
