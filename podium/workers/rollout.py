"""Rows for generation, where the workers that generate together are not those that train together.

Calls deal rows to workers by training's axes. A copy of the model that several workers have between them must get the same
rows on each; several copies within one training share can divide its rows. So rows are exchanged among the workers that
share a copy or a training share (HybridFlow's micro data-parallel groups), and their responses back.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from podium.core.batch import Batch
from podium.core.errors import RolloutError
from podium.core.ranks import WorkerContext
from podium.core.shares import costs_of, cut, restore, take
from podium.engines.base import RolloutEngine, SamplingParams
from podium.engines.rollout.generate import Progress, generate


class CopyRanks(Protocol):
    """This worker among those that have its copy of the model (`podium.models.divided.TensorRanks`)."""

    @property
    def rank(self) -> int: ...

    def least(self, number: int) -> int:
        """The smallest of their numbers. Collective."""
        ...


_NEEDED = ("prompt_ids", "sample_seed")


@dataclass(frozen=True)
class RowExchange:
    """One worker's part in generating with copies that several workers have between them.

    Args:
        members: ranks that exchange rows with this one (with it), in ascending order.
        copies: those copies of the model that they have, each by its ranks.
        rank: this one.
        shares: the data rank of each member: members with the same one are given the same rows.
        ranks: those of this worker's copy.
        group: a process group of the members (gloo).
    """

    members: tuple[int, ...]
    copies: tuple[tuple[int, ...], ...]
    rank: int
    shares: tuple[int, ...]
    ranks: CopyRanks
    group: Any

    @classmethod
    def among(cls, copies: Sequence[Sequence[int]], context: WorkerContext, ranks: CopyRanks, **how: Any) -> RowExchange:
        """From all copies and this worker's place. Collective over all workers; `how` is passed to `new_group`."""
        import torch.distributed as dist

        found: RowExchange | None = None
        for members in _linked(copies, [context.ranks.data_rank(rank) for rank in range(context.world_size)]):
            group = dist.new_group(list(members), backend="gloo", **how) if len(members) > 1 else None
            if context.rank in members:
                here = tuple(tuple(copy) for copy in copies if copy[0] in members)
                shares = tuple(context.ranks.data_rank(rank) for rank in members)
                found = cls(members, here, context.rank, shares, ranks, group)
        assert found is not None
        return found

    def generate(
        self, engine: RolloutEngine, batch: Batch, sampling: SamplingParams, *, on_progress: Progress | None = None
    ) -> Batch:
        """As `engines.rollout.generate`, for this worker's rows. All members call it.

        Raises RolloutError too where another worker of the copy gave the rollout up.
        """
        shares = self._shares(batch.select(*_NEEDED))
        order = sorted(shares)
        rows = Batch.concatenate([shares[share] for share in order])
        parts = cut(costs_of(rows), len(self.copies))
        copy = next(i for i, ranks in enumerate(self.copies) if self.rank in ranks)
        out = generate(engine, take(rows, parts[copy]), sampling, on_progress=self._agreeing(on_progress))
        written = out.drop(*_NEEDED)
        if len(self.copies) > 1 and len(rows):
            results = self._all(written if self.ranks.rank == 0 else None)
            written = restore([results[self.members.index(ranks[0])] for ranks in self.copies], parts)
        mine = self.shares[self.members.index(self.rank)]
        first = sum(len(shares[share]) for share in order if share < mine)
        return batch.union(written.slice(first, first + len(batch)))

    def _shares(self, batch: Batch) -> dict[int, Batch]:
        """The rows of every training share among the members."""
        if len(set(self.shares)) == 1:
            return {self.shares[0]: batch}
        return dict(zip(self.shares, self._all(batch), strict=True))

    def _all(self, value: Any) -> list[Any]:
        import torch.distributed as dist

        values: list[Any] = [None] * len(self.members)
        dist.all_gather_object(values, value, group=self.group)
        return values

    def _agreeing(self, on_progress: Progress | None) -> Progress:
        """Workers of one copy stop together: each goes on only where all do."""

        def report(done: int, total: int, tokens: int) -> None:
            error: BaseException | None = None
            if on_progress is not None:
                try:
                    on_progress(done, total, tokens)
                except BaseException as raised:
                    error = raised
            goes_on = self.ranks.least(int(error is None))
            if error is not None:
                raise error
            if not goes_on:
                raise RolloutError("another worker of this copy of the model gave the rollout up")

        return report


def _linked(copies: Sequence[Sequence[int]], shares: Sequence[int]) -> list[tuple[int, ...]]:
    """Ranks joined by a copy or by a training share, directly or through others."""
    groups = [set(copy) for copy in copies]
    groups += [{rank for rank, share in enumerate(shares) if share == value} for value in set(shares)]
    joined: list[set[int]] = []
    for group in groups:
        touching = [other for other in joined if other & group]
        joined = [other for other in joined if not other & group] + [group.union(*touching)]
    return sorted(tuple(sorted(group)) for group in joined)
