"""Hand-over plans: against brute force, element by element; and the formulas of HybridFlow's table 2."""

from __future__ import annotations

import itertools
import random
from fractions import Fraction

import pytest
import torch

from podium.core.errors import ConfigError
from podium.engines.layout import Box, Layout, ModelParallel, Split, TensorShards
from podium.hybrid.plan import Plan, make_plan, place_generation
from tests.unit.test_layout import places

HEADS, KV_HEADS, WIDTH, LAYERS = 8, 2, 4, 4


def model(layers: int = LAYERS, rows: int = 32, norms: bool = True) -> dict[str, tuple[tuple[int, ...], torch.dtype]]:
    """A small transformer's tensors: grouped key/value heads, norms that are whole everywhere, uneven vocabulary."""
    shapes: dict[str, tuple[tuple[int, ...], torch.dtype]] = {}
    for i in range(layers):
        shapes[f"layers.{i}.q_proj"] = ((HEADS * WIDTH, rows), torch.bfloat16)
        shapes[f"layers.{i}.o_proj"] = ((rows, HEADS * WIDTH), torch.bfloat16)
        if norms:
            shapes[f"layers.{i}.k_proj"] = ((KV_HEADS * WIDTH, rows), torch.bfloat16)
            shapes[f"layers.{i}.norm"] = ((rows,), torch.float32)
    if norms:
        shapes["layers.0.embed"] = ((37, rows), torch.bfloat16)
    return shapes


def split_of(name: str) -> Split | None:
    return {"q_proj": Split(0, HEADS), "k_proj": Split(0, KV_HEADS), "o_proj": Split(1, HEADS)}.get(name.split(".")[-1])


def layout(sizes: ModelParallel, shapes: dict[str, tuple[tuple[int, ...], torch.dtype]]) -> Layout:
    layers = 1 + max(int(name.split(".")[1]) for name in shapes)
    return sizes.layout(shapes, split_of, lambda name: int(name.split(".")[1]) * sizes.pipeline // layers)


def assert_right(plan: Plan) -> None:
    """Every element that a rank needs reaches it once, from a rank that holds it; only what it lacks is sent."""
    received = dict.fromkeys(range(plan.target.ranks), 0)
    got: dict[tuple[str, int], list[tuple[int, ...]]] = {}
    for transfer in (*plan.kept, *plan.sent):
        holds = plan.source.tensors[transfer.name].boxes[transfer.sender]
        assert places(transfer.box) <= places(holds)
        assert transfer.bytes == transfer.box.size * plan.target.tensors[transfer.name].dtype.itemsize
        got.setdefault((transfer.name, transfer.receiver), []).extend(places(transfer.box))
    for name, tensor in plan.target.tensors.items():
        for rank, box in enumerate(tensor.boxes):
            elements = got.get((name, rank), [])
            assert len(elements) == len(set(elements)) and set(elements) == places(box), (name, rank)
            have = plan.source.tensors[name].boxes[rank] if rank < plan.source.ranks else None
            received[rank] += len(places(box) - places(have)) * tensor.dtype.itemsize
    assert [plan.received_bytes(rank) for rank in received] == list(received.values())
    assert plan.total_bytes == sum(received.values()) == sum(plan.sent_bytes(rank) for rank in range(plan.source.ranks))
    assert all(transfer.sender != transfer.receiver for transfer in plan.sent)


SIZES = {
    "one": ModelParallel(),
    "fsdp 4": ModelParallel(shard=4),
    "fsdp 3": ModelParallel(shard=3),
    "tp 2": ModelParallel(tensor=2),
    "tp 4": ModelParallel(tensor=4),
    "tp 2 x dp 2": ModelParallel(tensor=2, data=2),
    "fsdp 2 x tp 2": ModelParallel(shard=2, tensor=2),
    "dp 4": ModelParallel(data=4),
    "fsdp 2 x dp 2": ModelParallel(shard=2, data=2),
    "pp 2 x tp 2": ModelParallel(pipeline=2, tensor=2),
    "pp 4": ModelParallel(pipeline=4),
}


@pytest.mark.parametrize(("a", "b"), list(itertools.product(SIZES, SIZES)))
def test_any_two_layouts_against_brute_force(a: str, b: str) -> None:
    shapes = model(layers=4, rows=6)
    assert_right(make_plan(layout(SIZES[a], shapes), layout(SIZES[b], shapes)))


@pytest.mark.parametrize("seed", range(20))
def test_boxes_drawn_at_random(seed: int) -> None:
    """Any boxes that cover the tensor together: overlapping, empty, of any shape."""
    draw = random.Random(seed)
    shape = tuple(draw.randint(1, 6) for _ in range(draw.randint(1, 3)))

    def box() -> Box | None:
        cuts = [sorted(draw.sample(range(extent + 1), 2)) for extent in shape]
        return None if draw.random() < 0.2 else Box(tuple(a for a, _ in cuts), tuple(b for _, b in cuts))

    holds = [box() for _ in range(draw.randint(0, 5))]
    missing = [Box.whole(shape)]
    for held in holds:
        missing = [rest for part in missing for rest in (part - held if held else [part])]
    holds += missing  # ranks that have the rest
    needs = [box() for _ in range(draw.randint(1, 6))]
    source = Layout(len(holds), {"w": TensorShards(shape, torch.float32, tuple(holds))})
    assert_right(make_plan(source, Layout(len(needs), {"w": TensorShards(shape, torch.bfloat16, tuple(needs))})))


def test_the_same_layout_moves_nothing() -> None:
    for sizes in SIZES.values():
        plan = make_plan(layout(sizes, model()), layout(sizes, model()))
        assert plan.sent == () and all(plan.redundant_bytes(rank) == 0 for rank in range(sizes.ranks))


def test_copies_share_the_sending() -> None:
    """Eight ranks hold everything, eight others need it: each of the first sends to about one."""
    shapes = {f"w{i}": ((4, 4), torch.float32) for i in range(32)}
    everything = ModelParallel(data=8).layout(shapes)
    boxes = (None,) * 8 + (Box.whole((4, 4)),) * 8
    target = Layout(16, {name: TensorShards(s, d, boxes) for name, (s, d) in shapes.items()})
    plan = make_plan(everything, target)
    assert max(plan.sent_bytes(rank) for rank in range(8)) == 32 * 64 == min(plan.sent_bytes(rank) for rank in range(8))


def test_what_nobody_holds_is_an_error() -> None:
    source = ModelParallel().layout({"w": ((4,), torch.float32)})
    holes = Layout(1, {"w": TensorShards((4,), torch.float32, (Box((0,), (3,)),))})
    with pytest.raises(ConfigError, match=r"no rank holds .*'w'"):
        make_plan(holes, source)
    with pytest.raises(ConfigError, match=r"needs 'w' of shape \[5\]; training has the shape \[4\]"):
        make_plan(source, ModelParallel().layout({"w": ((5,), torch.float32)}))
    with pytest.raises(ConfigError, match="no such tensor"):
        make_plan(source, ModelParallel().layout({"v": ((4,), torch.float32)}))


# ------------------------------------------------------------------ HybridFlow, table 2

# training p-t-d, generation p_g-t_g. The first is the paper's example (figure 8).
TABLE = [
    (1, 4, 2, 1, 2),
    (1, 4, 2, 1, 1),
    (1, 4, 2, 1, 4),
    (1, 8, 1, 1, 2),
    (1, 8, 1, 1, 1),
    (2, 4, 1, 1, 4),
    (2, 4, 1, 1, 2),
    (2, 4, 1, 2, 2),
    (2, 2, 2, 1, 2),
    (2, 2, 2, 1, 1),
    (4, 2, 1, 1, 2),
    (4, 2, 1, 2, 1),
    (4, 4, 1, 2, 2),
    (1, 2, 4, 1, 1),
]


@pytest.mark.parametrize(("p", "t", "d", "pg", "tg"), TABLE)
def test_hybridflows_formulas(p: int, t: int, d: int, pg: int, tg: int) -> None:
    """Per rank, as shares of the model: volume (d_g - 1) / tp, peak 1 / (t_g p_g), redundancy 0."""
    shapes = model(norms=False)
    training = layout(ModelParallel(pipeline=p, tensor=t, data=d), shapes)
    dg = p * t // (pg * tg)
    wanted = layout(ModelParallel(pipeline=pg, tensor=tg, data=dg * d), shapes)
    placed, rank_of = place_generation(training, wanted)
    assert sorted(rank_of) == list(range(p * t * d))
    plan = make_plan(training, placed)
    whole = training.total_bytes
    for rank in range(p * t * d):
        assert Fraction(plan.received_bytes(rank), whole) == Fraction(dg - 1, t * p)
        assert Fraction(plan.peak_bytes(rank), whole) == Fraction(1, tg * pg)
        assert plan.redundant_bytes(rank) == 0


def test_the_papers_example_beside_a_full_gather() -> None:
    """1-4-2 to 1-2-2-2: a quarter of the model to each rank; gathering it whole from ZeRO shards takes 7/8."""
    shapes = model(norms=False)
    training = layout(ModelParallel(tensor=4, data=2), shapes)
    plan = make_plan(training, place_generation(training, layout(ModelParallel(tensor=2, data=4), shapes))[0])
    assert {Fraction(plan.received_bytes(rank), training.total_bytes) for rank in range(8)} == {Fraction(1, 4)}
    gather = make_plan(ModelParallel(shard=8).layout(shapes), ModelParallel(data=8).layout(shapes))
    assert {Fraction(gather.received_bytes(rank), training.total_bytes) for rank in range(8)} == {Fraction(7, 8)}


def test_without_choosing_ranks_more_would_move() -> None:
    """Generation ranks in their usual order (0, 1 | 2, 3): half of them would hold shards that they cannot use."""
    shapes = model(norms=False)
    training, usual = layout(ModelParallel(tensor=4), shapes), layout(ModelParallel(tensor=2, data=2), shapes)
    placed, rank_of = place_generation(training, usual)
    assert rank_of == [0, 2, 1, 3]  # the paper's: generation's copies are {0, 2} and {1, 3}
    assert make_plan(training, placed).total_bytes < make_plan(training, usual).total_bytes


@pytest.mark.parametrize("seed", range(12))
def test_placement_keeps_the_most_that_any_can(seed: int) -> None:
    draw = random.Random(seed)
    names = [name for name, sizes in SIZES.items() if sizes.ranks == 4]
    a, b = draw.choice(names), draw.choice(names)
    shapes = model(layers=4, rows=6)
    training, wanted = layout(SIZES[a], shapes), layout(SIZES[b], shapes)
    order = draw.sample(range(4), 4)
    training = training.placed(order)
    best = min(make_plan(training, wanted.placed(list(p))).total_bytes for p in itertools.permutations(range(4)))
    assert make_plan(training, place_generation(training, wanted)[0]).total_bytes == best, (a, b, order)


def test_other_numbers_of_ranks_are_not_placed() -> None:
    shapes = model()
    with pytest.raises(ConfigError, match="training has 2 ranks and generation 4"):
        place_generation(layout(SIZES["tp 2"], shapes), layout(SIZES["tp 4"], shapes))
