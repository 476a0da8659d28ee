"""Losses over pairs of answers."""

from __future__ import annotations

import torch.nn.functional as F
from torch import Tensor


def bradley_terry_loss(
    chosen_scores: Tensor, rejected_scores: Tensor, *, margin: float | Tensor = 0.0
) -> tuple[Tensor, dict[str, Tensor]]:
    """Minus the log-likelihood that the chosen answer wins (Ouyang et al. 2022, arXiv:2203.02155, eq. 1).

    loss = -log sigmoid(s_chosen - s_rejected - margin). The margin is Llama 2's (Touvron et al. 2023, arXiv:2307.09288, eq. 2).

    Shapes: both alike, any shape, `margin` a number or of that shape; the loss has that shape and gradients for both
    scores. Metrics, detached: `accuracy`, 1 where the chosen answer scores higher (a tie is 0); `score_margin`,
    s_chosen - s_rejected.
    """
    difference = chosen_scores - rejected_scores
    metrics = {"accuracy": (difference > 0).to(difference.dtype), "score_margin": difference.detach()}
    return -F.logsigmoid(difference - margin), metrics
