"""From per-token losses to one number: token weights for a whole minibatch.

    loss = (token_weights(mask, mode) * per_token_loss).sum()

The engine computes the weights once, over the whole minibatch, and hands each micro-batch its slice. The sum of the
micro-batches' losses is then the loss of the minibatch, and the gradient can't depend on how it was split.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from podium.algorithms._lookup import look_up


@dataclass(frozen=True)
class Counts:
    """What denominators are made of: entries that count, rows that have any, all rows. They add up over ranks."""

    tokens: int
    sequences: int
    rows: int

    @classmethod
    def of(cls, mask: Tensor) -> Counts:
        """Of a mask `[B, T]` or `[B]`, bool."""
        rows = _rows(mask)
        return cls(int(rows.sum()), int(rows.any(dim=1).sum()), rows.shape[0])


def _token_mean(mask: Tensor, counts: Counts, _: int | None) -> Tensor:
    return mask.float() / max(counts.tokens, 1)


def _sequence_mean_token_mean(mask: Tensor, counts: Counts, _: int | None) -> Tensor:
    lengths = mask.sum(dim=1, keepdim=True)
    return mask.float() / (lengths.clamp(min=1) * max(counts.sequences, 1))


def _sequence_mean_token_sum(mask: Tensor, counts: Counts, _: int | None) -> Tensor:
    return mask.float() / max(counts.sequences, 1)


def _constant(mask: Tensor, counts: Counts, constant_length: int | None) -> Tensor:
    assert constant_length is not None
    return mask.float() / (max(counts.rows, 1) * constant_length)


REDUCTIONS: dict[str, Callable[[Tensor, Counts, int | None], Tensor]] = {
    "token_mean": _token_mean,
    "sequence_mean_token_mean": _sequence_mean_token_mean,
    "sequence_mean_token_sum": _sequence_mean_token_sum,
    "constant": _constant,
}


def token_weights(mask: Tensor, mode: str, *, constant_length: int | None = None, counts: Counts | None = None) -> Tensor:
    """The weight of each entry of the minibatch in its loss: 0 outside the mask.

    - `token_mean`: 1 / (tokens in the minibatch). Every token counts alike (DAPO, arXiv:2503.14476).
    - `sequence_mean_token_mean`: 1 / (tokens of the sequence * sequences). Every sequence counts alike (GRPO,
      arXiv:2402.03300).
    - `sequence_mean_token_sum`: 1 / sequences.
    - `constant`: 1 / (rows * `constant_length`). No length in it at all (Dr.GRPO, arXiv:2503.20783).

    "Sequences" are the rows that have tokens; `constant` counts all rows. Rows without tokens are allowed, and a mask
    without any token gives all zeros. Shape: `mask` [B, T], or [B] for one loss a row (taken as [B, 1]); bool. Returns that
    shape in fp32. `counts` are those of the whole minibatch, where `mask` is only one rank's share of it; None: the mask is
    the minibatch. Raises `ValueError` for another mode, or a missing or superfluous `constant_length`.
    """
    check_reduction(mode, constant_length)
    rows = _rows(mask)
    weights = REDUCTIONS[mode](rows, Counts.of(mask) if counts is None else counts, constant_length)
    return weights.to(torch.float32).view(mask.shape)


def _rows(mask: Tensor) -> Tensor:
    """The mask as `[B, T]` bool."""
    if mask.dim() not in (1, 2):
        raise ValueError(f"mask must be [B, T] or [B]; got {list(mask.shape)}.")
    return mask.bool() if mask.dim() == 2 else mask.bool().unsqueeze(1)


def check_reduction(mode: str, constant_length: int | None) -> None:
    """Raise `ValueError` unless `mode` is known and `constant_length` is there exactly when it is needed."""
    look_up(REDUCTIONS, mode, "reduction")
    if mode == "constant" and (constant_length is None or constant_length < 1):
        raise ValueError(f"Reduction 'constant' needs constant_length, at least 1 token; got {constant_length}.")
    if mode != "constant" and constant_length is not None:
        raise ValueError(f"constant_length={constant_length} is only used by reduction 'constant', not by {mode!r}.")
