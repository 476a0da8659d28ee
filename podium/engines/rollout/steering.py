"""What is added to a row's logits before they are divided by the temperature: logit bias, and bad words.

A bad word is a bias of minus infinity on the token that would complete it. So the log-prob reported is that of the
distribution as it was steered, at the temperature; truncation comes after both and does not change it.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from podium.core.errors import RolloutError
from podium.engines.base import SamplingParams

MOST_BIASES = 256
"""Tokens of one request that may have a bias at once."""


class Steering:
    """One request's biases.

    Args:
        bias: token id to what is added to its logit.
        words: bad words as token ids, each of at least two; a word of one token is a bias.
    """

    def __init__(self, bias: dict[int, float], words: Sequence[tuple[int, ...]]) -> None:
        self.bias, self.words = bias, list(words)

    @classmethod
    def of(cls, tokenizer: Any, sampling: SamplingParams, vocabulary: int) -> Steering | None:
        """That of a request; None where it asks for none.

        A bad word counts as the tokens it has at the start of a text and after a space.

        Raises RolloutError: a token outside the vocabulary, too many biases.
        """
        if not sampling.logit_bias and not sampling.bad_words:
            return None
        bias = dict(sampling.logit_bias)
        words: dict[tuple[int, ...], None] = {}
        for word in sampling.bad_words:
            for text in (word, f" {word}"):
                ids = tuple(tokenizer.encode(text, add_special_tokens=False))
                if len(ids) == 1:
                    bias[ids[0]] = float("-inf")
                elif ids:
                    words[ids] = None
        for token in (*bias, *(token for ids in words for token in ids)):
            if not 0 <= token < vocabulary:
                raise RolloutError(
                    f"token id {token} of logit_bias or bad_words is outside the model's vocabulary of {vocabulary}",
                    where="SamplingParams",
                )
        if len(bias) + len(words) > MOST_BIASES:
            raise RolloutError(
                f"logit_bias and bad_words make {len(bias) + len(words)} biases, more than {MOST_BIASES}",
                where="SamplingParams",
            )
        return cls(bias, list(words))

    @property
    def follows(self) -> bool:
        """What is added depends on the tokens written so far."""
        return bool(self.words)

    def at(self, written: Sequence[int]) -> dict[int, float]:
        """What is added to the logits of the token after `written` (the response so far)."""
        bias = self.bias
        for word in self.words:
            start = len(word) - 1
            if len(written) >= start and tuple(written[-start:]) == word[:-1]:
                bias = {**bias, word[-1]: float("-inf")}
        return bias


def steered(logits: Tensor, steerings: Sequence[Steering | None], written: Sequence[Sequence[int]]) -> Tensor:
    """`[B, V]` logits with each row's biases, in fp32; the same tensor where no row has any.

    Args:
        written: each row's response so far.
    """
    if not any(steerings):
        return logits
    rows, tokens, values = [], [], []
    for row, (steering, before) in enumerate(zip(steerings, written, strict=True)):
        for token, value in (steering.at(before) if steering is not None else {}).items():
            rows.append(row)
            tokens.append(token)
            values.append(value)
    out = logits.float() if logits.dtype != torch.float32 else logits.clone()
    out[
        torch.tensor(rows, dtype=torch.int64, device=out.device), torch.tensor(tokens, dtype=torch.int64, device=out.device)
    ] += torch.tensor(values, device=out.device)
    return out
