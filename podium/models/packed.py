"""Sequences laid end to end in one row: what every training forward pass takes. A prompt that rows share is there once."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from podium.core.batch import Batch, Ragged
from podium.core.prompts import Prompts, distinct_prompts


@dataclass(frozen=True)
class Packed:
    """S sequences in a row of N tokens, of which M are response tokens.

    The row is made of R runs. A run is a whole sequence; or a prompt that several sequences share; or one of their
    responses, which goes on where that prompt ends and sees it.

    `ids [N]`, `positions [N]` (each token's place in its sequence, from 0); `lengths [R]`; `parents [R]`: the run that a
    run goes on from, -1 for none; `predict_index [M]`: the place in the row whose hidden state predicts each response
    token (the token before it); `targets [M]`: those response tokens; `last_index [S]`: each sequence's last token. The
    last three are in the order of the batch's rows.
    """

    ids: Tensor
    positions: Tensor
    lengths: Tensor
    parents: Tensor
    predict_index: Tensor
    targets: Tensor
    last_index: Tensor

    def to(self, device: torch.device | str) -> Packed:
        return Packed(**{name: value.to(device) for name, value in vars(self).items()})


def pack(batch: Batch) -> Packed:
    """Lays prompt and response of every row end to end; the responses of rows with one prompt follow it, which stands once.

    Prompts come in the order in which they first appear. A prompt must have at least one token.

    Args:
        batch: with `prompt_ids` and `response_ids`; responses may be empty.
    """
    responses: Ragged = batch["response_ids"]
    prompts = distinct_prompts(batch["prompt_ids"])
    lengths = responses.lengths
    prompt_starts, starts = _starts(prompts, lengths)
    prompt_length = prompts.lengths[prompts.of_row]
    ids = responses.values.new_empty(int(prompts.lengths.sum() + lengths.sum()))
    positions = torch.empty_like(ids)
    before, after = _ranges(prompts.lengths), _ranges(lengths)
    prompt_places = torch.repeat_interleave(prompt_starts, prompts.lengths) + before
    places = torch.repeat_interleave(starts, lengths) + after
    ids[prompt_places], positions[prompt_places] = batch["prompt_ids"].index(prompts.first_row).values, before
    ids[places], positions[places] = responses.values, torch.repeat_interleave(prompt_length, lengths) + after
    prompt_last = (prompt_starts + prompts.lengths - 1)[prompts.of_row]
    run_lengths, parents = _runs(prompts, lengths, prompt_starts, starts)
    return Packed(
        ids=ids,
        positions=positions,
        lengths=run_lengths,
        parents=parents,
        predict_index=torch.where(after == 0, torch.repeat_interleave(prompt_last, lengths), places - 1),
        targets=responses.values,
        last_index=torch.where(lengths > 0, starts + lengths - 1, prompt_last),
    )


def _starts(prompts: Prompts, lengths: Tensor) -> tuple[Tensor, Tensor]:
    """Where each prompt `[P]` and each row's response `[B]` begins in the row."""
    order = torch.argsort(prompts.of_row, stable=True)
    starts = torch.empty_like(lengths)
    # Before a response lie the responses before it in this order, and all prompts up to its own.
    starts[order] = torch.cumsum(lengths[order], 0) - lengths[order] + torch.cumsum(prompts.lengths, 0)[prompts.of_row[order]]
    whole = prompts.lengths.index_add(0, prompts.of_row, lengths)
    return torch.cumsum(whole, 0) - whole, starts


def _runs(prompts: Prompts, lengths: Tensor, prompt_starts: Tensor, starts: Tensor) -> tuple[Tensor, Tensor]:
    """Lengths and parents of the runs, in the row's order. A prompt with one response (not empty) is one run with it."""
    filled = (lengths > 0).nonzero()[:, 0]
    several = torch.bincount(prompts.of_row[filled], minlength=len(prompts.lengths)) > 1
    alone = filled[~several[prompts.of_row[filled]]]
    branches = filled[several[prompts.of_row[filled]]]
    trunks = prompts.lengths.index_add(0, prompts.of_row[alone], lengths[alone])
    order = torch.argsort(torch.cat([prompt_starts, starts[branches]]))
    place = torch.empty_like(order)
    place[order] = torch.arange(len(order))
    of_branch = place[: len(trunks)][prompts.of_row[branches]]
    parents = torch.cat([torch.full_like(trunks, -1), of_branch])
    return torch.cat([trunks, lengths[branches]])[order], parents[order]


def _ranges(lengths: Tensor) -> Tensor:
    """0..l-1 for each length, one after another."""
    ends = torch.cumsum(lengths, 0)
    total = int(ends[-1]) if len(ends) else 0
    return torch.arange(total) - torch.repeat_interleave(ends - lengths, lengths)
