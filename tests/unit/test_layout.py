"""Boxes and layouts: against element-by-element sets."""

from __future__ import annotations

import itertools
import random

import pytest
import torch

from podium.engines.layout import Box, Layout, ModelParallel, Split, TensorShards, box_of, chunk, gathered_layout


def places(box: Box | None) -> set[tuple[int, ...]]:
    return set() if box is None else set(itertools.product(*map(range, box.start, box.stop)))


def random_box(draw: random.Random, shape: tuple[int, ...]) -> Box:
    cuts = [sorted(draw.sample(range(extent + 1), 2)) for extent in shape]
    return Box(tuple(a for a, _ in cuts), tuple(b for _, b in cuts))


@pytest.mark.parametrize("dims", [1, 2, 3])
def test_boxes_are_sets_of_places(dims: int) -> None:
    draw = random.Random(dims)
    for _ in range(300):
        shape = tuple(draw.randint(1, 5) for _ in range(dims))
        a, b = random_box(draw, shape), random_box(draw, shape)
        assert places(a & b) == places(a) & places(b)
        rest = a - b
        assert len(rest) <= 2 * dims
        assert sum(box.size for box in rest) == len(places(a) - places(b))  # so they don't overlap
        assert set().union(*map(places, rest)) == places(a) - places(b) if rest else places(a) <= places(b)


def test_a_scalar_is_one_place() -> None:
    box = Box.whole(())
    assert box.size == 1 and box & box == box and box - box == []


def test_a_box_within_a_local_tensor() -> None:
    whole = torch.arange(24).view(4, 6)
    outer, inner = Box((1, 2), (4, 6)), Box((2, 3), (3, 5))
    assert torch.equal(whole[1:4, 2:6][inner.within(outer)], whole[2:3, 3:5])


@pytest.mark.parametrize(("extent", "parts"), [(8, 2), (7, 2), (5, 4), (3, 4), (1, 3)])
def test_chunks_are_those_of_torch(extent: int, parts: int) -> None:
    want = [len(c) for c in torch.arange(extent).chunk(parts)]
    got = [b - a for a, b in (chunk(extent, parts, i) for i in range(parts))]
    assert got == want + [0] * (parts - len(want))


SHAPES = {
    "layers.0.self_attn.q_proj.weight": ((8, 6), torch.float32),
    "layers.0.self_attn.k_proj.weight": ((4, 6), torch.float32),
    "layers.0.self_attn.o_proj.weight": ((6, 8), torch.float32),
    "layers.1.norm.weight": ((7,), torch.bfloat16),
}


def split_of(name: str) -> Split | None:
    return {"q_proj": Split(0, 4), "k_proj": Split(0, 2), "o_proj": Split(1, 4)}.get(name.split(".")[-2])


def test_every_copy_of_a_layout_covers_the_model_once() -> None:
    for sizes in itertools.product([1, 2], [1, 2], [1, 2, 3], [1, 2]):
        made = ModelParallel(*sizes)
        layout = made.layout(SHAPES, split_of, lambda name, stages=sizes[0]: int(name.split(".")[1]) % stages)
        for name, tensor in layout.tensors.items():
            per_copy = made.ranks // made.data
            for copy in range(made.data):
                boxes = [box for box in tensor.boxes[copy * per_copy : (copy + 1) * per_copy] if box is not None]
                union = set().union(*map(places, boxes))
                assert union == places(Box.whole(tensor.shape))
                times = made.tensor if split_of(name) is None else 1
                assert sum(box.size for box in boxes) == times * len(union), (sizes, name)


def test_fewer_heads_than_ranks_are_held_by_several() -> None:
    boxes = ModelParallel(tensor=4).layout(SHAPES, split_of).tensors["layers.0.self_attn.k_proj.weight"].boxes
    assert [box and (box.start[0], box.stop[0]) for box in boxes] == [(0, 2), (0, 2), (2, 4), (2, 4)]


def test_uneven_shards_and_ranks_without_one() -> None:
    layout = ModelParallel(shard=5).layout({"norm": ((7,), torch.bfloat16)})
    assert [box and (box.start[0], box.stop[0]) for box in layout.tensors["norm"].boxes] == [
        (0, 2),
        (2, 4),
        (4, 6),
        (6, 7),
        None,
    ]
    assert [layout.bytes_of(rank) for rank in range(5)] == [4, 4, 4, 2, 0] and layout.total_bytes == 14


def test_placed_on_other_ranks() -> None:
    layout = ModelParallel(shard=3).layout({"w": ((3, 2), torch.float32)})
    moved = layout.placed([2, 0, 1])
    assert moved.tensors["w"].boxes[2] == layout.tensors["w"].boxes[0]
    assert moved.tensors["w"].boxes[0] == layout.tensors["w"].boxes[1]


def test_select_and_dtype() -> None:
    layout = ModelParallel(shard=2).layout(SHAPES)
    assert list(layout.select(["layers.1.norm.weight"]).tensors) == ["layers.1.norm.weight"]
    assert layout.as_dtype(torch.bfloat16).total_bytes * 2 == layout.as_dtype(torch.float32).total_bytes


def test_live_tensors_of_one_process_are_whole() -> None:
    tensors = {"a": torch.zeros(2, 3), "b": torch.zeros(())}
    assert box_of(tensors["a"]) == Box((0, 0), (2, 3))
    want = {name: TensorShards(tuple(t.shape), t.dtype, (Box.whole(t.shape),)) for name, t in tensors.items()}
    assert gathered_layout(tensors) == Layout(1, want)
