"""Reward against cost: one advantage of two, and the multiplier that weighs them."""

from __future__ import annotations

from typing import Any

from podium.algorithms.constraints import LagrangeMultiplier
from podium.core.batch import Batch
from podium.stages.advantage import measure_advantages
from podium.stages.base import Stage, StepContext
from podium.workers.advantages import combine_advantages


class ConstrainedAdvantageStage(Stage):
    """Advantages of reward and cost become one, (A_R - lambda A_C) / (1 + lambda); the multiplier then moves.

    As with a KL controller, the step uses the multiplier that it began with.
    """

    name = "constrained_advantages"
    reads = ("reward_advantages", "cost_advantages", "response_mask", "costs")
    writes = ("advantages",)

    def __init__(self, multiplier: LagrangeMultiplier, *, whiten_advantages: bool = True) -> None:
        self.multiplier, self.whiten = multiplier, whiten_advantages

    def run(self, batch: Batch, context: StepContext) -> Batch:
        out = combine_advantages(batch, self.multiplier.value, whiten_advantages=self.whiten)
        mean_cost = float(batch["costs"].mean())
        context.metrics.add("lagrange/multiplier", self.multiplier.value)
        context.metrics.add("lagrange/threshold", self.multiplier.threshold)
        context.metrics.add("lagrange/violation", mean_cost - self.multiplier.threshold)
        self.multiplier.update(mean_cost)
        measure_advantages(batch.union(out), "advantages", context)
        return out

    def state_dict(self) -> dict[str, Any]:
        return self.multiplier.state_dict()

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.multiplier.load_state_dict(state)
