"""Losses over answers that somebody preferred, or found good or bad."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

LossAndMetrics = tuple[Tensor, dict[str, Tensor]]


def bradley_terry_loss(chosen_scores: Tensor, rejected_scores: Tensor, *, margin: float | Tensor = 0.0) -> LossAndMetrics:
    """Minus the log-likelihood that the chosen answer wins (Ouyang et al. 2022, arXiv:2203.02155, eq. 1).

    loss = -log sigmoid(s_chosen - s_rejected - margin). The margin is Llama 2's (Touvron et al. 2023, arXiv:2307.09288, eq. 2).

    Shapes: both alike, any shape, `margin` a number or of that shape; the loss has that shape and gradients for both
    scores. Metrics, detached: `accuracy`, 1 where the chosen answer scores higher (a tie is 0); `score_margin`,
    s_chosen - s_rejected.
    """
    difference = chosen_scores - rejected_scores
    metrics = {"accuracy": (difference > 0).to(difference.dtype), "score_margin": difference.detach()}
    return -F.logsigmoid(difference - margin), metrics


def sequence_log_ratios(log_probs: Tensor, ref_log_probs: Tensor, mask: Tensor, *, mean: bool = False) -> Tensor:
    """log pi(y|x) - log pi_ref(y|x) of each row: the sum, or the mean, of the tokens' differences within the mask.

    Shapes: all [b, T]. Returns [b], with gradients for `log_probs`; 0 for a row without tokens. Entries outside the mask may
    hold anything.
    """
    mask = mask.bool()
    total = (log_probs - ref_log_probs).masked_fill(~mask, 0.0).sum(dim=1)
    return total / mask.sum(dim=1).clamp(min=1) if mean else total


def dpo_loss(
    chosen_log_ratios: Tensor, rejected_log_ratios: Tensor, *, beta: float = 0.1, label_smoothing: float = 0.0
) -> LossAndMetrics:
    """Direct preference optimisation (Rafailov et al. 2023, arXiv:2305.18290, eq. 7).

    h = log_ratio_chosen - log_ratio_rejected,    loss = -log sigmoid(beta * h)

    A log-ratio is log pi(y|x) - log pi_ref(y|x), summed over the answer's tokens; where the two policies are equal the loss is
    ln 2. `label_smoothing` is the share of pairs taken to be labelled the wrong way round (Mitchell 2023, "A note on DPO with
    noisy preferences", cDPO): loss = -(1 - s) log sigmoid(beta h) - s log sigmoid(-beta h).

    Shapes: both alike, any shape; the loss has that shape and gradients for both. Metrics, detached: `accuracy`, 1 where the
    chosen answer has the larger implicit reward beta * log_ratio (a tie is 0); `margin`, the difference of the two;
    `chosen_reward`, `rejected_reward`. Raises `ValueError` for a beta not above 0, or a smoothing outside [0, 0.5).
    """
    _check_beta(beta)
    if not 0 <= label_smoothing < 0.5:
        raise ValueError(f"label_smoothing must be at least 0 and below 0.5; got {label_smoothing}.")
    logits = beta * (chosen_log_ratios - rejected_log_ratios)
    loss = -(1 - label_smoothing) * F.logsigmoid(logits)
    if label_smoothing > 0:
        loss = loss - label_smoothing * F.logsigmoid(-logits)
    return loss, _pair_metrics(chosen_log_ratios, rejected_log_ratios, beta)


def ipo_loss(chosen_log_ratios: Tensor, rejected_log_ratios: Tensor, *, beta: float = 0.1) -> LossAndMetrics:
    """Identity preference optimisation (Azar et al. 2023, arXiv:2310.12036, eq. 17; beta is its tau).

    h = log_ratio_chosen - log_ratio_rejected,    loss = (h - 1 / (2 beta))^2

    A log-ratio is the mean over the answer's tokens, as in TRL, whose authors have it from the paper's; with the sum, a long
    answer would reach the target by length alone. Unlike DPO's it stops pulling once the margin is there.

    Shapes and metrics as in `dpo_loss`. Raises `ValueError` for a beta not above 0.
    """
    _check_beta(beta)
    loss = (chosen_log_ratios - rejected_log_ratios - 1 / (2 * beta)).square()
    return loss, _pair_metrics(chosen_log_ratios, rejected_log_ratios, beta)


def kahneman_tversky_loss(
    log_ratios: Tensor,
    label: Tensor,
    reference_point: Tensor,
    *,
    beta: float = 0.1,
    desirable_weight: float = 1.0,
    undesirable_weight: float = 1.0,
) -> LossAndMetrics:
    """Kahneman-Tversky optimisation (Ethayarajh et al. 2024, arXiv:2402.01306, eq. 8).

    good answers:  loss = desirable_weight * (1 - sigmoid(beta * (r - z)))
    bad answers:   loss = undesirable_weight * (1 - sigmoid(beta * (z - r)))

    r is the answer's log-ratio, summed over its tokens; z is the reference point (`kto_reference_point`), which has no
    gradient. The paper wants desirable_weight * goods within 1 to 4/3 of undesirable_weight * bads (sec. 4.2).

    Shapes: all alike, any shape, `label` bool (good); the loss has that shape and gradients for `log_ratios`. Metrics,
    detached: `accuracy`, 1 where a good answer lies above z or a bad one below; `reward`, beta * r; `margin`, beta * (r - z),
    with the other sign for a bad answer. Raises `ValueError` for a beta not above 0 or a negative weight.
    """
    _check_beta(beta)
    if desirable_weight < 0 or undesirable_weight < 0:
        raise ValueError(f"The weights must not be negative; got {desirable_weight} and {undesirable_weight}.")
    label = label.bool()
    away = beta * (log_ratios - reference_point.detach())
    margin = torch.where(label, away, -away)
    weight = torch.where(label, desirable_weight, undesirable_weight).to(margin.dtype)
    metrics = {
        "accuracy": (margin > 0).to(margin.dtype),
        "reward": beta * log_ratios.detach(),
        "margin": margin.detach(),
    }
    return weight * torch.sigmoid(-margin), metrics  # 1 - sigmoid(x), without the loss of digits


def kto_reference_point(log_ratios: Tensor) -> Tensor:
    """KTO's z: an estimate of KL(pi, pi_ref), from answers beside prompts that are not theirs (arXiv:2402.01306, sec. 4.1).

    z = max(0, mean_i log_ratio_i), over all rows of a batch: prompt i with the answer to another prompt. A mean of so few is
    biased, but has the right sign and scale, and no gradient goes through it.

    Shapes: `log_ratios` [B], summed over tokens. Returns a scalar tensor; 0 for no rows.
    """
    return (log_ratios.detach().sum() / max(len(log_ratios), 1)).clamp(min=0.0)


def _check_beta(beta: float) -> None:
    if not beta > 0:
        raise ValueError(f"beta must be above 0; got {beta}.")


def _pair_metrics(chosen: Tensor, rejected: Tensor, beta: float) -> dict[str, Tensor]:
    chosen, rejected = beta * chosen.detach(), beta * rejected.detach()
    return {
        "accuracy": (chosen > rejected).to(chosen.dtype),
        "margin": chosen - rejected,
        "chosen_reward": chosen,
        "rejected_reward": rejected,
    }
