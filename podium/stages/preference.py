"""Stages of the algorithms that learn from given responses and a reference: DPO, IPO, KTO."""

from __future__ import annotations

import torch

from podium.algorithms.preference_losses import kto_reference_point
from podium.core.batch import Batch
from podium.stages.base import Stage, StepContext


class ReferencePointStage(Stage):
    """KTO's reference point z_0 (Ethayarajh et al. 2024, arXiv:2402.01306, sec. 4.1): how far the policy is from the reference
    on responses that do not belong to their prompts.

    Each prompt is paired with the response half a step away (neighbours may share their prompt); the step's mean of the summed
    log-ratios, not below 0, is the same number for all rows. It is taken once a step, before the update.
    """

    name = "reference_point"
    reads = ("prompt_ids", "response_ids", "loss_mask")
    writes = ("reference_point",)
    roles = ("actor", "reference")

    def run(self, batch: Batch, context: StepContext) -> Batch:
        shifted = torch.arange(len(batch)).roll(-(len(batch) // 2))
        others = batch.select("response_ids", "loss_mask").index(shifted)
        mismatched = others.with_columns({"prompt_ids": batch["prompt_ids"]})
        ratios = _log_ratios(mismatched, context)
        point = kto_reference_point(ratios)
        context.metrics.add("kto/reference_point", float(point))
        return Batch({"reference_point": point.expand(len(batch)).clone()})


class PreferenceAccuracyStage(Stage):
    """How often the implicit reward, log(pi / pi_ref), of a pair's chosen response is above that of the rejected one."""

    name = "preference_accuracy"
    reads = ("prompt_ids", "response_ids", "loss_mask", "pair_id", "chosen")
    roles = ("actor", "reference")

    def run(self, batch: Batch, context: StepContext) -> Batch:
        ratios = _log_ratios(batch, context)
        order = batch["pair_id"].argsort(stable=True)
        ratios, chosen = ratios[order], batch["chosen"][order]
        margin = ratios[chosen] - ratios[~chosen]
        context.metrics.add("accuracy", float((margin > 0).sum()), len(margin))
        context.metrics.add("margin", float(margin.sum()), len(margin))
        return Batch()


class DesirabilityStage(Stage):
    """Mean implicit reward, log(pi / pi_ref), of desirable and of undesirable responses."""

    name = "desirability"
    reads = ("prompt_ids", "response_ids", "loss_mask", "label")
    roles = ("actor", "reference")

    def run(self, batch: Batch, context: StepContext) -> Batch:
        ratios, label = _log_ratios(batch, context), batch["label"]
        for name, rows in (("desirable", label), ("undesirable", ~label)):
            if rows.any():
                context.metrics.add(f"{name}_log_ratio", float(ratios[rows].sum()), int(rows.sum()))
        return Batch()


def _log_ratios(batch: Batch, context: StepContext) -> torch.Tensor:
    """`[B]`: the actor's log-probs less the reference's, summed over the tokens of the loss mask."""
    ids, mask = batch.select("prompt_ids", "response_ids"), batch.padded("loss_mask")
    actor = context.roles["actor"].compute_log_probs(ids, name="log_probs").result()
    reference = context.roles["reference"].compute_log_probs(ids, name="ref_log_probs").result()
    return ((actor.padded("log_probs") - reference.padded("ref_log_probs")) * mask).sum(dim=1)
