"""The order in which rows are taken: endless, shuffled per epoch, and exact when resumed."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator
from functools import cached_property
from typing import Any

import torch
from torch import Tensor

from podium.core.batch import Batch, Ragged
from podium.core.errors import CheckpointError, ConfigError
from podium.core.seeding import derive_seed


class Loader:
    """Takes `rows_per_step` rows of the batch at each `next_batch()`, for ever.

    Epoch e has its own order, from `derive_seed(seed, "data", e)`. Every row is taken exactly once an epoch: where a
    step reaches the epoch's end it goes on with the next one's beginning, so no tail is dropped.

    Args:
        batch: the whole data set.
        rows_per_step: rows of a step; a multiple of `unit`.
        shuffle: a new order every epoch; else the data set's.
        unit: adjacent rows that stay together (2 for preference pairs).

    Raises ConfigError where the data set is smaller than a step or the sizes don't divide.
    """

    def __init__(self, batch: Batch, rows_per_step: int, *, shuffle: bool, seed: int, unit: int = 1) -> None:
        where = "batch.prompts_per_step"
        if len(batch) < rows_per_step:
            raise ConfigError(
                f"a step takes {rows_per_step} rows, the data set has {len(batch)}",
                where=where,
                remedy=f"set it to at most {len(batch) // unit}, or give more data",
            )
        if rows_per_step <= 0 or rows_per_step % unit or len(batch) % unit:
            raise ConfigError(f"{rows_per_step} rows a step of {len(batch)} cannot be cut into units of {unit}", where=where)
        self.batch, self.rows_per_step, self.shuffle, self.seed, self.unit = batch, rows_per_step, shuffle, seed, unit
        self._epoch, self._position = 0, 0  # position: units taken of this epoch
        self._order = self._order_of(0)

    @property
    def units(self) -> int:
        """Units in the data set."""
        return len(self.batch) // self.unit

    @property
    def epoch(self) -> float:
        """Passes over the data made so far."""
        return self._epoch + self._position / self.units

    def __iter__(self) -> Iterator[Batch]:
        while True:
            yield self.next_batch()

    def next_batch(self, rows: int | None = None) -> Batch:
        """The next `rows` rows (a multiple of `unit`); by default a step's.

        Over an epoch's end a pair may be among them twice: `pair_id` counts these rows' pairs, from 0.
        """
        wanted = (self.rows_per_step if rows is None else rows) // self.unit
        parts: list[Tensor] = []
        while wanted:
            if self._position == self.units:
                self._epoch, self._position = self._epoch + 1, 0
                self._order = self._order_of(self._epoch)
            part = self._order[self._position : self._position + wanted]
            parts.append(part)
            self._position += len(part)
            wanted -= len(part)
        units = torch.cat(parts)
        taken = self.batch.index((units[:, None] * self.unit + torch.arange(self.unit)).flatten())
        if self.unit == 1 or "pair_id" not in taken:
            return taken
        return taken.with_columns({"pair_id": torch.arange(len(units)).repeat_interleave(self.unit)})

    def state_dict(self) -> dict[str, Any]:
        """Plain values; those but `epoch` and `position` only serve to notice that the data or its order changed."""
        return {"epoch": self._epoch, "position": self._position, **self._identity()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Goes on exactly where `state` was taken. Raises CheckpointError where the data or its order is another."""
        for name, now in self._identity().items():
            if state.get(name, now) != now:
                what = f"the data's {name} is {now}, the checkpoint was made with {state[name]}"
                raise CheckpointError(
                    "the data's rows are others than those the checkpoint was made with" if name == "content" else what,
                    where="data",
                    remedy="resume with the same data and seed, or start a new run from the saved model",
                )
        self._epoch, self._position = int(state["epoch"]), int(state["position"])
        self._order = self._order_of(self._epoch)

    def _identity(self) -> dict[str, Any]:
        given = {"rows": len(self.batch), "seed": self.seed, "shuffle": self.shuffle, "unit": self.unit}
        return {**given, "content": self._content}

    @cached_property
    def _content(self) -> str:
        """A hash of the tokens and of what is said about them: as many other rows are another data set."""
        digest = hashlib.sha256()
        for name in ("prompt_ids", "response_ids", "label", "head"):
            if name in self.batch:
                _add(digest, self.batch[name])
        return digest.hexdigest()

    @cached_property
    def extras_digest(self) -> dict[str, str]:
        """A hash of each extra column (answers, test cases ...), by its name: rewards read them."""
        out = {}
        for name, values in self.batch.extras().items():
            digest = hashlib.sha256()
            _add(digest, values)
            out[name] = f"sha256 {digest.hexdigest()[:12]}"
        return out

    def _order_of(self, epoch: int) -> Tensor:
        if not self.shuffle:
            return torch.arange(self.units)
        generator = torch.Generator().manual_seed(derive_seed(self.seed, "data", epoch))
        return torch.randperm(self.units, generator=generator)


def _add(digest: Any, column: Any) -> None:
    """A column's content: tensors by their bytes, anything else as JSON."""
    if isinstance(column, Ragged):
        _add(digest, column.offsets)
        column = column.values
    if isinstance(column, Tensor):
        digest.update(column.cpu().contiguous().numpy().tobytes())
        return
    for value in column:
        digest.update(json.dumps(value, sort_keys=True, default=repr, ensure_ascii=False).encode() + b"\n")
