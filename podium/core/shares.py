"""Cutting rows into shares of about equal work, and putting results back into the rows' order."""

from __future__ import annotations

import heapq
from collections.abc import Sequence

import torch
from torch import Tensor

from podium.core.batch import Batch
from podium.core.deferred import DeferredRagged
from podium.core.prompts import Prompts, distinct_prompts
from podium.core.work import Work

Share = slice | Tensor
"""Consecutive rows, or row indices in ascending order."""

TOKENS = Work()

UNEVEN = 1.05
"""Consecutive shares are taken where the largest is at most this much above the mean."""


def costs_of(batch: Batch, work: Work = TOKENS) -> Tensor:
    """What each row costs, `[B]` int64: by default its tokens.

    Where there are no responses yet each row costs 1, as nobody knows how long they get.
    """
    if "response_ids" not in batch or "prompt_ids" not in batch:
        return torch.ones(len(batch), dtype=torch.int64)
    responses = batch.lengths("response")
    return work.of(batch.lengths("prompt") + responses, responses)


def cut(costs: Tensor, parts: int, units: Tensor | None = None) -> list[Share]:
    """`parts` shares of about equal cost; every row is in one of them. With fewer rows than shares some are empty.

    Consecutive rows where that is even enough: rows of one group then stay together, and nothing is copied. Else the
    longest rows first, each to the share with the least (LPT, Graham 1969). The result depends on the arguments alone.

    Args:
        costs: of each row, `[B]`.
        units: `[B]`; rows with equal values go to the same share.
    """
    if parts == 1:
        return [slice(0, len(costs))]
    if units is not None:
        _, unit = torch.unique(units, return_inverse=True)
        sums = torch.zeros(int(unit.max()) + 1 if len(unit) else 0, dtype=costs.dtype).index_add(0, unit, costs)
        return [torch.isin(unit, torch.tensor(members)).nonzero()[:, 0] for members in _longest_first(sums, parts)]
    runs = _consecutive(costs, parts)
    loads = torch.stack([costs[run].sum() for run in runs])
    if float(loads.max()) <= UNEVEN * float(costs.sum()) / parts or bool((costs == costs[:1]).all()):
        return list(runs)
    return [torch.tensor(sorted(rows), dtype=torch.int64) for rows in _longest_first(costs, parts)]


def deal(batch: Batch, parts: int, work: Work = TOKENS, units: Tensor | None = None, *, fetch: bool = True) -> list[Share]:
    """Shares of a batch whose rows have responses, of about equal work; a prompt counts once in each share that has it.

    Consecutive rows where that is even enough. Else the best of these, whole groups with one prompt, and single rows, the
    costliest first: a group that is parted computes its prompt several times.

    Args:
        units: as in `cut`, which then deals them.
        fetch: look into prompts that lie elsewhere; False: rows whose prompts are not here share none.
    """
    costs = costs_of(batch, work)
    known = "response_ids" in batch and "prompt_ids" in batch
    if parts == 1 or units is not None or not known or not len(batch):
        return cut(costs, parts, units)
    prompts = batch["prompt_ids"]
    if isinstance(prompts, DeferredRagged) and not fetch:
        return cut(costs, parts)
    return _deal_groups(costs, distinct_prompts(prompts), work, parts)


def _deal_groups(costs: Tensor, prompts: Prompts, work: Work, parts: int) -> list[Share]:
    groups = prompts.of_row
    of_prompt = work.of(prompts.lengths)
    own = costs - of_prompt[groups]
    members = torch.bincount(groups, minlength=len(of_prompt))

    def largest(shares: list[Share]) -> int:
        return max(int(own[share].sum() + of_prompt[groups[share].unique()].sum()) for share in shares)

    in_a_row: list[Share] = list(_consecutive(own + of_prompt[groups] // members[groups], parts))
    least = int(own.sum() + of_prompt.sum()) / parts
    if largest(in_a_row) <= UNEVEN * least or (len(of_prompt) == len(groups) and bool((costs == costs[:1]).all())):
        return in_a_row
    whole = of_prompt.index_add(0, groups, own)
    by_group: list[Share] = [
        torch.isin(groups, torch.tensor(numbers, dtype=torch.int64)).nonzero()[:, 0] for numbers in _longest_first(whole, parts)
    ]
    by_row: list[Share] = [torch.tensor(sorted(rows), dtype=torch.int64) for rows in _longest_first(costs, parts)]
    by_own_cost: list[Share] = list(_consecutive(costs, parts))  # in a row too, each row with all of its prompt
    return min((in_a_row, by_own_cost, by_group, by_row), key=largest)


def _consecutive(costs: Tensor, parts: int) -> list[slice]:
    if bool((costs == costs[:1]).all()):  # equal rows: equal counts, the first shares one more
        base, extra = divmod(len(costs), parts)
        sizes = [base + (part < extra) for part in range(parts)]
        ends = torch.tensor([0, *sizes]).cumsum(0).tolist()
    else:
        total = torch.cat([costs.new_zeros(1), costs.cumsum(0)]).double()
        goals = total[-1] * torch.arange(1, parts) / parts
        above = torch.searchsorted(total, goals).clamp(1, len(costs))
        nearest = torch.where(goals - total[above - 1] < total[above] - goals, above - 1, above)
        ends = [0, *nearest.tolist(), len(costs)]
    return [slice(ends[part], ends[part + 1]) for part in range(parts)]


def _longest_first(costs: Tensor, parts: int) -> list[list[int]]:
    members: list[list[int]] = [[] for _ in range(parts)]
    loads = [(0, part) for part in range(parts)]
    sizes = costs.tolist()
    for row in sorted(range(len(sizes)), key=lambda row: (-sizes[row], row)):
        load, part = heapq.heappop(loads)
        members[part].append(row)
        heapq.heappush(loads, (load + sizes[row], part))
    return members


def take(batch: Batch, share: Share) -> Batch:
    """A share's rows; consecutive ones are views."""
    if isinstance(share, slice):
        return batch if share == slice(0, len(batch)) else batch.slice(share.start, share.stop)
    return batch.index(share)


def size_of(share: Share) -> int:
    return share.stop - share.start if isinstance(share, slice) else len(share)


def restore(results: Sequence[Batch], shares: Sequence[Share], copies: int = 1) -> Batch:
    """The results of the shares as one batch, in the rows' order.

    Args:
        results: one of each share, with `copies` rows for each of its rows, a row's together.
    """
    whole = Batch.concatenate([result for result, share in zip(results, shares, strict=True) if size_of(share)])
    if all(isinstance(share, slice) for share in shares):
        return whole
    order = torch.cat([torch.arange(s.start, s.stop) if isinstance(s, slice) else s for s in shares])
    back = torch.argsort(order)
    if copies > 1:
        back = (back[:, None] * copies + torch.arange(copies)).flatten()
    return whole.index(back)
