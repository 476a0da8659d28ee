"""Rows read and checked as text, before any tokenizer: what `prepare` and `podium data inspect` start from."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from podium.core.errors import DataError, did_you_mean
from podium.core.settings import DataSettings
from podium.data.formats import Example, Format, FormatKind, detect, to_examples
from podium.data.rendering import Limited
from podium.data.sources import Rows, place_of, source_of
from podium.data.texts import EMPTY_REMEDY, Message, Text, as_label, is_empty, shown


@dataclass(frozen=True)
class DataReport:
    """What became of a data set. `str()` and `lines()` are what the trainer shows."""

    source: str
    format: Format
    rows: int
    """Rows read."""
    used: int
    """Rows kept (a preference pair is one row)."""
    dropped: int
    """Rows left out because their prompt is too long."""
    truncated: int
    """Rows kept whose prompt was cut on the left."""
    longest_prompt: int
    """Tokens of the longest prompt, before the limit."""
    max_prompt_tokens: int
    columns: tuple[str, ...]
    """The data set's extra columns, which rewards can ask for."""
    equal: int = 0
    """Preference pairs left out because both answers are the same."""
    notes: tuple[str, ...] = ()
    """What else was understood or done."""

    @property
    def cut(self) -> int:
        """Rows whose prompt was longer than the limit: dropped, or cut."""
        return self.dropped + self.truncated

    def lines(self) -> list[str]:
        """One fact each."""
        out = [f"{self.source}: {self.format.description}"]
        count = f"{self.used} of {self.rows} rows used; longest prompt {self.longest_prompt} tokens"
        out.append(count)
        limit = f"longer than {self.max_prompt_tokens} tokens (data.max_prompt_tokens)"
        if self.dropped:
            out.append(f"{self.dropped} dropped: prompt {limit}")
        if self.truncated:
            out.append(f"{self.truncated} cut on the left: prompt {limit}")
        if self.equal:
            out.append(f"{self.equal} dropped: the chosen and the rejected answer are the same")
        out.extend(self.notes)
        if self.columns:
            out.append("extra columns: " + ", ".join(self.columns))
        return out

    def __str__(self) -> str:
        return "\n".join(self.lines())


@dataclass(frozen=True)
class Parsed:
    """A data set's rows in uniform form. `places` says where each stands, for messages."""

    source: str
    format: Format
    examples: list[Example]
    places: list[str]

    def select(self, picks: Sequence[int]) -> Parsed:
        """Only these rows."""
        return replace(self, examples=[self.examples[i] for i in picks], places=[self.places[i] for i in picks])

    def report(self, limited: Limited, settings: DataSettings, equal: int = 0, notes: Sequence[str] = ()) -> DataReport:
        """What became of the rows."""
        names = dict.fromkeys(name for example in self.examples for name in example.extras)
        return DataReport(
            source=self.source,
            format=self.format,
            rows=len(self.examples),
            used=len(limited.kept),
            dropped=limited.dropped,
            truncated=limited.truncated,
            longest_prompt=limited.longest,
            max_prompt_tokens=settings.max_prompt_tokens,
            columns=tuple(names),
            equal=equal,
            notes=tuple(notes),
        )


def read(rows: Sequence[Mapping[str, Any]] | Parsed, settings: DataSettings) -> Parsed:
    """The rows, their format detected. Raises DataError (file, row, column)."""
    if isinstance(rows, Parsed):
        return rows
    if not rows:
        raise DataError("the data set has no rows", where=source_of(rows), remedy="give at least one row")
    rows = rows if isinstance(rows, Rows) else Rows(map(dict, rows), settings.path or "data")
    fmt = detect(rows, settings.prompt_column)
    return Parsed(source_of(rows), fmt, to_examples(rows, fmt), [place_of(rows, i) for i in range(len(rows))])


# ---------------------------------------------------------------------- what a kind of training needs of a row

_LACKS = {
    "prompt": ("prompt", "name the column of the prompt: data.prompt_column=text"),
    "completion": (
        "response to learn",
        "give the columns prompt and completion, or messages that end with the assistant's turn",
    ),
    "chosen": ("pair of responses", "give the columns prompt, chosen and rejected"),
    "rejected": ("pair of responses", "give the columns prompt, chosen and rejected"),
}


def answer_of(data: Parsed, i: int, name: str) -> Text:
    """The text `completion`, `chosen` or `rejected` of a row. Raises DataError where it is missing or empty."""
    text = getattr(data.examples[i], name)
    if text is None:
        what, remedy = _LACKS[name]
        raise DataError(f"no {what}; the rows are {data.format.description}", where=data.places[i], remedy=remedy)
    if is_empty(text):
        raise DataError(f"the answer '{name}' is empty: {shown(text)}", where=data.places[i], remedy=EMPTY_REMEDY)
    return text


def label_of(data: Parsed, i: int) -> bool:
    """Whether a row's completion is a good one. Raises DataError where it has no label or none that can be read."""
    if data.examples[i].completion is None or not data.format.labelled:
        raise DataError(
            f"no labelled answer; the rows are {data.format.description}",
            where=data.places[i],
            remedy="give the columns prompt, completion and label (true or false), or prompt, chosen and rejected",
        )
    return as_label(data.examples[i].label, data.places[i])


def head_of(data: Parsed, i: int, heads: Sequence[str]) -> int:
    """The number of the head that a row's pair judges, from its column `aspect`.

    0 without `heads`, and where there is one head and no aspect. Raises DataError for an aspect that is none of them.
    """
    aspect = data.examples[i].extras.get("aspect")
    if not heads or (aspect is None and len(heads) == 1):
        return 0
    if not isinstance(aspect, str) or aspect not in heads:
        said = "no aspect" if aspect is None else f"the aspect {aspect!r} is no head of the reward model"
        near = did_you_mean(str(aspect), heads) if aspect is not None else "one of: " + ", ".join(heads)
        raise DataError(
            f"{said}; its heads are {', '.join(heads)}",
            where=f"{data.places[i]}, column 'aspect'",
            remedy=near if near.startswith("did") else f"name in each row which head its pair judges; {near}",
        )
    return list(heads).index(aspect)


def check_row(data: Parsed, i: int, kind: str, settings: DataSettings, heads: Sequence[str] = ()) -> None:
    """Raises DataError where the row cannot be of this kind of training data, by its text alone."""
    if kind == "prompts" and data.format.kind is FormatKind.PLAIN_TEXT:
        what, remedy = _LACKS["prompt"]
        raise DataError(f"no {what}; the rows are {data.format.description}", where=data.places[i], remedy=remedy)
    if kind == "supervised":
        conversation(data, i) if by_turns(data, settings) else answer_of(data, i, "completion")
    if kind == "preferences" or (kind == "unpaired" and data.format.pairs):
        answer_of(data, i, "chosen")
        answer_of(data, i, "rejected")
    elif kind == "unpaired":
        label_of(data, i)
        answer_of(data, i, "completion")
    if kind == "preferences":
        head_of(data, i, heads)


def by_turns(data: Parsed, settings: DataSettings) -> bool:
    """SFT learns every assistant turn (of text, the completion is the only one)."""
    return data.format.chat and settings.train_on == "assistant"


def conversation(data: Parsed, i: int) -> tuple[list[Message], list[Message]]:
    """A row's turns before the last assistant turn's end, as prompt and completion. Raises DataError where there is none."""
    prompt, completion = data.examples[i].prompt, data.examples[i].completion or []
    assert isinstance(prompt, list) and isinstance(completion, list)
    turns = [*prompt, *completion]
    spoken = [n for n, turn in enumerate(turns) if turn["role"] == "assistant"]
    if not spoken:
        raise DataError(
            f"no assistant turn to learn; the roles are {', '.join(turn['role'] for turn in turns)}",
            where=data.places[i],
            remedy="add the assistant's answer or remove the row",
        )
    for n in spoken:
        if is_empty([turns[n]]):
            raise DataError(
                f"the assistant's turn (message {n + 1}) is empty: {shown(turns[n])}", where=data.places[i], remedy=EMPTY_REMEDY
            )
    cut = min(len(prompt), spoken[-1] + 1)
    return turns[:cut], turns[cut : spoken[-1] + 1]
