"""Token columns that lie elsewhere: their row lengths are here, their values are fetched when someone reads them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

import torch
from torch import Tensor

from podium.core.ragged import Ragged


class Source(Protocol):
    """A column's values at another place. `lengths [B]` and `dtype` are known here."""

    lengths: Tensor
    dtype: torch.dtype

    def fetch(self) -> Tensor:
        """The flat values `[sum(lengths)]`."""
        ...


class DeferredRagged(Ragged):
    """Rows of some sources, in any order. It passes for a `Ragged`: reading `values` fetches the sources that are needed.

    Cutting, reordering and joining fetch nothing; a pickled one takes its sources along, not their values.

    Args:
        sources: where the values are.
        rows: which of their rows, counted through all sources, `[B]` int64; by default all.
    """

    __slots__ = ("_values", "rows", "sources")

    def __init__(self, sources: Sequence[Source], rows: Tensor | None = None) -> None:
        self.sources = tuple(sources)
        lengths = torch.cat([source.lengths for source in self.sources])
        self.rows = torch.arange(len(lengths)) if rows is None else rows
        self.offsets = torch.zeros(len(self.rows) + 1, dtype=torch.int64)
        torch.cumsum(lengths[self.rows], 0, out=self.offsets[1:])
        self._values: Tensor | None = None

    @property
    def dtype(self) -> torch.dtype:
        return self.sources[0].dtype

    @property
    def values(self) -> Tensor:  # type: ignore[override]
        if self._values is None:
            self._values = self._fetch()
        return self._values

    @property
    def is_here(self) -> bool:
        """The values have been fetched."""
        return self._values is not None

    def _fetch(self) -> Tensor:
        ends = torch.tensor([len(source.lengths) for source in self.sources]).cumsum(0)
        used = torch.bucketize(self.rows, ends, right=True)
        fetched = {int(i): self.sources[int(i)].fetch() for i in used.unique()}
        total = int(ends[-1])
        if len(self.rows) == total and bool((self.rows == torch.arange(total)).all()):
            parts = [fetched[i] for i in range(len(self.sources)) if i in fetched]
            return parts[0] if len(parts) == 1 else torch.cat(parts)
        if not len(self.rows):
            return torch.empty(0, dtype=self.dtype)
        views: list[Any] = []
        for i, source in enumerate(self.sources):
            rows = len(source.lengths)
            views += fetched[i].split(source.lengths.tolist()) if i in fetched and rows else [None] * rows
        return torch.cat([views[row] for row in self.rows.tolist()])

    def index(self, rows: Tensor) -> Ragged:
        return super().index(rows) if self.is_here else DeferredRagged(self.sources, self.rows[rows])

    def slice(self, start: int, stop: int) -> Ragged:
        return super().slice(start, stop) if self.is_here else DeferredRagged(self.sources, self.rows[start:stop])

    @staticmethod
    def join(parts: Sequence[Ragged]) -> Ragged:
        """Stays deferred where all parts are."""
        if any(not isinstance(part, DeferredRagged) for part in parts):
            return Ragged.join(parts)
        sources: list[Source] = []
        rows, at = [], 0
        for part in parts:
            assert isinstance(part, DeferredRagged)
            sources += part.sources
            rows.append(part.rows + at)
            at += sum(len(source.lengths) for source in part.sources)
        return DeferredRagged(sources, torch.cat(rows))

    def same_as(self, other: Ragged) -> bool:
        if isinstance(other, DeferredRagged) and self.sources == other.sources and torch.equal(self.rows, other.rows):
            return True
        return super().same_as(other)

    def __reduce__(self) -> Any:
        # Sources of which no row is left are not sent along.
        starts = torch.tensor([0, *(len(source.lengths) for source in self.sources)]).cumsum(0)
        used = torch.bucketize(self.rows, starts[1:], right=True).unique().tolist()
        kept, rows, at = [], self.rows.clone(), 0
        for i in used:
            inside = (self.rows >= starts[i]) & (self.rows < starts[i + 1])
            rows[inside] = self.rows[inside] - starts[i] + at
            at += len(self.sources[i].lengths)
            kept.append(self.sources[i])
        return _rebuilt, (kept or list(self.sources[:1]), rows.numpy())


def _rebuilt(sources: Sequence[Source], rows: Any) -> DeferredRagged:
    return DeferredRagged(sources, torch.from_numpy(rows.copy()))
