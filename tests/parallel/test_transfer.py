"""Collectives, messages that are not copied and messages that are: the same bits, between three ranks."""

from __future__ import annotations

from typing import Any
from unittest.mock import patch

import pytest
import torch
from torch import Tensor

from podium.engines.layout import Layout, ModelParallel, Split
from podium.hybrid import gathers, transfer
from podium.hybrid.gathers import Gather, GatherStep, gathered_names
from podium.hybrid.plan import Plan, make_plan
from podium.hybrid.transfer import Moved, Transport
from podium.hybrid.verify import mismatched_tensors
from podium.models.storage import by_columns
from tests.parallel.processes import on_ranks

pytestmark = pytest.mark.timeout(200)

RANKS = 3
SHAPES: dict[str, tuple[int, ...]] = {
    "even": (12, 8),
    "uneven": (10, 8),
    "by_columns": (9, 6),
    "cut": (6, 12),
    "deep": (6, 4, 5),
    "vector": (9,),
    "short": (2,),  # the last rank has none of it
}
GATHERED = {"even", "by_columns", "deep", "vector"}
TARGETS = ("whole", "cut", "one")
# Everything by itself; the small ones together; all together; in pieces.
WAYS = [(1, 1 << 20), (100, 1 << 20), (1 << 30, 1 << 20), (50, 64)]


def split_of(name: str) -> Split | None:
    return Split(dim=1) if name == "cut" else None


def planned(kind: str, trained: torch.dtype, dtype: torch.dtype, ranks: int = RANKS) -> Plan:
    source = ModelParallel(shard=ranks).layout({name: (shape, trained) for name, shape in SHAPES.items()})
    sizes = {"whole": ModelParallel(data=ranks), "cut": ModelParallel(tensor=ranks), "one": ModelParallel()}
    return make_plan(source, sizes[kind].layout({name: (shape, dtype) for name, shape in SHAPES.items()}, split_of))


def whole(version: int, dtype: torch.dtype) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(version)
    return {name: torch.randn(shape, generator=generator).to(dtype) for name, shape in SHAPES.items()}


def local(values: dict[str, Tensor], layout: Layout, rank: int) -> dict[str, Tensor]:
    """What a rank holds of these values, in memory of its own."""
    out = {}
    for name, shards in layout.tensors.items():
        box = shards.boxes[rank] if rank < layout.ranks else None
        if box is not None:
            out[name] = values[name][tuple(map(slice, box.start, box.stop))].clone()
    return out


def moves(rank: int, plan: Plan, way: tuple[int, int], device: str) -> Moved:
    """Two hand-overs, and one after each kind of step was measured alone: every bit is right."""
    trained, dtype = (layout.tensors["even"].dtype for layout in (plan.source, plan.target))
    held = {name: t.to(device) for name, t in local(whole(0, trained), plan.source, rank).items()}
    wanted = {name: t.to(device, dtype) for name, t in local(whole(0, trained), plan.target, rank).items()}
    if "by_columns" in wanted:
        wanted["by_columns"] = by_columns(wanted["by_columns"])
    alone, bucket_bytes = way
    with (
        patch.object(transfer, "ALONE_BYTES", alone),
        patch.object(gathers, "GROUP_BYTES", bucket_bytes),
        patch.object(transfer, "_can_gather", lambda *_: True),  # as with NCCL
    ):
        transport = Transport(plan, rank, held, wanted, bucket_bytes=bucket_bytes)
    for version in (1, 2, 3):
        for name, value in local(whole(version, trained), plan.source, rank).items():
            held[name].copy_(value)
        for value in wanted.values():
            value.fill_(torch.nan)
        if version == 3:
            for part in transport.parts().values():
                part()
        moved = transport.run()
        for name, value in local(whole(version, trained), plan.target, rank).items():
            assert torch.equal(wanted[name].cpu(), value.to(dtype)), (name, version, way)
    assert not mismatched_tensors(plan, rank, held, wanted)
    assert (moved.sent, moved.received) == (plan.sent_bytes(rank), plan.received_bytes(rank))
    assert moved.copied == sum(t.bytes for t in plan.kept if t.receiver == rank)
    launches = [step for step in transport._steps if isinstance(step, GatherStep)]
    names = gathered_names(plan)
    assert sum(len(step.gathers) for step in launches) == len(names)
    return moved


def every_way(rank: int, ranks: int, device: str = "cpu") -> dict[str, list[Moved]]:
    out = {}
    for kind in TARGETS:
        for trained, dtype in ((torch.bfloat16,) * 2, (torch.float32, torch.bfloat16), (torch.float32,) * 2):
            plan = planned(kind, trained, dtype, ranks)
            out[f"{kind} {trained} {dtype}"] = [moves(rank, plan, way, device) for way in WAYS]
    return out


def check(ranks: list[dict[str, list[Moved]]]) -> None:
    """Of all ranks: what is sent is received, and fewer messages are sent where they go together."""
    for name in ranks[0]:
        ways: list[tuple[Any, ...]] = list(zip(*(rank[name] for rank in ranks), strict=True))
        assert len(ways) == len(WAYS)
        assert all(sum(m.sent for m in way) == sum(m.received for m in way) > 0 for way in ways)
        alone, _, together, _ = (sum(m.messages for m in way) for way in ways)
        assert alone > together, name


def test_every_way_gives_the_same_bits_and_counts() -> None:
    check(on_ranks(every_way, RANKS, RANKS, timeout=100))


def test_what_every_rank_needs_and_has_an_equal_part_of_is_gathered() -> None:
    plan = planned("whole", torch.float32, torch.bfloat16)
    # Uneven rows and columns that are cut are not.
    assert set(gathered_names(plan)) == GATHERED | {"cut"}
    assert set(gathered_names(planned("cut", torch.float32, torch.bfloat16))) == GATHERED
    assert gathered_names(planned("one", torch.float32, torch.bfloat16)) == []
    source = plan.source.placed([1, 0, 2])  # parts in another order than the ranks
    assert gathered_names(make_plan(source, plan.target)) == []


def test_a_gather_brings_just_what_a_rank_lacks() -> None:
    plan = planned("whole", torch.float32, torch.bfloat16)
    for rank in range(RANKS):
        for name in gathered_names(plan):
            box = plan.source.tensors[name].boxes[rank]
            full = torch.zeros(SHAPES[name], dtype=torch.bfloat16)
            assert box is not None
            own = full[tuple(map(slice, box.start, box.stop))]
            gather = GatherStep([Gather(own.float(), full, own)], RANKS)
            assert gather.received == sum(t.bytes for t in plan.sent if t.receiver == rank and t.name == name)
            assert gather.sent == sum(t.bytes for t in plan.sent if t.sender == rank and t.name == name)


def test_a_launch_has_one_dtype_and_a_limit() -> None:
    wholes = [
        torch.zeros(size, dtype=dtype)
        for size, dtype in zip((60, 40, 10, 300), (torch.float32, torch.bfloat16) * 2, strict=True)
    ]
    with patch.object(gathers, "GROUP_BYTES", 280):
        steps = gathers.gather_steps([Gather(whole[:10], whole, whole[:10]) for whole in wholes], RANKS)
    assert [[len(gather.whole) for gather in step.gathers] for step in steps] == [[40], [300], [60, 10]]
