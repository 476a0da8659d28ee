"""Which rows go through the model together: micro-batches under a token budget."""

from __future__ import annotations

import heapq

import torch
from torch import Tensor

from podium.core.errors import ConfigError


def plan(lengths: Tensor, budget: int, keep_together: Tensor | None = None) -> list[Tensor]:
    """Cuts rows into few micro-batches of nearly equal token counts, none above the budget.

    Longest first, each unit to the micro-batch with the fewest tokens (LPT, Graham 1969); with as many micro-batches as the
    total needs, one more where that does not fit. A row (or unit) longer than the budget gets one of its own. The result
    depends on the arguments alone.

    Args:
        lengths: tokens of each row, `[B]` int64.
        budget: most tokens in a micro-batch.
        keep_together: `[B]` int64; rows with one value form a unit that is not cut (the pairs of a preference loss).

    Returns:
        the int64 row indices of each micro-batch, ascending; every row is in exactly one.
    """
    if budget < 1:
        raise ConfigError(f"a budget of {budget} tokens", where="batch.microbatch_tokens", remedy="at least 1")
    if not len(lengths):
        return []
    units = torch.arange(len(lengths)) if keep_together is None else keep_together
    _, unit_of_row = torch.unique(units, return_inverse=True)
    tokens = torch.zeros(int(unit_of_row.max()) + 1, dtype=torch.int64).index_add_(0, unit_of_row, lengths)
    sizes = tokens.tolist()
    order = sorted(range(len(sizes)), key=lambda unit: (-sizes[unit], unit))
    alone = [unit for unit in order if sizes[unit] > budget]
    rest = [unit for unit in order if sizes[unit] <= budget]
    bins = [[unit] for unit in alone] + _fill([sizes[unit] for unit in rest], rest, budget)
    bin_of_unit = torch.empty(len(sizes), dtype=torch.int64)
    for number, members in enumerate(bins):
        bin_of_unit[torch.tensor(members)] = number
    bin_of_row = bin_of_unit[unit_of_row]
    # A stable sort keeps the rows of each micro-batch in ascending order.
    rows = torch.sort(bin_of_row, stable=True).indices
    return list(rows.split(torch.bincount(bin_of_row, minlength=len(bins)).tolist()))


def _fill(sizes: list[int], units: list[int], budget: int) -> list[list[int]]:
    """Units (longest first) into the fewest bins for which the balanced filling stays under the budget."""
    if not units:
        return []
    count = max(1, -(-sum(sizes) // budget))
    while True:
        bins: list[list[int]] = [[] for _ in range(count)]
        loads = [(0, number) for number in range(count)]
        for size, unit in zip(sizes, units, strict=True):
            load, number = heapq.heappop(loads)
            if load + size > budget:
                break
            bins[number].append(unit)
            heapq.heappush(loads, (load + size, number))
        else:
            return [members for members in bins if members]
        count += 1
