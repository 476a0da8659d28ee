"""Scoring responses, with functions and with models: rewards, and the costs of Safe-RLHF."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, ClassVar

from podium.core.batch import Batch
from podium.core.config import parse
from podium.core.errors import ConfigError, did_you_mean
from podium.core.settings import RewardSettings, ShapingSettings
from podium.rewards.base import Reward, TrainerState
from podium.rewards.fusion import check_columns, fuse
from podium.rewards.loading import load_rewards
from podium.rewards.model import ModelReward
from podium.rewards.shaping import Shaper
from podium.rewards.sources import Weights, match_weights, model_sources
from podium.rewards.state import load_states, states_of
from podium.stages.base import Stage, StepContext


class ScoringStage(Stage):
    """Every source scores every response; their weighted sum is the column that the subclass names.

    Args:
        models: reward models (`load_reward_model(path)`), or heads of one (`model.head("helpfulness")`). Each model is a role
            of its own: `reward`, `reward_2`, ...; heads of one model share its role and its forward pass.
        functions: python functions with TRL's or verl's signature, names of built-ins, or `RewardSettings`.
        weights: one per source, models (and heads) first, or a mapping by source name; by default 1 (or the settings' own).
        scaling: how every source is normalised that does not say so itself: "dynamic" (running mean and deviation of the
            run), "batch", "group", "none".
        shaping: `ShapingSettings` (or a mapping of them) by source name, for models and heads; functions may have their own.

    Raises ConfigError where weights, shaping and sources do not match, or there is no source.

    An evaluation (`context.step` < 0) learns no statistics, and its sum is of the scores as they are: a scale that moves
    would make `evaluation.solved_at` mean another thing at each evaluation. Conditions and gates hold there too.
    """

    family: ClassVar[str]
    """Roles, columns and metrics begin with it."""
    total: ClassVar[str]
    """The column of the weighted sum."""
    reads: tuple[str, ...] = ("prompt_ids", "response_ids", "response")
    changes_rows = True  # samples that cannot be scored and are skipped leave the step

    def __init__(
        self,
        models: Sequence[Any] = (),
        functions: Sequence[Callable[..., Any] | str | RewardSettings] = (),
        weights: Weights = None,
        *,
        scaling: str = "none",
        shaping: Mapping[str, ShapingSettings | Mapping[str, Any]] | None = None,
    ) -> None:
        where = type(self).__name__
        self.functions: list[Reward] = load_rewards(functions)
        called = [f.name for f in self.functions]
        self._models, self.sources = model_sources(models, self.family, where, weights, called)
        if not self.sources and not self.functions:
            remedy = f"set {self.family}s (a function) or model.{self.family}_path"
            raise ConfigError(f"no {self.family} source", where=where, remedy=remedy)
        self.roles = tuple(self._models)
        named = [source.name for source in self.sources]
        taken = [f.name for f in self.functions if f.name in (*named, *self.roles)]
        if taken:
            raise ConfigError(
                f"a {self.family} function is called '{taken[0]}', as a {self.family} model's role or head is",
                where=f"{self.family}s",
                remedy="give it another name",
            )
        self.weights = match_weights(weights, named, called, where)
        for function in self.functions:
            function.weight = self.weights.get(function.name, function.weight)
        own = {f.name: getattr(f, "shaping", None) for f in self.functions}
        self.shaper = Shaper(_shaping({**dict.fromkeys(named), **own}, scaling, shaping or {}, where))
        if self.shaper.by_group:
            self.reads = (*type(self).reads, "group_id")

    @property
    def comparable(self) -> bool:
        """A response's score does not depend on those it is scored with: no source is normalised by batch or group."""
        return all(s.normalize in ("none", "running") for s in self.shaper.settings.values())

    def models(self) -> dict[str, Any]:
        return dict(self._models)

    def check_data(self, columns: Iterable[str]) -> None:
        """Raises ConfigError where a function needs a data column that is not there."""
        check_columns(self.functions, columns)

    def run(self, batch: Batch, context: StepContext) -> Batch:
        return self.score(batch, context)

    def score(self, batch: Batch, context: StepContext, *, learn: bool = True) -> Batch:
        """The rows that could be scored, with the sum and each source's own score.

        Args:
            learn: False scores other responses of the same step (the greedy ones of ReMax), after `run`: on the same scale;
                no running statistics are updated and no metrics added.
        """
        evaluating = context.step < 0
        fused, metrics = fuse(
            batch,
            [*self._model_rewards(batch, context), *self.functions],
            TrainerState(context.step, context.total_steps, context.epoch),
            shaper=self.shaper,
            learn=learn and not evaluating,
            raw=evaluating,
            family=self.family,
        )
        if learn:
            context.metrics.merge(metrics)
        return fused

    def state_dict(self) -> dict[str, Any]:
        """The running statistics of sources that are scaled by them, and the state of the user's own objects."""
        return {"scaling": self.shaper.state_dict(), "functions": states_of(self.functions)}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.shaper.load_state_dict(state.get("scaling", {}))
        load_states(self.functions, state.get("functions", {}))

    def _model_rewards(self, batch: Batch, context: StepContext) -> list[ModelReward]:
        # One call a role, whatever heads are asked for; all are under way before the first is waited for.
        ids = batch.select("prompt_ids", "response_ids")
        passes = {role: context.roles[role].score(ids, name="scores") for role in self.roles}
        return [
            ModelReward(s.name, lambda _, role=s.role: passes[role], head=s.head, weight=self.weights[s.name])  # type: ignore[misc]
            for s in self.sources
        ]


SCALINGS = {"none": "none", "dynamic": "running", "running": "running", "batch": "batch", "group": "group"}


def _shaping(
    own: Mapping[str, ShapingSettings | None],
    scaling: str,
    given: Mapping[str, ShapingSettings | Mapping[str, Any]],
    where: str,
) -> dict[str, ShapingSettings]:
    """Each source's shaping: what the stage was given for it, else its own; `scaling` where neither normalises."""
    if scaling not in SCALINGS:
        raise ConfigError(f"scaling={scaling!r}", where=where, remedy=did_you_mean(str(scaling), SCALINGS))
    unknown = [name for name in given if name not in own]
    if unknown:
        what = f"shaping is given for '{unknown[0]}', which is no source here"
        raise ConfigError(what, where=f"{where}(shaping=...)", remedy=did_you_mean(unknown[0], own))
    settings: dict[str, ShapingSettings] = {}
    for name, shaping in own.items():
        said = given.get(name, shaping) or ShapingSettings()
        if not isinstance(said, ShapingSettings):
            said = parse(ShapingSettings, said, f"{where}(shaping=...).{name}")
        # A new object: functions' settings are the user's, and are not to change.
        settings[name] = said if said.normalize != "none" else said.model_copy(update={"normalize": SCALINGS[scaling]})
    return settings


class RewardStage(ScoringStage):
    """Writes `rewards`, and each source's score as `reward.<name>`. Its arguments: see `ScoringStage`."""

    name = "reward"
    family, total = "reward", "rewards"
    writes = ("rewards",)


class CostStage(ScoringStage):
    """Writes `costs` (and each source's as `cost.<name>`): what Safe-RLHF holds below a threshold (arXiv:2310.12773).

    Sources are as for `RewardStage`; the roles of models are `cost`, `cost_2`, ...
    """

    name = "cost"
    family, total = "cost", "costs"
    writes = ("costs",)
