"""Step-wise rewards: values for parts of a response, each on the token that completes its part."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from numbers import Real
from typing import Any, Literal, Self

import torch
from torch import nn

from podium.core.batch import Batch, Ragged, resolve
from podium.core.errors import ConfigError, RewardError
from podium.core.settings import RewardSettings
from podium.rewards.adapters import TRLReward
from podium.rewards.base import REMEDY, OnError, TrainerState, sample
from podium.rewards.loading import load_reward
from podium.rewards.model import head_column
from podium.rewards.sources import is_head
from podium.rewards.token_spans import completing_tokens, tokens_left_out

Unit = Literal["char", "token"]


@dataclass
class Placed:
    """Step-wise rewards of a batch: `values` a token column of the response's axis; rows that failed, with the reason."""

    values: Ragged
    steps: int
    failed: list[tuple[int, str]]


class StepwiseRewardInjector:
    """Puts values of parts of a response on its tokens.

    Args:
        source: a function of TRL's signature, `f(prompts, completions, **columns)` (or `RewardSettings`, or its name), that
            returns for each response a list of `((start, end), value)`, or None for none; or a process reward model (see
            `from_model`).
        unit: what `start` and `end` (exclusive) count: characters of the response's text ("char"), or its tokens, special
            ones included ("token").
        weight: factor on the values.
        separator: for a model, what ends a step.

    A value stands on the last token that overlaps its span: of a token that goes over the span's border, that token; of a
    character spread over several tokens, the last of them. Values on one token add up.

    Raises ConfigError for a source that is neither, or an unknown unit.
    """

    def __init__(
        self,
        source: Any,
        unit: Unit = "char",
        *,
        name: str | None = None,
        weight: float = 1.0,
        on_error: OnError = "raise",
        separator: str = "\n",
    ) -> None:
        if unit not in ("char", "token"):
            raise ConfigError(f"unit={unit!r}", where="StepwiseRewardInjector", remedy="'char' or 'token'")
        if not separator:
            raise ConfigError("separator is empty", where="StepwiseRewardInjector", remedy='a text such as "\\n"')
        self.unit, self.weight, self.on_error, self.separator = unit, weight, on_error, separator
        self.model = source if isinstance(source, nn.Module) or is_head(source) else None
        self.function = None if self.model is not None else _function(source)
        self.name = name or (self.function.name if self.function else "process_model")
        self.columns = self.function.columns if self.function else ()

    @classmethod
    def from_model(cls, model: Any, separator: str = "\n", **options: Any) -> Self:
        """From a process reward model (a `RewardModel`, or one head): its score at the end of each step of a response.

        Steps are what stands between `separator`s, blank ones left out. Each is scored by a pass over the prompt and the
        response up to the step's last token: a response of S steps costs S passes, in one call for the whole batch.
        """
        if not isinstance(model, nn.Module) and not is_head(model):
            raise ConfigError(f"{model!r} is no reward model", where="StepwiseRewardInjector.from_model")
        return cls(model, separator=separator, **options)

    def place(
        self,
        batch: Batch,
        tokenizer: Any,
        state: TrainerState | None = None,
        score: Callable[[Batch], Any] | None = None,
    ) -> Placed:
        """Values on the tokens of B responses, as the token column `step_rewards`.

        Args:
            batch: with `response_ids`, `response`, what the function reads; for a model also `prompt_ids`.
            tokenizer: the one that `response_ids` are of.
            score: for a model, its role's `score(batch, name="scores")`.

        Raises RewardError (sample, span, length) for a span outside its response, or a value that is not a finite number.
        """
        if self.function is None:
            assert score is not None
            return self._by_model(batch, tokenizer, score)
        placed = _Placing(batch, tokenizer, self)
        for row, answer in enumerate(self._answers(batch, state)):
            placed.add(row, answer)
        return placed.done()

    def _answers(self, batch: Batch, state: TrainerState | None) -> list[Any]:
        assert self.function is not None
        if not len(batch):
            return []
        try:
            return self.function.answers(batch, state or TrainerState())
        except RewardError:
            raise
        except Exception as error:
            what = f"raised {type(error).__name__}: {error}"
            raise RewardError(what, where=f"step-wise reward '{self.name}'", remedy="correct the function") from error

    def _by_model(self, batch: Batch, tokenizer: Any, score: Callable[[Batch], Any]) -> Placed:
        placed = _Placing(batch, tokenizer, self)
        ends = [(row, span) for row in range(len(batch)) for span in steps_of(batch["response"][row], self.separator)]
        if not ends:
            return placed.done()
        ids = batch["response_ids"].to_list()
        cut = [ids[row][: placed.token_of(row, *span) + 1] for row, span in ends]
        prompts = batch["prompt_ids"].index(torch.tensor([row for row, _ in ends]))
        scores = resolve(score(Batch({"prompt_ids": prompts, "response_ids": cut})))
        values = head_column(scores, getattr(self.model, "name", None), self.name).tolist()
        by_row: dict[int, list[Any]] = {}
        for (row, span), value in zip(ends, values, strict=True):
            by_row.setdefault(row, []).append((span, value))
        for row, steps in by_row.items():
            placed.add(row, steps)
        return placed.done()


def steps_of(text: str, separator: str) -> Iterator[tuple[int, int]]:
    """Spans of the steps of a text: what stands between separators, blank ones left out."""
    at = 0
    for part in text.split(separator):
        if part.strip():
            yield at, at + len(part)
        at += len(part) + len(separator)


class _Placing:
    """The placing of one batch's values; texts are mapped to tokens when they are first asked for."""

    def __init__(self, batch: Batch, tokenizer: Any, injector: StepwiseRewardInjector) -> None:
        self.batch, self.tokenizer, self.injector = batch, tokenizer, injector
        self.rows = batch["response_ids"].to_list()
        self.values = [[0.0] * len(row) for row in self.rows]
        self.failed: list[tuple[int, str]] = []
        self.steps = 0
        self._maps: dict[int, list[int]] = {}
        self._left_out: set[int] = set()

    def add(self, row: int, answer: Any) -> None:
        """One response's list of (span, value); a mistake in it is an error, or the row counts as failed."""
        try:
            placed = [(self._token(row, step), self._value(step)) for step in _listed(answer)]
        except _Wrong as wrong:
            where = f"step-wise reward '{self.injector.name}', {sample(self.batch, row)}"
            if self.injector.on_error == "raise":
                raise RewardError(str(wrong), where=where, remedy=REMEDY) from wrong.__cause__
            self.failed.append((row, str(wrong)))
            return
        for token, value in placed:
            self.values[row][token] += value * self.injector.weight
        self.steps += len(placed)

    def _token(self, row: int, step: Any) -> int:
        try:
            (start, end), _ = step
            start, end = start.__index__(), end.__index__()
        except (TypeError, ValueError, AttributeError):
            raise _Wrong(f"gave {step!r}, not ((start, end), value)") from None
        tokens = self.injector.unit == "token"
        length = len(self.rows[row]) if tokens else len(self.batch["response"][row])
        if not 0 <= start < end <= length:
            unit = "tokens" if tokens else "characters"
            why = "is empty" if start == end and 0 <= start <= length else "is not inside the response"
            raise _Wrong(f"the span ({start}, {end}) {why}, which has {length} {unit}")
        return end - 1 if tokens else self.token_of(row, start, end)

    def token_of(self, row: int, start: int, end: int) -> int:
        """The token that completes the characters start..end of a response."""
        if row not in self._maps:
            self._left_out = self._left_out or tokens_left_out(self.tokenizer)
            text, self._maps[row] = completing_tokens(self.rows[row], self.tokenizer, self._left_out)
            if text != self.batch["response"][row]:
                raise RewardError(
                    "the response's tokens decode to another text than its column 'response' has",
                    where=f"step-wise reward '{self.injector.name}', {sample(self.batch, row)}",
                    remedy="give the tokenizer that the responses were made with: StepwiseRewardStage(tokenizer=...)",
                )
        return self._maps[row][end - 1]

    @staticmethod
    def _value(step: Any) -> float:
        value = step[1].item() if isinstance(step[1], torch.Tensor) and step[1].numel() == 1 else step[1]
        if not isinstance(value, Real) or not math.isfinite(float(value)):
            raise _Wrong(f"gave {value!r} for the span {tuple(step[0])}, not a finite number")
        return float(value)

    def done(self) -> Placed:
        return Placed(Ragged.from_rows(self.values, torch.float32), self.steps, self.failed)


class _Wrong(Exception):
    """What a function gave for one response cannot be placed."""


def _listed(answer: Any) -> Sequence[Any]:
    if isinstance(answer, Exception):
        raise _Wrong(f"gave {type(answer).__name__}: {answer}") from answer
    if answer is None:
        return ()
    if isinstance(answer, str) or not hasattr(answer, "__iter__"):
        raise _Wrong(f"gave {answer!r} ({type(answer).__name__}), not a list of ((start, end), value)")
    return list(answer)


def _function(source: Any) -> TRLReward:
    if isinstance(source, str):
        source = RewardSettings(function=source)
    found = load_reward(source)
    if not isinstance(found, TRLReward):
        raise ConfigError(
            f"'{found.name}' is no function of the signature f(prompts, completions, **columns)",
            where="StepwiseRewardInjector",
            remedy="a step-wise reward returns for each completion a list of ((start, end), value)",
        )
    return found
