"""Which of the field's row formats a data set has, and every row in one form, `Example`.

Formats: TRL's dataset types (prompt-only, prompt-completion, preference, unpaired preference, language modelling with
`messages` or `text`; https://huggingface.co/docs/trl/dataset_formats) as text or as chat messages, and verl's rows
(`data_source, prompt, ability, reward_model, extra_info`; https://verl.readthedocs.io, "Prepare data").
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from enum import Enum
from typing import Any

from podium.core.errors import DataError, did_you_mean
from podium.data.sources import place_of, source_of
from podium.data.texts import Message, Text, check_no_media, is_chat, template_options, text_of


class FormatKind(Enum):
    """The columns that make a format."""

    PROMPT = ("prompt",)
    PROMPT_COMPLETION = ("prompt", "completion")
    PREFERENCE = ("prompt", "chosen", "rejected")
    IMPLICIT_PREFERENCE = ("chosen", "rejected")
    MESSAGES = ("messages",)
    LABELLED = ("prompt", "completion", "label")
    VERL = ("data_source", "prompt", "reward_model")
    PLAIN_TEXT = ("text",)


@dataclass(frozen=True)
class Format:
    """What was detected. `chat`: the texts are lists of chat messages."""

    kind: FormatKind
    chat: bool
    prompt_column: str = "prompt"

    @property
    def columns(self) -> tuple[str, ...]:
        """The columns it reads, by the data set's own names."""
        return tuple(self.prompt_column if name == "prompt" else name for name in self.kind.value)

    @property
    def pairs(self) -> bool:
        """Rows are preference pairs."""
        return self.kind in (FormatKind.PREFERENCE, FormatKind.IMPLICIT_PREFERENCE)

    @property
    def labelled(self) -> bool:
        """Rows are answers with a label."""
        return self.kind is FormatKind.LABELLED

    @property
    def uses(self) -> tuple[str, ...]:
        """The kinds of training data that the rows can be, the likeliest first."""
        return _USES[self.kind]

    @property
    def description(self) -> str:
        """One line for the user."""
        what = {
            FormatKind.PROMPT: "prompts",
            FormatKind.PROMPT_COMPLETION: "prompts with completions",
            FormatKind.PREFERENCE: "preference pairs",
            FormatKind.IMPLICIT_PREFERENCE: "preference pairs, the prompt being what both begin with",
            FormatKind.MESSAGES: "conversations",
            FormatKind.LABELLED: "completions labelled good or bad",
            FormatKind.VERL: "verl's rows",
            FormatKind.PLAIN_TEXT: "plain texts, all of which is learnt",
        }[self.kind]
        return f"{what} ({', '.join(self.columns)}), {'chat messages' if self.chat else 'text'}"


_USES: dict[FormatKind, tuple[str, ...]] = {
    FormatKind.PROMPT: ("prompts",),
    FormatKind.PROMPT_COMPLETION: ("supervised", "prompts"),
    FormatKind.PREFERENCE: ("preferences", "unpaired", "prompts"),
    FormatKind.IMPLICIT_PREFERENCE: ("preferences", "unpaired", "prompts"),
    FormatKind.MESSAGES: ("supervised", "prompts"),
    FormatKind.LABELLED: ("unpaired", "supervised", "prompts"),
    FormatKind.VERL: ("prompts",),
    FormatKind.PLAIN_TEXT: ("supervised",),
}


@dataclass(frozen=True)
class Example:
    """One row in uniform form. `row` counts from 0; `extras` are the columns that the format does not use."""

    row: int
    prompt: Text
    completion: Text | None = None
    chosen: Text | None = None
    rejected: Text | None = None
    label: Any = None
    """As the row gives it: `as_label` reads it where a label is asked for."""
    extras: dict[str, Any] = field(default_factory=dict)
    template: dict[str, Any] = field(default_factory=dict)
    """Options that the row gives its chat template: tools, and what `chat_template_kwargs` says."""


def detect(rows: Sequence[Mapping[str, Any]], prompt_column: str = "prompt") -> Format:
    """The format of a data set, from the columns and values of its first row.

    Raises DataError, listing the columns that are there, where no format fits.
    """
    first = rows[0]
    columns = set(first)
    if prompt_column != "prompt" and prompt_column not in columns:
        raise _no_column(rows, 0, prompt_column)
    has_prompt = prompt_column in columns
    kind: FormatKind | None = None
    if has_prompt and {"reward_model", "data_source"} <= columns:
        kind = FormatKind.VERL
    elif {"chosen", "rejected"} <= columns:
        kind = FormatKind.PREFERENCE if has_prompt else FormatKind.IMPLICIT_PREFERENCE
        # Published sets often carry the prompt as text and again inside both conversations.
        if kind is FormatKind.PREFERENCE and is_chat(first["chosen"]) and not is_chat(first[prompt_column]):
            kind = FormatKind.IMPLICIT_PREFERENCE
    elif has_prompt and "completion" in columns:
        kind = FormatKind.LABELLED if "label" in columns else FormatKind.PROMPT_COMPLETION
    elif has_prompt:
        kind = FormatKind.PROMPT
    elif "messages" in columns:
        kind = FormatKind.MESSAGES
    elif "text" in columns:
        kind = FormatKind.PLAIN_TEXT
    if kind is None:
        raise _no_column(rows, 0, prompt_column)
    told_by = prompt_column if "prompt" in kind.value else kind.value[0]
    return Format(kind, is_chat(first[told_by]), prompt_column)


def to_examples(rows: Sequence[Mapping[str, Any]], fmt: Format) -> list[Example]:
    """Every row as an `Example`.

    A conversation (`messages`) that ends with the assistant's turn is cut there: the turn is the completion.
    Raises DataError (file, row, column) for a missing column, for a value that is null, empty or of the wrong type, for
    a row that is both a pair and a labelled answer, and for pictures.
    """
    return [to_example(rows, i, fmt) for i in range(len(rows))]


def to_example(rows: Sequence[Mapping[str, Any]], i: int, fmt: Format) -> Example:
    """Row `i` (from 0) as an `Example`. Raises as `to_examples`."""
    row, where = rows[i], place_of(rows, i)
    for column in fmt.columns:
        if column not in row:
            raise _no_column(rows, i, column)
    _check_one_kind(row, where)
    check_no_media(row, where)
    example = _example(rows, i, fmt)
    return replace(example, template=template_options(row, where)) if fmt.chat else example


def _check_one_kind(row: Mapping[str, Any], where: str) -> None:
    """A pair or a labelled answer, not both. (A label that is neither true nor false is an extra column.)"""
    pair = [name for name in ("chosen", "rejected") if row.get(name) is not None]
    label = row.get("label")
    if pair and isinstance(label, int) and label in (0, 1):  # true and false too
        raise DataError(
            f"the row has '{pair[0]}' and 'label' ({label!r}): it is a preference pair or a labelled answer, not both",
            where=where,
            remedy="remove the column that is not meant: 'label', or 'chosen' and 'rejected'",
        )


def _example(rows: Sequence[Mapping[str, Any]], i: int, fmt: Format) -> Example:
    row, kind = rows[i], fmt.kind
    used = {*fmt.columns}
    if kind is FormatKind.PLAIN_TEXT:
        text = text_of(rows, i, "text", False)
        _check_filled(rows, i, "text", text, "the text is empty")
        return Example(i, "", text, extras=_extras(row, used))
    if kind is FormatKind.IMPLICIT_PREFERENCE:
        used.add(fmt.prompt_column)
        texts = {name: text_of(rows, i, name, fmt.chat) for name in ("chosen", "rejected")}
        prompt, chosen, rejected = _split_common(texts["chosen"], texts["rejected"])
        _check_filled(rows, i, "chosen", prompt, "chosen and rejected begin with no common prompt")
        return Example(i, prompt, chosen=chosen, rejected=rejected, extras=_extras(row, used))
    if kind is FormatKind.MESSAGES:
        prompt, completion = _split_conversation(text_of(rows, i, "messages", True))
        _check_filled(rows, i, "messages", prompt, "there is no turn before the assistant's last one")
        return Example(i, prompt, completion, extras=_extras(row, used))
    prompt = text_of(rows, i, fmt.prompt_column, fmt.chat)
    _check_filled(rows, i, fmt.prompt_column, prompt, "the prompt is empty")
    others = {n: text_of(rows, i, n, fmt.chat) for n in ("completion", "chosen", "rejected") if n in kind.value}
    if kind is FormatKind.LABELLED:
        others["label"] = row["label"]
    extras = _extras(row, used)
    if kind is FormatKind.VERL:
        model = row["reward_model"]
        extras |= {"data_source": row["data_source"], "reward_model": model}
        extras["ground_truth"] = model.get("ground_truth") if isinstance(model, Mapping) else None
    return Example(i, prompt, extras=extras, **others)  # type: ignore[arg-type]


def _extras(row: Mapping[str, Any], used: set[str]) -> dict[str, Any]:
    return {name: value for name, value in row.items() if name not in used}


# ---------------------------------------------------------------------- prompts


def _check_filled(rows: Sequence[Mapping[str, Any]], i: int, column: str, prompt: Text, problem: str) -> None:
    filled = prompt.strip() if isinstance(prompt, str) else any(m["content"].strip() for m in prompt)
    if not filled:
        raise DataError(problem, where=f"{place_of(rows, i)}, column '{column}'", remedy="fill it in or remove the row")


def _split_conversation(messages: list[Message]) -> tuple[list[Message], list[Message] | None]:
    if messages and messages[-1]["role"] == "assistant":
        return messages[:-1], messages[-1:]
    return messages, None


def _split_common(chosen: Text, rejected: Text) -> tuple[Text, Text, Text]:
    """The common beginning and the two rests (TRL's `extract_prompt`): whole messages, or text up to a word's border."""
    n = 0
    while n < min(len(chosen), len(rejected)) and chosen[n] == rejected[n]:
        n += 1
    if isinstance(chosen, str) and n and chosen[n - 1] == " ":
        n -= 1  # the space belongs to the word that follows
    elif isinstance(chosen, list) and n and n == min(len(chosen), len(rejected)):
        n -= 1  # equal conversations: the last turn is the answer
    return chosen[:n], chosen[n:], rejected[n:]


# ---------------------------------------------------------------------- messages


def _no_column(rows: Sequence[Mapping[str, Any]], i: int, column: str) -> DataError:
    present = sorted(map(str, rows[i]))
    known = "; ".join(", ".join(kind.value) for kind in FormatKind)
    near = did_you_mean(column, present) if present else ""
    near = near if near.startswith("did you mean") else f"set data.prompt_column, or use the columns of a known format: {known}"
    return DataError(
        f"no column '{column}'; the row has: {', '.join(present) or 'none'}",
        where=place_of(rows, i) if i else source_of(rows),
        remedy=near,
    )
