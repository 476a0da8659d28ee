"""SFT on every assistant turn of a conversation: which of its tokens are learnt.

Where the chat template marks what the assistant says (`{% generation %}`, as `transformers` reads it), those marks count.
Elsewhere the conversation is rendered up to each turn and through it, and compared token by token: the loss is exactly on
what the model would generate there. A template that renders a turn in another way once more turns follow cannot be used so.
"""

from __future__ import annotations

import re
from typing import Any

from podium.core.errors import DataError
from podium.data.parsed import Parsed, conversation
from podium.data.rendering import Rendered, Renderer
from podium.data.texts import Message

_MARK = re.compile(r"\{%-?\s*generation\s*-?%\}")
_REMEDY = (
    "set model.chat_template to one that marks the assistant's turns with {% generation %} or leaves earlier turns as they "
    "are, or data.train_on=completion to learn the last turn only"
)

Tokens = tuple[list[int], list[bool]]


def has_marks(tokenizer: Any) -> bool:
    """The chat template marks what the assistant says, and the tokenizer can tell which tokens that are."""
    return bool(tokenizer.is_fast and _MARK.search(str(tokenizer.chat_template or "")))


def assistant_turns(data: Parsed, renderer: Renderer) -> list[Tokens]:
    """Each row's token ids and which of them are learnt. The first token that is learnt ends the prompt.

    Raises DataError (row) where the learnt tokens cannot be told exactly, ModelError without a chat template or end token.
    """
    renderer.require_end()
    spoken = []
    for i, where in enumerate(data.places):
        prompt, answer = conversation(data, i)
        messages = renderer.messages(prompt, where) or []
        spoken.append(renderer.joined(messages, answer) if answer else messages)
    return _by_marks(data, renderer, spoken) if has_marks(renderer.tokenizer) else _by_prefixes(data, renderer, spoken)


def _by_marks(data: Parsed, renderer: Renderer, spoken: list[list[Message]]) -> list[Tokens]:
    out = []
    for example, where, messages in zip(data.examples, data.places, spoken, strict=True):
        asked = {"tokenize": True, "return_dict": True, "return_assistant_tokens_mask": True}
        found = renderer.template(messages, where, **asked, **example.template)
        ids, mask = list(found["input_ids"]), [bool(m) for m in found["assistant_masks"]]
        if not any(mask):
            raise DataError("the chat template's {% generation %} marks hold no token", where=where, remedy=_REMEDY)
        out.append((ids, mask))
    return out


def _by_prefixes(data: Parsed, renderer: Renderer, spoken: list[list[Message]]) -> list[Tokens]:
    wholes: list[Rendered] = []
    pieces: list[Rendered] = []  # of each assistant turn: the text before it, and the text through it
    for example, where, messages in zip(data.examples, data.places, spoken, strict=True):
        whole = renderer.template(messages, where, **example.template)
        wholes.append(Rendered(whole, False))
        for n in _turns(messages):
            before = renderer.template(messages[:n], where, **example.template, add_generation_prompt=True)
            through = renderer.template(messages[: n + 1], where, **example.template)
            if not (through.startswith(before) and whole.startswith(through)):
                raise DataError(
                    f"the chat template renders message {n + 1} differently once more turns follow: the tokens to learn "
                    "cannot be told",
                    where=where,
                    remedy=_REMEDY,
                )
            pieces += [Rendered(before, False), Rendered(through, False)]
    ids, parts = renderer.encode(wholes), iter(renderer.encode(pieces))
    return [
        _masked(renderer, row, [(n, next(parts), next(parts)) for n in _turns(messages)], where)
        for row, messages, where in zip(ids, spoken, data.places, strict=True)
    ]


def _turns(messages: list[Message]) -> list[int]:
    return [n for n, message in enumerate(messages) if message["role"] == "assistant"]


def _masked(renderer: Renderer, ids: list[int], turns: list[tuple[int, list[int], list[int]]], where: str) -> Tokens:
    """A conversation's tokens, cut after the last turn and ended, and which are the assistant's."""
    mask = [False] * len(ids)
    for n, before, through in turns:
        if ids[: len(before)] != before or ids[: len(through)] != through:
            raise DataError(
                f"a token spans the border of message {n + 1}: the tokens to learn cannot be told exactly",
                where=where,
                remedy=_REMEDY,
            )
        end = len(before) + renderer.end_of(through[len(before) :])
        mask[len(before) : end] = [True] * (end - len(before))
    ids, mask = ids[:end], mask[:end]
    return (ids, mask) if ids[-1] == renderer.eos else ([*ids, renderer.require_end()], [*mask, True])
