"""Prompts and completions as token ids: the chat template, special tokens, the end token, the limit on length."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from podium.core.errors import DataError, ModelError
from podium.core.settings import DataSettings
from podium.data.texts import Message, Text

_CHUNK = 1024


class NoRowLeft(DataError):
    """Every row was left out: for its length, or because it teaches nothing."""


@dataclass(frozen=True)
class Rendered:
    """Text ready for the tokenizer. `special`: add the tokenizer's own special tokens (a chat template brings its own)."""

    text: str
    special: bool


class Renderer:
    """Turns texts and conversations into token ids, by one tokenizer and the data settings.

    Plain text is tokenised with the special tokens that the tokenizer adds by default, except an end token after the
    prompt: what is to be continued has not ended. Chat messages go through the chat template.
    """

    def __init__(self, tokenizer: Any, settings: DataSettings) -> None:
        self.tokenizer, self.settings = tokenizer, settings
        self.eos: int | None = tokenizer.eos_token_id
        self._suffix = _tokens_put_after(tokenizer)

    # ------------------------------------------------------------------ rendering

    def prompt(self, prompt: Text, where: str, options: Mapping[str, Any] | None = None) -> Rendered:
        """The prompt as the model shall see it: with the system prompt and, for chat, the opening of the answer.

        `options` go to the chat template (tools, for example).
        """
        messages = self.messages(prompt, where)
        if messages is None:
            return Rendered(self._with_system_text(str(prompt)), True)
        continues = messages[-1]["role"] == "assistant"
        opening = {"add_generation_prompt": not continues, "continue_final_message": continues}
        return Rendered(self.template(messages, where, **(options or {}), **opening), False)

    def answered(self, prompt: Text, completion: Text, where: str, options: Mapping[str, Any] | None = None) -> Rendered:
        """Prompt and completion as one text; it must begin with what `prompt` gives."""
        messages = self.messages(prompt, where)
        if messages is None:
            return Rendered(self._with_system_text(str(prompt)) + str(completion), True)
        return Rendered(self.template(self.joined(messages, completion), where, **(options or {})), False)

    @staticmethod
    def joined(messages: list[Message], completion: Text) -> list[Message]:
        """The conversation with its answer; one that the prompt opened is continued in its turn."""
        turns = completion if isinstance(completion, list) else [{"role": "assistant", "content": completion}]
        if messages[-1]["role"] == turns[0]["role"] == "assistant":  # the prompt opened the answer
            opened = {**turns[0], "content": messages[-1]["content"] + turns[0]["content"]}
            messages, turns = messages[:-1], [opened, *turns[1:]]
        return [*messages, *turns]

    def messages(self, prompt: Text, where: str) -> list[Message] | None:
        """The conversation with the system prompt, or None where the prompt stays plain text."""
        if isinstance(prompt, str):
            if self.settings.chat != "always":
                return None
            prompt = [{"role": "user", "content": prompt}]
        elif self.settings.chat == "never":
            raise DataError(
                "the prompt is a list of chat messages, but data.chat is 'never'",
                where=where,
                remedy="set data.chat to 'auto', or give the prompts as text",
            )
        system = self.settings.system_prompt
        if not system:
            return list(prompt)
        if prompt[0]["role"] == "system":
            return [{**prompt[0], "content": f"{system}\n\n{prompt[0]['content']}"}, *prompt[1:]]
        return [{"role": "system", "content": system}, *prompt]

    def _with_system_text(self, text: str) -> str:
        return f"{self.settings.system_prompt}\n\n{text}" if self.settings.system_prompt else text

    def template(self, messages: list[Message], where: str, tokenize: bool = False, **options: Any) -> Any:
        """What the chat template makes of a conversation: text, or with `tokenize` what the tokenizer makes of it."""
        if not self.tokenizer.chat_template:
            raise ModelError(
                "the tokenizer has no chat template, and the prompts are chat messages",
                where=where,
                remedy="set model.chat_template, use a chat model, or give the prompts as text with data.chat=auto",
            )
        try:
            return self.tokenizer.apply_chat_template(messages, tokenize=tokenize, **options)
        except Exception as error:  # jinja2's errors and whatever a template's code raises
            roles = ", ".join(m["role"] for m in messages)
            raise DataError(
                f"the chat template refuses this conversation ({roles}): {error}",
                where=where,
                remedy="order the messages as the template wants them, or set model.chat_template",
            ) from error

    # ------------------------------------------------------------------ tokens

    def encode(self, texts: Sequence[Rendered]) -> list[list[int]]:
        """Token ids of each text."""
        out: list[list[int]] = [[] for _ in texts]
        for special in (False, True):
            picks = [i for i, text in enumerate(texts) if text.special is special]
            for at in range(0, len(picks), _CHUNK):
                chunk = picks[at : at + _CHUNK]
                found = self.tokenizer([texts[i].text for i in chunk], add_special_tokens=special, verbose=False).input_ids
                cut = self._suffix if special else 0
                for i, ids in zip(chunk, found, strict=True):
                    out[i] = ids[: len(ids) - cut]
        return out

    def responses(
        self, prompts: Sequence[Rendered], prompt_ids: Sequence[list[int]], whole: Sequence[Rendered], places: Sequence[str]
    ) -> list[list[int]]:
        """The tokens after each prompt, ended by the end token.

        The prompt's own tokens are kept, as generation will see them. Where a token of the whole text spans the border,
        the rest is tokenised by itself.
        """
        self.require_end()
        rests: list[Rendered] = []
        for prompt, text, where in zip(prompts, whole, places, strict=True):
            if not text.text.startswith(prompt.text):
                raise DataError(
                    "the chat template renders the prompt differently once it is answered: the response cannot be told apart",
                    where=where,
                    remedy="set model.chat_template to one that leaves earlier turns as they are",
                )
            rests.append(Rendered(text.text[len(prompt.text) :], False))
        apart = self.encode(rests)
        out = []
        for ids, together, rest, text in zip(prompt_ids, self.encode(whole), apart, whole, strict=True):
            tokens = together[len(ids) :] if together[: len(ids)] == ids else rest
            out.append(self._ended(tokens, chat=not text.special))
        return out

    def require_end(self) -> int:
        """The end token. Raises ModelError where the tokenizer has none."""
        if self.eos is None:
            raise ModelError(
                "the tokenizer has no end-of-sequence token, so no response would ever end",
                remedy="set eos_token in the tokenizer's folder (tokenizer_config.json)",
            )
        return self.eos

    def _ended(self, tokens: list[int], chat: bool) -> list[int]:
        """With the end token last: appended, or the template's white space after its own end token cut off."""
        if chat:
            tokens = tokens[: self.end_of(tokens)]
        return tokens if tokens[-1:] == [self.eos] else [*tokens, self.require_end()]

    def end_of(self, tokens: list[int]) -> int:
        """Where a rendered turn ends: after its end token, if only the template's white space follows; else its length."""
        if self.eos in tokens:
            end = len(tokens) - tokens[::-1].index(self.eos)
            if not self.tokenizer.decode(tokens[end:]).strip():
                return end
        return len(tokens)


def _tokens_put_after(tokenizer: Any) -> int:
    """How many special tokens the tokenizer puts after a text by itself (an end token, in some models' settings)."""
    plain, special = (tokenizer("a", add_special_tokens=add).input_ids for add in (False, True))
    for after in range(len(special) - len(plain) + 1):
        end = len(special) - after
        if special[end - len(plain) : end] == plain:
            return after
    return 0


@dataclass
class Limited:
    """Which rows keep their place under the limit, and their prompts."""

    kept: list[int]
    prompt_ids: list[list[int]]
    dropped: int = 0
    truncated: int = 0
    longest: int = 0


def limit_prompts(prompt_ids: Sequence[list[int]], settings: DataSettings, places: Sequence[str]) -> Limited:
    """Applies `max_prompt_tokens`: longer prompts are dropped, cut on the left, or an error.

    Raises DataError where a prompt has no token at all, or where no prompt is left.
    """
    limit, out = settings.max_prompt_tokens, Limited([], [])
    for i, ids in enumerate(prompt_ids):
        if not ids:
            raise DataError("the tokenizer makes no token of the prompt", where=places[i], remedy="change or remove the row")
        out.longest = max(out.longest, len(ids))
        if len(ids) > limit:
            if settings.too_long == "error":
                raise DataError(
                    f"the prompt has {len(ids)} tokens, data.max_prompt_tokens is {limit}",
                    where=places[i],
                    remedy="raise the limit, or set data.too_long to 'drop' or 'truncate'",
                )
            if settings.too_long == "drop":
                out.dropped += 1
                continue
            out.truncated += 1
            ids = ids[-limit:]
        out.kept.append(i)
        out.prompt_ids.append(ids)
    if not out.kept:
        shortest = min(map(len, prompt_ids))
        raise NoRowLeft(
            f"all {len(prompt_ids)} prompts are longer than data.max_prompt_tokens={limit}; the shortest has {shortest} tokens",
            remedy=f"raise data.max_prompt_tokens to {shortest} or more, or set data.too_long to 'truncate'",
        )
    return out
