"""Holding out rows for evaluation."""

from __future__ import annotations

import random

import torch
from torch import Tensor

from podium.core.batch import Batch
from podium.core.errors import DataError
from podium.core.seeding import derive_seed


def hold_out(batch: Batch, n: int, seed: int) -> tuple[Batch, Batch]:
    """(train, held out): `n` examples drawn by `seed`, both parts in the data set's order.

    An example is a row, or the rows that came from one row of the data set (a preference pair's two), which stay together.
    Raises DataError where `n` would leave nothing to train on.
    """
    example = _examples(batch)
    count = int(example.max()) + 1 if len(example) else 0
    if n >= count:
        raise DataError(
            f"cannot hold out {n} of {count} examples: none would be left to train on",
            where="data.eval_samples",
            remedy=f"set it to less than {count}, or give data.eval_path",
        )
    picks = random.Random(derive_seed(seed, "hold_out")).sample(range(count), n)
    held = torch.isin(example, torch.tensor(picks, dtype=torch.int64))
    return batch.index(~held), batch.index(held)


def first(batch: Batch, n: int) -> Batch:
    """The rows of the first `n` examples (all, where there are fewer)."""
    return batch.index(_examples(batch) < n)


def _examples(batch: Batch) -> Tensor:
    """The number of each row's example `[B]`, int64, counted from 0."""
    if "pair_id" in batch:
        return torch.unique(batch["pair_id"], return_inverse=True)[1]
    if "row_index" in batch:
        return torch.unique(batch["row_index"], return_inverse=True)[1]
    return torch.arange(len(batch))
