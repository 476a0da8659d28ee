"""Scoring responses, with functions and with models."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable, Sequence
from typing import Any

from podium.core.batch import Batch
from podium.core.errors import ConfigError
from podium.core.settings import RewardSettings
from podium.rewards.base import Reward, TrainerState
from podium.rewards.fusion import check_columns, fuse
from podium.rewards.loading import load_rewards
from podium.rewards.model import ModelReward
from podium.stages.base import Stage, StepContext


class RewardStage(Stage):
    """Every source scores every response; `rewards` is their weighted sum.

    Args:
        models: reward models (`load_reward_model(path)`), each a role of its own: `reward`, `reward_2`, ...
        functions: python functions with TRL's or verl's signature, names of built-ins, or `RewardSettings`.
        weights: one per source, models first; by default 1 (or the settings' own).

    Raises ConfigError where weights and sources differ in number, or there is no source.
    """

    name = "reward"
    reads = ("prompt_ids", "response_ids", "response")
    writes = ("rewards",)
    changes_rows = True  # samples whose reward is skipped leave the step

    def __init__(
        self,
        models: Sequence[Any] = (),
        functions: Sequence[Callable[..., Any] | str | RewardSettings] = (),
        weights: Sequence[float] | None = None,
    ) -> None:
        self._models = list(models)
        for model in self._models:
            if inspect.isroutine(model):
                raise ConfigError(
                    f"{model!r} is no reward model", where="RewardStage", remedy="functions go in RewardStage(functions=[...])"
                )
        sources = len(self._models) + len(functions)
        if sources == 0:
            raise ConfigError("no reward source", where="RewardStage", remedy="set rewards (a function) or model.reward_path")
        if weights is not None and len(weights) != sources:
            raise ConfigError(
                f"{len(weights)} weights for {sources} reward sources", where="RewardStage", remedy="give one weight a source"
            )
        n = len(self._models)
        self._model_weights = list(weights[:n]) if weights is not None else [1.0] * n
        self.functions: list[Reward] = load_rewards(functions)
        if weights is not None:
            for function, weight in zip(self.functions, weights[n:], strict=True):
                function.weight = weight
        self.roles = tuple(self.models())
        taken = [f.name for f in self.functions if f.name in self.roles]
        if taken:
            raise ConfigError(
                f"a reward function is called '{taken[0]}', as a reward model's role is",
                where="rewards",
                remedy="give it another name",
            )

    def models(self) -> dict[str, Any]:
        return {("reward" if i == 0 else f"reward_{i + 1}"): model for i, model in enumerate(self._models)}

    def check_data(self, columns: Iterable[str]) -> None:
        """Raises ConfigError where a function needs a data column that is not there."""
        check_columns(self.functions, columns)

    def run(self, batch: Batch, context: StepContext) -> Batch:
        models = [
            ModelReward(name, _scorer(context.roles[name]), weight=weight)
            for name, weight in zip(self.models(), self._model_weights, strict=True)
        ]
        fused, metrics = fuse(batch, [*models, *self.functions], TrainerState(context.step, context.total_steps, context.epoch))
        context.metrics.merge(metrics)
        return fused


def _scorer(role: Any) -> Callable[[Batch], Any]:
    """A reward role's handle as a function from a batch to its column `scores`."""
    return lambda batch: role.score(batch.select("prompt_ids", "response_ids"), name="scores")
