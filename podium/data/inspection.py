"""What Podium understands of a data set, and all that is wrong with it: the same reading as training, which stops at once."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from itertools import groupby
from typing import Any

from podium.core.batch import Batch
from podium.core.errors import DataError, ModelError, PodiumError
from podium.core.settings import DataSettings
from podium.data.formats import Example, Format, FormatKind, detect, to_example
from podium.data.parsed import DataReport, Parsed, check_row
from podium.data.prepare import prepare
from podium.data.rendering import NoRowLeft
from podium.data.sources import Rows, load_rows, place_of
from podium.data.texts import Text

_NO_LIMIT = 10**9
ANSWERS = {"completion": "answer", "chosen": "chosen answer", "rejected": "rejected answer"}


@dataclass(frozen=True)
class Part:
    """A stretch of the first example. `learnt`: the loss is on it. `tokens` is None where no tokenizer was given."""

    name: str
    text: str
    learnt: bool
    tokens: list[str] | None = None


@dataclass
class Inspection:
    """What was understood of a data set."""

    source: str
    rows: int = 0
    """Rows looked at."""
    usable: int = 0
    """Rows that a run would train on."""
    format: Format | None = None
    kind: str | None = None
    """The kind of training data that the rows were checked as."""
    columns: dict[str, str] = field(default_factory=dict)
    """Each column of the first row, and what it is used for."""
    problems: list[PodiumError] = field(default_factory=list)
    """What a run would refuse, in the rows' order; of each row the first."""
    all_found: bool = True
    """Every row was looked at; else the search stopped at the limit."""
    unit: str = "words"
    lengths: dict[str, list[int]] = field(default_factory=dict)
    """Lengths of the prompts and of each kind of answer, in `unit`."""
    over_limit: int | None = None
    """Rows whose prompt is longer than `data.max_prompt_tokens` (None: not known without a tokenizer)."""
    duplicates: list[tuple[str, str]] = field(default_factory=list)
    """(place, place of the row that it repeats) of rows with the same prompt and answers."""
    repeated_prompts: int = 0
    """Rows whose prompt an earlier row has too."""
    notes: list[str] = field(default_factory=list)
    """What a run would say of the data."""
    example: list[Part] = field(default_factory=list)
    """The first usable row as it is rendered."""


def inspect(
    path: Any,
    settings: DataSettings,
    tokenizer: Any = None,
    *,
    kind: str | None = None,
    heads: Sequence[str] = (),
    rows: int | None = None,
    limit: int = 20,
) -> Inspection:
    """Reads a data set as a run would, and goes on where a run would stop.

    Args:
        tokenizer: for lengths in tokens and for what only a rendered row shows (templates, equal tokens).
        kind: check the rows as this kind of training data; by default as what they look like most.
        heads: a reward model's heads, which the rows' `aspect` names.
        rows: look at the first so many.
        limit: search for this many problems at least before giving up (those found by text alone are all found).
    """
    problems: list[DataError] = []
    try:
        found = load_rows(path, settings.options, problems)
    except DataError as error:
        return Inspection(str(path), problems=[error])
    if rows is not None and len(found) > rows:
        found = Rows(found[:rows], found.source, found.lines[:rows] if found.lines else None)
    unread = len(problems) - sum(not isinstance(row, dict) for row in found)
    out = Inspection(found.source, len(found) + unread, problems=list(problems))
    if (data := _parse(found, settings, out)) is not None:
        _look(data, settings, tokenizer, kind, heads, limit, out)
    out.problems.sort(key=_row_number)
    return out


def _look(
    data: Parsed, settings: DataSettings, tokenizer: Any, kind: str | None, heads: Sequence[str], limit: int, out: Inspection
) -> None:
    """Everything about rows that could be read."""
    out.kind = kind or _likely(data)
    if out.kind not in data.format.uses:
        what = f"the rows are {data.format.description}; this training needs {_NEEDS[out.kind]}"
        out.problems.append(DataError(what, where=data.source, remedy="give such rows, or train what these rows are for"))
        return
    data = _checked(data, settings, heads, out)
    _find_repeats(data, out)
    if data.examples and tokenizer is not None:
        _in_tokens(data, tokenizer, settings, heads, limit, out)
    elif data.examples:
        _in_words(data, out)


def _row_number(problem: PodiumError) -> int:
    """Where it stands in the file; what is no row's fault comes first."""
    found = re.search(r", (?:line|row) (\d+)(?:,|$)", problem.where or "")
    return int(found[1]) if found else 0


_NEEDS = {
    "prompts": "prompts",
    "supervised": "answers to learn (prompt and completion, or messages)",
    "preferences": "preference pairs (prompt, chosen, rejected)",
    "unpaired": "labelled answers (prompt, completion, label) or preference pairs",
}

# ---------------------------------------------------------------------- rows to examples


def _parse(rows: Rows, settings: DataSettings, out: Inspection) -> Parsed | None:
    """The rows that can be read, each problem noted. None where no format fits."""
    good = [i for i, row in enumerate(rows) if isinstance(row, dict)]
    if not good:
        return None
    first = rows[good[0]]
    try:
        fmt = out.format = detect(Rows([first], rows.source), settings.prompt_column)
    except DataError as error:
        out.problems.append(error)
        return None
    examples: list[Example] = []
    for i in good:
        try:
            examples.append(to_example(rows, i, fmt))
        except DataError as error:
            out.problems.append(error)
    out.columns = {name: _use_of(name, fmt) for name in first}
    return Parsed(rows.source, fmt, examples, [place_of(rows, e.row) for e in examples])


def _use_of(column: str, fmt: Format) -> str:
    if column in fmt.columns:
        return "prompt" if column == fmt.prompt_column else column
    if column in ("tools", "chat_template_kwargs") and fmt.chat:
        return "given to the chat template and to rewards"
    if column == "aspect" and fmt.pairs:
        return "the head of a reward model that the pair judges"
    if fmt.kind is FormatKind.IMPLICIT_PREFERENCE and column == fmt.prompt_column:
        return "not used: the answers hold the prompt"
    return "given to rewards"


def _likely(data: Parsed) -> str:
    """What the rows look like most: conversations that nobody answers are prompts."""
    uses = data.format.uses
    answered = any(example.completion is not None for example in data.examples)
    return "prompts" if data.format.kind is FormatKind.MESSAGES and not answered else uses[0]


def _checked(data: Parsed, settings: DataSettings, heads: Sequence[str], out: Inspection) -> Parsed:
    """The rows whose text has what the training needs; each problem noted."""
    picks = []
    for i in range(len(data.examples)):
        try:
            check_row(data, i, str(out.kind), settings, heads)
            picks.append(i)
        except DataError as error:
            out.problems.append(error)
    return data.select(picks)


def _find_repeats(data: Parsed, out: Inspection) -> None:
    seen: dict[str, str] = {}
    prompts: set[str] = set()
    for example, where in zip(data.examples, data.places, strict=True):
        answers = [example.completion, example.chosen, example.rejected, example.label]
        key = json.dumps([example.prompt, *answers, example.extras], sort_keys=True, default=str)
        if key in seen:
            out.duplicates.append((where, seen[key]))
        seen.setdefault(key, where)
        prompt = json.dumps(example.prompt, sort_keys=True, default=str)
        out.repeated_prompts += bool(example.prompt) and prompt in prompts
        prompts.add(prompt)


# ---------------------------------------------------------------------- with a tokenizer


def _in_tokens(data: Parsed, tokenizer: Any, settings: DataSettings, heads: Sequence[str], limit: int, out: Inspection) -> None:
    whole = settings.model_copy(update={"max_prompt_tokens": _NO_LIMIT, "too_long": "drop"})
    kind = str(out.kind)
    found: list[PodiumError] = []
    try:
        picks = _preparable(data, lambda some: prepare(kind, some, tokenizer, whole, heads), found, limit)
        out.all_found = len(found) < limit
        out.problems += found
        if not picks:
            return
        data = data.select(picks)
        batch, report = prepare(kind, data, tokenizer, whole, heads)
        out.unit, out.lengths = "tokens", _token_lengths(kind, batch)
        out.example = _parts_of(kind, batch, tokenizer)
        out.usable, out.over_limit = report.used, 0
        if report.longest_prompt > settings.max_prompt_tokens:
            out.usable = 0
            dropping = settings if settings.too_long != "error" else settings.model_copy(update={"too_long": "drop"})
            out.over_limit = prepare(kind, data, tokenizer, dropping, heads)[1].cut
            _, report = prepare(kind, data, tokenizer, settings, heads)
            out.usable = report.used
        out.notes = report.lines()[1:]
    except ModelError as error:  # the tokenizer lacks what these rows need: a template, an end token
        out.problems.append(error)
        _in_words(data, out)
        out.usable = 0
    except DataError as error:  # every row is too long, every pair is equal, or data.too_long=error
        out.problems.append(error)


def _preparable(
    data: Parsed, attempt: Callable[[Parsed], tuple[Batch, DataReport]], problems: list[PodiumError], limit: int
) -> list[int]:
    """Numbers of the rows that can be rendered: all at once, and where that fails by halves down to the rows at fault."""

    def good(picks: list[int]) -> list[int]:
        if not picks or len(problems) >= limit:
            return []
        try:
            attempt(data.select(picks))
        except NoRowLeft:
            pass  # no fault of a row; what is left of all of them is counted later
        except DataError as error:
            if len(picks) == 1:
                problems.append(error)
                return []
            half = len(picks) // 2
            return good(picks[:half]) + good(picks[half:])
        return picks

    return good(list(range(len(data.examples))))


def _sides(kind: str, batch: Batch) -> dict[str, Any]:
    """Which rows of the batch hold which answers (numbers of rows)."""
    every = list(range(len(batch)))
    if kind == "preferences":
        return {"chosen answer": every[::2], "rejected answer": every[1::2]}
    if kind == "unpaired":
        label = batch["label"].tolist()
        sides = {
            "answer labelled true": [i for i in every if label[i]],
            "answer labelled false": [i for i in every if not label[i]],
        }
        return {name: rows for name, rows in sides.items() if rows}
    return {"answer": every} if kind == "supervised" else {}


def _token_lengths(kind: str, batch: Batch) -> dict[str, list[int]]:
    prompts = batch["prompt_ids"].lengths.tolist()
    out = {"prompt": [length for i, length in enumerate(prompts) if kind != "preferences" or i % 2 == 0]}
    for name, rows in _sides(kind, batch).items():
        lengths = batch["response_ids"].lengths.tolist()
        out[name] = [lengths[i] for i in rows]
    return out


def _parts_of(kind: str, batch: Batch, tokenizer: Any) -> list[Part]:
    """The first row as prompt and answers, cut where the loss begins and ends."""

    def part(name: str, ids: list[int], learnt: bool) -> Part:
        tokens = [tokenizer.decode([token], skip_special_tokens=False) for token in ids]
        return Part(name, tokenizer.decode(ids, skip_special_tokens=False), learnt, tokens)

    out = [part("prompt", batch["prompt_ids"][0].tolist(), False)]
    for name, rows in _sides(kind, batch).items():
        ids, mask = batch["response_ids"][rows[0]].tolist(), batch["loss_mask"][rows[0]].tolist()
        for learnt, run in groupby(zip(ids, mask, strict=True), key=lambda pair: pair[1]):
            out.append(part(name, [token for token, _ in run], bool(learnt)))
    return out


# ---------------------------------------------------------------------- without


def _in_words(data: Parsed, out: Inspection) -> None:
    first = data.examples[0]
    out.usable = len(data.examples)
    equal = sum(e.chosen is not None and e.chosen == e.rejected for e in data.examples) if data.format.pairs else 0
    if equal and out.kind in ("preferences", "unpaired"):
        out.usable -= equal
        out.notes.append(f"{equal} dropped: the chosen and the rejected answer are the same")
        if not out.usable:
            out.problems.append(DataError("in every pair both answers are the same", where=data.source, remedy="give others"))
    out.unit = "words"
    out.example = [Part("prompt", _plain(first.prompt), False)] if first.prompt else []
    out.lengths = {"prompt": [_words(e.prompt) for e in data.examples]} if first.prompt else {}
    for field_name, name in ANSWERS.items():
        texts = [text for e in data.examples if (text := getattr(e, field_name)) is not None]
        if texts and out.kind != "prompts":
            out.lengths[name] = [_words(text) for text in texts]
            out.example.append(Part(name, _plain(texts[0]), True))


def _plain(text: Text) -> str:
    return text if isinstance(text, str) else "\n".join(f"[{m['role']}] {m['content']}" for m in text)


def _words(text: Text) -> int:
    return len((text if isinstance(text, str) else " ".join(m["content"] for m in text)).split())
