"""`Batch`: the one carrier between rooms. Token columns are ragged; nothing is padded to the longest row."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from podium.core import schema
from podium.core.errors import BatchError
from podium.core.ragged import Ragged, as_array, as_tensor

ColumnValue = Ragged | Tensor | list[Any]


class Batch:
    """Named columns over the same rows, checked against the schema when they enter.

    Token columns are `Ragged`, sequence columns tensors `[B]`, object columns lists. A batch is not changed in place:
    every operation returns a new one that shares the columns it did not touch.

    Raises BatchError for an unknown column, a wrong kind or dtype, or rows and lengths that disagree.
    """

    def __init__(self, columns: Mapping[str, Any] | None = None) -> None:
        self._columns: dict[str, ColumnValue] = {}
        self._axes: dict[str, str] = {}
        self._rows: int | None = None
        for name, value in (columns or {}).items():
            self._set(name, value)

    # ------------------------------------------------------------------ columns in

    def _set(self, name: str, value: Any) -> None:
        spec = schema.lookup(name)
        value = _coerce(spec, name, value)
        if self._rows is None:
            self._rows = len(value)
        elif len(value) != self._rows:
            raise BatchError(f"column '{name}' has {len(value)} rows, the batch has {self._rows}", where="Batch")
        if spec.axis is not None and isinstance(value, Ragged):
            twin = self._axes.setdefault(spec.axis, name)
            other = self._columns.get(twin, value)
            assert isinstance(other, Ragged)
            if not torch.equal(other.offsets, value.offsets):
                row = int((other.lengths != value.lengths).nonzero()[0])
                raise BatchError(
                    f"column '{name}' has {int(value.lengths[row])} tokens in row {row}, "
                    f"'{twin}' of the same axis has {int(other.lengths[row])}",
                    where="Batch",
                )
        self._columns[name] = value

    def with_columns(self, columns: Mapping[str, Any]) -> Batch:
        """A batch with these columns added; one that exists is replaced."""
        kept = {name: value for name, value in self._columns.items() if name not in columns}
        return Batch({**kept, **columns})

    def with_padded(self, name: str, padded: Tensor) -> Batch:
        """Adds the token column `name` from its padded `[B, T]` view; lengths are those of the column's axis."""
        return self.with_columns({name: Ragged.from_padded(padded, self.lengths(_axis(name)))})

    def union(self, other: Any) -> Batch:
        """Both batches' columns, over the same rows. A column in both must be the same object or equal.

        `other` may be the future that a role handle returned.
        """
        other = resolve(other)
        for name in set(self._columns) & set(other._columns):
            if not _equal(self._columns[name], other._columns[name]):
                raise BatchError(f"both sides of the union carry a different '{name}'", remedy="use with_columns to replace it")
        return Batch({**self._columns, **other._columns})

    # ------------------------------------------------------------------ columns out

    def __getitem__(self, name: str) -> Any:
        if name not in self._columns:
            schema.lookup(name)
            raise BatchError(f"the batch has no column '{name}'", remedy="it has: " + ", ".join(self.names))
        return self._columns[name]

    def __contains__(self, name: object) -> bool:
        return name in self._columns

    def __len__(self) -> int:
        return self._rows or 0

    @property
    def names(self) -> list[str]:
        return sorted(self._columns)

    def lengths(self, axis: str) -> Tensor:
        """Row lengths `[B]` of an axis ("prompt", "response")."""
        if axis not in self._axes:
            raise BatchError(f"the batch has no column of the axis '{axis}'", remedy="it has: " + ", ".join(self.names))
        value = self._columns[self._axes[axis]]
        assert isinstance(value, Ragged)
        return value.lengths

    def padded(self, name: str, fill: float | int | bool = 0) -> Tensor:
        """A token column as `[B, T]`, right-padded with `fill`; a sequence column as it is, `[B]`."""
        value = self[name]
        return value.padded(fill) if isinstance(value, Ragged) else value

    def mask(self, axis: str) -> Tensor:
        """Bool `[B, T]`: which entries of a padded view of this axis exist."""
        value = self[self._axes[axis]] if axis in self._axes else None
        if value is None:
            raise BatchError(f"the batch has no column of the axis '{axis}'")
        return value.valid()

    def extras(self) -> dict[str, list[Any]]:
        """The data set's own columns, by their own names."""
        return {n.removeprefix("data."): v for n, v in self._columns.items() if n.startswith("data.")}  # type: ignore[misc]

    def here(self) -> Batch:
        """With the values of columns that lie elsewhere fetched."""
        columns = self._columns.items()
        return Batch({n: Ragged(v.values, v.offsets) if isinstance(v, Ragged) else v for n, v in columns})

    # ------------------------------------------------------------------ rows

    def select(self, *names: str) -> Batch:
        """Only these columns."""
        return Batch({name: self[name] for name in names})

    def drop(self, *names: str) -> Batch:
        """Without these columns (those that are there)."""
        return Batch({name: value for name, value in self._columns.items() if name not in names})

    def index(self, rows: Tensor | Sequence[int]) -> Batch:
        """The rows at these indices (or where a bool mask `[B]` is true), in that order."""
        picks = torch.as_tensor(rows)
        picks = picks.nonzero()[:, 0] if picks.dtype == torch.bool else picks.to(torch.int64)
        return Batch({name: _take(value, picks) for name, value in self._columns.items()})

    def split(self, sizes: int | Sequence[int]) -> list[Batch]:
        """Consecutive parts: of at most `sizes` rows each, or of the sizes listed (which must add up)."""
        if isinstance(sizes, int):
            sizes = [min(sizes, len(self) - at) for at in range(0, len(self), sizes)]
        if sum(sizes) != len(self):
            raise BatchError(f"the sizes {list(sizes)} do not add up to {len(self)} rows", where="Batch.split")
        parts, at = [], 0
        for size in sizes:
            parts.append(self.slice(at, at + size))
            at += size
        return parts

    def slice(self, start: int, stop: int) -> Batch:
        """The rows from `start` up to `stop`; tensors are views of this batch's."""
        columns = self._columns.items()
        return Batch({n: v.slice(start, stop) if isinstance(v, Ragged) else v[start:stop] for n, v in columns})

    def repeat(self, times: int) -> Batch:
        """Each row `times` times in a row (the rows of a group stay together)."""
        return self.index(torch.arange(len(self)).repeat_interleave(times))

    @staticmethod
    def concatenate(batches: Sequence[Batch]) -> Batch:
        """The rows of all, in order. Every batch must have the same columns."""
        if not batches:
            return Batch()
        names = batches[0].names
        for other in batches[1:]:
            if other.names != names:
                odd = sorted(set(names) ^ set(other.names))
                raise BatchError(f"batches differ in the columns {odd}", where="Batch.concatenate")
        return Batch({name: _join([b[name] for b in batches]) for name in names})

    # ------------------------------------------------------------------ disk

    def save(self, folder: str | Path) -> None:
        """Writes `batch.safetensors` and `batch.json` (objects must be JSON values) into `folder`."""
        from safetensors.torch import save_file

        folder = Path(folder)
        folder.mkdir(parents=True, exist_ok=True)
        tensors: dict[str, Tensor] = {}
        objects: dict[str, list[Any]] = {}
        for name, value in self._columns.items():
            if isinstance(value, Ragged):
                tensors[f"{name}|values"], tensors[f"{name}|offsets"] = value.values.contiguous(), value.offsets
            elif isinstance(value, Tensor):
                tensors[name] = value.contiguous()
            else:
                objects[name] = value
        # A shared offsets tensor would be refused: safetensors wants every tensor to own its storage.
        save_file({name: tensor.clone() for name, tensor in tensors.items()}, folder / "batch.safetensors")
        (folder / "batch.json").write_text(json.dumps({"rows": len(self), "objects": objects}, ensure_ascii=False))

    @staticmethod
    def load(folder: str | Path) -> Batch:
        """Reads what `save` wrote."""
        from safetensors.torch import load_file

        folder = Path(folder)
        tensors = load_file(folder / "batch.safetensors")
        columns: dict[str, Any] = json.loads((folder / "batch.json").read_text())["objects"]
        for name, tensor in tensors.items():
            base, _, part = name.partition("|")
            if part == "values":
                columns[base] = Ragged(tensor, tensors[f"{base}|offsets"])
            elif not part:
                columns[base] = tensor
        return Batch(columns)

    def __reduce__(self) -> Any:
        columns = {n: as_array(v) if isinstance(v, Tensor) else v for n, v in self._columns.items()}
        return _batch, (columns,)

    def __repr__(self) -> str:
        return f"Batch(rows={len(self)}, columns={self.names})"


def resolve(value: Any) -> Any:
    """What a future holds, or the value itself. (Anything with `result()` counts as a future.)"""
    return value.result() if hasattr(value, "result") else value


def _axis(name: str) -> str:
    axis = schema.lookup(name).axis
    if axis is None:
        raise BatchError(f"'{name}' is not a token column")
    return axis


def _coerce(spec: schema.Column, name: str, value: Any) -> ColumnValue:
    """The value in its column's kind and dtype; raises BatchError where it does not fit."""
    if spec.kind == "token":
        if not isinstance(value, Ragged):
            value = Ragged.from_rows(value, spec.dtype)
        if value.dtype != spec.dtype:
            value = Ragged(value.values.to(spec.dtype), value.offsets)
        return value
    if spec.kind == "sequence":
        value = torch.as_tensor(value, dtype=spec.dtype)
        if value.ndim != 1:
            raise BatchError(f"column '{name}' must have the shape [rows], got {list(value.shape)}", where="Batch")
        return value
    if isinstance(value, Tensor | Ragged | str):
        raise BatchError(f"column '{name}' holds one Python value per row, got {type(value).__name__}", where="Batch")
    return list(value)


def _take(value: ColumnValue, rows: Tensor) -> ColumnValue:
    if isinstance(value, Ragged):
        return value.index(rows)
    if isinstance(value, Tensor):
        return value[rows]
    return [value[i] for i in rows.tolist()]


def _join(values: list[Any]) -> ColumnValue:
    if isinstance(values[0], Ragged):
        return values[0].join(values)
    if isinstance(values[0], Tensor):
        return torch.cat(values)
    return [item for value in values for item in value]


def _equal(a: Any, b: Any) -> bool:
    if a is b:
        return True
    if isinstance(a, Ragged) and isinstance(b, Ragged):
        return a.same_as(b)
    if isinstance(a, Tensor) and isinstance(b, Tensor):
        return torch.equal(a, b)
    return type(a) is type(b) and a == b


def _batch(columns: dict[str, Any]) -> Batch:
    return Batch({n: as_tensor(v) if not isinstance(v, Ragged | list) else v for n, v in columns.items()})
