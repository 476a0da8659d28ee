"""Which rows have the same prompt: what is computed once for all of them."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from podium.core.ragged import Ragged


@dataclass(frozen=True)
class Prompts:
    """The distinct prompts of B rows, numbered as they first appear: `of_row [B]`, `first_row [P]`, `lengths [P]`."""

    of_row: Tensor
    first_row: Tensor
    lengths: Tensor


def distinct_prompts(prompts: Ragged) -> Prompts:
    """Rows with the same tokens have the same prompt."""
    values, cuts = prompts.values.numpy(), prompts.offsets.tolist()
    numbers: dict[bytes, int] = {}
    of_row: list[int] = []
    first_row: list[int] = []
    for row in range(len(prompts)):
        number = numbers.setdefault(values[cuts[row] : cuts[row + 1]].tobytes(), len(numbers))
        if number == len(first_row):
            first_row.append(row)
        of_row.append(number)
    first = torch.tensor(first_row, dtype=torch.int64)
    return Prompts(torch.tensor(of_row, dtype=torch.int64), first, prompts.lengths[first])
