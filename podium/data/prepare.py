"""Rows to a `Batch` that holds a whole data set: prompts, supervised examples, or preference pairs."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from podium.core.batch import Batch
from podium.core.errors import DataError
from podium.core.settings import DataSettings
from podium.data.formats import Example, Format, Text, detect, to_examples
from podium.data.rendering import Limited, Renderer, limit_prompts
from podium.data.sources import Rows, place_of, source_of


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

    def lines(self) -> list[str]:
        out = [f"{self.source}: {self.format.description}"]
        count = f"{self.used} of {self.rows} rows used; longest prompt {self.longest_prompt} tokens"
        out.append(count)
        limit = f"longer than {self.max_prompt_tokens} tokens (data.max_prompt_tokens)"
        if self.dropped:
            out.append(f"{self.dropped} dropped: prompt {limit}")
        if self.truncated:
            out.append(f"{self.truncated} cut on the left: prompt {limit}")
        if self.columns:
            out.append("extra columns: " + ", ".join(self.columns))
        return out

    def __str__(self) -> str:
        return "\n".join(self.lines())


def prepare_prompts(rows: Sequence[Mapping[str, Any]], tokenizer: Any, settings: DataSettings) -> tuple[Batch, DataReport]:
    """Prompts to generate from. Columns: prompt_ids, prompt, row_index, data.*.

    Every format is taken. A completion that comes with the prompt is kept as `data.completion`.
    Raises DataError (file, row, column) for rows that cannot be used; ModelError for messages without a chat template.
    """
    data = _read(rows, settings)
    renderer = Renderer(tokenizer, settings)
    prompts = [renderer.prompt(e.prompt, where) for e, where in zip(data.examples, data.places, strict=True)]
    limited = limit_prompts(renderer.encode(prompts), settings, data.places)
    batch = Batch(_prompt_columns(data, limited) | _completions(data, limited))
    return batch, data.report(limited, settings)


def prepare_supervised(rows: Sequence[Mapping[str, Any]], tokenizer: Any, settings: DataSettings) -> tuple[Batch, DataReport]:
    """Prompts with the response to learn. Columns of `prepare_prompts`, and response_ids, response_mask, loss_mask.

    Reads `prompt, completion` or `messages` (the assistant's last turn is the response). The loss is on the response
    only; it ends with the end token. Raises DataError and ModelError as `prepare_prompts`, and for a missing completion.
    """
    data = _read(rows, settings)
    for example, where in zip(data.examples, data.places, strict=True):
        if example.completion is None:
            raise DataError(
                f"no response to learn; the rows are {data.format.description}",
                where=where,
                remedy="give the columns prompt and completion, or messages that end with the assistant's turn",
            )
    limited, (responses,) = _with_responses(data, tokenizer, settings, [[e.completion for e in data.examples]])
    columns = _prompt_columns(data, limited) | _response_columns(responses)
    return Batch(columns), data.report(limited, settings)


def prepare_preferences(rows: Sequence[Mapping[str, Any]], tokenizer: Any, settings: DataSettings) -> tuple[Batch, DataReport]:
    """Preference pairs as two adjacent rows, the chosen one first. Columns of `prepare_supervised`, pair_id, chosen.

    Reads `prompt, chosen, rejected`, or `chosen, rejected` that begin with the prompt. Raises as `prepare_supervised`.
    """
    data = _read(rows, settings)
    for example, where in zip(data.examples, data.places, strict=True):
        if example.chosen is None or example.rejected is None:
            raise DataError(
                f"no pair of responses; the rows are {data.format.description}",
                where=where,
                remedy="give the columns prompt, chosen and rejected",
            )
    sides = [[e.chosen for e in data.examples], [e.rejected for e in data.examples]]
    limited, (chosen, rejected) = _with_responses(data, tokenizer, settings, sides)
    prompts = Batch(_prompt_columns(data, limited)).repeat(2)
    both = [side for pair in zip(chosen, rejected, strict=True) for side in pair]
    pair_id = [i // 2 for i in range(len(both))]
    batch = prompts.with_columns(
        _response_columns(both) | {"pair_id": pair_id, "chosen": [i % 2 == 0 for i in range(len(both))]}
    )
    return batch, data.report(limited, settings)


# ---------------------------------------------------------------------- steps


@dataclass(frozen=True)
class _Data:
    source: str
    format: Format
    examples: list[Example]
    places: list[str]

    def report(self, limited: Limited, settings: DataSettings) -> DataReport:
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
        )


def _read(rows: Sequence[Mapping[str, Any]], settings: DataSettings) -> _Data:
    if not rows:
        raise DataError("the data set has no rows", where=source_of(rows), remedy="give at least one row")
    rows = rows if isinstance(rows, Rows) else Rows(map(dict, rows), settings.path or "data")
    fmt = detect(rows, settings.prompt_column)
    return _Data(source_of(rows), fmt, to_examples(rows, fmt), [place_of(rows, i) for i in range(len(rows))])


def _with_responses(
    data: _Data, tokenizer: Any, settings: DataSettings, sides: Sequence[Sequence[Text | None]]
) -> tuple[Limited, list[list[list[int]]]]:
    """The prompts under the limit, and for each side the responses of the kept rows."""
    renderer = Renderer(tokenizer, settings)
    prompts = [renderer.prompt(e.prompt, where) for e, where in zip(data.examples, data.places, strict=True)]
    prompt_ids = renderer.encode(prompts)
    limited = limit_prompts(prompt_ids, settings, data.places)
    kept = limited.kept

    def of(side: Sequence[Text | None]) -> list[list[int]]:
        whole = [renderer.answered(data.examples[i].prompt, side[i] or "", data.places[i]) for i in kept]
        places = [data.places[i] for i in kept]
        return renderer.responses([prompts[i] for i in kept], [prompt_ids[i] for i in kept], whole, places)

    return limited, [of(side) for side in sides]


def _prompt_columns(data: _Data, limited: Limited) -> dict[str, Any]:
    examples = [data.examples[i] for i in limited.kept]
    # A column that a row lacks is None there; one that every row lacks does not exist.
    names = dict.fromkeys(name for example in data.examples for name in example.extras)
    return {
        "prompt_ids": limited.prompt_ids,
        "prompt": [e.prompt for e in examples],
        "row_index": [e.row for e in examples],
        **{f"data.{name}": [e.extras.get(name) for e in examples] for name in names},
    }


def _completions(data: _Data, limited: Limited) -> dict[str, Any]:
    found = [data.examples[i].completion for i in limited.kept]
    return {} if all(c is None for c in found) else {"data.completion": found}


def _response_columns(responses: list[list[int]]) -> dict[str, Any]:
    mask = [[True] * len(r) for r in responses]
    return {"response_ids": responses, "response_mask": mask, "loss_mask": mask}
