"""Where every shard of every tensor lives: which rank holds which box of it."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from math import prod
from typing import Any

import torch
from torch import Tensor

Shape = tuple[int, ...]


@dataclass(frozen=True)
class Box:
    """A block of a tensor: `start` to `stop` (exclusive) in every dimension, in places of the whole tensor."""

    start: Shape
    stop: Shape

    @classmethod
    def whole(cls, shape: Sequence[int]) -> Box:
        return cls((0,) * len(shape), tuple(shape))

    @property
    def shape(self) -> Shape:
        return tuple(b - a for a, b in zip(self.start, self.stop, strict=True))

    @property
    def size(self) -> int:
        """Elements."""
        return prod(self.shape)

    def __and__(self, other: Box) -> Box | None:
        """What both have; None for nothing."""
        start = tuple(map(max, self.start, other.start))
        stop = tuple(map(min, self.stop, other.stop))
        return Box(start, stop) if all(a < b for a, b in zip(start, stop, strict=True)) else None

    def __sub__(self, other: Box) -> list[Box]:
        """What this one has and the other has not, as boxes that do not overlap: at most two for each dimension."""
        common = self & other
        if common is None:
            return [self]
        left: list[Box] = []
        start, stop = list(self.start), list(self.stop)
        for dim in range(len(start)):
            if start[dim] < common.start[dim]:
                left.append(Box(tuple(start), (*stop[:dim], common.start[dim], *stop[dim + 1 :])))
            if common.stop[dim] < stop[dim]:
                left.append(Box((*start[:dim], common.stop[dim], *start[dim + 1 :]), tuple(stop)))
            start[dim], stop[dim] = common.start[dim], common.stop[dim]
        return left

    def within(self, outer: Box) -> tuple[slice, ...]:
        """Where this box lies in a local tensor that holds `outer`."""
        return tuple(slice(a - o, b - o) for a, b, o in zip(self.start, self.stop, outer.start, strict=True))


@dataclass(frozen=True)
class TensorShards:
    """A tensor's shape and dtype, and the box that each rank holds: `boxes [ranks]`, None for nothing."""

    shape: Shape
    dtype: torch.dtype
    boxes: tuple[Box | None, ...]

    def bytes_of(self, box: Box | None) -> int:
        return 0 if box is None else box.size * self.dtype.itemsize


@dataclass(frozen=True)
class Layout:
    """A model's tensors by name over `ranks` ranks."""

    ranks: int
    tensors: Mapping[str, TensorShards]

    def select(self, names: Iterable[str]) -> Layout:
        """Only these tensors (the adapter's, where the rest never changes)."""
        return replace(self, tensors={name: self.tensors[name] for name in names})

    def placed(self, rank_of: Sequence[int]) -> Layout:
        """The same shards on other ranks: what rank `i` has here goes to `rank_of[i]`."""
        position = {rank: i for i, rank in enumerate(rank_of)}
        order = [position[rank] for rank in range(self.ranks)]
        tensors = {name: replace(tensor, boxes=tuple(tensor.boxes[i] for i in order)) for name, tensor in self.tensors.items()}
        return replace(self, tensors=tensors)

    def as_dtype(self, dtype: torch.dtype) -> Layout:
        """The same boxes in another dtype."""
        return replace(self, tensors={name: replace(tensor, dtype=dtype) for name, tensor in self.tensors.items()})

    def bytes_of(self, rank: int) -> int:
        """Bytes of all shards of a rank."""
        return sum(tensor.bytes_of(tensor.boxes[rank]) for tensor in self.tensors.values())

    @property
    def total_bytes(self) -> int:
        """Bytes of the model, each element once."""
        return sum(prod(tensor.shape) * tensor.dtype.itemsize for tensor in self.tensors.values())


# ------------------------------------------------------------------ layouts from sizes


@dataclass(frozen=True)
class Split:
    """How tensor parallelism cuts a tensor: along `dim`, in `units` that are not cut (heads); None: single rows.

    With fewer units than ranks (grouped KV heads) each unit is held by several ranks.
    """

    dim: int
    units: int | None = None


def chunk(extent: int, parts: int, index: int) -> tuple[int, int]:
    """The borders of part `index` as `torch.chunk` cuts: equal parts, the last ones smaller or empty."""
    size = -(-extent // parts)
    return min(index * size, extent), min((index + 1) * size, extent)


@dataclass(frozen=True)
class ModelParallel:
    """Sizes of a layout: pipeline stages, tensor parallel, FSDP shards (dimension 0 of what tensor parallelism left), copies.

    rank = ((data * pipeline + stage) * shard + s) * tensor + t: the ranks of one copy of the model are consecutive.
    """

    pipeline: int = 1
    tensor: int = 1
    shard: int = 1
    data: int = 1

    @property
    def ranks(self) -> int:
        return self.pipeline * self.tensor * self.shard * self.data

    def layout(
        self,
        shapes: Mapping[str, tuple[Shape, torch.dtype]],
        split_of: Callable[[str], Split | None] = lambda name: None,
        stage_of: Callable[[str], int] = lambda name: 0,
    ) -> Layout:
        """Args:
        shapes: of the whole tensors, by name.
        split_of: how tensor parallelism cuts a tensor; None: every rank has it whole.
        stage_of: the pipeline stage that has a tensor.
        """
        tensors = {}
        for name, (shape, dtype) in shapes.items():
            boxes = tuple(self._box(rank, shape, split_of(name), stage_of(name)) for rank in range(self.ranks))
            tensors[name] = TensorShards(tuple(shape), dtype, boxes)
        return Layout(self.ranks, tensors)

    def _box(self, rank: int, shape: Shape, split: Split | None, stage: int) -> Box | None:
        rank, t = divmod(rank, self.tensor)
        rank, s = divmod(rank, self.shard)
        if rank % self.pipeline != stage:
            return None
        start, stop = [0] * len(shape), list(shape)
        if split is not None:
            units = split.units or shape[split.dim]
            first, last = chunk(units, self.tensor, t) if units >= self.tensor else _shared_unit(units, self.tensor, t)
            width = shape[split.dim] // units
            start[split.dim], stop[split.dim] = first * width, last * width
        if self.shard > 1 and shape:
            first, last = chunk(stop[0] - start[0], self.shard, s)
            start[0], stop[0] = start[0] + first, start[0] + last
        box = Box(tuple(start), tuple(stop))
        return box if box.size else None


def _shared_unit(units: int, parts: int, index: int) -> tuple[int, int]:
    unit = index * units // parts
    return unit, unit + 1


# ------------------------------------------------------------------ layouts of live tensors


def local_of(tensor: Tensor) -> Tensor:
    """This rank's part of a (possibly distributed) tensor: the same memory."""
    to_local = getattr(tensor, "to_local", None)
    return tensor if to_local is None else to_local()


def box_of(tensor: Tensor) -> Box | None:
    """The box that this rank holds; None for nothing. A plain tensor is whole."""
    if not hasattr(tensor, "placements"):
        return Box.whole(tensor.shape)
    from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

    distributed: Any = tensor
    shape, offset = compute_local_shape_and_global_offset(distributed.shape, distributed.device_mesh, distributed.placements)
    box = Box(tuple(offset), tuple(o + n for o, n in zip(offset, shape, strict=True)))
    return box if box.size else None


def gathered_layout(tensors: Mapping[str, Tensor], group: Any = None) -> Layout:
    """The layout of live tensors over the ranks of a process group (the default one), by asking all of them: collective."""
    import torch.distributed as dist

    mine = {name: box_of(tensor) for name, tensor in tensors.items()}
    everyone: list[Any] = [mine]
    if dist.is_initialized() and dist.get_world_size(group) > 1:
        everyone = [None] * dist.get_world_size(group)
        dist.all_gather_object(everyone, mine, group=group)
    shards = {
        name: TensorShards(tuple(tensor.shape), tensor.dtype, tuple(boxes[name] for boxes in everyone))
        for name, tensor in tensors.items()
    }
    return Layout(len(everyone), shards)
