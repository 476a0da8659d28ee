"""Stages that only measure: what an evaluation runs over held-out rows."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from podium.core.batch import Batch
from podium.stages.base import Stage, StepContext


class LikelihoodStage(Stage):
    """Mean negative log-likelihood of given responses, per token (nats)."""

    name = "likelihood"
    reads = ("prompt_ids", "response_ids", "loss_mask")
    roles = ("actor",)

    def run(self, batch: Batch, context: StepContext) -> Batch:
        out = context.roles["actor"].compute_log_probs(batch.select("prompt_ids", "response_ids"), name="log_probs").result()
        mask = batch["loss_mask"].values
        context.metrics.add("nll", -float(out["log_probs"].values[mask].sum()), float(mask.sum()))
        return Batch()


class PairAccuracyStage(Stage):
    """How often the chosen row of a pair scores above the rejected one, and by how much.

    Args:
        heads: names of a reward model's several scores: each pair (`head`) is judged by its own; each is also measured apart.
    """

    name = "pair_accuracy"
    roles = ("reward",)

    def __init__(self, heads: Sequence[str] = ()) -> None:
        self.heads = list(heads)
        self.reads = ("prompt_ids", "response_ids", "pair_id", "chosen", *(("head",) if self.heads else ()))

    def run(self, batch: Batch, context: StepContext) -> Batch:
        out = context.roles["reward"].score(batch.select("prompt_ids", "response_ids"), name="scores").result()
        scores = out["scores"] if not self.heads else self._of_own_head(batch, out)
        order = batch["pair_id"].argsort(stable=True)
        scores, chosen = scores[order], batch["chosen"][order]
        margin = scores[chosen] - scores[~chosen]
        context.metrics.add("accuracy", float((margin > 0).sum()), len(margin))
        context.metrics.add("margin", float(margin.sum()), len(margin))
        for i, name in enumerate(self.heads):
            own = margin[batch["head"][order][chosen] == i]
            if len(own):
                context.metrics.add(f"accuracy/{name}", float((own > 0).sum()), len(own))
        return Batch()

    def _of_own_head(self, batch: Batch, out: Batch) -> Tensor:
        every = torch.stack([out[f"scores.{name}"] for name in self.heads], dim=1)
        return every.gather(1, batch["head"][:, None]).squeeze(1)


class SolvedStage(Stage):
    """`accuracy`: the share of responses that reach a reward of at least `threshold`. One that could not be scored does not."""

    name = "solved"
    reads = ("rewards",)

    def __init__(self, threshold: float = 1.0) -> None:
        self.threshold = threshold

    def run(self, batch: Batch, context: StepContext) -> Batch:
        # Fused rewards are sums of products in fp32: a full score may miss its sum by rounding.
        solved = batch["rewards"] >= self.threshold - 1e-5
        skipped = dict(context.metrics.items()).get("reward/skipped", (0.0, 0.0))[0]
        context.metrics.add("accuracy", float(solved.sum()), len(batch) + skipped)
        return Batch()
