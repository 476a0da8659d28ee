"""Step-wise rewards as a stage."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch

from podium.core.batch import Batch, Ragged
from podium.core.errors import ConfigError, RewardError
from podium.rewards.base import REMEDY, TrainerState
from podium.rewards.fusion import check_columns
from podium.rewards.sources import model_sources
from podium.rewards.state import load_states, states_of
from podium.rewards.stepwise import Placed, StepwiseRewardInjector
from podium.stages.base import Stage, StepContext

_log = logging.getLogger(__name__)


class StepwiseRewardStage(Stage):
    """Writes `step_rewards`, which `PPOStage(use_stepwise_reward=True)` adds at their tokens.

    Args:
        injectors: one or several `StepwiseRewardInjector`s, or functions (made into such); their values add up.
        tokenizer: the one that responses are made with; by default the run's.

    A process reward model is a role of its own: `reward_steps`, `reward_steps_2`, ...
    """

    name = "step_rewards"
    reads = ("prompt_ids", "response_ids", "response")
    writes = ("step_rewards",)
    changes_rows = True  # responses that cannot be scored and are skipped leave the step; functions see all data columns
    wants_tokenizer = True

    def __init__(
        self,
        injectors: StepwiseRewardInjector | Callable[..., Any] | Sequence[StepwiseRewardInjector | Callable[..., Any]],
        tokenizer: Any = None,
    ) -> None:
        given = injectors if isinstance(injectors, Sequence) and not isinstance(injectors, str) else [injectors]
        self.injectors = [i if isinstance(i, StepwiseRewardInjector) else StepwiseRewardInjector(i) for i in given]
        if not self.injectors:
            raise ConfigError("no step-wise reward", where="StepwiseRewardStage", remedy="give a StepwiseRewardInjector")
        self.tokenizer = tokenizer
        models = [i.model for i in self.injectors if i.model is not None]
        self._models, sources = model_sources(models, "reward_steps", "StepwiseRewardStage")
        self.roles = tuple(self._models)
        places = iter(sources)
        self._role_of = [next(places).role if i.model is not None else None for i in self.injectors]

    def models(self) -> dict[str, Any]:
        return dict(self._models)

    def check_data(self, columns: Iterable[str]) -> None:
        """Raises ConfigError where a function needs a data column that is not there."""
        check_columns(self._functions, columns)

    def run(self, batch: Batch, context: StepContext) -> Batch:
        if self.tokenizer is None:
            raise ConfigError(
                "there is no tokenizer", where="StepwiseRewardStage", remedy="StepwiseRewardStage(..., tokenizer=tokenizer)"
            )
        state = TrainerState(context.step, context.total_steps, context.epoch)
        placed = []
        for injector, role in zip(self.injectors, self._role_of, strict=True):
            score = None if role is None else _scorer(context.roles[role])
            placed.append(injector.place(batch, self.tokenizer, state, score))
        values = torch.stack([p.values.values for p in placed]).sum(0)
        out = batch.with_columns({"step_rewards": Ragged(values, batch["response_ids"].offsets)})
        out = self._without_failed(out, placed)
        context.metrics.add("step_rewards/per_response", float(out["step_rewards"].values.sum()), len(out))
        context.metrics.add("step_rewards/steps", sum(p.steps for p in placed), len(batch))
        context.metrics.add("step_rewards/skipped", len(batch) - len(out))
        return out

    def state_dict(self) -> dict[str, Any]:
        """The state of the user's own objects."""
        return {"functions": states_of(self._functions)}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        load_states(self._functions, state.get("functions", {}))

    @property
    def _functions(self) -> list[Any]:
        return [i.function for i in self.injectors if i.function is not None]

    def _without_failed(self, batch: Batch, placed: Sequence[Placed]) -> Batch:
        failed = dict(failure for p in placed for failure in p.failed)
        if not failed:
            return batch
        first = f"row {min(failed)}: {failed[min(failed)]}"
        if len(failed) == len(batch):
            what = f"none of the {len(batch)} responses could be scored; the first: {first}"
            raise RewardError(what, where="step-wise rewards", remedy=REMEDY)
        _log.warning("step-wise rewards: %d of %d responses left out; the first: %s", len(failed), len(batch), first)
        return batch.index([row for row in range(len(batch)) if row not in failed])


def _scorer(role: Any) -> Callable[[Batch], Any]:
    return lambda batch: role.score(batch, name="scores")
