"""The losses that recipes train with: each function puts pure functions together into a `Loss` that an engine can run.

What is switched off costs nothing: without an entropy bonus no entropy is computed, without a KL term no reference is read.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from podium.algorithms._lookup import look_up
from podium.algorithms.base import Loss
from podium.algorithms.kl import KL_ESTIMATORS, kl_estimate
from podium.algorithms.policy_losses import clipped_policy_loss
from podium.algorithms.preference_losses import bradley_terry_loss
from podium.algorithms.reduce import check_reduction
from podium.algorithms.supervised import negative_log_likelihood
from podium.algorithms.value_losses import clipped_value_loss

Tensors = Mapping[str, Tensor]
LossAndMetrics = tuple[Tensor, dict[str, Tensor]]


def policy_loss(
    *,
    clip_low: float = 0.2,
    clip_high: float = 0.2,
    dual_clip: float | None = None,
    entropy_coef: float = 0.0,
    kl_coef: float = 0.0,
    kl_estimator: str = "k3",
    one_update: bool = False,
    reduction: str = "token_mean",
    constant_length: int | None = None,
) -> Loss:
    """`clipped_policy_loss - entropy_coef * entropy + kl_coef * kl_estimate(log_probs, ref_log_probs)`, per token.

    `one_update` is for steps that make a single update: the old policy is the one that is being updated, so its log-probs
    are those of this very pass (the ratio is exactly 1, with the right gradient), and the column `old_log_probs` is not read.
    For samples that are older, or a second update, the loss's `otherwise` reads it.
    """
    if one_update:
        settings = dict(locals(), one_update=False)
    if kl_coef < 0:
        raise ValueError(f"kl_coef must not be negative; got {kl_coef}.")
    look_up(KL_ESTIMATORS, kl_estimator, "KL estimator")
    check_reduction(reduction, constant_length)

    def function(outputs: Tensors, columns: Tensors) -> LossAndMetrics:
        loss, metrics = clipped_policy_loss(
            outputs["log_probs"],
            outputs["log_probs"].detach() if one_update else columns["old_log_probs"],
            columns["advantages"],
            clip_low=clip_low,
            clip_high=clip_high,
            dual_clip=dual_clip,
        )
        if entropy_coef != 0:
            loss = loss - entropy_coef * outputs["entropy"]
            metrics["entropy"] = outputs["entropy"].detach()
        if kl_coef > 0:
            kl = kl_estimate(outputs["log_probs"], columns["ref_log_probs"], estimator=kl_estimator)
            loss = loss + kl_coef * kl
            metrics["ref_kl"] = kl.detach()
        return loss, metrics

    columns = ("advantages",) if one_update else ("old_log_probs", "advantages")
    return Loss(
        name="policy",
        function=function,
        outputs=("log_probs", "entropy") if entropy_coef != 0 else ("log_probs",),
        columns=(*columns, "ref_log_probs") if kl_coef > 0 else columns,
        reduction=reduction,
        constant_length=constant_length,
        otherwise=policy_loss(**settings) if one_update else None,
    )


def value_loss(*, clip: float | None = None, reduction: str = "token_mean") -> Loss:
    """`clipped_value_loss` of the critic's new values against the columns `values` (old) and `returns`."""
    check_reduction(reduction, None)

    def function(outputs: Tensors, columns: Tensors) -> LossAndMetrics:
        return clipped_value_loss(outputs["values"], columns["values"], columns["returns"], clip=clip)

    return Loss(name="value", function=function, outputs=("values",), columns=("values", "returns"), reduction=reduction)


def supervised_loss(*, reduction: str = "token_mean") -> Loss:
    """`negative_log_likelihood` of the tokens in the loss mask."""
    check_reduction(reduction, None)

    def function(outputs: Tensors, columns: Tensors) -> LossAndMetrics:
        return negative_log_likelihood(outputs["log_probs"]), {}

    return Loss(name="supervised", function=function, outputs=("log_probs",), columns=(), reduction=reduction)


def pairwise_reward_loss(*, margin: float = 0.0) -> Loss:
    """`bradley_terry_loss` over rows that come in pairs: equal `pair_id`, one row `chosen`, the other not.

    The loss and the metrics of a pair sit on its chosen row, so `chosen` is the mask and the mean is over pairs. A
    `pair_id` that doesn't have exactly one row of each kind is a `ValueError`.
    """

    def function(outputs: Tensors, columns: Tensors) -> LossAndMetrics:
        scores, chosen = outputs["scores"], columns["chosen"].bool()
        partner = scores[_partners(columns["pair_id"], chosen)]
        loss, metrics = bradley_terry_loss(scores, partner, margin=margin)
        metrics |= {"chosen_score": scores.detach(), "rejected_score": partner.detach()}
        return loss.masked_fill(~chosen, 0.0), {name: value * chosen for name, value in metrics.items()}

    return Loss(
        name="pairwise_reward",
        function=function,
        outputs=("scores",),
        columns=("pair_id", "chosen"),
        mask="chosen",
        keep_together="pair_id",
    )


def _partners(pair_id: Tensor, chosen: Tensor) -> Tensor:
    """[b]: the row of the other member of each row's pair."""
    ids, pair = torch.unique(pair_id, return_inverse=True)
    rows = torch.arange(pair.shape[0], device=pair.device)
    members = torch.zeros(2, ids.shape[0], dtype=torch.int64, device=pair.device)
    kind = chosen.long()
    count = members.clone().index_put_((kind, pair), torch.ones_like(rows), accumulate=True)
    if not bool((count == 1).all()):
        broken = ids[(count != 1).any(dim=0)].tolist()
        raise ValueError(f"Each pair_id needs one chosen and one rejected row in its micro-batch; not so: {broken[:10]}.")
    return members.index_put_((kind, pair), rows)[1 - kind, pair]
