"""Several processes on GPUs: training and generation over NCCL on two, and two processes of one device by CUDA IPC."""

from __future__ import annotations

import time
from datetime import timedelta
from typing import Any

import pytest
import torch
import torch.distributed as dist

from podium.algorithms import policy_loss
from podium.core.batch import Batch
from podium.core.ranks import Ranks, WorkerContext
from podium.engines.base import SamplingParams
from podium.engines.layout import Box, Layout, TensorShards
from podium.engines.rollout.divided import DividedModel
from podium.engines.rollout.generate import generate
from podium.engines.rollout.native.choose import native_engine
from podium.engines.train import SingleDeviceEngine, create_train_engine
from podium.hybrid.engine import SharedHandOver
from podium.hybrid.generation import DividedGeneration
from podium.hybrid.plan import make_plan
from podium.hybrid.transfer import Transport
from podium.hybrid.verify import mismatched_tensors
from podium.models.heads import ActorModel
from tests.parallel.processes import on_ranks, once
from tests.parallel.test_sharded_training import OPTIMIZER, Steps, rows_of, steps
from tests.tiny import tiny_model, tiny_tokenizer

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.timeout(600),
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU"),
]
two_gpus = pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")

AXES = ("shard", "tensor", "data", "sequence")
SAMPLED = SamplingParams(max_new_tokens=24, temperature=0.8)
# Graphs or the plain path, fused layers or the model's own modules.
WAYS = [{"graphs": graphs, "fused": fused} for graphs in (True, False) for fused in (True, False)]


# ------------------------------------------------------------------ one device, two processes


def read_on_one_gpu(rank: int) -> dict[str, Any]:
    """A process that trains and one that generates, on one GPU: 2 GiB of fp32 masters, generated with in bf16."""
    device = torch.device("cuda", 0)
    torch.cuda.set_device(device)
    shapes = {f"w{i}": (4096, 4096 * 8) for i in range(4)}
    shapes["norm"] = (77, 1)
    boxes = {name: Box.whole(shape) for name, shape in shapes.items()}
    source = Layout(2, {n: TensorShards(s, torch.float32, (boxes[n], None)) for n, s in shapes.items()})
    target = Layout(2, {n: TensorShards(s, torch.bfloat16, (None, boxes[n])) for n, s in shapes.items()})
    generator = torch.Generator(device).manual_seed(1)
    values = {n: torch.randn(s, generator=generator, device=device) for n, s in shapes.items()}
    held = values if rank == 0 else {}
    wanted = {n: torch.zeros(s, dtype=torch.bfloat16, device=device) for n, s in shapes.items()} if rank == 1 else {}
    transport = Transport(make_plan(source, target), rank, held, wanted)
    out: dict[str, Any] = {"seconds": []}
    for update in range(3):
        for value in values.values():
            value += 1.0  # in place, as an optimizer does; both processes compute what is to arrive
        dist.barrier()
        start = time.perf_counter()
        moved = transport.run()
        out["seconds"].append(time.perf_counter() - start)
        out["same"] = rank == 0 or all(torch.equal(wanted[n], values[n].bfloat16()) for n in shapes)
        out["odd"] = mismatched_tensors(transport.plan, rank, held, wanted)
        assert out["same"] and not out["odd"], update
    return {**out, "moved": vars(moved), "bytes": sum(v.numel() * 2 for v in values.values())}


def test_processes_of_one_gpu_read_each_others_memory() -> None:
    trains, generates = on_ranks(read_on_one_gpu, 2, timeout=200)
    assert generates["same"]
    assert generates["moved"]["read"] == generates["moved"]["received"] == generates["bytes"] == trains["moved"]["sent"]
    assert generates["moved"]["messages"] == trains["moved"]["messages"] == 0
    best = min(generates["seconds"])
    print(f"CUDA IPC: {generates['bytes'] / 1e9:.2f} GB in {best * 1e3:.2f} ms, {generates['bytes'] / best / 1e9:.0f} GB/s")
    assert generates["bytes"] / best > 50e9  # copied on the device: through the host it would be a tenth of that


# ------------------------------------------------------------------ two devices


def context_of(rank: int, **sizes: int) -> WorkerContext:
    return WorkerContext("actor", rank, Ranks(**sizes), f"cuda:{rank}", "nccl")


def policy(rank: int) -> ActorModel:
    return ActorModel(tiny_model("qwen3").to(f"cuda:{rank}"))


def recorded(context: WorkerContext) -> Batch:
    """A rank's share of the recorded rollouts."""
    return rows_of(context.data_rank, context.data_size)


def alone(rank: int) -> Steps:
    engine = SingleDeviceEngine(policy(rank), optimizer=OPTIMIZER, microbatch_tokens=40)
    return steps(engine, rows_of(0, 1), policy_loss(kl_coef=0.1))


def prompts(count: int = 12) -> Batch:
    rows = [[7 + i // 2, 30, 41 + i // 2, 9, 11][: 1 + i // 2 % 5] for i in range(count)]
    return Batch({"prompt_ids": rows, "sample_seed": list(range(100, 100 + count))})


def sampled(engine: Any) -> dict[str, Any]:
    out = generate(engine, prompts(), SAMPLED)
    return {name: out[name].to_list() for name in ("response_ids", "rollout_log_probs")}


def trained_and_sampled(rank: int, axis: str, way: dict[str, bool]) -> dict[str, Any]:
    """Training on two GPUs, its weights handed over to tensor parallel generation after every update; what is sampled."""
    model, context = policy(rank), context_of(rank, **{axis: 2})
    divided = DividedModel(model.model, 2)
    engine = create_train_engine("ddp", model, context=context, optimizer=OPTIMIZER, microbatch_tokens=40)
    side = DividedGeneration(divided, engine, context, timeout=timedelta(seconds=120), deadline_seconds=60.0)
    rollout = native_engine(side.model, tiny_tokenizer(), max_concurrent=8, **way)
    hand_over = side.hand_over()
    first = sampled(rollout)  # records graphs, which must hold over new weights
    made: Steps = []
    for _ in range(3):
        made += steps(engine, recorded(context), policy_loss(kl_coef=0.1), 1)
        report = hand_over(engine.policy_version)
        rollout.update_weights(engine.policy_version)
    return {
        "steps": made,
        "first": first,
        "sampled": sampled(rollout),
        "shared": isinstance(hand_over, SharedHandOver),
        "moved": vars(report.moved),
    }


def two_ranks(rank: int) -> dict[str, Any]:
    torch.cuda.set_device(rank)
    out: dict[str, Any] = {"alone": alone(rank)}
    single = SingleDeviceEngine(policy(rank), optimizer=OPTIMIZER, microbatch_tokens=40)
    whole = native_engine(single.model.model, tiny_tokenizer(), max_concurrent=8)
    out["first"] = sampled(whole)
    steps(single, rows_of(0, 1), policy_loss(kl_coef=0.1))
    whole.update_weights(single.policy_version)
    out["sampled"] = sampled(whole)
    for axis in AXES:
        out[axis] = trained_and_sampled(rank, axis, WAYS[0])
    for number, way in enumerate(WAYS[1:], start=1):
        out[f"way {number}"] = trained_and_sampled(rank, "shard", way)
    return out


@pytest.fixture(scope="module")
def two(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    return once(tmp_path_factory, "two-gpus", lambda _: on_ranks(two_ranks, 2, timeout=400, backend="nccl"))[1]


@two_gpus
@pytest.mark.parametrize("axis", AXES)
def test_recorded_rollouts_train_as_on_one_gpu(axis: str, two: list[dict[str, Any]]) -> None:
    for ranks in two:
        for number, (mine, theirs) in enumerate(zip(ranks[axis]["steps"], ranks["alone"], strict=True)):
            for name in ("loss", "grad_norm", "tokens"):
                assert mine[name] == pytest.approx(theirs[name], rel=1e-5, abs=1e-6), (number, name)


@two_gpus
@pytest.mark.parametrize("name", [*AXES, *(f"way {number}" for number in range(1, len(WAYS)))])
def test_two_gpus_sample_what_one_does(name: str, two: list[dict[str, Any]]) -> None:
    """In fp32: the same tokens, log-probs within 1e-4; before training, and after three hand-overs."""
    for when in ("first", "sampled"):
        assert two[0][name][when] == two[1][name][when]  # both ranks, to the last bit
        got, want = two[0][name][when], two[0][when]
        assert got["response_ids"] == want["response_ids"], when
        for mine, theirs in zip(got["rollout_log_probs"], want["rollout_log_probs"], strict=True):
            assert mine == pytest.approx(theirs, abs=1e-4)


@two_gpus
def test_the_same_layout_moves_nothing(two: list[dict[str, Any]]) -> None:
    for ranks in two:
        assert ranks["tensor"]["shared"] and set(ranks["tensor"]["moved"].values()) == {0}
        assert not ranks["shard"]["shared"] and ranks["shard"]["moved"]["received"] > 0
