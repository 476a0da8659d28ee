"""Rows to a `Batch` that holds a whole data set: prompts, supervised examples, preference pairs, or labelled answers."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import compress
from typing import Any

from podium.core.batch import Batch
from podium.core.settings import DataSettings
from podium.data.formats import FormatKind
from podium.data.parsed import DataReport, Parsed, answer_of, by_turns, check_row, head_of, label_of, read
from podium.data.rendering import Limited, NoRowLeft, Rendered, Renderer, limit_prompts
from podium.data.texts import Text, shown
from podium.data.turns import assistant_turns, has_marks

AnyRows = Sequence[Mapping[str, Any]] | Parsed
"""Rows as they were loaded, or read already."""


def prepare_prompts(rows: AnyRows, tokenizer: Any, settings: DataSettings) -> tuple[Batch, DataReport]:
    """Prompts to generate from. Columns: prompt_ids, prompt, row_index, data.*.

    Every format is taken. A completion that comes with the prompt is kept as `data.completion`.
    Raises DataError (file, row, column) for rows that cannot be used; ModelError for messages without a chat template.
    """
    data = read(rows, settings)
    for i in range(len(data.examples)):
        check_row(data, i, "prompts", settings)
    renderer = Renderer(tokenizer, settings)
    limited = limit_prompts(renderer.encode(_rendered(data, renderer)), settings, data.places)
    batch = Batch(_prompt_columns(data, limited) | _completions(data, limited))
    return batch, data.report(limited, settings, notes=_template_notes(data, tokenizer))


def prepare_supervised(rows: AnyRows, tokenizer: Any, settings: DataSettings) -> tuple[Batch, DataReport]:
    """Prompts with the response to learn. Columns of `prepare_prompts`, and response_ids, response_mask, loss_mask.

    Reads `prompt, completion`, `messages`, or `text`. `data.train_on` says what the loss is on: the completion (of a
    conversation the assistant's last turn), every assistant turn, or every token but the first, which stands as the prompt
    (so it is for plain texts in any case). A response ends with the end token. response_mask is loss_mask.
    Raises DataError and ModelError as `prepare_prompts`, and for a missing or an empty completion.
    """
    data = read(rows, settings)
    learnt = _learnt(data, tokenizer, settings)
    columns = _prompt_columns(data, learnt.limited) | _response_columns(learnt.responses, learnt.masks)
    notes = (*learnt.notes, *_label_notes(data), *_template_notes(data, tokenizer))
    return Batch(columns), data.report(learnt.limited, settings, notes=notes)


def prepare_preferences(
    rows: AnyRows, tokenizer: Any, settings: DataSettings, heads: Sequence[str] | None = None
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
    data = read(rows, settings)
    head = [head_of(data, i, heads or ()) for i in range(len(data.examples))]
    pairs = _pairs(data, tokenizer, settings)
    columns = {
        "pair_id": [i // 2 for i in range(2 * len(pairs.chosen))],
        "chosen": [i % 2 == 0 for i in range(2 * len(pairs.chosen))],
        "head": [head[i] for i in pairs.limited.kept for _ in range(2)],
    }
    notes = (*_head_notes(head, heads or ()), *_template_notes(data, tokenizer))
    report = data.report(pairs.limited, settings, pairs.equal, notes)
    return pairs.batch(data).with_columns(columns), report


def prepare_unpaired(rows: AnyRows, tokenizer: Any, settings: DataSettings) -> tuple[Batch, DataReport]:
    """Answers that are each labelled good or bad (KTO). Columns of `prepare_supervised`, label, and row_mask (all true).

    Reads `prompt, completion, label` (true or false; 1 and 0 are taken too). Preference pairs are also read: the chosen
    answer becomes a row labelled true, the rejected one a row labelled false.
    Raises as `prepare_preferences`, and DataError for a label that is neither.
    """
    data = read(rows, settings)
    notes: list[str] = []
    if data.format.pairs:
        pairs = _pairs(data, tokenizer, settings)
        limited, equal, batch = pairs.limited, pairs.equal, pairs.batch(data)
        labels = [i % 2 == 0 for i in range(len(batch))]
        notes.append("each pair gives two rows: its chosen answer labelled true, its rejected one false")
    else:
        every = [label_of(data, i) for i in range(len(data.examples))]
        sides = [_answers(data, "completion")]
        limited, (responses,) = _with_responses(data, tokenizer, settings, sides)
        equal, labels = 0, [every[i] for i in limited.kept]
        batch = Batch(_prompt_columns(data, limited) | _response_columns(responses))
        if any(type(example.label) is int for example in data.examples):
            notes.append("labels are numbers: 1 is read as true, 0 as false")
    notes.append(f"labels: {sum(labels)} true, {len(labels) - sum(labels)} false")
    batch = batch.with_columns({"label": labels, "row_mask": [True] * len(labels)})
    return batch, data.report(limited, settings, equal, (*notes, *_template_notes(data, tokenizer)))


PREPARE: dict[str, Callable[..., tuple[Batch, DataReport]]] = {
    "prompts": prepare_prompts,
    "supervised": prepare_supervised,
    "preferences": prepare_preferences,
    "unpaired": prepare_unpaired,
}
"""What makes each kind of data from rows."""


def prepare(
    kind: str, rows: AnyRows, tokenizer: Any, settings: DataSettings, heads: Sequence[str] | None = None
) -> tuple[Batch, DataReport]:
    """Rows as this kind of data. Only preference pairs say which of a reward model's `heads` they judge."""
    return PREPARE[kind](rows, tokenizer, settings, **({"heads": heads} if kind == "preferences" else {}))


# ---------------------------------------------------------------------- what SFT learns


@dataclass(frozen=True)
class _Learnt:
    """The kept rows' responses and which of their tokens are learnt."""

    limited: Limited
    responses: list[list[int]]
    masks: list[list[bool]]
    notes: tuple[str, ...] = ()


def _learnt(data: Parsed, tokenizer: Any, settings: DataSettings) -> _Learnt:
    if data.format.kind is FormatKind.PLAIN_TEXT:
        return _plain_texts(data, tokenizer, settings)
    if by_turns(data, settings):
        return _every_turn(data, tokenizer, settings)
    limited, (responses,) = _with_responses(data, tokenizer, settings, [_answers(data, "completion")])
    if settings.train_on != "all":
        return _Learnt(limited, responses, [[True] * len(r) for r in responses])
    whole = [prompt + response for prompt, response in zip(limited.prompt_ids, responses, strict=True)]
    return _all_but_first(limited, whole, ("the loss is on every token, the prompt's too (data.train_on=all)",))


def _plain_texts(data: Parsed, tokenizer: Any, settings: DataSettings) -> _Learnt:
    renderer = Renderer(tokenizer, settings)
    end = renderer.require_end()
    texts = renderer.encode([Rendered(str(text), True) for text in _answers(data, "completion")])
    return _all_but_first(Limited(list(range(len(texts))), texts, longest=1), [[*ids, end] for ids in texts], ())


def _all_but_first(limited: Limited, whole: list[list[int]], notes: tuple[str, ...]) -> _Learnt:
    """Nothing stands before the first token, so nothing predicts it: it is the prompt."""
    first = replace(limited, prompt_ids=[ids[:1] for ids in whole])
    return _Learnt(first, [ids[1:] for ids in whole], [[True] * (len(ids) - 1) for ids in whole], notes)


def _every_turn(data: Parsed, tokenizer: Any, settings: DataSettings) -> _Learnt:
    turns = assistant_turns(data, Renderer(tokenizer, settings))
    starts = [mask.index(True) for _, mask in turns]
    limited = limit_prompts([ids[:start] for (ids, _), start in zip(turns, starts, strict=True)], settings, data.places)
    responses, masks = [], []
    for i in limited.kept:
        (ids, mask), start = turns[i], starts[i]
        end = len(mask) - mask[::-1].index(True)
        responses.append(ids[start:end])
        masks.append(mask[start:end])
    how = "the template's {% generation %} marks" if has_marks(tokenizer) else "the template rendered turn by turn"
    notes = [f"the loss is on every assistant turn (data.train_on=assistant), told by {how}"]
    learnt = (token for pair in zip(responses, masks, strict=True) for token in compress(*pair))
    if tokenizer.eos_token_id not in learnt:
        notes.append("the end token is never inside the template's marks: it does not learn to stop by it")
    return _Learnt(limited, responses, masks, tuple(notes))


# ---------------------------------------------------------------------- pairs


@dataclass(frozen=True)
class _Pairs:
    """The kept rows' two responses, and how many pairs were equal."""

    limited: Limited
    chosen: list[list[int]]
    rejected: list[list[int]]
    equal: int

    def batch(self, data: Parsed) -> Batch:
        """Two adjacent rows a pair, the chosen one first."""
        prompts = Batch(_prompt_columns(data, self.limited)).repeat(2)
        both = [side for pair in zip(self.chosen, self.rejected, strict=True) for side in pair]
        return prompts.with_columns(_response_columns(both))


def _pairs(data: Parsed, tokenizer: Any, settings: DataSettings) -> _Pairs:
    sides = [_answers(data, "chosen"), _answers(data, "rejected")]
    limited, (chosen, rejected) = _with_responses(data, tokenizer, settings, sides)
    # Compared as tokens: a template may strip what tells two texts apart.
    differ = [i for i, (good, bad) in enumerate(zip(chosen, rejected, strict=True)) if good != bad]
    if not differ:
        raise NoRowLeft(
            f"in all {len(chosen)} pairs the chosen and the rejected answer are the same, for example "
            f"{shown(data.examples[limited.kept[0]].chosen)}",
            where=data.places[limited.kept[0]],
            remedy="give pairs whose answers differ",
        )
    fewer = replace(limited, kept=[limited.kept[i] for i in differ], prompt_ids=[limited.prompt_ids[i] for i in differ])
    return _Pairs(fewer, [chosen[i] for i in differ], [rejected[i] for i in differ], len(chosen) - len(differ))


# ---------------------------------------------------------------------- what the report adds


def _head_notes(head: list[int], heads: Sequence[str]) -> tuple[str, ...]:
    if len(heads) < 2:
        return ()
    return ("pairs per head: " + ", ".join(f"{name} {head.count(i)}" for i, name in enumerate(heads)),)


def _label_notes(data: Parsed) -> tuple[str, ...]:
    bad = sum(example.label in (False, 0) for example in data.examples) if data.format.labelled else 0
    return (
        (f"{bad} of {len(data.examples)} rows are labelled false and learnt like the others: SFT does not read labels",)
        if bad
        else ()
    )


def _template_notes(data: Parsed, tokenizer: Any) -> tuple[str, ...]:
    """What becomes of the rows' tools."""
    having = sum("tools" in example.template for example in data.examples)
    if not having:
        return ()
    place = "" if "tools" in str(tokenizer.chat_template) else ", which has no place for them: the model does not see them"
    return (f"{having} of {len(data.examples)} rows give tools to the chat template{place}",)


# ---------------------------------------------------------------------- steps


def _answers(data: Parsed, name: str) -> list[Text]:
    return [answer_of(data, i, name) for i in range(len(data.examples))]


def _rendered(data: Parsed, renderer: Renderer) -> list[Rendered]:
    return [renderer.prompt(e.prompt, where, e.template) for e, where in zip(data.examples, data.places, strict=True)]


def _answered(data: Parsed, i: int, answer: Text, renderer: Renderer) -> Rendered:
    return renderer.answered(data.examples[i].prompt, answer, data.places[i], data.examples[i].template)


def _with_responses(
    data: Parsed, tokenizer: Any, settings: DataSettings, sides: Sequence[Sequence[Text]]
) -> tuple[Limited, list[list[list[int]]]]:
    """The prompts under the limit, and for each side the responses of the kept rows."""
    renderer = Renderer(tokenizer, settings)
    prompts = _rendered(data, renderer)
    prompt_ids = renderer.encode(prompts)
    limited = limit_prompts(prompt_ids, settings, data.places)
    kept = limited.kept

    def of(side: Sequence[Text]) -> list[list[int]]:
        whole = [_answered(data, i, side[i], renderer) for i in kept]
        places = [data.places[i] for i in kept]
        return renderer.responses([prompts[i] for i in kept], [prompt_ids[i] for i in kept], whole, places)

    return limited, [of(side) for side in sides]


def _prompt_columns(data: Parsed, limited: Limited) -> dict[str, Any]:
    examples = [data.examples[i] for i in limited.kept]
    # A column that a row lacks is None there; one that every row lacks does not exist.
    names = dict.fromkeys(name for example in data.examples for name in example.extras)
    return {
        "prompt_ids": limited.prompt_ids,
        "prompt": [e.prompt for e in examples],
        "row_index": [e.row for e in examples],
        **{f"data.{name}": [e.extras.get(name) for e in examples] for name in names},
    }


def _completions(data: Parsed, limited: Limited) -> dict[str, Any]:
    """What a format uses and generation does not, for rewards to compare with."""
    examples = [data.examples[i] for i in limited.kept]
    found = {name: [getattr(e, name) for e in examples] for name in ("completion", "label")}
    return {f"data.{name}": values for name, values in found.items() if any(v is not None for v in values)}


def _response_columns(responses: list[list[int]], mask: list[list[bool]] | None = None) -> dict[str, Any]:
    mask = mask if mask is not None else [[True] * len(r) for r in responses]
    return {"response_ids": responses, "response_mask": mask, "loss_mask": mask}
