"""Policy losses. Elementwise: any shape in, the same shape out; the reduction is somebody else's (`reduce.py`)."""

from __future__ import annotations

import torch
from torch import Tensor

# exp(20) is 5e8: past that a ratio means that the two log-probs are not of the same text, and infinity would spread.
LARGEST_LOG_RATIO = 20.0


def clipped_policy_loss(
    log_probs: Tensor,
    old_log_probs: Tensor,
    advantages: Tensor,
    *,
    clip_low: float = 0.2,
    clip_high: float = 0.2,
    dual_clip: float | None = None,
) -> tuple[Tensor, dict[str, Tensor]]:
    """PPO's clipped surrogate, to be minimised (Schulman et al. 2017, arXiv:1707.06347, eq. 7).

    rho = exp(log_probs - old_log_probs),    loss = -min(rho * A, clip(rho, 1 - clip_low, 1 + clip_high) * A)

    `clip_high > clip_low` is DAPO's clip-higher (Yu et al. 2025, arXiv:2503.14476). `dual_clip` (above 1) bounds the loss of a
    negative advantage by `-dual_clip * A` (Ye et al. 2019, arXiv:1912.09729, eq. 5). The log-ratio is held within
    +-LARGEST_LOG_RATIO so that nothing overflows.

    Shapes: all alike, any shape; the loss has that shape and gradients for `log_probs`. Metrics, detached and of the same
    shape: `ratio`; `clip_fraction`, 1 where clipping took the gradient away; `approx_kl`, the k3 estimate of KL(old, new);
    with `dual_clip` also `dual_clip_fraction`. Raises `ValueError` for bounds that make no sense.
    """
    if not (0 <= clip_low <= 1 and clip_high >= 0):
        raise ValueError(f"Need 0 <= clip_low <= 1 and clip_high >= 0; got clip_low={clip_low}, clip_high={clip_high}.")
    if dual_clip is not None and not dual_clip > 1:
        raise ValueError(f"dual_clip must be above 1, or None for no dual clip; got {dual_clip}.")
    log_ratio = (log_probs - old_log_probs).clamp(-LARGEST_LOG_RATIO, LARGEST_LOG_RATIO)
    ratio = log_ratio.exp()
    plain = -advantages * ratio
    clipped = -advantages * ratio.clamp(1 - clip_low, 1 + clip_high)
    loss = torch.maximum(plain, clipped)
    metrics = {
        "ratio": ratio.detach(),
        "clip_fraction": (clipped > plain).to(loss.dtype),
        "approx_kl": (ratio - 1 - log_ratio).detach(),
    }
    if dual_clip is not None:
        bound = -advantages * dual_clip
        bounded = (advantages < 0) & (loss > bound)
        loss = torch.where(bounded, bound, loss)
        metrics["dual_clip_fraction"] = bounded.to(loss.dtype)
    return loss, metrics
