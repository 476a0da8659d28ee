"""The values of a row, checked: texts, chat messages, labels, and what a row gives its chat template."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Mapping, Sequence
from typing import Any

from podium.core.errors import DataError
from podium.data.sources import place_of

Message = dict[str, Any]
Text = str | list[Message]

EMPTY_REMEDY = "fill the answer in or remove the row"


def as_label(value: Any, where: str) -> bool:
    """True or false from a row's `label`; 1 and 0 are taken too. Raises DataError for anything else."""
    if isinstance(value, bool) or (isinstance(value, int) and value in (0, 1)):
        return bool(value)
    raise DataError(
        f"a label is true or false (or 1 or 0), found {found(value)}",
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


_MEDIA = ("image", "images", "video", "videos", "audio", "audios")


def check_no_media(row: Mapping[str, Any], where: str) -> None:
    """Raises DataError where a row has pictures, films or sound: training without them would be another task.

    A plain string (a file's name, an address) is taken for an extra column.
    """
    for name in _MEDIA:
        if (value := row.get(name)) and not isinstance(value, str):
            raise DataError(
                f"the row has {name} ({type(value).__name__}); Podium trains on text only",
                where=f"{where}, column '{name}'",
                remedy=f"remove the row, or the column '{name}' where the text stands for itself",
            )


def template_options(row: Mapping[str, Any], where: str) -> dict[str, Any]:
    """What a row gives its chat template beside messages: TRL's columns `tools` and `chat_template_kwargs`.

    `tools` is a list of JSON schemas, or that list as a JSON string. Raises DataError for anything else.
    """
    options = _without_nulls(row.get("chat_template_kwargs") or {})
    if not isinstance(options, Mapping):
        raise DataError(
            f"found {found(options)}",
            where=f"{where}, column 'chat_template_kwargs'",
            remedy='give an object, for example {"enable_thinking": false}',
        )
    tools = row.get("tools") or None
    if isinstance(tools, str):
        with contextlib.suppress(json.JSONDecodeError):  # what is no JSON is shown as it is, below
            tools = json.loads(tools)
    if tools is not None and not (isinstance(tools, list) and all(isinstance(tool, Mapping) for tool in tools)):
        raise DataError(
            f"found {found(tools)}",
            where=f"{where}, column 'tools'",
            remedy="give a list of JSON schemas, or remove the column",
        )
    return {**options, "tools": _without_nulls(tools)} if tools else dict(options)


# ---------------------------------------------------------------------- texts


def is_chat(value: Any) -> bool:
    """Chat messages, not text."""
    return isinstance(value, list)


def text_of(rows: Sequence[Mapping[str, Any]], i: int, column: str, chat: bool) -> Any:
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
            f"found {'text' if chat else 'a list of messages'} where the {'rows before have' if i else 'other columns have'} "
            f"{'a list of messages' if chat else 'text'}",
            where=where,
            remedy="write every row and column in the same form",
        )
    expected = 'a list of messages, [{"role": "user", "content": "..."}]' if chat else "text or a list of chat messages"
    raise DataError(f"found {found(value)}", where=where, remedy=f"give {expected}, or remove the row")


def _message(message: Any, number: int, where: str) -> Message:
    where = f"{where}, message {number}"
    if not isinstance(message, Mapping) or not isinstance(message.get("role"), str):
        raise DataError(f"not a chat message: {found(message)}", where=where, remedy='write {"role": "user", "content": "..."}')
    # Arrow fills every key that any message of the set has; templates ask whether a key is there at all.
    message = _without_nulls(message)
    content = message.get("content", "" if message.get("tool_calls") else None)
    if isinstance(content, list) and content and all(isinstance(part, Mapping) for part in content):
        content = _joined(content, where)
    if not isinstance(content, str):
        raise DataError(f"the content is {found(content)}", where=where, remedy="give the content as text")
    _check_unicode(content, where)
    return {**message, "content": content}


def _joined(parts: Sequence[Mapping[str, Any]], where: str) -> str:
    """Content in parts, `[{"type": "text", "text": ...}]`, as one text."""
    for part in parts:
        if part.get("type") != "text" or not isinstance(part.get("text"), str):
            raise DataError(
                f"the content is {found(list(parts))}: a part of type {part.get('type')!r} is no text",
                where=where,
                remedy="Podium trains on text: give the content as text, or remove the row",
            )
    return "".join(part["text"] for part in parts)


def _without_nulls(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {key: _without_nulls(item) for key, item in value.items() if item is not None}
    return [_without_nulls(item) for item in value] if isinstance(value, list) else value


def _check_unicode(text: str, where: str) -> None:
    try:
        text.encode("utf-8")
    except UnicodeEncodeError as error:
        raise DataError(
            f"character {error.start} is half of a surrogate pair ({text[error.start]!a}), not valid Unicode",
            where=where,
            remedy="write the character itself, or both halves of the pair",
        ) from None


def found(value: Any) -> str:
    if value is None:
        return "null"
    return f"{type(value).__name__} {shown(value)}"
