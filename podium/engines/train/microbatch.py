"""Which rows go through the model together: micro-batches under a token budget."""

from __future__ import annotations

import heapq

import torch
from torch import Tensor

from podium.core.errors import ConfigError
from podium.models.packed import Prompts


def plan(lengths: Tensor, budget: int, keep_together: Tensor | None = None, prompts: Prompts | None = None) -> list[Tensor]:
    """Cuts rows into few micro-batches of nearly equal token counts, none above the budget.

    Rows with one prompt stay together, and their prompt counts once, as it runs once; only where they exceed the budget
    are they cut, and each part then has the prompt. Longest first, each unit to the micro-batch with the fewest tokens
    (LPT, Graham 1969); with as many micro-batches as the total needs, one more where that does not fit. A row (or unit)
    longer than the budget gets one of its own. The result depends on the arguments alone.

    Args:
        lengths: tokens of each row, with its prompt, `[B]` int64.
        budget: most tokens in a micro-batch.
        keep_together: `[B]` int64; rows with one value form a unit that is not cut (the pairs of a preference loss).
        prompts: which rows share a prompt; None: none do.

    Returns:
        the int64 row indices of each micro-batch, ascending; every row is in exactly one.
    """
    if budget < 1:
        raise ConfigError(f"a budget of {budget} tokens", where="batch.microbatch_tokens", remedy="at least 1")
    if not len(lengths):
        return []
    if prompts is None:
        rows = torch.arange(len(lengths))
        prompts = Prompts(rows, rows, torch.zeros_like(lengths))
    units, sizes = _units(lengths, budget, keep_together, prompts)
    order = sorted(range(len(sizes)), key=lambda unit: (-sizes[unit], unit))
    alone = [unit for unit in order if sizes[unit] > budget]
    rest = [unit for unit in order if sizes[unit] <= budget]
    bins = [[unit] for unit in alone] + _fill([sizes[unit] for unit in rest], rest, budget)
    return [torch.tensor(sorted(row for unit in members for row in units[unit])) for members in bins]


def _units(lengths: Tensor, budget: int, keep_together: Tensor | None, prompts: Prompts) -> tuple[list[list[int]], list[int]]:
    """Rows that go together, in the order of their first rows, and the tokens of each such unit."""
    prompt_of_row, prompt_tokens = prompts.of_row.tolist(), prompts.lengths.tolist()
    response = (lengths - prompts.lengths[prompts.of_row]).tolist()
    atoms: dict[int, list[int]] = {}
    for row, key in enumerate(range(len(lengths)) if keep_together is None else keep_together.tolist()):
        atoms.setdefault(key, []).append(row)
    families: dict[int, list[list[int]]] = {}
    for atom in atoms.values():
        families.setdefault(prompt_of_row[atom[0]], []).append(atom)
    units: list[list[int]] = []
    sizes: list[int] = []
    for family in families.values():
        held: set[int] = set()  # prompts of the unit at hand
        for number, atom in enumerate(family):
            new = {prompt_of_row[row] for row in atom}
            tokens = sum(response[row] for row in atom)
            more = tokens + sum(prompt_tokens[prompt] for prompt in new - held)
            if number and sizes[-1] + more <= budget:
                units[-1] += atom
                sizes[-1] += more
                held |= new
            else:
                units.append(list(atom))
                sizes.append(tokens + sum(prompt_tokens[prompt] for prompt in new))
                held = new
    return units, sizes


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
