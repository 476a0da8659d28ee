"""`Ragged`: rows of unequal length as flat values and offsets."""

from __future__ import annotations

import warnings
from collections.abc import Iterable, Iterator, Sequence
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor

_LONG_ROWS = 64
"""Tokens a row above which rows are copied whole."""


class Ragged:
    """Rows of unequal length: `values [sum(lengths)]` and `offsets [B + 1]` (int64)."""

    __slots__ = ("offsets", "values")

    def __init__(self, values: Tensor, offsets: Tensor) -> None:
        self.values, self.offsets = values, offsets

    @classmethod
    def from_rows(cls, rows: Iterable[Sequence[Any] | Tensor], dtype: torch.dtype | None = None) -> Ragged:
        """From one sequence or 1-D tensor per row; empty rows are allowed."""
        tensors = [torch.as_tensor(row, dtype=dtype) for row in rows]
        empty = torch.empty(0, dtype=dtype or torch.float32)
        values = torch.cat(tensors) if tensors else empty
        return cls.of_lengths(values if dtype is None else values.to(dtype), torch.tensor([len(t) for t in tensors]))

    @classmethod
    def of_lengths(cls, values: Tensor, lengths: Tensor) -> Ragged:
        """From flat values and the lengths `[B]` that cut them."""
        offsets = torch.zeros(len(lengths) + 1, dtype=torch.int64)
        torch.cumsum(lengths.to(torch.int64).cpu(), 0, out=offsets[1:])
        return cls(values, offsets)

    @classmethod
    def from_padded(cls, padded: Tensor, lengths: Tensor) -> Ragged:
        """The first `lengths[i]` entries of each row of a padded `[B, T]` tensor."""
        valid = torch.arange(padded.shape[1], device=padded.device) < lengths.to(padded.device)[:, None]
        return cls.of_lengths(padded[valid], lengths)

    @property
    def lengths(self) -> Tensor:
        """Row lengths `[B]`, int64."""
        return self.offsets.diff()

    @property
    def dtype(self) -> torch.dtype:
        return self.values.dtype

    @property
    def max_length(self) -> int:
        return int(self.lengths.max()) if len(self) else 0

    def padded(self, fill: float | int | bool = 0) -> Tensor:
        """`[B, T]`, T the longest row, right-padded with `fill`."""
        out = self.values.new_full((len(self), self.max_length), fill)
        out[self.valid()] = self.values
        return out

    def valid(self) -> Tensor:
        """Bool `[B, T]`: which entries of the padded view exist."""
        return torch.arange(self.max_length) < self.lengths[:, None]

    def index(self, rows: Tensor) -> Ragged:
        """The rows at the int64 indices `rows [K]`, in that order; repeats are allowed."""
        lengths = self.lengths[rows]
        if len(rows) == 0:
            return Ragged.of_lengths(self.values[:0], lengths)
        if int(lengths.sum()) > _LONG_ROWS * len(rows):  # whole rows are copied faster than single entries are looked up
            views = self.values.split(self.lengths.tolist())
            return Ragged.of_lengths(torch.cat([views[row] for row in rows.tolist()]), lengths)
        starts = self.offsets[:-1][rows]
        ends = torch.cumsum(lengths, 0)
        within = torch.arange(int(ends[-1])) - torch.repeat_interleave(ends - lengths, lengths)
        return Ragged.of_lengths(self.values[torch.repeat_interleave(starts, lengths) + within], lengths)

    def slice(self, start: int, stop: int) -> Ragged:
        """The rows from `start` up to `stop`, over the same memory."""
        offsets = self.offsets[start : stop + 1]
        return Ragged(self.values[int(offsets[0]) : int(offsets[-1])], offsets - offsets[0])

    @staticmethod
    def join(parts: Sequence[Ragged]) -> Ragged:
        """The rows of all parts, in order."""
        return Ragged.of_lengths(torch.cat([p.values for p in parts]), torch.cat([p.lengths for p in parts]))

    def same_as(self, other: Ragged) -> bool:
        """The same rows with the same values."""
        return torch.equal(self.offsets, other.offsets) and torch.equal(self.values, other.values)

    def __reduce__(self) -> Any:
        # As arrays: pickle's protocol 5 hands their memory over without a copy, and a view takes no more than its own part.
        return _ragged, (as_array(self.values), as_array(self.offsets))

    def __getitem__(self, row: int) -> Tensor:
        row = range(len(self))[row]
        return self.values[self.offsets[row] : self.offsets[row + 1]]

    def __iter__(self) -> Iterator[Tensor]:
        return (self[i] for i in range(len(self)))

    def __len__(self) -> int:
        return len(self.offsets) - 1

    def to_list(self) -> list[list[Any]]:
        flat, cuts = self.values.tolist(), self.offsets.tolist()
        return [flat[a:b] for a, b in pairwise(cuts)]

    def __repr__(self) -> str:
        return f"Ragged(rows={len(self)}, tokens={int(self.offsets[-1])}, dtype={self.dtype})"


def as_array(tensor: Tensor) -> Any:
    """A tensor as a NumPy array over the same memory; as it is where NumPy lacks the dtype (bfloat16)."""
    tensor = tensor.detach().cpu()
    return tensor if tensor.dtype == torch.bfloat16 else tensor.numpy()


def as_tensor(array: Any) -> Tensor:
    """A tensor over the same memory, which may be read-only: a batch is not changed in place."""
    if isinstance(array, Tensor):
        return array
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)  # "the given NumPy array is not writable"
        return torch.from_numpy(array)


def _ragged(values: Any, offsets: Any) -> Ragged:
    return Ragged(as_tensor(values), as_tensor(offsets))
