"""From per-token losses to one number: token weights for a whole minibatch.

    loss = (token_weights(mask, mode) * per_token_loss).sum()

The engine computes the weights once, over the whole minibatch, and hands each micro-batch its slice. The sum of the
micro-batches' losses is then the loss of the minibatch, and the gradient can't depend on how it was split.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from podium.algorithms._lookup import look_up


def _token_mean(mask: Tensor, _: int | None) -> Tensor:
    return mask.float() / mask.sum().clamp(min=1)


def _sequence_mean_token_mean(mask: Tensor, _: int | None) -> Tensor:
    lengths = mask.sum(dim=1, keepdim=True)
    return mask.float() / (lengths.clamp(min=1) * (lengths > 0).sum().clamp(min=1))


def _sequence_mean_token_sum(mask: Tensor, _: int | None) -> Tensor:
    return mask.float() / mask.any(dim=1).sum().clamp(min=1)


def _constant(mask: Tensor, constant_length: int | None) -> Tensor:
    assert constant_length is not None
    return mask.float() / (max(mask.shape[0], 1) * constant_length)


REDUCTIONS: dict[str, Callable[[Tensor, int | None], Tensor]] = {
    "token_mean": _token_mean,
    "sequence_mean_token_mean": _sequence_mean_token_mean,
    "sequence_mean_token_sum": _sequence_mean_token_sum,
    "constant": _constant,
}


def token_weights(mask: Tensor, mode: str, *, constant_length: int | None = None) -> Tensor:
    """The weight of each entry of the minibatch in its loss: 0 outside the mask.

    - `token_mean`: 1 / (tokens in the minibatch). Every token counts alike (DAPO, arXiv:2503.14476).
    - `sequence_mean_token_mean`: 1 / (tokens of the sequence * sequences). Every sequence counts alike (GRPO,
      arXiv:2402.03300).
    - `sequence_mean_token_sum`: 1 / sequences.
    - `constant`: 1 / (rows * `constant_length`). No length in it at all (Dr.GRPO, arXiv:2503.20783).

    "Sequences" are the rows that have tokens; `constant` counts all rows. Rows without tokens are allowed, and a mask
    without any token gives all zeros. Shape: `mask` [B, T], or [B] for one loss a row (taken as [B, 1]); bool. Returns that
    shape in fp32. Raises `ValueError` for another mode, or a missing or superfluous `constant_length`.
    """
    check_reduction(mode, constant_length)
    if mask.dim() not in (1, 2):
        raise ValueError(f"mask must be [B, T] or [B]; got {list(mask.shape)}.")
    rows = mask.bool() if mask.dim() == 2 else mask.bool().unsqueeze(1)
    return REDUCTIONS[mode](rows, constant_length).to(torch.float32).view(mask.shape)


def check_reduction(mode: str, constant_length: int | None) -> None:
    """Raise `ValueError` unless `mode` is known and `constant_length` is there exactly when it is needed."""
    look_up(REDUCTIONS, mode, "reduction")
    if mode == "constant" and (constant_length is None or constant_length < 1):
        raise ValueError(f"Reduction 'constant' needs constant_length, at least 1 token; got {constant_length}.")
    if mode != "constant" and constant_length is not None:
        raise ValueError(f"constant_length={constant_length} is only used by reduction 'constant', not by {mode!r}.")
