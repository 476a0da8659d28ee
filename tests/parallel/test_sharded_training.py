"""The same training run on one process and on several: losses and gradient norms step by step, and checkpoints between them.

Every group of processes is started once and runs all its cases; starting one takes longer than all of them.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
from torch import nn

from podium.algorithms import Loss, policy_loss, supervised_loss
from podium.core.batch import Batch
from podium.core.settings import LoraSettings, OptimizerSettings
from podium.engines.layout import Box
from podium.engines.train import SingleDeviceEngine
from podium.engines.train.sharded import ShardedEngine
from podium.models.heads import ActorModel, CriticModel
from podium.models.loading import load_causal_lm
from podium.models.own import OwnActor
from podium.workers.base import TrainedRole
from tests.parallel.processes import context_of, on_ranks, once
from tests.properties.test_train_invariance import CASES, shared_rows
from tests.tiny import tiny_model
from tests.unit.test_models_own import Mixer
from tests.unit.test_models_padded import small

pytestmark = pytest.mark.timeout(900)  # of the test that waits for the processes, on a busy machine

Steps = list[dict[str, float]]
Sizes = dict[str, int]

# AdamW's first steps are of one size for any gradient above eps: at the default, gradients of pure rounding would become
# whole steps, and two right runs would part.
OPTIMIZER = OptimizerSettings(lr=1e-3, eps=1e-5, weight_decay=0.1, max_grad_norm=0.5)
STEPS = 3
AXES = ("data", "shard", "tensor", "sequence")
LOSSES = ("policy", "policy, sequence means", "value", "pairwise reward")
FAMILIES = ("qwen3", "mistral", "gemma2", "gemma3")
FOUR: list[Sizes] = [
    {"shard": 2, "tensor": 2},
    {"data": 2, "shard": 2},
    {"shard": 4},
    {"data": 4},
    {"tensor": 2, "sequence": 2},
    {"shard": 2, "sequence": 2},
    {"data": 2, "tensor": 2},
]
HEADS = ("a capped head, tied", "a capped head of its own")  # at a temperature
LORA = LoraSettings(rank=4, alpha=8, target_modules="all-linear")


def rows_of(data_rank: int, data_size: int, pairs: bool = False) -> Batch:
    """A rank's share: very uneven, and with four ranks one has none. Pairs stay together."""
    uneven = {1: [list(range(8))], 2: [[0, 1, 2, 3, 4, 5, 6], [7]], 4: [[0, 1, 2], [3], [], [4, 5, 6, 7]]}
    paired = {1: [list(range(8))], 2: [[0, 4, 1, 5, 2, 6, 3, 7], []], 4: [[0, 4], [1, 5], [], [2, 6, 3, 7]]}
    rows = (paired if pairs else uneven)[data_size][data_rank]
    return shared_rows().index(torch.tensor(rows, dtype=torch.int64))


def case_of(name: str) -> tuple[Callable[[], nn.Module], Loss]:
    """A loss's model, or a family's under a policy loss."""
    if name in CASES:
        return CASES[name]
    if name == "lora":
        return lora_actor, supervised_loss()
    if name == "lora over bf16":
        return lambda: lora_actor(torch.bfloat16), supervised_loss()
    if name == "critic in bf16 with a head in fp32":
        return mixed_critic, CASES["value"][1]
    if name in HEADS:
        fields = {"final_logit_softcapping": 2.0, "tie_word_embeddings": "tied" in name}
        loss = policy_loss(kl_coef=0.1, entropy_coef=0.01)
        return lambda: ActorModel(tiny_model("gemma2", **fields), temperature=0.7), loss
    if name == "padded rows":
        return lambda: ActorModel(small("bloom")), supervised_loss()
    if name == "a class of one's own":
        return lambda: OwnActor(Mixer()), supervised_loss()
    return lambda: ActorModel(tiny_model(name)), policy_loss(kl_coef=0.1)


def lora_actor(dtype: torch.dtype = torch.float32) -> nn.Module:
    from podium.models.adapters import add_lora

    model = tiny_model("llama", dtype=dtype)
    torch.manual_seed(3)
    add_lora(model, LORA)
    return ActorModel(model)


def mixed_critic() -> nn.Module:
    torch.manual_seed(1)
    return CriticModel.from_causal_lm(tiny_model("llama", dtype=torch.bfloat16))


def steps(engine: SingleDeviceEngine, batch: Batch, loss: Loss, count: int = STEPS) -> Steps:
    return [engine.update(batch, loss).means() for _ in range(count)]


def sharded(rank: int, name: str, sizes: Sizes, **options: Any) -> tuple[ShardedEngine, Batch, Loss]:
    make, loss = case_of(name)
    context = context_of(rank, **sizes)
    torch.manual_seed(rank)  # other heads on each rank, where they are new: the first rank's must win
    engine = ShardedEngine(make(), context=context, optimizer=OPTIMIZER, microbatch_tokens=40, **options)
    return engine, rows_of(context.data_rank, context.data_size, "pair" in name), loss


def single(name: str, **changes: Any) -> tuple[SingleDeviceEngine, Batch, Loss]:
    make, loss = case_of(name)
    options = {"optimizer": OPTIMIZER, "microbatch_tokens": 40, **changes}
    return SingleDeviceEngine(make(), **options), rows_of(0, 1, "pair" in name), loss


def assert_same(got: Steps, want: Steps, tolerance: float = 1e-5) -> None:
    assert len(got) == len(want)
    for number, (mine, theirs) in enumerate(zip(got, want, strict=True)):
        assert mine.keys() == theirs.keys()
        for name in theirs:
            if tolerance <= 1e-5 or name in ("loss", "grad_norm", "tokens"):
                assert mine[name] == pytest.approx(theirs[name], rel=tolerance, abs=1e-6), (number, name)


# ------------------------------------------------------------------ two processes

TWO = [(name, {axis: 2}) for name in LOSSES for axis in AXES]
TWO += [(family, {axis: 2}) for family in FAMILIES for axis in ("tensor", "sequence")]
TWO += [("lora", {"shard": 2}), ("lora", {"sequence": 2}), ("lora over bf16", {"shard": 2})]
TWO += [(name, {axis: 2}) for name in ("padded rows", "a class of one's own") for axis in ("data", "shard")]
TWO += [(name, {axis: 2}) for name in HEADS for axis in ("shard", "tensor", "sequence")]
TWO += [("critic in bf16 with a head in fp32", {"shard": 2})]


def two_ranks(rank: int, folder: str) -> dict[str, Any]:
    out: dict[str, Any] = {}
    for name, sizes in TWO:
        engine, batch, loss = sharded(rank, name, sizes)
        out[name, str(sizes)] = steps(engine, batch, loss)
    for check in (computes, offloads, in_16_bits, resumes, saves, lays_out, marks):
        out[check.__name__] = check(rank, folder)
    return out


def computes(rank: int, _: str) -> Any:
    """Forward passes, of a rank without rows too."""
    out = {}
    for axis in AXES:
        engine, _, _ = sharded(rank, "policy", {axis: 2})
        split = axis in ("data", "shard")
        batch = shared_rows().index(torch.arange(8 if rank == 0 or not split else 0))
        made = engine.compute(batch, ("log_probs", "entropy"))
        out[axis] = {name: made[name].values for name in ("log_probs", "entropy")} if len(batch) else len(made)
    return out


def offloads(rank: int, _: str) -> Any:
    runs = []
    for offload in (False, True):
        engine, batch, loss = sharded(rank, "policy", {"shard": 2}, offload_optimizer=offload)
        runs.append(steps(engine, batch, loss))
    return runs


def in_16_bits(rank: int, _: str) -> Any:
    out = {}
    for axis in AXES:
        for dtype in (torch.bfloat16, torch.float16) if axis == "shard" else (torch.bfloat16,):
            context = context_of(rank, **{axis: 2})
            model = ActorModel(tiny_model("llama", dtype=dtype))
            engine = ShardedEngine(model, context=context, optimizer=OPTIMIZER, microbatch_tokens=40)
            batch = rows_of(context.data_rank, context.data_size)
            out[axis, str(dtype)] = steps(engine, batch, supervised_loss())
    return out


def resumes(rank: int, folder: str) -> Any:
    """Two steps on FSDP, the state on one process's disk, then a third step on every axis (and on one process: the test's)."""
    engine, batch, loss = sharded(rank, "policy", {"shard": 2})
    steps(engine, batch, loss, 2)
    state = engine.state_dict()
    if rank == 0:
        torch.save(state, f"{folder}/state.pt")
    dist.barrier()
    saved = torch.load(f"{folder}/state.pt")
    out = {"on": steps(engine, batch, loss, 1)}
    for axis in AXES:
        other, batch, loss = sharded(rank, "policy", {axis: 2})
        other.load_state_dict(saved)
        assert other.policy_version == 2
        again = other.state_dict()
        if rank == 0:
            assert all(torch.equal(again["model"][name], value) for name, value in saved["model"].items())
            for name, moments in saved["optimizer"]["moments"].items():
                assert all(torch.equal(again["optimizer"]["moments"][name][k], v) for k, v in moments.items())
        out[axis] = steps(other, batch, loss, 1)
    tuned, batch, loss = sharded(rank, "lora", {"shard": 2})
    steps(tuned, batch, loss, 1)
    state = tuned.state_dict()
    return out, {"frozen": state["frozen"], "names": sorted(state["model"])}


def saves(rank: int, folder: str) -> Any:
    for axis in ("shard", "tensor"):
        engine, _, _ = sharded(rank, "qwen3", {axis: 2})
        engine.save_pretrained(f"{folder}/{axis}")
    return None


def lays_out(rank: int, _: str) -> Any:
    engine, _, _ = sharded(rank, "policy", {"tensor": 2})
    layout = engine.layout()
    return {name.removeprefix("model.model."): shards.boxes for name, shards in layout.tensors.items()}


def marks(rank: int, _: str) -> Any:
    """Marks of the weights: after a step, after a pass that writes nothing, after an update that broke off behind its step."""
    out = {}
    for axis in AXES:
        for offload in (False, True):
            engine, batch, loss = sharded(rank, "policy", {axis: 2}, offload_optimizer=offload)
            role = TrainedRole(engine, context=engine.context)
            steps(engine, batch, loss, 1)
            found = [role.weights_mark()]
            engine.compute(batch, ("log_probs",))
            found.append(role.weights_mark())
            with patch.object(engine, "_over_ranks", side_effect=TimeoutError), pytest.raises(TimeoutError):
                engine.update(batch, loss)
            out[axis, offload] = [*found, role.weights_mark()]
    return out


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, list[dict[str, Any]]]:
    return once(tmp_path_factory, "two", lambda folder: on_ranks(two_ranks, 2, str(folder), timeout=280))


@pytest.fixture(scope="module")
def folder(run: tuple[Path, Any]) -> Path:
    return run[0]


@pytest.fixture(scope="module")
def two(run: tuple[Path, Any]) -> list[dict[str, Any]]:
    return run[1]


@pytest.mark.parametrize(("name", "sizes"), TWO, ids=lambda value: "-".join(value) if isinstance(value, dict) else value)
def test_two_processes_train_as_one(two: list[dict[str, Any]], name: str, sizes: Sizes) -> None:
    engine, batch, loss = single(name)
    want = steps(engine, batch, loss)
    for ranks in two:
        assert_same(ranks[name, str(sizes)], want, 2e-2 if "bf16" in name else 1e-5)


@pytest.mark.parametrize("axis", AXES)
def test_compute_is_that_of_one_process(two: list[dict[str, Any]], axis: str) -> None:
    engine, _, _ = single("policy")
    want = engine.compute(shared_rows(), ("log_probs", "entropy"))
    for rank, ranks in enumerate(two):
        got = ranks["computes"][axis]
        if rank == 1 and axis in ("data", "shard"):
            assert got == 0
            continue
        for name in ("log_probs", "entropy"):
            torch.testing.assert_close(got[name], want[name].values, rtol=1e-5, atol=1e-5)


def test_an_offloaded_optimizer_gives_the_same_numbers(two: list[dict[str, Any]]) -> None:
    for ranks in two:
        kept, offloaded = ranks["offloads"]
        assert kept == offloaded


@pytest.mark.parametrize(("axis", "dtype"), [*((axis, torch.bfloat16) for axis in AXES), ("shard", torch.float16)])
def test_16_bits_with_masters_in_fp32(two: list[dict[str, Any]], axis: str, dtype: torch.dtype) -> None:
    model = ActorModel(tiny_model("llama", dtype=dtype))
    want = steps(SingleDeviceEngine(model, optimizer=OPTIMIZER, microbatch_tokens=40), rows_of(0, 1), supervised_loss())
    assert all(step["skipped_updates"] == 0 for step in want)
    for ranks in two:
        assert_same(ranks["in_16_bits"][axis, str(dtype)], want, 3e-2)


def test_a_checkpoint_is_loaded_on_other_ranks(two: list[dict[str, Any]], folder: Path) -> None:
    """FSDP's state goes on alike on every axis, and on one process."""
    want = two[0]["resumes"][0]["on"]
    for ranks in two:
        for name in AXES:
            assert_same(ranks["resumes"][0][name], want)
    engine, batch, loss = single("policy")
    saved = torch.load(folder / "state.pt")
    engine.load_state_dict(saved)
    assert_same(steps(engine, batch, loss, 1), want)
    assert saved["model"].keys() == engine.state_dict()["model"].keys()


def test_an_adapters_checkpoint_is_that_of_one_process(two: list[dict[str, Any]]) -> None:
    """The weights that train, and the digest of the others: the same bytes on any number of ranks."""
    engine, _, _ = single("lora")
    state = engine.state_dict()
    for ranks in two:
        assert ranks["resumes"][1]["frozen"] == state["frozen"]
    assert two[0]["resumes"][1]["names"] == sorted(state["model"])


@pytest.mark.parametrize("axis", ["shard", "tensor"])
def test_a_sharded_model_is_saved_whole(two: list[dict[str, Any]], folder: Path, axis: str) -> None:
    saved = load_causal_lm(folder / axis, dtype="float32", device="cpu")
    for name, want in tiny_model("qwen3").named_parameters():
        assert torch.equal(saved.get_parameter(name), want), name


def test_heads_are_cut_and_norms_are_whole(two: list[dict[str, Any]]) -> None:
    boxes = two[0]["lays_out"]
    assert boxes["layers.0.self_attn.q_proj.weight"] == (Box((0, 0), (32, 64)), Box((32, 0), (64, 64)))
    assert boxes["layers.0.self_attn.q_proj.bias"] == (Box((0,), (32,)), Box((32,), (64,)))
    assert boxes["layers.0.mlp.down_proj.weight"] == (Box((0, 0), (64, 64)), Box((0, 64), (64, 128)))
    assert boxes["norm.weight"] == (Box((0,), (64,)),) * 2
    assert two[0]["lays_out"] == two[1]["lays_out"]


@pytest.mark.parametrize("offload", [False, True])
@pytest.mark.parametrize("axis", AXES)
def test_an_update_that_broke_off_behind_its_step_shows(two: list[dict[str, Any]], axis: str, offload: bool) -> None:
    """The fused kernel writes weights that are their own masters, and torch does not count it."""
    for ranks in two:
        before, again, after = ranks["marks"][axis, offload]
        assert before == again != after


# ------------------------------------------------------------------ four processes


def four_ranks(rank: int) -> dict[str, Any]:
    out = {}
    for name in LOSSES:
        for sizes in FOUR:
            engine, batch, loss = sharded(rank, name, sizes)
            out[name, str(sizes)] = (
                steps(engine, batch, loss),
                {k: tuple(v.shape) for k, v in engine.state_dict()["model"].items()},
            )
    return out


@pytest.fixture(scope="module")
def four(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    return once(tmp_path_factory, "four", lambda _: on_ranks(four_ranks, 4, timeout=280))[1]


@pytest.mark.slow
@pytest.mark.parametrize("sizes", FOUR, ids="-".join)
@pytest.mark.parametrize("name", LOSSES)
def test_four_processes_train_as_one(four: list[dict[str, Any]], name: str, sizes: Sizes) -> None:
    engine, batch, loss = single(name)
    want = steps(engine, batch, loss)
    for ranks in four:
        assert_same(ranks[name, str(sizes)][0], want)
    shapes = {key: tuple(value.shape) for key, value in engine.state_dict()["model"].items()}
    assert four[0][name, str(sizes)][1] == shapes
