"""Hand-overs between ranks: live engines' weights into generation layouts, bit for bit, the bytes as planned."""

from __future__ import annotations

from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from podium.algorithms import supervised_loss
from podium.core.errors import DeadlineError, RolloutError
from podium.core.settings import LoraSettings, OptimizerSettings
from podium.engines.layout import Layout, ModelParallel, box_of
from podium.engines.train import SingleDeviceEngine, create_train_engine
from podium.engines.train.sharded import ShardedEngine
from podium.engines.train.single import own_tensors
from podium.engines.train.tensor_parallel import split_of
from podium.hybrid import same_device, transfer
from podium.hybrid.engine import MovedHandOver, SharedHandOver, hand_over_between, whole_on_every_rank
from podium.hybrid.plan import make_plan, place_generation
from podium.models.heads import ActorModel
from tests.parallel.processes import context_of, on_ranks, once
from tests.properties.test_train_invariance import shared_rows
from tests.tiny import tiny_model

pytestmark = pytest.mark.timeout(900)  # of the test that waits for the processes, on a busy machine

SOURCES = [{"data": 2}, {"shard": 2}, {"tensor": 2}, {"sequence": 2}]
FOUR_SOURCES = [{"shard": 4}, {"shard": 2, "tensor": 2}, {"data": 2, "shard": 2}, {"data": 2, "tensor": 2}]
TARGETS = {2: [ModelParallel(data=2), ModelParallel(tensor=2)]}
TARGETS[4] = [ModelParallel(data=4), ModelParallel(tensor=2, data=2), ModelParallel(tensor=4), ModelParallel(shard=3)]
# Widths that do not divide by 4 and a vocabulary that does not by 2; grouped key/value heads; norms of single heads.
MODEL = {"vocab_size": 509, "num_attention_heads": 4, "num_key_value_heads": 2, "intermediate_size": 124}


def model(dtype: torch.dtype = torch.float32) -> Any:
    return tiny_model("qwen3", dtype=dtype, **MODEL)


def engine_of(rank: int, sizes: dict[str, int], dtype: torch.dtype = torch.float32) -> ShardedEngine:
    context = context_of(rank, **sizes)
    return ShardedEngine(ActorModel(model(dtype)), context=context, optimizer=OptimizerSettings(lr=1e-2))


def generation_layout(target: ModelParallel, source: Layout, dtype: torch.dtype) -> Layout:
    shapes = {name: (tensor.shape, dtype) for name, tensor in source.tensors.items()}
    made = target.layout(shapes, split_of)
    return place_generation(source, made)[0] if target.ranks == source.ranks else made


def update(engine: ShardedEngine) -> None:
    rows = shared_rows()
    engine.update(rows.index(torch.arange(engine.context.data_rank, len(rows), engine.context.data_size)), supervised_loss())


def check_pair(engine: ShardedEngine, whole: dict[str, Tensor], target: ModelParallel, dtype: torch.dtype) -> dict[str, int]:
    """Moves into a generation layout, twice; what each rank then holds is the slice of the whole weights."""
    rank = engine.context.rank
    source = engine.layout()
    layout = generation_layout(target, source, dtype)
    mine: dict[str, Tensor] = {}
    for name, tensor in layout.tensors.items():
        box = tensor.boxes[rank] if rank < layout.ranks else None
        mine[name] = torch.full(box.shape if box else (0,), torch.nan, dtype=dtype)
    # Some transfers are larger than a bucket, some go alone, some together; some tensors are gathered, as with NCCL.
    with patch.object(transfer, "ALONE_BYTES", 2000), patch.object(transfer, "_can_gather", lambda *_: True):
        hand_over = MovedHandOver(engine.tensors(), mine, rank=rank, target_layout=layout, bucket_bytes=5000)
    assert hand_over.plan == make_plan(source, layout)
    for version in (1, 2):
        for value in mine.values():
            value.fill_(torch.nan)
        moved = hand_over(version).moved
        for name, tensor in layout.tensors.items():
            box = tensor.boxes[rank] if rank < layout.ranks else None
            if box is not None:
                want = whole[name][tuple(slice(a, b) for a, b in zip(box.start, box.stop, strict=True))]
                assert torch.equal(mine[name], want.to(dtype)), name
        assert moved.received == hand_over.plan.received_bytes(rank) and moved.sent == hand_over.plan.sent_bytes(rank)
    return {"received": moved.received, "sent": moved.sent, "messages": moved.messages}


def every_pair(rank: int, sources: list[dict[str, int]], ranks: int) -> dict[str, Any]:
    out = {}
    for sizes in sources:
        for dtype in (torch.float32, torch.bfloat16):
            engine = engine_of(rank, sizes)
            update(engine)
            whole = [engine.state_dict()["model"]]
            dist.broadcast_object_list(whole)
            for target in TARGETS[ranks]:
                out[f"{sizes} -> {target} {dtype}"] = check_pair(engine, whole[0], target, dtype)
    return out


def two_ranks(rank: int) -> dict[str, Any]:
    out = {"pairs": every_pair(rank, SOURCES, 2)}
    for check in (into_modules, of_an_adapter, of_shared_memory, that_is_tampered_with, on_one_device, that_waits):
        out[check.__name__] = check(rank)
    return out


def into_modules(rank: int) -> Any:
    """FSDP and TP engines into a module that generates, before and after updates: log-probs agree with training's."""
    out = {}
    for axis in ("shard", "tensor"):
        engine, generating = engine_of(rank, {axis: 2}, torch.bfloat16), model(torch.bfloat16)
        reader = SingleDeviceEngine(ActorModel(generating))

        def canary(engine: Any = engine, reader: Any = reader) -> tuple[Tensor, Tensor]:
            both = [each.compute(shared_rows(), ("log_probs",))["log_probs"].values for each in (engine, reader)]
            return both[0], both[1]

        hand_over = hand_over_between(engine, generating, canary=canary, canary_every=1, canary_tolerance=0.2)
        for _ in range(2):
            update(engine)
            report = hand_over(engine.policy_version)
            assert report.version == engine.policy_version
        trained, own = canary()
        out[axis] = float((trained - own).abs().mean()), report.moved.received
    return out


def of_an_adapter(rank: int) -> Any:
    from podium.models.adapters import add_lora

    trained, generating = model(), tiny_model("qwen3", seed=9, **MODEL)
    for each in (trained, generating):
        torch.manual_seed(rank)
        add_lora(each, LoraSettings(rank=4, target_modules=["q_proj"]))
    engine = ShardedEngine(ActorModel(trained), context=context_of(rank, shard=2), optimizer=OptimizerSettings(lr=1e-2))
    hand_over = hand_over_between(engine, generating)
    update(engine)
    report = hand_over(1)
    adapter = sum(p.numel() for p in generating.parameters() if p.requires_grad)
    whole = [engine.state_dict()["model"]]
    dist.broadcast_object_list(whole)
    same = all(
        torch.equal(value, whole[0]["model." + name]) for name, value in generating.named_parameters() if value.requires_grad
    )
    base = all(
        torch.equal(value, model().get_parameter(name.replace(".base_layer", "")))
        for name, value in generating.named_parameters()
        if not value.requires_grad
    )
    return report.moved.received, adapter, same, base


def of_shared_memory(rank: int) -> Any:
    """Copies of the whole model generate with the very weights that train: nothing crosses, nothing is copied."""
    inner = model()
    engine = create_train_engine("ddp", ActorModel(inner), context=context_of(rank, data=2), optimizer=OptimizerSettings())
    hand_over = hand_over_between(engine, inner)
    assert isinstance(hand_over, SharedHandOver)
    update(engine)
    return vars(hand_over(1).moved)


def that_is_tampered_with(rank: int) -> Any:
    engine, generating = engine_of(rank, {"shard": 2}), model()
    hand_over = hand_over_between(engine, generating)
    hand_over(1)
    if rank == 1:
        with torch.no_grad():
            generating.model.layers[1].mlp.up_proj.weight[3, 5] += 1e-6
    try:
        hand_over.check()
    except RolloutError as error:
        return str(error)
    return None


def on_one_device(rank: int) -> Any:
    """Processes that share a device, played by the CPU's shared memory: weights are read where they lie."""
    torch.multiprocessing.set_sharing_strategy("file_system")
    places, same_device.place_of = same_device.place_of, lambda _: ("here", "gpu", 0)
    try:
        engine, generating = engine_of(rank, {"shard": 2}, torch.bfloat16), model(torch.bfloat16)
        hand_over = hand_over_between(engine, generating)
        reports = []
        for _ in range(2):
            update(engine)
            reports.append(vars(hand_over(engine.policy_version).moved))
    finally:
        same_device.place_of = places
    whole = [engine.state_dict()["model"]]
    dist.broadcast_object_list(whole)
    same = all(torch.equal(value, whole[0]["model." + name]) for name, value in generating.named_parameters())
    return reports, same


def that_waits(rank: int) -> Any:
    """One rank comes too late: the other says for whom it waited, in moving and in checking."""
    said = []
    for phase in ("moving", "checking"):
        group = dist.new_group(backend="gloo")
        engine, generating = engine_of(rank, {"shard": 2}), model()
        tensors, target = engine.tensors(), {"model." + name: p for name, p in own_tensors(generating).items()}
        hand_over = MovedHandOver(tensors, target, rank=rank, group=group, deadline_seconds=0.3)
        try:
            if rank == 1:
                dist.barrier()
            if phase == "moving":
                hand_over(1)
            else:
                hand_over.check()
        except (DeadlineError, RuntimeError) as error:
            said.append(str(error))
        if rank == 0:
            dist.barrier()
    return said


@pytest.fixture(scope="module")
def two(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    return once(tmp_path_factory, "hand-over", lambda _: on_ranks(two_ranks, 2, timeout=280))[1]


def test_every_pair_of_layouts_on_two_ranks(two: list[dict[str, Any]]) -> None:
    pairs = [ranks["pairs"] for ranks in two]
    assert len(pairs[0]) == len(SOURCES) * 2 * len(TARGETS[2])
    for name in pairs[0]:
        assert sum(p[name]["received"] for p in pairs) == sum(p[name]["sent"] for p in pairs)
    for name, moved in pairs[0].items():
        copies = name.startswith(("{'data'", "{'sequence'"))
        same = name.startswith("{'tensor'") and "tensor=2" in name
        assert (moved["received"] == 0) == (copies or same), name


def test_a_module_that_generates_agrees_with_training(two: list[dict[str, Any]]) -> None:
    whole = whole_on_every_rank(own_tensors(model(torch.bfloat16)), 1).total_bytes
    for ranks in two:
        apart, received = ranks["into_modules"]["shard"]
        # FSDP gathers the bf16 of its fp32 masters: the numbers of both sides are the same.
        assert apart == 0 and abs(received - whole / 2) < whole * 0.01
        apart, received = ranks["into_modules"]["tensor"]
        assert apart < 0.05 and 0 < received < whole / 2  # products are summed in another order; what is whole stays


def test_processes_of_one_device_read_each_others_memory(two: list[dict[str, Any]]) -> None:
    for ranks in two:
        reports, same = ranks["on_one_device"]
        assert same and reports[0] == reports[1]
        assert reports[0]["read"] == reports[0]["received"] > 0 and reports[0]["messages"] == 0


def test_a_rank_that_does_not_come_is_named_within_the_deadline(two: list[dict[str, Any]]) -> None:
    moving, checking = two[0]["that_waits"]
    assert "deadlines.hand_over: rank 0 waited 0.3 s in a hand-over for weights of rank 1" in moving
    assert "for fingerprints of rank 1" in checking


def test_only_the_adapter_crosses(two: list[dict[str, Any]]) -> None:
    for ranks in two:
        received, adapter, same, base = ranks["of_an_adapter"]
        assert received == adapter * 4 / 2 and same and base


def test_copies_share_their_memory_with_generation(two: list[dict[str, Any]]) -> None:
    for ranks in two:
        assert set(ranks["of_shared_memory"].values()) == {0}


def test_a_wrong_element_is_named_on_every_rank(two: list[dict[str, Any]]) -> None:
    for ranks in two:
        assert "'model.layers.1.mlp.up_proj.weight' on rank 1 is not what training holds" in ranks["that_is_tampered_with"]


@pytest.mark.slow
def test_every_pair_of_layouts_on_four_ranks() -> None:
    pairs = on_ranks(every_pair, 4, FOUR_SOURCES, 4, timeout=250)
    for name in pairs[0]:
        assert sum(p[name]["received"] for p in pairs) == sum(p[name]["sent"] for p in pairs), name


def test_a_plain_tensor_is_whole() -> None:
    assert box_of(torch.zeros(2, 3)).size == 6  # type: ignore[union-attr]
