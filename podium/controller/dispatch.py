"""How a method's arguments reach the workers of a role, and how their results come back.

A worker's method says its protocol with `@dispatch("rows")`; the worker does not know who calls it. A protocol is a function
of a call's arguments and the role's ranks; users add their own with `@PROTOCOLS.register("name")`.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

import torch

from podium.core.batch import Batch, resolve
from podium.core.errors import BatchError, WorkerError
from podium.core.metrics import Metrics
from podium.core.ranks import Ranks
from podium.core.registry import Registry
from podium.core.shares import Share, deal, restore, size_of, take

F = TypeVar("F", bound=Callable[..., Any])
Call = tuple[tuple[Any, ...], dict[str, Any]]


@dataclass(frozen=True)
class Plan:
    """One call of a role's method, laid out for its workers.

    Attributes:
        calls: (args, kwargs) of the first workers, in rank order; the others are not called.
        collect: makes the results of the `wanted` ranks, in that order, into one.
        wanted: ranks whose results are read; None: those of all that were called. What the others return stays where it is.
        for_files: the result goes into a file: where several controllers run, only the one that writes gets it.
    """

    calls: Sequence[Call]
    collect: Callable[[list[Any]], Any]
    wanted: tuple[int, ...] | None = None
    for_files: bool = False

    @property
    def read(self) -> tuple[int, ...]:
        """The ranks whose results are read."""
        return tuple(range(len(self.calls))) if self.wanted is None else self.wanted


Dispatch = Callable[[tuple[Any, ...], dict[str, Any], Ranks], Plan]
PROTOCOLS: Registry[Dispatch] = Registry("dispatch protocol")


def dispatch(protocol: str) -> Callable[[F], F]:
    """Marks a worker's method as callable from its role's handle, by this protocol."""

    def mark(method: F) -> F:
        method.__podium_dispatch__ = protocol  # type: ignore[attr-defined]
        return method

    return mark


def protocol_of(method: Any) -> str | None:
    """The protocol's name, or None for a method that handles cannot call."""
    return getattr(method, "__podium_dispatch__", None)


def resolve_arguments(args: tuple[Any, ...], kwargs: dict[str, Any]) -> Call:
    """Arguments that are futures of other roles' calls become what they hold."""
    return tuple(resolve(a) for a in args), {k: resolve(v) for k, v in kwargs.items()}


# ---------------------------------------------------------------------- without rows


@PROTOCOLS.register("broadcast")
def broadcast(args: tuple[Any, ...], kwargs: dict[str, Any], ranks: Ranks) -> Plan:
    """All workers do the same; the first one's result is taken."""
    return Plan([(args, kwargs)] * ranks.workers, _first, (0,))


@PROTOCOLS.register("for_files")
def for_files(args: tuple[Any, ...], kwargs: dict[str, Any], ranks: Ranks) -> Plan:
    """As `broadcast`, for a result that is large and goes into a file (a role's state)."""
    return Plan([(args, kwargs)] * ranks.workers, _first, (0,), for_files=True)


@PROTOCOLS.register("gather")
def gather(args: tuple[Any, ...], kwargs: dict[str, Any], ranks: Ranks) -> Plan:
    """All workers do the same; the result is a list, one entry a worker."""
    return Plan([(args, kwargs)] * ranks.workers, list)


@PROTOCOLS.register("first")
def first(args: tuple[Any, ...], kwargs: dict[str, Any], ranks: Ranks) -> Plan:
    """Rank 0 alone is called. Not for a method in which workers talk to each other."""
    return Plan([(args, kwargs)], _first)


@PROTOCOLS.register("each")
def each(args: tuple[Any, ...], kwargs: dict[str, Any], ranks: Ranks) -> Plan:
    """Every argument is a list with one entry a worker, in rank order; so is the result."""
    odd = [len(value) for value in (*args, *kwargs.values()) if len(value) != ranks.workers]
    if odd:
        raise WorkerError(
            f"an argument has {odd[0]} entries, and the role has {ranks.workers} workers",
            where="dispatch 'each'",
            remedy="give a list with one entry a worker",
        )
    calls = [(tuple(a[r] for a in args), {k: v[r] for k, v in kwargs.items()}) for r in range(ranks.workers)]
    return Plan(calls, list)


def _first(results: list[Any]) -> Any:
    return results[0]


# ---------------------------------------------------------------------- by rows


@PROTOCOLS.register("rows")
def rows(args: tuple[Any, ...], kwargs: dict[str, Any], ranks: Ranks) -> Plan:
    """Every batch among the arguments is cut into shares of about equal work, one a data rank; the rest goes to all.

    Workers of one data rank get the same rows, and the first of them gives the result. Batches must come back with the rows
    that they got, and are put back into the order of the whole; metrics are added up; anything else comes as a list.
    """
    return _by_rows(args, kwargs, ranks, _repeats_nothing)


@PROTOCOLS.register("prompts")
def prompts(args: tuple[Any, ...], kwargs: dict[str, Any], ranks: Ranks) -> Plan:
    """As `rows`, for a method that answers each row `group_size` times: rows are numbered before they are cut."""
    args = tuple(number_prompts(a) if isinstance(a, Batch) else a for a in args)
    kwargs = {k: number_prompts(v) if isinstance(v, Batch) else v for k, v in kwargs.items()}
    return _by_rows(args, kwargs, ranks, lambda: int(kwargs.get("group_size", 1)))


def number_prompts(batch: Batch) -> Batch:
    """Adds `group_id`, and `occurrence`: how often the data's row came before in this batch.

    With them a worker that gets some of the rows gives every sample the group and the seed that it has in the whole.
    """
    if "occurrence" in batch:
        return batch
    numbers = torch.arange(len(batch))
    seen: Counter[int] = Counter()
    occurrence = []
    for row in batch["row_index"].tolist() if "row_index" in batch else numbers.tolist():
        occurrence.append(seen[row])
        seen[row] += 1
    return batch.with_columns({"group_id": numbers, "occurrence": occurrence})


def _by_rows(args: tuple[Any, ...], kwargs: dict[str, Any], ranks: Ranks, copies: Callable[[], int]) -> Plan:
    batches = [value for value in (*args, *kwargs.values()) if isinstance(value, Batch)]
    sizes = {len(batch) for batch in batches}
    if len(sizes) > 1:
        raise BatchError(f"the batches of one call have {sorted(sizes)} rows", where="dispatch by rows")
    total = sizes.pop() if sizes else 0
    shares: list[Share] = [slice(0, 0)] * ranks.data_size
    if batches:
        shares = deal(batches[0], ranks.data_size, ranks.work, fetch=False)
    taken = [[take(batch, share) for share in shares] for batch in batches]

    def share_of(data_rank: int) -> Call:
        parts = iter(taken)
        given = tuple(next(parts)[data_rank] if isinstance(a, Batch) else a for a in args)
        return given, {k: next(parts)[data_rank] if isinstance(v, Batch) else v for k, v in kwargs.items()}

    of_data_rank = [share_of(data_rank) for data_rank in range(ranks.data_size)]
    calls = [of_data_rank[ranks.data_rank(rank)] for rank in range(ranks.workers)]
    leaders = tuple(rank for rank in range(ranks.workers) if ranks.leads(rank))

    def collect(results: list[Any]) -> Any:
        if not batches or not isinstance(results[0], Batch):
            return merge_results(results)
        _check_lengths(results, shares, copies(), leaders)
        return results[0] if total == 0 else restore(results, shares, copies())

    return Plan(calls, collect, leaders)


def _repeats_nothing() -> int:
    return 1


def _check_lengths(results: Sequence[Any], shares: Sequence[Share], copies: int, leaders: Sequence[int]) -> None:
    for rank, result, share in zip(leaders, results, shares, strict=True):
        wanted = size_of(share) * copies
        if wanted and len(result) != wanted:
            raise WorkerError(
                f"rank {rank} was given {size_of(share)} rows and returned {len(result)}, not {wanted}",
                where="dispatch by rows",
                remedy="return one row for each (all workers of a role the same way), or use another protocol",
            )


def merge_results(results: list[Any]) -> Any:
    """Metrics added up; anything else as it came, one entry a worker; a single one for itself."""
    if isinstance(results[0], Metrics):
        total = Metrics()
        for result in results:
            total.merge(result)
        return total
    return results[0] if len(results) == 1 else results
