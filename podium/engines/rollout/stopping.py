"""When a response ends: end tokens, stop strings, the length."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from transformers import PreTrainedModel, PreTrainedTokenizerBase

from podium.engines.base import FinishReason, SamplingParams

_CONTEXT_TOKENS = 6


def end_token_ids(model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase) -> frozenset[int]:
    """The model's own end tokens: those of its generation config and its tokenizer's. Empty where it has none."""
    found: set[int] = set()
    for value in (getattr(model.generation_config, "eos_token_id", None), tokenizer.eos_token_id):
        found.update([value] if isinstance(value, int) else value or [])
    return frozenset(found)


class StopStrings:
    """Finds stop strings in a response token by token.

    Text is decoded in small pieces, each with the few tokens before it (a token's text depends on them), and held back
    while it ends inside a character of several bytes. Special tokens count as their text.

    Args:
        stop: the strings, none empty.
        context: tokens before the response (the prompt's end); no match starts in them.
    """

    def __init__(self, tokenizer: Any, stop: Sequence[str], context: Sequence[int]) -> None:
        self._tokenizer = tokenizer
        self._stop = tuple(stop)
        self._ids = list(context[-_CONTEXT_TOKENS:])
        self._prefix, self._read = 0, len(self._ids)
        self._tail = ""
        self._keep = max(map(len, self._stop)) - 1

    def push(self, token: int) -> bool:
        """Takes the next token; whether the response now holds a stop string."""
        self._ids.append(token)
        before = self._decode(self._ids[self._prefix : self._read])
        text = self._decode(self._ids[self._prefix :])
        if len(text) <= len(before):
            return False
        window = self._tail + text[len(before) :]
        if text.endswith("�"):  # inside a character: what stands before it counts, but is read again with the next token
            return self._found(window.rstrip("�"))
        self._prefix, self._read = self._read, len(self._ids)
        self._tail = window[-self._keep :] if self._keep else ""
        return self._found(window)

    def _found(self, text: str) -> bool:
        return any(stop in text for stop in self._stop)

    def _decode(self, ids: list[int]) -> str:
        return self._tokenizer.decode(ids, skip_special_tokens=False, clean_up_tokenization_spaces=False)


class StopRule:
    """Whether a response has ended, fed token by token.

    Args:
        end_ids: the model's end tokens.
        written: response tokens that are there already (of an interrupted response).
    """

    def __init__(
        self,
        tokenizer: Any,
        sampling: SamplingParams,
        end_ids: frozenset[int],
        prompt_ids: Sequence[int],
        written: Sequence[int] = (),
    ) -> None:
        self.end_ids = end_ids.union(sampling.stop_token_ids) if sampling.stop_token_ids else end_ids
        self._left = sampling.max_new_tokens - len(written)
        self._strings = StopStrings(tokenizer, sampling.stop, prompt_ids) if sampling.stop else None
        if self._strings:
            for token in written:
                self._strings.push(token)

    def push(self, token: int) -> FinishReason | None:
        """Takes the next token; why the response ends with it, or None."""
        self._left -= 1
        matched = self._strings.push(token) if self._strings else False
        if matched or token in self.end_ids:
            return "stop"
        return "length" if self._left <= 0 else None
