"""Sequences laid end to end in one row: what every training forward pass takes."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from podium.core.batch import Batch, Ragged


@dataclass(frozen=True)
class Packed:
    """S sequences, N tokens, of which M are response tokens.

    `ids [N]`, `positions [N]` (from 0 in each sequence), `lengths [S]`; `predict_index [M]`: the place in the row whose
    hidden state predicts each response token (the token before it); `targets [M]`: those response tokens;
    `last_index [S]`: each sequence's last token.
    """

    ids: Tensor
    positions: Tensor
    lengths: Tensor
    predict_index: Tensor
    targets: Tensor
    last_index: Tensor

    def to(self, device: torch.device | str) -> Packed:
        return Packed(**{name: value.to(device) for name, value in vars(self).items()})


def pack(batch: Batch) -> Packed:
    """Lays prompt and response of every row end to end. A prompt must have at least one token.

    Args:
        batch: with `prompt_ids` and `response_ids`; responses may be empty.
    """
    prompts, responses = batch["prompt_ids"], batch["response_ids"]
    both = interleave(prompts, responses)
    starts = both.offsets[:-1]
    within = _ranges(responses.lengths)
    first = torch.repeat_interleave(starts + prompts.lengths, responses.lengths)
    return Packed(
        ids=both.values,
        positions=_ranges(both.lengths),
        lengths=both.lengths,
        predict_index=first + within - 1,
        targets=responses.values,
        last_index=both.offsets[1:] - 1,
    )


def interleave(first: Ragged, second: Ragged) -> Ragged:
    """Row by row, `first` followed by `second`."""
    lengths = first.lengths + second.lengths
    out = Ragged.of_lengths(first.values.new_empty(int(lengths.sum())), lengths)
    starts = out.offsets[:-1]
    for part, begin in ((first, starts), (second, starts + first.lengths)):
        out.values[torch.repeat_interleave(begin, part.lengths) + _ranges(part.lengths)] = part.values
    return out


def _ranges(lengths: Tensor) -> Tensor:
    """0..l-1 for each length, one after another."""
    ends = torch.cumsum(lengths, 0)
    total = int(ends[-1]) if len(ends) else 0
    return torch.arange(total) - torch.repeat_interleave(ends - lengths, lengths)
