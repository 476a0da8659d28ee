"""Which rows go through the model together: micro-batches under a token budget."""

from __future__ import annotations

import heapq
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from podium.core.errors import ConfigError
from podium.core.prompts import Prompts
from podium.core.shares import TOKENS
from podium.core.work import Work


def plan(
    lengths: Tensor,
    budget: int,
    keep_together: Tensor | None = None,
    prompts: Prompts | None = None,
    *,
    responses: Tensor | int = 0,
    work: Work = TOKENS,
) -> list[Tensor]:
    """Cuts rows into few micro-batches of nearly equal work, none above the budget of tokens.

    Rows with one prompt stay together, and their prompt counts once, as it runs once; only where they exceed the budget
    are they cut, and each part then has the prompt. The costliest first, each unit to the micro-batch with the least work
    that has room for its tokens (LPT, Graham 1969); as few micro-batches as balancing by tokens needs. A row (or unit)
    longer than the budget gets one of its own. The result depends on the arguments alone.

    Args:
        lengths: tokens of each row, with its prompt, `[B]` int64.
        budget: most tokens in a micro-batch.
        keep_together: `[B]` int64; rows with one value form a unit that is not cut (the pairs of a preference loss).
        prompts: which rows share a prompt; None: none do.
        responses: tokens of each row that are predicted, `[B]` int64, where their number counts.
        work: what a row costs; its tokens by default.

    Returns:
        the int64 row indices of each micro-batch, ascending; every row is in exactly one. The costliest micro-batch comes
        first: what ranks run at the same time is then alike. (It need not be the one of the most tokens.)
    """
    if budget < 1:
        raise ConfigError(f"a budget of {budget} tokens", where="batch.microbatch_tokens", remedy="at least 1")
    if not len(lengths):
        return []
    if prompts is None:
        rows = torch.arange(len(lengths))
        prompts = Prompts(rows, rows, torch.zeros_like(lengths))
    costs_of_rows = work.of(lengths, responses).tolist()
    costs_of_prompts = work.of(prompts.lengths).tolist()
    prompt_of_row = prompts.of_row.tolist()
    units = _units(lengths, budget, keep_together, prompts)
    sizes = [unit.tokens for unit in units]

    def cost_of(members: list[int]) -> int:
        """The work of these units in one micro-batch: a prompt that several of them have once."""
        rows = [row for unit in members for row in units[unit].rows]
        have = [prompt_of_row[row] for row in rows]
        own = sum(costs_of_rows[row] - costs_of_prompts[prompt] for row, prompt in zip(rows, have, strict=True))
        return own + sum(costs_of_prompts[prompt] for prompt in set(have))

    alone = [[number] for number, size in enumerate(sizes) if size > budget]
    rest = [number for number, size in enumerate(sizes) if size <= budget]
    bins = alone + _fill(rest, sizes, cost_of, budget)
    bins.sort(key=lambda members: (-cost_of(members), min(units[unit].rows[0] for unit in members)))
    return [torch.tensor(sorted(row for unit in members for row in units[unit].rows)) for members in bins]


@dataclass
class _Unit:
    """Rows that are not parted, and their tokens, each prompt once."""

    rows: list[int]
    tokens: int


def _units(lengths: Tensor, budget: int, keep_together: Tensor | None, prompts: Prompts) -> list[_Unit]:
    """Rows that go together, in the order of their first rows."""
    prompt_of_row, prompt_tokens = prompts.of_row.tolist(), prompts.lengths.tolist()
    response = (lengths - prompts.lengths[prompts.of_row]).tolist()
    atoms: dict[int, list[int]] = {}
    for row, key in enumerate(range(len(lengths)) if keep_together is None else keep_together.tolist()):
        atoms.setdefault(key, []).append(row)
    families: dict[int, list[list[int]]] = {}
    for atom in atoms.values():
        families.setdefault(prompt_of_row[atom[0]], []).append(atom)
    units: list[_Unit] = []
    for family in families.values():
        held: set[int] = set()  # prompts of the unit at hand
        for number, atom in enumerate(family):
            new = {prompt_of_row[row] for row in atom}
            tokens = sum(response[row] for row in atom)
            more = tokens + sum(prompt_tokens[prompt] for prompt in new - held)
            if number and units[-1].tokens + more <= budget:
                units[-1].rows += atom
                units[-1].tokens += more
                held |= new
            else:
                units.append(_Unit(list(atom), tokens + sum(prompt_tokens[prompt] for prompt in new)))
                held = new
    return units


def _fill(units: list[int], sizes: list[int], cost_of: Callable[[list[int]], int], budget: int) -> list[list[int]]:
    """Units into bins of at most `budget` tokens: as many as balancing by tokens needs, and of work as even as can be.

    Work that is even can leave tokens uneven, and then a unit may find no room: then the bins are those balanced by tokens.
    """
    if not units:
        return []
    count = max(1, -(-sum(sizes[unit] for unit in units) // budget))
    while (by_tokens := _balanced(units, sizes, sizes, budget, count)) is None:
        count += 1
    by_cost = _balanced(units, [cost_of([unit]) for unit in range(len(sizes))], sizes, budget, count)
    if by_cost is None or max(map(cost_of, by_tokens)) < max(map(cost_of, by_cost)):
        by_cost = by_tokens
    return [members for members in by_cost if members]


def _balanced(units: list[int], costs: list[int], sizes: list[int], budget: int, count: int) -> list[list[int]] | None:
    """The costliest unit first, each to the least loaded of `count` bins that has room; None where one finds none."""
    bins: list[list[int]] = [[] for _ in range(count)]
    loads = [(0, number) for number in range(count)]  # a heap
    room = [budget] * count
    for unit in sorted(units, key=lambda unit: (-costs[unit], unit)):
        full = []
        while loads and room[loads[0][1]] < sizes[unit]:
            full.append(heapq.heappop(loads))
        if not loads:
            return None
        load, number = loads[0]
        bins[number].append(unit)
        room[number] -= sizes[unit]
        heapq.heapreplace(loads, (load + costs[unit], number))
        for entry in full:
            heapq.heappush(loads, entry)
    return bins
