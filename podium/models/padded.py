"""Padded rows: how models run whose layers cannot keep the sequences of a packed row apart (Bloom, Falcon, Mamba, ...).

Each sequence is written out whole, its prompt included, and goes through the model's own attention code with a mask.
Slower than a packed row: a shared prompt runs once for each response, and padding runs too. The numbers are the same.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor
from transformers import PreTrainedModel

from podium.models.packed import Packed
from podium.models.packed_attention import classes_of_like_size


@dataclass(frozen=True)
class PaddedRows:
    """Whole sequences of like length, one a row, padded on the right to the longest.

    `runs [r]`: the run that ends each sequence; `before [r]`: the tokens of its parent; `places [r, t]`: where in the packed
    row each token stands; `mask [r, t]` bool: False on padding (there `places` repeat the last token). All on the CPU.
    """

    runs: Tensor
    before: Tensor
    places: Tensor
    mask: Tensor


def padded_hidden_states(base: PreTrainedModel, packed: Packed) -> Tensor:
    """The last hidden states of all the row's tokens, `[N, D]`, by the model's own code. Differentiable.

    A prompt that several responses share is read from the first of them, so the model must be causal.
    """
    parents = packed.parents.cpu()
    children = (parents >= 0).nonzero()[:, 0]
    is_parent = torch.zeros(len(parents), dtype=torch.bool).index_fill_(0, parents[children], True)
    first_child = torch.full_like(parents, len(parents)).scatter_reduce_(0, parents[children], children, "amin")
    back = torch.empty(len(packed.ids), dtype=torch.int64)
    states, read = [], 0
    for rows in padded_rows(packed, (~is_parent).nonzero()[:, 0]):
        ids, mask = _inputs(base, packed, rows)
        states.append(base(input_ids=ids, attention_mask=mask, use_cache=False).last_hidden_state.flatten(0, 1))
        # Every token is read once: those of a shared prompt by one row alone.
        reads_parent = first_child[parents[rows.runs].clamp(min=0)] == rows.runs
        own = torch.arange(rows.mask.shape[1]) >= rows.before[:, None]
        reads = (rows.mask & (own | reads_parent[:, None])).flatten()
        back[rows.places.flatten()[reads]] = read + reads.nonzero()[:, 0]
        read += len(reads)
    return torch.cat(states).index_select(0, back.to(base.device))


def padded_logits(model: PreTrainedModel, packed: Packed, *, token_types: bool = False) -> Tensor:
    """What a sequence classifier says of each sequence, `[S, heads]`, in the order of the batch's rows.

    A decoder's class finds a sequence's end by the pad id; where its config has none, each sequence runs alone.

    Args:
        token_types: hand over `token_type_ids`: 0 for the prompt, 1 for the response (BERT's pairs).
    """
    ends = torch.cumsum(packed.lengths.cpu(), 0)
    runs, of_sequence = torch.unique(torch.searchsorted(ends, packed.last_index.cpu(), right=True), return_inverse=True)
    types = _token_types(packed) if token_types else None
    logits, order = [], []
    for rows in padded_rows(packed, runs, alone=_pad_id(model) is None):
        ids, mask = _inputs(model, packed, rows)
        more = {} if types is None else {"token_type_ids": (types[rows.places] * rows.mask).to(model.device)}
        logits.append(model(input_ids=ids, attention_mask=mask, **more).logits)
        order.append(rows.runs)
    back = torch.argsort(torch.cat(order))[of_sequence]
    return torch.cat(logits).index_select(0, back.to(model.device))


def padded_rows(packed: Packed, runs: Tensor, *, alone: bool = False) -> list[PaddedRows]:
    """The sequences that end with these `runs`, put together by like length; `alone`: each by itself."""
    lengths, parents = packed.lengths.cpu(), packed.parents.cpu()
    starts = torch.cumsum(lengths, 0) - lengths
    before = torch.where(parents < 0, 0, lengths[parents.clamp(min=0)])
    whole = lengths + before
    out = []
    for members in runs.split(1) if alone else classes_of_like_size(whole, runs):
        real, shared = whole[members, None], before[members, None]
        column = torch.arange(int(real.max()))
        token = torch.minimum(column, real - 1)
        of_parent = starts[parents[members].clamp(min=0), None] + token
        places = torch.where(token < shared, of_parent, starts[members, None] + token - shared)
        out.append(PaddedRows(members, before[members], places, column < real))
    return out


def _inputs(model: PreTrainedModel, packed: Packed, rows: PaddedRows) -> tuple[Tensor, Tensor]:
    """Ids and attention mask `[r, t]` int64 on the model's device; padding is the config's pad id (0 where it has none)."""
    ids = packed.ids.cpu()[rows.places].masked_fill(~rows.mask, _pad_id(model) or 0)
    return ids.to(model.device), rows.mask.long().to(model.device)


def _pad_id(model: PreTrainedModel) -> int | None:
    pad = getattr(model.config.get_text_config(), "pad_token_id", None)
    return pad if pad is not None and 0 <= pad < model.get_input_embeddings().weight.shape[0] else None


def _token_types(packed: Packed) -> Tensor:
    """`[N]` int64: 1 on response tokens. One follows each token that predicts one; a run with a parent is all response."""
    types = torch.repeat_interleave(packed.parents.cpu() >= 0, packed.lengths.cpu()).long()
    predict = packed.predict_index.cpu()
    return types.index_fill_(0, predict[predict + 1 < len(types)] + 1, 1)
