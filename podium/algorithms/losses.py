"""The losses that recipes train with: each function puts pure functions together into a `Loss` that an engine can run.

What is switched off costs nothing: without an entropy bonus no entropy is computed, without a KL term no reference is read.
`LOSSES` has every builder by its name.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any, Literal, TypeVar

import torch
from torch import Tensor

from podium.algorithms._lookup import look_up
from podium.algorithms.base import Loss
from podium.algorithms.kl import KL_ESTIMATORS, kl_estimate
from podium.algorithms.policy_losses import POLICY_LOSSES, PolicyObjective, find_policy_objective
from podium.algorithms.preference_losses import (
    bradley_terry_loss,
    dpo_loss,
    ipo_loss,
    kahneman_tversky_loss,
    sequence_log_ratios,
)
from podium.algorithms.reduce import check_reduction
from podium.algorithms.supervised import negative_log_likelihood
from podium.algorithms.value_losses import clipped_value_loss

Tensors = Mapping[str, Tensor]
LossAndMetrics = tuple[Tensor, dict[str, Tensor]]
PreferenceKind = Literal["dpo", "ipo"]
Builder = TypeVar("Builder", bound=Callable[..., Loss])

LOSSES: dict[str, Callable[..., Loss]] = {}
"""The builders of losses, by name. Every one builds a `Loss` from its defaults."""


def loss_builder(name: str) -> Callable[[Builder], Builder]:
    """Register a function that builds a `Loss` from keywords, all with defaults. `ValueError` for a name that is taken."""

    def enter(builder: Builder) -> Builder:
        if name in LOSSES:
            raise ValueError(f"There is already a loss {name!r}.")
        LOSSES[name] = builder
        return builder

    return enter


@loss_builder("policy")
def policy_loss(
    *,
    objective: str = "clip",
    clip_low: float | None = None,
    clip_high: float | None = None,
    dual_clip: float | None = None,
    entropy_coef: float = 0.0,
    kl_coef: float = 0.0,
    kl_estimator: str = "k3",
    one_update: bool = False,
    corrected: bool = False,
    reduction: str = "token_mean",
    constant_length: int | None = None,
    **objective_settings: Any,
) -> Loss:
    """`objective - entropy_coef * entropy + kl_coef * kl_estimate(log_probs, ref_log_probs)`, per token.

    Args:
        objective: a registered policy objective: "clip", "gspo", "cispo", "reinforce" (`POLICY_LOSSES`).
        clip_low, clip_high, dual_clip: the objective's settings of these names; None is the objective's own default. Others
            that it has are given by keyword.
        one_update: for steps that make a single update: the old policy is the one that is being updated, so its log-probs are
            those of this very pass (the ratio is exactly 1, with the right gradient), and the column `old_log_probs` is not
            read. For samples that are older, or a second update, the loss's `otherwise` reads it.
        corrected: the batch went through an importance correction (`corrections.py`): the mask is `corrected_mask`, and the
            objective's term (not the entropy's or the KL's) is multiplied by `importance_weights`.

    Raises `ValueError` for an unknown objective or reduction, or a setting that the objective doesn't have.
    """
    if one_update:
        again = {k: v for k, v in locals().items() if k != "objective_settings"} | objective_settings | {"one_update": False}
    clips = {"clip_low": clip_low, "clip_high": clip_high, "dual_clip": dual_clip}
    settings = {name: value for name, value in clips.items() if value is not None} | objective_settings
    objective_of = _checked_objective(objective, settings)
    if kl_coef < 0:
        raise ValueError(f"kl_coef must not be negative; got {kl_coef}.")
    look_up(KL_ESTIMATORS, kl_estimator, "KL estimator")
    check_reduction(reduction, constant_length)
    mask = "corrected_mask" if corrected else "loss_mask"

    def function(outputs: Tensors, columns: Tensors) -> LossAndMetrics:
        log_probs = outputs["log_probs"]
        old_log_probs = log_probs.detach() if one_update else columns["old_log_probs"]
        loss, metrics = objective_of(log_probs, old_log_probs, columns["advantages"], columns[mask], **settings)
        if corrected:
            loss = loss * columns["importance_weights"]
        if entropy_coef != 0:
            loss = loss - entropy_coef * outputs["entropy"]
            metrics["entropy"] = outputs["entropy"].detach()
        if kl_coef > 0:
            kl = kl_estimate(log_probs, columns["ref_log_probs"], estimator=kl_estimator)
            loss = loss + kl_coef * kl
            metrics["ref_kl"] = kl.detach()
        return loss, metrics

    old = () if one_update else ("old_log_probs",)
    columns = (*old, "advantages", mask, *(("importance_weights",) if corrected else ()))
    return Loss(
        name="policy",
        function=function,
        outputs=("log_probs", "entropy") if entropy_coef != 0 else ("log_probs",),
        columns=(*columns, "ref_log_probs") if kl_coef > 0 else columns,
        mask=mask,
        reduction=reduction,
        constant_length=constant_length,
        otherwise=policy_loss(**again) if one_update else None,
    )


def _checked_objective(name: str, settings: Mapping[str, Any]) -> PolicyObjective:
    """The objective. Its settings are tried on one token, so that values that make no sense are found before a run."""
    objective = find_policy_objective(name)
    for setting in settings:
        if setting not in objective.settings:
            having = [other for other, each in sorted(POLICY_LOSSES.items()) if setting in each.settings]
            hint = f" Those that have it: {', '.join(having)}." if having else ""
            known = f"It has: {', '.join(objective.settings) or 'none'}."
            raise ValueError(f"The policy objective {name!r} has no setting {setting!r}. {known}{hint}")
    one = torch.zeros(1, 1)
    objective(one, one, one, torch.ones(1, 1, dtype=torch.bool), **settings)
    return objective


@loss_builder("value")
def value_loss(
    *, clip: float | None = None, reduction: str = "token_mean", values: str = "values", returns: str = "returns"
) -> Loss:
    """`clipped_value_loss` of the critic's new values against the columns of the old ones and of their targets.

    `values` and `returns` name these columns: "cost_values" and "cost_returns" for a critic of costs.
    """
    check_reduction(reduction, None)

    def function(outputs: Tensors, columns: Tensors) -> LossAndMetrics:
        return clipped_value_loss(outputs["values"], columns[values], columns[returns], clip=clip)

    return Loss(name="value", function=function, outputs=("values",), columns=(values, returns), reduction=reduction)


@loss_builder("supervised")
def supervised_loss(*, reduction: str = "token_mean") -> Loss:
    """`negative_log_likelihood` of the tokens in the loss mask."""
    check_reduction(reduction, None)

    def function(outputs: Tensors, columns: Tensors) -> LossAndMetrics:
        return negative_log_likelihood(outputs["log_probs"]), {}

    return Loss(name="supervised", function=function, outputs=("log_probs",), columns=(), reduction=reduction)


@loss_builder("pairwise_reward")
def pairwise_reward_loss(*, margin: float = 0.0, heads: bool = False) -> Loss:
    """`bradley_terry_loss` over rows that come in pairs: equal `pair_id`, one row `chosen`, the other not.

    The loss and the metrics of a pair sit on its chosen row, so `chosen` is the mask and the mean is over pairs. With `heads`
    the model gives several scores a row, [b, H], and the column `head` says which of them the pair is about. A `pair_id`
    that doesn't have exactly one row of each kind, or has two heads, is a `ValueError`, as is a head that the model lacks.
    """

    def function(outputs: Tensors, columns: Tensors) -> LossAndMetrics:
        scores, chosen = outputs["scores"], columns["chosen"].bool()
        other = _partners(columns["pair_id"], chosen)
        if heads:
            scores = _scores_of_heads(scores, columns["head"], other)
        partner = scores[other]
        loss, metrics = bradley_terry_loss(scores, partner, margin=margin)
        metrics |= {"chosen_score": scores.detach(), "rejected_score": partner.detach()}
        return _on_chosen(loss, metrics, chosen)

    return Loss(
        name="pairwise_reward",
        function=function,
        outputs=("scores",),
        columns=("pair_id", "chosen", "head") if heads else ("pair_id", "chosen"),
        mask="chosen",
        keep_together="pair_id",
    )


@loss_builder("preference")
def preference_loss(*, kind: PreferenceKind = "dpo", beta: float = 0.1, label_smoothing: float = 0.0) -> Loss:
    """`dpo_loss` or `ipo_loss` over rows that come in pairs, against the column `ref_log_probs`.

    A row's log-ratio is over its tokens in `loss_mask`: their sum for "dpo", their mean for "ipo". Pairs as in
    `pairwise_reward_loss`. Raises `ValueError` for another kind, or for `label_smoothing` with "ipo".
    """
    look_up({"dpo": None, "ipo": None}, kind, "kind of preference loss")
    if kind == "ipo" and label_smoothing != 0:
        raise ValueError(f"label_smoothing={label_smoothing} has no place in IPO; it is DPO's.")
    loss_of = partial(ipo_loss, beta=beta) if kind == "ipo" else partial(dpo_loss, beta=beta, label_smoothing=label_smoothing)
    loss_of(torch.zeros(0), torch.zeros(0))  # finds values that make no sense before a run

    def function(outputs: Tensors, columns: Tensors) -> LossAndMetrics:
        chosen = columns["chosen"].bool()
        sequence = (outputs["log_probs"], columns["ref_log_probs"], columns["loss_mask"])
        log_ratios = sequence_log_ratios(*sequence, mean=kind == "ipo")
        loss, metrics = loss_of(log_ratios, log_ratios[_partners(columns["pair_id"], chosen)])
        return _on_chosen(loss, metrics, chosen)

    return Loss(
        name=kind,
        function=function,
        outputs=("log_probs",),
        columns=("ref_log_probs", "loss_mask", "pair_id", "chosen"),
        mask="chosen",
        keep_together="pair_id",
    )


@loss_builder("kto")
def kto_loss(*, beta: float = 0.1, desirable_weight: float = 1.0, undesirable_weight: float = 1.0) -> Loss:
    """`kahneman_tversky_loss` of each row of `row_mask`, against `ref_log_probs` and the column `reference_point` [b].

    A row's log-ratio is the sum over its tokens in `loss_mask`. Raises `ValueError` as `kahneman_tversky_loss`.
    """
    settings = {"beta": beta, "desirable_weight": desirable_weight, "undesirable_weight": undesirable_weight}
    nothing = torch.zeros(0)
    kahneman_tversky_loss(nothing, nothing.bool(), nothing, **settings)  # finds values that make no sense before a run

    def function(outputs: Tensors, columns: Tensors) -> LossAndMetrics:
        log_ratios = sequence_log_ratios(outputs["log_probs"], columns["ref_log_probs"], columns["loss_mask"])
        loss, metrics = kahneman_tversky_loss(log_ratios, columns["label"], columns["reference_point"], **settings)
        return loss, metrics | {"reference_point": columns["reference_point"].detach()}

    return Loss(
        name="kto",
        function=function,
        outputs=("log_probs",),
        columns=("ref_log_probs", "loss_mask", "label", "reference_point", "row_mask"),
        mask="row_mask",
    )


def _on_chosen(loss: Tensor, metrics: dict[str, Tensor], chosen: Tensor) -> LossAndMetrics:
    """What is said of a pair, on its chosen row only."""
    return loss.masked_fill(~chosen, 0.0), {name: value * chosen for name, value in metrics.items()}


def _scores_of_heads(scores: Tensor, head: Tensor, partner: Tensor) -> Tensor:
    """[b]: of each row's scores [b, H] the one that its pair is about."""
    if scores.dim() != 2:
        raise ValueError(f"A loss over heads needs scores [b, H]; the model gives {list(scores.shape)}: it has one head.")
    if not bool(((head >= 0) & (head < scores.shape[1])).all()):
        raise ValueError(
            f"The model has {scores.shape[1]} heads, numbered from 0; the column 'head' says {head.tolist()[:10]}."
        )
    if not bool((head == head[partner]).all()):
        raise ValueError("The two rows of a pair must be about the same head.")
    return scores.gather(1, head[:, None])[:, 0]


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
