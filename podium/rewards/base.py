"""What a reward is: a name, a weight, and a call that scores every row of a batch."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, Protocol, runtime_checkable

import torch
from torch import Tensor

from podium.core.batch import Batch
from podium.core.errors import BatchError, RewardError
from podium.core.metrics import Metrics

OnError = Literal["raise", "skip"]
_SHOWN = 200


@dataclass(frozen=True)
class TrainerState:
    """What a reward may know of the run (TRL's functions ask for it as `trainer_state`)."""

    global_step: int = 0
    max_steps: int = 0
    epoch: float = 0.0


@dataclass
class Scored:
    """One reward's answer for a batch of B rows.

    `values` is float32 `[B]`: the score before the weight. It is NaN in the rows of `failed` and `absent`; anywhere
    else a value that is not finite is an error.
    """

    values: Tensor
    failed: list[tuple[int, str]] = field(default_factory=list)
    """(row of the batch, reason): the rows that could not be scored; they are left out of the update."""
    absent: list[int] = field(default_factory=list)
    """Rows to which this reward does not apply (the function returned None); it adds nothing to their sum."""
    metrics: Metrics = field(default_factory=Metrics)
    """What else the function reported, under its own names."""
    columns: dict[str, list[Any]] = field(default_factory=dict)
    """Extra values per row, to be shown with the samples."""


@runtime_checkable
class Reward(Protocol):
    """A source of reward. One that cannot do without some of the data set's columns names them in `columns`.

    Raises RewardError (function, sample, reason) where a row cannot be scored and failures are not to be skipped.
    """

    name: str
    weight: float

    def __call__(self, batch: Batch) -> Scored: ...


class SampleFailure(Exception):
    """One sample could not be scored. A function may also return it (or any exception) in the sample's place."""


def collect(
    name: str,
    batch: Batch,
    answers: Sequence[Any],
    on_error: OnError,
    metrics: Metrics | None = None,
    columns: dict[str, list[Any]] | None = None,
) -> Scored:
    """Checks what a function gave for each row: a finite number, None (does not apply), or an exception (failed).

    Raises RewardError for the first row that failed, with the function's own traceback, where `on_error` is "raise".
    """
    values = torch.full((len(batch),), float("nan"), dtype=torch.float32)
    failed: list[tuple[int, str]] = []
    absent: list[int] = []
    for row, answer in enumerate(answers):
        if answer is None:
            absent.append(row)
            continue
        number, problem = _number(answer)
        if problem is None:
            values[row] = number
            continue
        if on_error == "raise":
            cause = answer if isinstance(answer, BaseException) else None
            raise RewardError(problem, where=f"reward '{name}', {sample(batch, row)}", remedy=REMEDY) from cause
        failed.append((row, problem))
    return Scored(values, failed, absent, metrics or Metrics(), columns or {})


REMEDY = "correct the function, or set on_error: skip to leave such samples out and count them"


def _number(answer: Any) -> tuple[float, str | None]:
    """(the number, None) or (NaN, what is wrong with the answer)."""
    nan = float("nan")
    if isinstance(answer, BaseException):
        kind = "" if isinstance(answer, SampleFailure) else f"raised {type(answer).__name__}: "
        return nan, f"{kind}{answer}"
    wrong = f"returned {_short(repr(answer), 80)} ({type(answer).__name__}), not a number"
    if isinstance(answer, str | bytes):  # also one that reads like a number: a mistake all the same
        return nan, wrong
    try:
        number = float(answer)
    except (TypeError, ValueError, OverflowError, RuntimeError):
        return nan, wrong
    if not torch.isfinite(torch.tensor(number, dtype=torch.float32)):
        return nan, f"returned {number}, not a finite number"
    return number, None


def sample(batch: Batch, row: int) -> str:
    """Names a sample: its row, and the beginnings of its prompt and response."""
    index = int(batch["row_index"][row]) if "row_index" in batch else row
    parts = [f"sample {row} (data row {index})" if "row_index" in batch else f"sample {row}"]
    for column in ("prompt", "response"):
        if column in batch:
            parts.append(f"{column} {_short(shown(batch[column][row]), _SHOWN)!r}")
    return ", ".join(parts)


def shown(text: Any) -> str:
    """A prompt as text: of chat messages, their roles and contents."""
    if isinstance(text, list):
        return "\n".join(f"{m.get('role')}: {m.get('content')}" for m in text)
    return str(text)


def responses_of(batch: Batch) -> list[str]:
    """The responses' text. Raises BatchError where the batch was not generated (or its text left out)."""
    if "response" not in batch:
        raise BatchError("rewards read the responses' text, and the batch has no column 'response'", where="rewards")
    return batch["response"]


def _short(text: str, length: int) -> str:
    return text if len(text) <= length else text[:length] + "..."
