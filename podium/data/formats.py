"""Which of the field's row formats a data set has, and every row in one form, `Example`.

Formats: TRL's dataset types (prompt-only, prompt-completion, preference, unpaired preference, language modelling with
`messages`; https://huggingface.co/docs/trl/dataset_formats) as text or as chat messages, and verl's rows
(`data_source, prompt, ability, reward_model, extra_info`; https://verl.readthedocs.io, "Prepare data").
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from enum import Enum
from typing import Any

from podium.core.errors import DataError, did_you_mean
from podium.data.sources import place_of, source_of

Message = dict[str, Any]
Text = str | list[Message]


class FormatKind(Enum):
    """The columns that make a format."""

    PROMPT = ("prompt",)
    PROMPT_COMPLETION = ("prompt", "completion")
    PREFERENCE = ("prompt", "chosen", "rejected")
    IMPLICIT_PREFERENCE = ("chosen", "rejected")
    MESSAGES = ("messages",)
    LABELLED = ("prompt", "completion", "label")
    VERL = ("data_source", "prompt", "reward_model")


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
        }[self.kind]
        return f"{what} ({', '.join(self.columns)}), {'chat messages' if self.chat else 'text'}"


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
        if kind is FormatKind.PREFERENCE and _is_chat(first["chosen"]) and not _is_chat(first[prompt_column]):
            kind = FormatKind.IMPLICIT_PREFERENCE
    elif has_prompt and "completion" in columns:
        kind = FormatKind.LABELLED if "label" in columns else FormatKind.PROMPT_COMPLETION
    elif has_prompt:
        kind = FormatKind.PROMPT
    elif "messages" in columns:
        kind = FormatKind.MESSAGES
    if kind is None:
        raise _no_column(rows, 0, prompt_column)
    told_by = {FormatKind.MESSAGES: "messages", FormatKind.IMPLICIT_PREFERENCE: "chosen"}.get(kind, prompt_column)
    return Format(kind, _is_chat(first[told_by]), prompt_column)


def to_examples(rows: Sequence[Mapping[str, Any]], fmt: Format) -> list[Example]:
    """Every row as an `Example`.

    A conversation (`messages`) that ends with the assistant's turn is cut there: the turn is the completion.
    Raises DataError (file, row, column) for a missing column and for a value that is null, empty or of the wrong type.
    """
    return [_example(rows, i, fmt) for i in range(len(rows))]


def _example(rows: Sequence[Mapping[str, Any]], i: int, fmt: Format) -> Example:
    row, kind = rows[i], fmt.kind
    for column in fmt.columns:
        if column not in row:
            raise _no_column(rows, i, column)
    used = {*fmt.columns}
    if kind is FormatKind.IMPLICIT_PREFERENCE:
        used.add(fmt.prompt_column)
        texts = {name: _text(rows, i, name, fmt.chat) for name in ("chosen", "rejected")}
        prompt, chosen, rejected = _split_common(texts["chosen"], texts["rejected"])
        _check_filled(rows, i, "chosen", prompt, "chosen and rejected begin with no common prompt")
        return Example(i, prompt, chosen=chosen, rejected=rejected, extras=_extras(row, used))
    if kind is FormatKind.MESSAGES:
        prompt, completion = _split_conversation(_text(rows, i, "messages", True))
        _check_filled(rows, i, "messages", prompt, "there is no turn before the assistant's last one")
        return Example(i, prompt, completion, extras=_extras(row, used))
    prompt = _text(rows, i, fmt.prompt_column, fmt.chat)
    _check_filled(rows, i, fmt.prompt_column, prompt, "the prompt is empty")
    others = {n: _text(rows, i, n, fmt.chat) for n in ("completion", "chosen", "rejected") if n in kind.value}
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


# ---------------------------------------------------------------------- values

EMPTY_REMEDY = "fill the answer in or remove the row"


def as_label(value: Any, where: str) -> bool:
    """True or false from a row's `label`; 1 and 0 are taken too. Raises DataError for anything else."""
    if isinstance(value, bool) or (isinstance(value, int) and value in (0, 1)):
        return bool(value)
    raise DataError(
        f"a label is true or false (or 1 or 0), found {_found(value)}",
        where=f"{where}, column 'label'",
        remedy="write true for a good answer and false for a bad one, or remove the row",
    )


def is_empty(text: Text) -> bool:
    """No letter in it: blank text, or turns without content and without tool calls."""
    if isinstance(text, str):
        return not text.strip()
    return not any(message["content"].strip() or message.get("tool_calls") for message in text)


def shown(value: Any, length: int = 60) -> str:
    """A value for a message, cut to `length`."""
    text = repr(value)
    return text if len(text) <= length else text[: length - 3] + "..."


# ---------------------------------------------------------------------- texts


def _is_chat(value: Any) -> bool:
    return isinstance(value, list)


def _text(rows: Sequence[Mapping[str, Any]], i: int, column: str, chat: bool) -> Any:
    """The value of a text column, checked: a string, or messages with role and content."""
    value = rows[i][column]
    where = f"{place_of(rows, i)}, column '{column}'"
    if chat and isinstance(value, list):
        return [_message(message, n, where) for n, message in enumerate(value, 1)]
    if not chat and isinstance(value, str):
        _check_unicode(value, where)
        return value
    if value is not None and isinstance(value, str | list):
        raise DataError(
            f"found {'text' if chat else 'a list of messages'} where the rows before have "
            f"{'a list of messages' if chat else 'text'}",
            where=where,
            remedy="write every row in the same form",
        )
    expected = 'a list of messages, [{"role": "user", "content": "..."}]' if chat else "text or a list of chat messages"
    raise DataError(f"found {_found(value)}", where=where, remedy=f"give {expected}, or remove the row")


def _message(message: Any, number: int, where: str) -> Message:
    where = f"{where}, message {number}"
    if not isinstance(message, Mapping) or not isinstance(message.get("role"), str):
        raise DataError(
            f"not a chat message: {_found(message)}", where=where, remedy='write {"role": "user", "content": "..."}'
        )
    # Arrow fills every key that any message of the set has; templates ask whether a key is there at all.
    message = {key: value for key, value in message.items() if value is not None}
    content = message.setdefault("content", "" if message.get("tool_calls") else None)
    if not isinstance(content, str):
        raise DataError(f"the content is {_found(content)}", where=where, remedy="give the content as text")
    _check_unicode(content, where)
    return message


def _check_unicode(text: str, where: str) -> None:
    try:
        text.encode("utf-8")
    except UnicodeEncodeError as error:
        raise DataError(
            f"character {error.start} is half of a surrogate pair ({text[error.start]!a}), not valid Unicode",
            where=where,
            remedy="write the character itself, or both halves of the pair",
        ) from None


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


def _found(value: Any) -> str:
    if value is None:
        return "null"
    return f"{type(value).__name__} {shown(value)}"
