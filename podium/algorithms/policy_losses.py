"""Policy losses: one number per token, to be minimised; the reduction is somebody else's (`reduce.py`).

A policy objective has a name that a recipe can give:

    @policy_objective("mine")
    def my_objective(log_probs, old_log_probs, advantages, mask, *, scale=1.0):
        return -scale * advantages * log_probs, {}

Tensors are [b, T]; `mask` says which tokens the loss counts (what is outside may hold anything). It returns the loss and
metrics of that shape, and must treat each row by itself. Every other parameter is a setting with a default.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from podium.algorithms._lookup import look_up
from podium.algorithms._named import NamedFunction, register

# exp(20) is 5e8: past that a ratio means that the two log-probs are not of the same text, and infinity would spread.
LARGEST_LOG_RATIO = 20.0

LossAndMetrics = tuple[Tensor, dict[str, Tensor]]
PolicyObjective = NamedFunction[LossAndMetrics]

POLICY_LOSSES: dict[str, PolicyObjective] = {}


def policy_objective(name: str) -> Callable[[Callable[..., LossAndMetrics]], Callable[..., LossAndMetrics]]:
    """Register a function as the policy objective `name`; the function itself stays as it is.

    Raises `ValueError` for a name that is taken or a signature that doesn't fit.
    """
    return register(POLICY_LOSSES, name, "policy objective", tensors=4)


def find_policy_objective(name: str) -> PolicyObjective:
    """The objective registered as `name`; `ValueError` with the nearest name if there is none."""
    return look_up(POLICY_LOSSES, name, "policy objective")


def clipped_policy_loss(
    log_probs: Tensor,
    old_log_probs: Tensor,
    advantages: Tensor,
    *,
    clip_low: float = 0.2,
    clip_high: float = 0.2,
    dual_clip: float | None = None,
) -> LossAndMetrics:
    """PPO's clipped surrogate, to be minimised (Schulman et al. 2017, arXiv:1707.06347, eq. 7).

    rho = exp(log_probs - old_log_probs),    loss = -min(rho * A, clip(rho, 1 - clip_low, 1 + clip_high) * A)

    `clip_high > clip_low` is DAPO's clip-higher (Yu et al. 2025, arXiv:2503.14476). `dual_clip` (above 1) bounds the loss of a
    negative advantage by `-dual_clip * A` (Ye et al. 2019, arXiv:1912.09729, eq. 5). The log-ratio is held within
    +-LARGEST_LOG_RATIO so that nothing overflows.

    Shapes: all alike, any shape; the loss has that shape and gradients for `log_probs`. Metrics, detached and of the same
    shape: `ratio`; `clip_fraction`, 1 where clipping took the gradient away; `approx_kl`, the k3 estimate of KL(old, new);
    with `dual_clip` also `dual_clip_fraction`. Raises `ValueError` for bounds that make no sense.
    """
    _check_bounds(clip_low, clip_high)
    if dual_clip is not None and not dual_clip > 1:
        raise ValueError(f"dual_clip must be above 1, or None for no dual clip; got {dual_clip}.")
    log_ratio = _bounded(log_probs - old_log_probs)
    ratio = log_ratio.exp()
    loss, clipped = _clipped_surrogate(ratio, advantages, clip_low, clip_high)
    metrics = _metrics(log_ratio, clipped)
    if dual_clip is not None:
        bound = -advantages * dual_clip
        bounded = (advantages < 0) & (loss > bound)
        loss = torch.where(bounded, bound, loss)
        metrics["dual_clip_fraction"] = bounded.to(loss.dtype)
    return loss, metrics


@policy_objective("clip")
def clip(
    log_probs: Tensor,
    old_log_probs: Tensor,
    advantages: Tensor,
    mask: Tensor,
    *,
    clip_low: float = 0.2,
    clip_high: float = 0.2,
    dual_clip: float | None = None,
) -> LossAndMetrics:
    """`clipped_policy_loss`; each token by itself, so the mask changes nothing."""
    return clipped_policy_loss(
        log_probs, old_log_probs, advantages, clip_low=clip_low, clip_high=clip_high, dual_clip=dual_clip
    )


@policy_objective("gspo")
def gspo(
    log_probs: Tensor,
    old_log_probs: Tensor,
    advantages: Tensor,
    mask: Tensor,
    *,
    clip_low: float = 3e-4,
    clip_high: float = 4e-4,
) -> LossAndMetrics:
    """GSPO: the ratio of the whole sequence is clipped (Zheng et al. 2025, arXiv:2507.18071, eqs. 7 and 13).

    s_i = exp(1/|y_i| sum_t (log_probs_t - old_log_probs_t)),    s_it = sg[s_i] * exp(log_probs_t - sg[log_probs_t])
    loss_t = -min(s_it * A_t, clip(s_it, 1 - clip_low, 1 + clip_high) * A_t)

    `s_it` has the value of `s_i` at every token and its own token's gradient (the paper's GSPO-token). Where a row's
    advantages and weights are equal, the row's gradient is that of `s_i` itself, and a token weight is that token's share.
    The paper's own reduction is "sequence_mean_token_mean". The bounds are the paper's (sec. 5.1): a sequence's ratio moves far
    less than a token's.

    Shapes: all [b, T]; |y_i| counts the mask's tokens, and only they are in the sum. Metrics as in `clipped_policy_loss`, of
    the sequence's ratio. Raises `ValueError` for bounds that make no sense.
    """
    _check_bounds(clip_low, clip_high)
    mask = mask.bool()
    difference = (log_probs - old_log_probs).detach().masked_fill(~mask, 0.0)
    sequence = difference.sum(dim=-1, keepdim=True) / mask.sum(dim=-1, keepdim=True).clamp(min=1)
    log_ratio = _bounded(sequence) + (log_probs - log_probs.detach()).masked_fill(~mask, 0.0)
    loss, clipped = _clipped_surrogate(log_ratio.exp(), advantages, clip_low, clip_high)
    return loss, _metrics(log_ratio, clipped)


@policy_objective("cispo")
def cispo(
    log_probs: Tensor,
    old_log_probs: Tensor,
    advantages: Tensor,
    mask: Tensor,
    *,
    clip_low: float = 1.0,
    clip_high: float = 4.0,
) -> LossAndMetrics:
    """CISPO: the importance weight is clipped, not the gradient (MiniMax 2025, arXiv:2506.13585, eqs. 4 and 5).

    loss = -sg[clip(rho, 1 - clip_low, 1 + clip_high)] * A * log_probs

    So every token keeps a gradient. `clip_low=1` is no lower bound, as in the paper; it doesn't print its upper one. A weight
    of at most 5 (`clip_high=4`) is ScaleRL's (Khatri et al. 2025, arXiv:2510.13786).

    Shapes: all [b, T]; each token by itself. Metrics: `ratio`, before clipping; `clip_fraction`, 1 where the weight was
    clipped; `approx_kl`. Raises `ValueError` for bounds that make no sense.
    """
    _check_bounds(clip_low, clip_high)
    log_ratio = _bounded(log_probs - old_log_probs).detach()
    ratio = log_ratio.exp()
    weight = ratio.clamp(1 - clip_low, 1 + clip_high)
    return -weight * advantages * log_probs, _metrics(log_ratio, weight != ratio)


@policy_objective("reinforce")
def reinforce(log_probs: Tensor, old_log_probs: Tensor, advantages: Tensor, mask: Tensor) -> LossAndMetrics:
    """REINFORCE: `-A * log_probs` (Williams 1992). No ratio and no clip, so it is meant for one update a step.

    Shapes: all [b, T]. `old_log_probs` give the metrics `ratio` and `approx_kl` only; `clip_fraction` is 0.
    """
    log_ratio = _bounded(log_probs - old_log_probs)
    return -advantages * log_probs, _metrics(log_ratio, torch.zeros_like(log_ratio))


def _check_bounds(clip_low: float, clip_high: float) -> None:
    if not (0 <= clip_low <= 1 and clip_high >= 0):
        raise ValueError(f"Need 0 <= clip_low <= 1 and clip_high >= 0; got clip_low={clip_low}, clip_high={clip_high}.")


def _bounded(log_ratio: Tensor) -> Tensor:
    return log_ratio.clamp(-LARGEST_LOG_RATIO, LARGEST_LOG_RATIO)


def _clipped_surrogate(ratio: Tensor, advantages: Tensor, clip_low: float, clip_high: float) -> tuple[Tensor, Tensor]:
    """The pessimistic one of the plain and the clipped surrogate, and where that is the clipped one."""
    plain = -advantages * ratio
    clipped = -advantages * ratio.clamp(1 - clip_low, 1 + clip_high)
    return torch.maximum(plain, clipped), clipped > plain


def _metrics(log_ratio: Tensor, clipped: Tensor) -> dict[str, Tensor]:
    log_ratio = log_ratio.detach()
    ratio = log_ratio.exp()
    return {"ratio": ratio, "clip_fraction": clipped.to(ratio.dtype), "approx_kl": ratio - 1 - log_ratio}
