"""Which rows read the same pages first, so that decode attention reads those pages once for all of them (cascade)."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch

from podium.engines.rollout.native.paged_cache import to_device
from podium.engines.rollout.native.paged_scheduler import Row
from podium.engines.rollout.native.pages import PagePool

# Queries of one product in the shared part: fp32 has no registers for more.
_TILE_QUERIES, _TILE_QUERIES_FP32 = 64, 16
# A shared start shorter than this is read by each row: one more part to merge costs as much.
_LEAST_KEYS = 256
# The least share of all keys that must be saved.
_LEAST_SAVED = 0.25
# Programs of the shared part: enough for a large GPU; a part is never shorter than 256 keys.
_PROGRAMS = 512
_MOST_SPLITS = 16


class Tiles:
    """Rows that share their start, in tiles of up to `height`: `rows [T, height]` (-1: none), `keys [T]` (how many keys
    they share; 0: no tile), and for each row `skip [slots]`, where its own keys begin. All int32; they never move.

    Args:
        group: query heads of a key head. Where it is so large that a tile is one row, nothing is shared.
        dtype: of the cache.
    """

    def __init__(self, slots: int, group: int, dtype: torch.dtype, device: torch.device) -> None:
        self.device = device
        queries = _TILE_QUERIES_FP32 if dtype == torch.float32 else _TILE_QUERIES
        self.height = max(1, queries // (1 << (group - 1).bit_length()))
        self.rows = torch.full((slots, self.height), -1, dtype=torch.int32, device=device)
        self.keys = torch.zeros(slots, dtype=torch.int32, device=device)
        self.skip = torch.zeros(slots, dtype=torch.int32, device=device)

    def set(self, groups: list[tuple[int, list[int]]]) -> int:
        """Sends groups (keys shared, rows) to the device; how many tiles they make."""
        tiles = [(keys, rows[at : at + self.height]) for keys, rows in groups for at in range(0, len(rows), self.height)]
        table = np.full(self.rows.shape, -1, dtype=np.int32)
        counts, skip = np.zeros(len(self.keys), dtype=np.int32), np.zeros(len(self.skip), dtype=np.int32)
        for tile, (keys, rows) in enumerate(tiles):
            table[tile, : len(rows)] = rows
            counts[tile] = keys
            skip[rows] = keys
        for tensor, values in ((self.rows, table), (self.keys, counts), (self.skip, skip)):
            tensor.copy_(to_device(values, self.device))
        return len(tiles)


@dataclass(frozen=True)
class Shared:
    """The first `count` tiles (a power of two; some may be empty), each one's keys in `splits` parts. Part of a graph's
    key; what is in the tiles may change under the graph.
    """

    tiles: Tiles
    count: int
    splits: int


class SharingPlan:
    """Keeps the tiles up to date with the running rows."""

    def __init__(self, tiles: Tiles) -> None:
        self.tiles = tiles
        self._rows: list[Row] = []
        self._groups: list[tuple[int, list[int]]] = []
        self._count = 0

    def of(self, rows: list[Row], pool: PagePool, kv_heads: int) -> Shared | None:
        """How these rows (row i in slot i) are to read what they share; None where it does not pay."""
        if rows != self._rows:
            self._rows = list(rows)
            groups = groups_of(rows, pool)
            self._groups = groups if self._pays(groups, rows) else []
            self._count = self.tiles.set(self._groups) if self._groups else 0
        if not self._groups:
            return None
        count = min(1 << (self._count - 1).bit_length(), len(self.tiles.keys))
        longest, splits = max(keys for keys, _ in self._groups), 1
        while splits < _MOST_SPLITS and 2 * splits * count * kv_heads <= _PROGRAMS and splits * _LEAST_KEYS < longest:
            splits *= 2
        return Shared(self.tiles, count, splits)

    def own_lengths(self, steps: int) -> list[int]:
        """The keys that each of these rows reads for itself after so many steps, at most."""
        lengths = [row.reach + steps for row in self._rows]
        for keys, slots in self._groups:
            for slot in slots:
                lengths[slot] -= keys
        return lengths

    def _pays(self, groups: list[tuple[int, list[int]]], rows: list[Row]) -> bool:
        height = self.tiles.height
        saved = sum(keys * (len(slots) - -(-len(slots) // height)) for keys, slots in groups)
        return saved > 0 and saved >= _LEAST_SAVED * sum(row.reach for row in rows)


def groups_of(rows: list[Row], pool: PagePool) -> list[tuple[int, list[int]]]:
    """Rows that hold the same shared page last: (keys up to its end, their slots)."""
    found: dict[int, tuple[int, list[int]]] = {}
    for slot, row in enumerate(rows):
        depth = pool.shared(row.pages)
        if depth * pool.size >= _LEAST_KEYS:
            found.setdefault(row.pages[depth - 1], (depth * pool.size, []))[1].append(slot)
    return [(keys, slots) for keys, slots in found.values() if len(slots) > 1]
