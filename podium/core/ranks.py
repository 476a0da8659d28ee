"""Where a worker stands among those of its role: its rank, and its place on the four axes of parallelism."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from podium.core.errors import ResourceError, did_you_mean
from podium.core.work import Work

AXES = ("data", "shard", "tensor", "sequence")
"""Outermost first. Ranks along `data` and `shard` get different rows; along `tensor` and `sequence` the same rows."""


@dataclass(frozen=True)
class Ranks:
    """How many workers a role has along each axis; rank = ((data * S + shard) * T + tensor) * Q + sequence."""

    data: int = 1
    shard: int = 1
    tensor: int = 1
    sequence: int = 1
    work: Work = field(default_factory=Work, compare=False, kw_only=True)
    """What a row costs these workers, so that they get equal shares of it."""

    @classmethod
    def fit(cls, sizes: Mapping[str, int], workers: int, where: str = "parallel") -> Ranks:
        """Axes for so many workers; `data` 0 (or absent) takes what the others leave.

        Raises ResourceError where they do not multiply to `workers`, with sizes that would.
        """
        unknown = [name for name in sizes if name not in AXES]
        if unknown:
            raise ResourceError(f"unknown axis '{unknown[0]}'", where=where, remedy=did_you_mean(unknown[0], AXES))
        small = [name for name, size in sizes.items() if size < (0 if name == "data" else 1)]
        if small:
            raise ResourceError(f"{small[0]}={sizes[small[0]]}", where=where, remedy="sizes of axes are at least 1")
        rest = 1
        for name in AXES[1:]:
            rest *= sizes.get(name, 1)
        data = sizes.get("data", 0) or max(1, workers // rest)
        if data * rest != workers:
            shown = " x ".join(f"{name} {sizes[name]}" for name in AXES if sizes.get(name, 0) > 1)
            fits = workers % rest == 0
            remedy = f"data={workers // rest}, or {data * rest} workers" if fits else _divisors(sizes, workers)
            raise ResourceError(
                f"{shown or 'data 1'} makes {data * rest} workers, and the pool has {workers}", where=where, remedy=remedy
            )
        return cls(data, *(sizes.get(name, 1) for name in AXES[1:]))

    @property
    def sizes(self) -> dict[str, int]:
        """By axis, in the order of `AXES`: the shape of the role's device mesh."""
        return {name: getattr(self, name) for name in AXES}

    @property
    def workers(self) -> int:
        return self.data * self.shard * self.tensor * self.sequence

    @property
    def data_size(self) -> int:
        """How many different shares of the rows there are."""
        return self.data * self.shard

    def data_rank(self, rank: int) -> int:
        """Which share of the rows this worker gets."""
        return rank // (self.tensor * self.sequence)

    def leads(self, rank: int) -> bool:
        """Of the workers that get one share, this one gives the result."""
        return rank % (self.tensor * self.sequence) == 0


TAKES_THE_REST = {"fsdp": "shard", "fsdp2": "shard", "tensor_parallel": "tensor", "sequence_parallel": "sequence"}
"""By train engine: the axis that gets the workers which `parallel` leaves over; `data` for the others."""


def axes_of(backend: str, sizes: Mapping[str, int], workers: int, where: str = "parallel") -> Ranks:
    """The axes of a role's workers: as `sizes` says; where it leaves workers over, the backend's own axis takes them.

    `fsdp` on 8 workers is shard 8; with `{"tensor": 2}` it is shard 4 x tensor 2; with `{"data": 2}`, data 2 x shard 4.

    Raises ResourceError where sizes and workers do not fit.
    """
    axis = TAKES_THE_REST.get(backend)
    if axis is not None and axis not in sizes:
        rest = 1
        for size in sizes.values():
            rest *= max(size, 1)
        sizes = {"data": 1, **sizes, axis: max(1, workers // rest)}
    return Ranks.fit(sizes, workers, where)


def _divisors(sizes: Mapping[str, int], workers: int) -> str:
    large = max(AXES[1:], key=lambda name: sizes.get(name, 1))
    return f"{large} must divide {workers}: one of {[d for d in range(1, workers + 1) if workers % d == 0]}"


@dataclass(frozen=True)
class WorkerContext:
    """What a worker is told when it is built, inside its own process.

    With several workers `torch.distributed` is initialised: the default process group is that of the pool's processes, and
    every role of the pool has all of them as its ranks. `mesh` is the role's device mesh over them, with the dimensions
    named by `AXES` (sizes of 1 included); None for a single worker.

    A train engine that is given this context must do the same on every rank, whatever rows it gets: `update` is called
    equally often on all of them, with the rank's share of each minibatch (which may have no rows), divides by denominators
    of the whole minibatch, and returns the metrics of the whole minibatch on every rank. `compute` may get no rows too.
    """

    role: str = "role"
    rank: int = 0
    ranks: Ranks = field(default_factory=Ranks)
    device: str = "cpu"
    backend: str = "gloo"
    """Of the process group: "gloo" or "nccl"."""
    pool: str = "local"
    mesh: Any = None

    @property
    def world_size(self) -> int:
        return self.ranks.workers

    @property
    def data_rank(self) -> int:
        return self.ranks.data_rank(self.rank)

    @property
    def data_size(self) -> int:
        return self.ranks.data_size

    @property
    def is_first(self) -> bool:
        """Rank 0 writes files."""
        return self.rank == 0

    def __str__(self) -> str:
        return f"role '{self.role}', rank {self.rank} of {self.world_size}, pool '{self.pool}'"


def names_of(ranks: Sequence[int]) -> str:
    """Ranks for a message: "rank 1", "ranks 0, 2"."""
    return ("rank " if len(ranks) == 1 else "ranks ") + ", ".join(map(str, ranks))
