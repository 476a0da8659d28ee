"""From rewards to advantages."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from podium.algorithms import kl
from podium.algorithms.advantage_estimators import AdvantageEstimator, find_advantage_estimator
from podium.core.batch import Batch
from podium.core.errors import ConfigError, did_you_mean
from podium.stages.base import Stage, StepContext
from podium.workers.advantages import (
    column_of,
    estimate_advantages,
    place_token_costs,
    place_token_rewards,
    policy_column,
)


class TokenRewardStage(Stage):
    """Rewards at their tokens, with the KL penalty of a controller.

    The controller is updated once a step with the observed KL per sequence, after its present value was used.
    """

    name = "token_rewards"
    writes = ("token_rewards", "shaped_rewards")

    def __init__(
        self,
        controller: kl.KLController | None = None,
        *,
        estimator: str = "k1",
        stepwise: bool = False,
        policy_log_probs: str = "rollout_log_probs",
    ) -> None:
        self.controller, self.estimator = controller, estimator
        self.reads: tuple[str, ...] = ("rewards", "response_mask")
        if controller is not None:
            self.reads += ("ref_log_probs", policy_log_probs)
        self.optional_reads = ("step_rewards",) if stepwise else ()

    def run(self, batch: Batch, context: StepContext) -> Batch:
        coef = self.controller.value if self.controller is not None else 0.0
        out = place_token_rewards(batch, kl_coef=coef, kl_estimator=self.estimator)
        if self.controller is not None:
            update_controller(self.controller, batch, context)
        return out

    def state_dict(self) -> dict[str, Any]:
        return {"controller": self.controller.state_dict()} if self.controller is not None else {}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        if self.controller is not None:
            self.controller.load_state_dict(state["controller"])


def update_controller(controller: kl.KLController, batch: Batch, context: StepContext) -> None:
    """Reports the step's KL per sequence to the controller, and both to the metrics."""
    mask = batch.padded("response_mask").bool()
    policy = batch.padded(policy_column(batch))
    per_token = kl.kl_estimate(policy, batch.padded("ref_log_probs"), estimator="k1") * mask
    per_sequence = float(per_token.sum()) / max(1, len(batch))
    context.metrics.add("kl/coef", controller.value)
    context.metrics.add("kl/per_sequence", float(per_token.sum()), len(batch))
    context.metrics.add("kl/per_token", float(per_token.sum()), float(mask.sum()))
    controller.update(per_sequence, len(batch))


class TokenCostStage(Stage):
    """Costs at the last token of their responses."""

    name = "token_costs"
    reads = ("costs", "response_mask")
    writes = ("token_costs",)

    def run(self, batch: Batch, context: StepContext) -> Batch:
        return place_token_costs(batch)


class AdvantageStage(Stage):
    """A registered estimator as a stage; its own settings are keywords.

    Args:
        columns: what the estimator reads from other columns than those of its own names.
        outputs: other names for what it gives.
        name: the stage's, where there are several.
    """

    name = "advantages"

    def __init__(
        self,
        estimator: str,
        *,
        columns: Mapping[str, str] | None = None,
        outputs: Mapping[str, str] | None = None,
        name: str | None = None,
        **settings: Any,
    ) -> None:
        spec = advantage_estimator_of(estimator)
        unknown = [name for name in settings if name not in spec.settings]
        if unknown:
            raise ConfigError(
                f"the advantage estimator '{estimator}' has no setting '{unknown[0]}'",
                remedy=did_you_mean(unknown[0], spec.settings),
            )
        self.name = name or self.name
        self.estimator, self.estimator_settings = estimator, settings
        self.columns, self.outputs = dict(columns or {}), dict(outputs or {})
        self.reads = tuple(dict.fromkeys((*(self.columns.get(n, column_of(n)) for n in spec.needs), "response_mask")))
        self.writes = tuple(self.outputs.get(n, n) for n in spec.writes)

    def run(self, batch: Batch, context: StepContext) -> Batch:
        out = estimate_advantages(
            batch.select(*self.reads),
            estimator=self.estimator,
            columns=self.columns,
            outputs=self.outputs,
            **self.estimator_settings,
        )
        measure_advantages(out, self.outputs.get("advantages", "advantages"), context)
        return out.select(*self.writes)


def advantage_estimator_of(name: str) -> AdvantageEstimator:
    """The registered estimator. Raises ConfigError with the nearest name."""
    try:
        return find_advantage_estimator(name)
    except ValueError as error:
        raise ConfigError(str(error), where="advantage") from None


def measure_advantages(batch: Batch, column: str, context: StepContext) -> None:
    """The advantages' mean size, under `<column>/abs`."""
    values = batch[column].values[batch["response_mask"].values]
    context.metrics.add(f"{column}/abs", float(values.abs().sum()), len(values))
