"""Functions written for TRL and for verl, as rewards. They run unchanged."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping
from typing import Any

import torch

from podium.core.batch import Batch
from podium.core.errors import RewardError
from podium.core.metrics import Metrics
from podium.core.settings import ShapingSettings
from podium.rewards.base import REMEDY, OnError, SampleFailure, Scored, TrainerState, collect, responses_of, sample
from podium.rewards.signatures import TRL_BATCH, VERL_ARGUMENTS, Convention, Signature, read_signature, run_async

# Columns that TRL does not pass on to reward functions (GRPOTrainer._calculate_rewards).
_NOT_PASSED = ("prompt", "completion", "completion_ids")


class FunctionReward:
    """A python function as a reward: what both conventions share. `columns` are the data columns that it requires."""

    def __init__(
        self,
        function: Callable[..., Any],
        name: str,
        signature: Signature,
        *,
        weight: float = 1.0,
        on_error: OnError = "raise",
        options: Mapping[str, Any] | None = None,
    ) -> None:
        self.function, self.name, self.weight, self.on_error = function, name, weight, on_error
        self.options, self.signature, self.columns = dict(options or {}), signature, signature.columns
        self.shaping: ShapingSettings | None = None
        """How its score enters the sum, where its settings say so."""

    @property
    def description(self) -> str:
        """One line for the user: the name and the convention that was detected."""
        return f"reward '{self.name}' (weight {self.weight:g}): {self.signature.convention.value}"

    def __call__(self, batch: Batch, state: TrainerState | None = None) -> Scored:
        """Scores every row. Raises RewardError for a missing column, a failure, a wrong number of answers."""
        raise NotImplementedError

    def _check_columns(self, batch: Batch) -> None:
        present = batch.extras()
        missing = [column for column in self.columns if column not in present]
        if missing:
            raise RewardError(
                f"the function needs the data column {', '.join(missing)}; the data set has: {', '.join(present) or 'none'}",
                where=f"reward '{self.name}'",
                remedy="add the column to the data, or give the parameter a default",
            )


class TRLReward(FunctionReward):
    """A function of TRL's signature: `f(prompts, completions, **columns) -> list[float]`, `def` or `async def`.

    Called once a batch, by keyword, with what its signature asks for: prompts, completions (text for text prompts, one
    assistant message each for chat prompts), completion_ids, the data set's columns, trainer_state, log_extra,
    log_metric. None in the list says that the reward does not apply to that sample. An exception object in the list
    (an addition to TRL's convention) says that this sample failed.
    """

    def __call__(self, batch: Batch, state: TrainerState | None = None) -> Scored:
        if not len(batch):
            return Scored(torch.empty(0))
        self._check_columns(batch)
        metrics = Metrics()
        columns: dict[str, list[Any]] = {}
        keywords = self._keywords(batch, state or TrainerState(), metrics, columns)
        try:
            answers = self._answers(keywords, len(batch))
        except RewardError:
            raise
        except Exception as error:
            return self._row_by_row(batch, state, error)
        return collect(self.name, batch, answers, self.on_error, metrics, columns)

    def answers(self, batch: Batch, state: TrainerState) -> list[Any]:
        """What the function returns, one a row, as it is (for step-wise rewards, which are no numbers).

        Raises RewardError for a missing column or a wrong number of answers, and what the function raises.
        """
        self._check_columns(batch)
        return self._answers(self._keywords(batch, state, Metrics(), {}), len(batch))

    def _keywords(self, batch: Batch, state: TrainerState, metrics: Metrics, columns: dict[str, list[Any]]) -> dict[str, Any]:
        responses = responses_of(batch)
        prompts = batch["prompt"]
        everything: dict[str, Any] = {k: v for k, v in batch.extras().items() if k not in (*_NOT_PASSED, *TRL_BATCH)}
        everything["prompts"] = list(prompts)
        everything["completions"] = [
            [{"role": "assistant", "content": text}] if isinstance(prompt, list) else text
            for prompt, text in zip(prompts, responses, strict=True)
        ]
        if "response_ids" in batch or "completion_ids" in self.signature.accepts:
            everything["completion_ids"] = batch["response_ids"].to_list()
        everything["trainer_state"] = state
        everything["log_metric"] = lambda name, value: metrics.add(name, float(value))
        everything["log_extra"] = lambda name, values: columns.__setitem__(name, list(values))
        everything |= self.options
        return {name: value for name, value in everything.items() if self.signature.wants(name)}

    def _answers(self, keywords: Mapping[str, Any], rows: int) -> list[Any]:
        answers = self.function(**keywords)
        if self.signature.is_async:
            answers = run_async(answers)
        if isinstance(answers, torch.Tensor) or hasattr(answers, "tolist"):
            answers = answers.tolist()
        where, remedy = f"reward '{self.name}'", "return one number per completion"
        try:
            answers = list(answers)
        except TypeError:
            found = type(answers).__name__
            raise RewardError(f"returned {found} for {rows} completions, not a list", where=where, remedy=remedy) from None
        if len(answers) != rows:
            raise RewardError(f"returned {len(answers)} rewards for {rows} completions", where=where, remedy=remedy)
        return answers

    def _row_by_row(self, batch: Batch, state: TrainerState | None, error: Exception) -> Scored:
        """The function raised for the batch: which sample was it? Scores each row by itself to find out."""
        metrics = Metrics()
        answers: list[Any] = []
        for row in range(len(batch)):
            keywords = self._keywords(batch.index([row]), state or TrainerState(), metrics, {})
            try:
                answers += self._answers(keywords, 1)
            except Exception as alone:
                if self.on_error == "raise":
                    what, where = f"raised {type(alone).__name__}: {alone}", f"reward '{self.name}', {sample(batch, row)}"
                    raise RewardError(what, where=where, remedy=REMEDY) from alone
                answers.append(alone)
        if not any(isinstance(answer, Exception) for answer in answers):
            # Every sample by itself is fine: the failure belongs to the batch, so no single score can be trusted.
            if self.on_error == "raise":
                what = f"raised {type(error).__name__}: {error} (for the batch of {len(batch)}; for no sample alone)"
                raise RewardError(what, where=f"reward '{self.name}'", remedy=REMEDY) from error
            answers = [error] * len(batch)
        return collect(self.name, batch, answers, self.on_error, metrics)


class VerlReward(FunctionReward):
    """A function of verl's signature: `compute_score(data_source, solution_str, ground_truth, extra_info=None)`.

    Called once a sample, by keyword; returns a number, or a dict with `score` whose other numbers become metrics.
    `async def` functions run concurrently over the batch. `extra_info` holds verl's `num_turns` and
    `rollout_reward_scores` besides the data set's own.
    """

    def __call__(self, batch: Batch, state: TrainerState | None = None) -> Scored:
        if not len(batch):
            return Scored(torch.empty(0))
        self._check_columns(batch)
        calls = self._calls(batch)
        results = run_async(self._gather(calls)) if self.signature.is_async else [self._one(call) for call in calls]
        metrics = Metrics()
        answers = [self._score(result, metrics) for result in results]
        return collect(self.name, batch, answers, self.on_error, metrics)

    def _calls(self, batch: Batch) -> list[dict[str, Any]]:
        extras = batch.extras()
        calls = []
        for row, text in enumerate(responses_of(batch)):
            given: dict[str, Any] = {name: extras[name][row] for name in ("data_source", "ground_truth") if name in extras}
            given["solution_str"] = text
            own = extras["extra_info"][row] if "extra_info" in extras else None
            given["extra_info"] = {**(own or {}), "num_turns": None, "rollout_reward_scores": {}}
            calls.append({name: given[name] for name in VERL_ARGUMENTS if name in given and self.signature.wants(name)})
        return [{**call, **self.options} for call in calls]

    def _one(self, call: Mapping[str, Any]) -> Any:
        try:
            return self.function(**call)
        except Exception as error:
            return error

    async def _gather(self, calls: list[dict[str, Any]]) -> list[Any]:
        return await asyncio.gather(*(self.function(**call) for call in calls), return_exceptions=True)

    @staticmethod
    def _score(result: Any, metrics: Metrics) -> Any:
        if not isinstance(result, Mapping):
            return SampleFailure("returned None, not a number") if result is None else result
        if "score" not in result:
            return SampleFailure(f"the dict it returned has no 'score', only: {', '.join(map(str, result))}")
        for name, value in result.items():
            if name != "score" and isinstance(value, bool | int | float):
                metrics.add(name, float(value))
        return result["score"]


def adapt(
    function: Callable[..., Any],
    name: str,
    *,
    weight: float = 1.0,
    on_error: OnError = "raise",
    options: Mapping[str, Any] | None = None,
) -> TRLReward | VerlReward:
    """A function of either convention as a reward. Raises ConfigError for one that fits neither."""
    signature = read_signature(function, name, options or {})
    kind = VerlReward if signature.convention is Convention.VERL else TRLReward
    return kind(function, name, signature, weight=weight, on_error=on_error, options=options)
