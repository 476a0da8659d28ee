"""What engines check of a request before they queue it, and what a caller does with an interrupted one."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from numbers import Integral, Real

from transformers import PreTrainedModel

from podium.core.errors import RolloutError
from podium.engines.base import Request, SamplingParams, Trajectory


@dataclass(frozen=True)
class Limits:
    """What a model can take: tokens in all (None: no limit known), and its vocabulary (valid token ids)."""

    positions: int | None
    vocabulary: int
    name: str = "max_position_embeddings"
    """The config field that limits the tokens."""

    @classmethod
    def of(cls, model: PreTrainedModel) -> Limits:
        config = model.config.get_text_config()
        return cls(getattr(config, "max_position_embeddings", None), model.get_input_embeddings().num_embeddings)

    @classmethod
    def within_one_rotation(cls, model: PreTrainedModel) -> Limits:
        """As `of`; where the rotary embedding changes for all tokens once a sequence of the batch is long (longrope), the
        limit is that length: keys in a cache would not change with it.
        """
        limits = cls.of(model)
        config = model.config.get_text_config()
        rope = getattr(config, "rope_parameters", None) or {}
        border = rope.get("original_max_position_embeddings", getattr(config, "original_max_position_embeddings", None))
        if rope.get("rope_type") == "longrope" and border and (limits.positions is None or border < limits.positions):
            return replace(limits, positions=border, name="original_max_position_embeddings (longrope)")
        return limits

    def check(self, request: Request) -> None:
        """Raises RolloutError for a request that can never be served."""
        sampling, prompt, written = request.sampling, request.prompt_ids, request.response_ids
        if not prompt:
            raise RolloutError("the prompt is empty", remedy="a prompt needs at least one token; add the begin token")
        if sampling.max_new_tokens <= len(written):
            raise RolloutError(
                f"max_new_tokens={sampling.max_new_tokens} leaves nothing to generate after {len(written)} response tokens"
            )
        total = len(prompt) + sampling.max_new_tokens
        if self.positions is not None and total > self.positions:
            raise RolloutError(
                f"prompt of {len(prompt)} tokens + max_new_tokens={sampling.max_new_tokens} = {total}, "
                f"beyond the model's {self.name}={self.positions}",
                remedy=f"set rollout.max_new_tokens to at most {max(0, self.positions - len(prompt))}, or shorten the prompt",
            )
        odd = [t for t in (*prompt, *written, *sampling.stop_token_ids) if not 0 <= t < self.vocabulary]
        if odd:
            raise RolloutError(
                f"token id {odd[0]} is outside the model's vocabulary of {self.vocabulary}",
                remedy="use the tokenizer that belongs to the model",
            )
        _check_sampling(request)


def _check_sampling(request: Request) -> None:
    s = request.sampling
    _check_form(s)
    tokens = [token for token, _ in s.logit_bias]
    for name, value, good, remedy in (
        ("temperature", s.temperature, s.temperature >= 0, "0 (greedy) or more"),
        ("top_p", s.top_p, 0 < s.top_p <= 1, "above 0, at most 1 (the whole distribution)"),
        ("top_k", s.top_k, s.top_k >= 0, "0 (no limit) or more"),
        ("min_p", s.min_p, 0 <= s.min_p <= 1, "from 0 (no limit) to 1"),
        ("stop", s.stop, all(s.stop), "no empty text among them"),
        ("bad_words", s.bad_words, all(word.strip() for word in s.bad_words), "no empty text among them"),
        ("logit_bias", s.logit_bias, all(bias < math.inf for _, bias in s.logit_bias), "finite numbers, or -inf to forbid"),
        ("logit_bias", s.logit_bias, len(set(tokens)) == len(tokens), "each token id once"),
    ):
        if not good:
            raise RolloutError(f"{name}={value!r} is out of range", where="SamplingParams", remedy=remedy)


def _check_form(s: SamplingParams) -> None:
    """One text is a sequence of texts to Python, and a mapping one of its keys: both would be taken for something else."""
    for name, texts in (("stop", s.stop), ("bad_words", s.bad_words)):
        if isinstance(texts, str) or not all(isinstance(text, str) for text in texts):
            raise RolloutError(
                f"{name}={texts!r} is no list of texts", where="SamplingParams", remedy=f"{name}=('one', 'another')"
            )
    if isinstance(s.logit_bias, Mapping) or not all(_is_bias(pair) for pair in s.logit_bias):
        raise RolloutError(
            f"logit_bias={s.logit_bias!r} is no list of pairs (token id, number)",
            where="SamplingParams",
            remedy="logit_bias=((42, -1.5), (43, float('-inf'))); of a mapping: tuple(mapping.items())",
        )


def _is_bias(pair: object) -> bool:
    match pair:
        case [Integral(), Real()]:  # numpy's numbers too
            return True
    return False


def resume(request: Request, partial: Trajectory) -> Request:
    """The request that continues an aborted one: same seed, so the same remaining draws."""
    return replace(request, response_ids=(*request.response_ids, *partial.response_ids))


def join(partial: Trajectory, continued: Trajectory) -> Trajectory:
    """Both parts of an interrupted response as one trajectory."""
    return replace(continued, segments=[*partial.segments, *continued.segments])
