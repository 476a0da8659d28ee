"""Rows to a `Batch` that holds a whole data set: prompts, supervised examples, preference pairs, or labelled answers."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from podium.core.batch import Batch
from podium.core.errors import DataError, did_you_mean
from podium.core.settings import DataSettings
from podium.data.formats import EMPTY_REMEDY, Example, Format, Text, as_label, detect, is_empty, shown, to_examples
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
    equal: int = 0
    """Preference pairs left out because both answers are the same."""
    notes: tuple[str, ...] = ()
    """What else was understood or done."""

    def lines(self) -> list[str]:
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
    limited, (responses,) = _with_responses(data, tokenizer, settings, [_filled(data, "completion")])
    columns = _prompt_columns(data, limited) | _response_columns(responses)
    return Batch(columns), data.report(limited, settings)


def prepare_preferences(
    rows: Sequence[Mapping[str, Any]], tokenizer: Any, settings: DataSettings, heads: Sequence[str] | None = None
) -> tuple[Batch, DataReport]:
    """Preference pairs as two adjacent rows, the chosen one first.

    Columns of `prepare_supervised`, pair_id, chosen, and head: the number of the head that the pair judges.
    Reads `prompt, chosen, rejected`, or `chosen, rejected` that begin with the prompt. Pairs whose answers are the same
    tokens teach nothing: they are dropped and counted.

    Args:
        heads: names of a reward model's heads. The data's column `aspect` names one of them in each row; it may be
            missing where there is one head (head is 0 then, as it is without `heads`).

    Raises as `prepare_supervised`, and DataError for an empty answer, an aspect that is no head, and where no pair is left.
    """
    data = _read(rows, settings)
    head = _heads_of(data, heads or ())
    pairs = _pairs(data, tokenizer, settings)
    columns = {
        "pair_id": [i // 2 for i in range(2 * len(pairs.chosen))],
        "chosen": [i % 2 == 0 for i in range(2 * len(pairs.chosen))],
        "head": [head[i] for i in pairs.limited.kept for _ in range(2)],
    }
    report = replace(data.report(pairs.limited, settings), equal=pairs.equal, notes=_head_notes(data, head, heads or ()))
    return pairs.batch(data).with_columns(columns), report


def prepare_unpaired(rows: Sequence[Mapping[str, Any]], tokenizer: Any, settings: DataSettings) -> tuple[Batch, DataReport]:
    """Answers that are each labelled good or bad (KTO). Columns of `prepare_supervised`, label, and row_mask (all true).

    Reads `prompt, completion, label` (true or false; 1 and 0 are taken too). Preference pairs are also read: the chosen
    answer becomes a row labelled true, the rejected one a row labelled false.
    Raises as `prepare_preferences`, and DataError for a label that is neither.
    """
    data = _read(rows, settings)
    notes: list[str] = []
    if data.format.pairs:
        pairs = _pairs(data, tokenizer, settings)
        limited, equal, batch = pairs.limited, pairs.equal, pairs.batch(data)
        labels = [i % 2 == 0 for i in range(len(batch))]
        notes.append("each pair gives two rows: its chosen answer labelled true, its rejected one false")
    else:
        every = [_label_of(data, example, where) for example, where in zip(data.examples, data.places, strict=True)]
        sides = [_filled(data, "completion")]
        limited, (responses,) = _with_responses(data, tokenizer, settings, sides)
        equal, labels = 0, [every[i] for i in limited.kept]
        batch = Batch(_prompt_columns(data, limited) | _response_columns(responses))
        if any(type(example.label) is int for example in data.examples):
            notes.append("labels are numbers: 1 is read as true, 0 as false")
    notes.append(f"{sum(labels)} answers labelled true, {len(labels) - sum(labels)} false")
    batch = batch.with_columns({"label": labels, "row_mask": [True] * len(labels)})
    return batch, replace(data.report(limited, settings), equal=equal, notes=tuple(notes))


# ---------------------------------------------------------------------- pairs, labels, heads


@dataclass(frozen=True)
class _Pairs:
    """The kept rows' two responses, and how many pairs were equal."""

    limited: Limited
    chosen: list[list[int]]
    rejected: list[list[int]]
    equal: int

    def batch(self, data: _Data) -> Batch:
        """Two adjacent rows a pair, the chosen one first."""
        prompts = Batch(_prompt_columns(data, self.limited)).repeat(2)
        both = [side for pair in zip(self.chosen, self.rejected, strict=True) for side in pair]
        return prompts.with_columns(_response_columns(both))


def _pairs(data: _Data, tokenizer: Any, settings: DataSettings) -> _Pairs:
    sides = [_filled(data, "chosen"), _filled(data, "rejected")]
    limited, (chosen, rejected) = _with_responses(data, tokenizer, settings, sides)
    # Compared as tokens: a template may strip what tells two texts apart.
    differ = [i for i, (good, bad) in enumerate(zip(chosen, rejected, strict=True)) if good != bad]
    if not differ:
        raise DataError(
            f"in all {len(chosen)} pairs the chosen and the rejected answer are the same, for example "
            f"{shown(data.examples[limited.kept[0]].chosen)}",
            where=data.places[limited.kept[0]],
            remedy="give pairs whose answers differ",
        )
    fewer = replace(limited, kept=[limited.kept[i] for i in differ], prompt_ids=[limited.prompt_ids[i] for i in differ])
    return _Pairs(fewer, [chosen[i] for i in differ], [rejected[i] for i in differ], len(chosen) - len(differ))


_LACKS = {
    "completion": (
        "response to learn",
        "give the columns prompt and completion, or messages that end with the assistant's turn",
    ),
    "chosen": ("pair of responses", "give the columns prompt, chosen and rejected"),
    "rejected": ("pair of responses", "give the columns prompt, chosen and rejected"),
}


def _filled(data: _Data, name: str) -> list[Text]:
    """A side's texts, none missing and none empty. Raises DataError."""
    out: list[Text] = []
    for example, where in zip(data.examples, data.places, strict=True):
        text = getattr(example, name)
        what, remedy = _LACKS[name]
        if text is None:
            raise DataError(f"no {what}; the rows are {data.format.description}", where=where, remedy=remedy)
        if is_empty(text):
            raise DataError(f"the answer '{name}' is empty: {shown(text)}", where=where, remedy=EMPTY_REMEDY)
        out.append(text)
    return out


def _label_of(data: _Data, example: Example, where: str) -> bool:
    if example.completion is None or not data.format.labelled:
        raise DataError(
            f"no labelled answer; the rows are {data.format.description}",
            where=where,
            remedy="give the columns prompt, completion and label (true or false), or prompt, chosen and rejected",
        )
    return as_label(example.label, where)


def _heads_of(data: _Data, heads: Sequence[str]) -> list[int]:
    """The head that each example's pair judges. Raises DataError for an aspect that is none of `heads`."""
    out = []
    for example, where in zip(data.examples, data.places, strict=True):
        aspect = example.extras.get("aspect")
        if not heads or (aspect is None and len(heads) == 1):
            out.append(0)
            continue
        if not isinstance(aspect, str) or aspect not in heads:
            said = "no aspect" if aspect is None else f"the aspect {aspect!r} is no head of the reward model"
            near = did_you_mean(str(aspect), heads) if aspect is not None else "one of: " + ", ".join(heads)
            raise DataError(
                f"{said}; its heads are {', '.join(heads)}",
                where=f"{where}, column 'aspect'",
                remedy=near if near.startswith("did") else f"name in each row which head its pair judges; {near}",
            )
        out.append(list(heads).index(aspect))
    return out


def _head_notes(data: _Data, head: list[int], heads: Sequence[str]) -> tuple[str, ...]:
    if len(heads) < 2:
        return ()
    return ("pairs per head: " + ", ".join(f"{name} {head.count(i)}" for i, name in enumerate(heads)),)


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
    data: _Data, tokenizer: Any, settings: DataSettings, sides: Sequence[Sequence[Text]]
) -> tuple[Limited, list[list[list[int]]]]:
    """The prompts under the limit, and for each side the responses of the kept rows."""
    renderer = Renderer(tokenizer, settings)
    prompts = [renderer.prompt(e.prompt, where) for e, where in zip(data.examples, data.places, strict=True)]
    prompt_ids = renderer.encode(prompts)
    limited = limit_prompts(prompt_ids, settings, data.places)
    kept = limited.kept

    def of(side: Sequence[Text]) -> list[list[int]]:
        whole = [renderer.answered(data.examples[i].prompt, side[i], data.places[i]) for i in kept]
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
    """What a format uses and generation does not, for rewards to compare with."""
    examples = [data.examples[i] for i in limited.kept]
    found = {name: [getattr(e, name) for e in examples] for name in ("completion", "label")}
    return {f"data.{name}": values for name, values in found.items() if any(v is not None for v in values)}


def _response_columns(responses: list[list[int]]) -> dict[str, Any]:
    mask = [[True] * len(r) for r in responses]
    return {"response_ids": responses, "response_mask": mask, "loss_mask": mask}
