"""A decode step for a batch: run directly, or recorded once per size as a CUDA graph and replayed.

A graph holds addresses: of the parameters (updated in place), the row state (never moved), and scratch memory that all
graphs share. The cache is found through the device (`PagedCache`), so it may come and go.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import cache
from types import ModuleType

import torch
from torch import Tensor

from podium.engines.rollout.native.looks import Draws, draw
from podium.engines.rollout.native.paged_cache import PagedCache, RowState
from podium.engines.rollout.native.passes import DecodePass, FusedForward, ModuleForward
from podium.engines.rollout.native.sharing import Shared

# Programs of decode attention: so many run at once on a large GPU. Many rows of very different lengths are cut finer.
_PROGRAMS, _UNEVEN_PROGRAMS = 512, 1024
_MOST_SPLITS = 64
# Graphs that are kept; the one used longest ago makes room. A run of requests of many lengths has some dozens.
_MOST_GRAPHS = 256


def bucket_of(rows: int, most: int) -> int:
    """The size of batch that so many rows run in: a power of two or one of three steps between two."""
    if rows >= most:
        return most
    power = 1 << (rows - 1).bit_length()
    quarter = max(1, power // 8)
    return min(most, max(8, -(-rows // quarter) * quarter))


def splits_of(rows: int, kv_heads: int, lengths: Sequence[int]) -> int:
    """How many parts a row's keys are cut into, at most (a power of two); a part is never shorter than 256 keys."""
    longest = max(lengths)
    pairs = rows * kv_heads
    wanted = _PROGRAMS // pairs
    if longest * len(lengths) > 1.5 * sum(lengths) and 2 * pairs >= _PROGRAMS:
        wanted = max(2, _UNEVEN_PROGRAMS // pairs)
    splits = 1
    while splits < min(wanted, _MOST_SPLITS) and splits * 256 < longest:
        splits *= 2
    return splits


@dataclass(frozen=True)
class Shape:
    """What one recording is for: the first `rows` rows, attention in `splits` parts, what is shared, how tokens are drawn."""

    rows: int
    splits: int
    shared: Shared | None = None
    draws: Draws = field(default_factory=Draws)


@cache
def _recording_stream(device: int) -> torch.cuda.Stream:
    """One for all recordings: cuBLAS keeps a workspace (32 MiB on Hopper) for every stream that it has ever worked on."""
    return torch.cuda.Stream(device)


class DecodeStep:
    """`step(shape)`: one token for each of the shape's rows.

    Args:
        graphs: record and replay (CUDA); otherwise each call runs as it is written.
    """

    def __init__(
        self, forward: FusedForward | ModuleForward, logits: Callable[[Tensor], Tensor], ops: ModuleType, cache: PagedCache,
        state: RowState, *, graphs: bool,
    ) -> None:  # fmt: skip
        self.forward, self.logits, self.ops, self.cache, self.state = forward, logits, ops, cache, state
        self.graphs = graphs
        self._recorded: dict[Shape, torch.cuda.CUDAGraph] = {}
        self._pool = torch.cuda.graph_pool_handle() if graphs else None

    def __call__(self, shape: Shape) -> None:
        if not self.graphs:
            self._run(shape)
            return
        graph = self._recorded.pop(shape, None)
        if graph is None:
            if len(self._recorded) >= _MOST_GRAPHS:
                torch.cuda.synchronize()  # it may be running
                self._recorded.pop(next(iter(self._recorded)))
            graph = self._record(shape)
        self._recorded[shape] = graph  # last, as it was used last
        graph.replay()

    def _run(self, shape: Shape) -> None:
        step = DecodePass(self.ops, self.cache, self.state, shape.rows, shape.splits, shape.shared)
        slots = self.state.all_slots[: shape.rows]
        draw(self.ops, self.logits(self.forward(step)), slots, slots, self.state, shape.draws)

    def _record(self, shape: Shape) -> torch.cuda.CUDAGraph:
        # Kernels are compiled and libraries set up by a run on which no row is active: it changes nothing.
        live = self.state.live.clone()
        self.state.active.zero_()
        side = _recording_stream(torch.cuda.current_device())
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            self._run(shape)
        torch.cuda.current_stream().wait_stream(side)
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, pool=self._pool, stream=side, capture_error_mode="thread_local"):
            self._run(shape)
        self.state.live.copy_(live)
        return graph
