"""The plan's arithmetic against torch's own numbers: counts, optimizer bytes, caches, what autograd keeps, what is on disk."""

from __future__ import annotations

import json
from dataclasses import replace
from itertools import accumulate
from pathlib import Path
from typing import Any

import pytest
import torch

from podium.checkpoints.store import CheckpointStore
from podium.cli.plan import plan_of, short
from podium.core.batch import Batch
from podium.core.errors import ConfigError, ModelError, ResourceError
from podium.core.ranks import Ranks
from podium.core.settings import LoraSettings, OptimizerSettings
from podium.engines.base import Request, SamplingParams
from podium.engines.rollout.native import cpu_products
from podium.engines.rollout.native.cpu_products import Products
from podium.engines.rollout.native.engine import NativeEngine, generating
from podium.engines.train import SingleDeviceEngine
from podium.models.adapters import add_lora
from podium.models.heads import ActorModel, CriticModel
from podium.models.lm_head import base_of
from podium.models.packed import pack
from podium.planner import memory as planned_memory
from podium.planner.devices import DEVICES, load_cluster, this_machine
from podium.planner.host import PROCESS, state_bytes
from podium.planner.memory import RoleSpec, _adapted_pass, cache_bytes, generation_copy, packed_bytes
from podium.planner.shapes import ModelShape, shape_at, shape_of
from podium.planner.throughput import decode_step_seconds
from podium.recipes import load
from tests.tiny import FAMILIES, tiny_model, tiny_tokenizer

QWEN_7B = {
    "model_type": "qwen2",
    "vocab_size": 152064,
    "hidden_size": 3584,
    "intermediate_size": 18944,
    "num_hidden_layers": 28,
    "num_attention_heads": 28,
    "num_key_value_heads": 4,
    "tie_word_embeddings": False,
    "max_position_embeddings": 32768,
}
QWEN_1B = {**QWEN_7B, "hidden_size": 1536, "intermediate_size": 8960, "num_attention_heads": 12, "num_key_value_heads": 2}
QWEN_1B["tie_word_embeddings"] = True
LLAMA_70B = {
    "model_type": "llama",
    "vocab_size": 128256,
    "hidden_size": 8192,
    "intermediate_size": 28672,
    "num_hidden_layers": 80,
    "num_attention_heads": 64,
    "num_key_value_heads": 8,
    "tie_word_embeddings": False,
    "max_position_embeddings": 131072,
}


def spec(model: Any, **given: Any) -> RoleSpec:
    itemsize = next(model.parameters()).dtype.itemsize
    return RoleSpec("actor", shape_of(model.config), **{"itemsize": itemsize, "trains": True, "cuda": False} | given)


def bytes_of(value: Any) -> int:
    if isinstance(value, torch.Tensor):
        return value.numel() * value.element_size()
    return sum(bytes_of(v) for v in value.values()) if isinstance(value, dict) else 0


def rows(tokens: int) -> Batch:
    ids = torch.arange(tokens) % 500
    each = tokens // 4
    return Batch(
        {
            "prompt_ids": [ids[:4] + i for i in range(4)],
            "response_ids": [ids[: each - 4] for _ in range(4)],
            "loss_mask": [torch.ones(each - 4, dtype=torch.bool) for _ in range(4)],
        }
    )


# ------------------------------------------------------------------ counts


@pytest.mark.parametrize("family", FAMILIES)
def test_parameters_are_counted_exactly(family: str) -> None:
    model = tiny_model(family)
    shape = shape_of(model.config)
    assert shape.total == sum(p.numel() for p in model.parameters())
    assert shape.with_scores(1).total == sum(p.numel() for p in CriticModel.from_causal_lm(model).parameters()) - 1  # its bias
    assert shape.tied and shape.head == 0


def test_the_adapter_is_counted_exactly() -> None:
    model = tiny_model(dtype=torch.bfloat16)
    add_lora(model, LoraSettings(rank=8))
    planned = spec(tiny_model(dtype=torch.bfloat16), lora=8)
    assert planned.adapter == sum(p.numel() for p in model.parameters() if p.requires_grad)
    assert planned.weights == sum(p.numel() * p.element_size() for p in model.parameters())


def test_a_mixture_of_experts_uses_a_share_of_its_weights() -> None:
    from transformers import AutoConfig

    config = AutoConfig.for_model(
        "qwen3_moe",
        vocab_size=512,
        hidden_size=64,
        moe_intermediate_size=32,
        intermediate_size=128,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=16,
        num_experts=8,
        num_experts_per_tok=2,
    )
    assert 0.2 < shape_of(config).active < 0.6


def test_a_folder_with_a_config_alone_is_enough(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(QWEN_7B))
    assert shape_at(str(tmp_path)).total == 7_615_616_512  # as its model card says: 7.61B


def test_no_config(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match="no model"):
        shape_at(str(tmp_path / "nowhere"))


# ------------------------------------------------------------------ what stays


def test_eight_bit_moments() -> None:
    from podium.algorithms.losses import LOSSES

    model = tiny_model()
    engine = SingleDeviceEngine(ActorModel(model), optimizer=OptimizerSettings(states="8bit"))
    engine.update(rows(64), LOSSES["supervised"]())
    held = bytes_of(engine.state_dict()["optimizer"]["moments"])
    assert spec(model, moment_bytes=2 + 8 / 256).moments == pytest.approx(held, rel=0.02)  # blocks that are not full


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("lora", [0, 4])
def test_optimizer_bytes_are_those_of_the_engine(dtype: torch.dtype, lora: int, tmp_path: Path) -> None:
    from podium.algorithms.losses import LOSSES

    model = tiny_model(dtype=dtype)
    planned = spec(model, lora=lora)
    if lora:
        add_lora(model, LoraSettings(rank=lora))
    engine = SingleDeviceEngine(ActorModel(model), optimizer=OptimizerSettings())
    engine.update(rows(64), LOSSES["supervised"]())
    state = engine.state_dict()
    steps = 4 * len(state["optimizer"]["moments"])  # the update's number, beside each tensor's moments
    assert planned.moments == bytes_of(state["optimizer"]["moments"]) - steps
    assert planned.masters == bytes_of(state["optimizer"]["masters"])
    CheckpointStore(tmp_path).save(1, {"role_actor": state})
    on_disk = sum(p.stat().st_size for p in tmp_path.rglob("*") if p.is_file())
    assert on_disk == pytest.approx(state_bytes(planned), rel=0.1, abs=60_000)  # headers, and buffers that are no parameters


def test_keys_and_values_are_those_of_the_native_engine() -> None:
    model = tiny_model()
    engine = NativeEngine(model, tiny_tokenizer(), max_concurrent=5)
    held = 0
    for seed in range(5):
        engine.submit(Request((1, 20 + seed, 30), SamplingParams(max_new_tokens=90, temperature=1.0, stop=()), seed))
    while engine.pending:
        engine.step()
        held = max(held, engine._cache.bytes)
    assert held <= cache_bytes(spec(model), 5, 93)
    assert held in (cache_bytes(spec(model), 5, 93), cache_bytes(spec(model), 5, 64))  # 64: all ended early


def test_packed_weights_are_those_of_the_native_engine(monkeypatch: pytest.MonkeyPatch) -> None:
    if not cpu_products.can_pack(torch.float32):
        pytest.skip("this torch has no oneDNN")
    model = tiny_model()
    assert packed_bytes(spec(model)) == 0  # too small
    assert planned_memory.LEAST_PACKED == cpu_products._LEAST_PARAMETERS
    for module, name in (
        (cpu_products, "_LEAST_PARAMETERS"),
        (cpu_products, "_LEAST_WEIGHT"),
        (planned_memory, "LEAST_PACKED"),
    ):
        monkeypatch.setattr(module, name, 0)
    engine = NativeEngine(model, tiny_tokenizer())
    engine.submit(Request((1, 20, 30), SamplingParams(max_new_tokens=5)))
    engine.step()
    assert engine._products.bytes == pytest.approx(packed_bytes(spec(model)), rel=0.01)  # the norms are not packed
    assert packed_bytes(spec(model, cuda=True)) == 0


@pytest.mark.parametrize("family", ["llama", "qwen3"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("lora", [0, 8])
def test_activations_are_what_autograd_keeps(family: str, dtype: torch.dtype, lora: int) -> None:
    kept: dict[int, int] = {}
    for layers in (1, 4):
        model = tiny_model(family, dtype=dtype, num_hidden_layers=layers)
        if lora:
            add_lora(model, LoraSettings(rank=lora))
        kept[layers] = saved_bytes(ActorModel(model), rows(256))
    per_layer = (kept[4] - kept[1]) / 3 / 256
    planned = spec(tiny_model(family, dtype=dtype, num_hidden_layers=1), lora=lora).per_token
    assert planned == pytest.approx(per_layer, rel=0.01)


def saved_bytes(model: ActorModel, batch: Batch) -> int:
    own = {p.untyped_storage().data_ptr() for p in model.parameters()}
    seen: dict[int, tuple[int, torch.Tensor]] = {}

    def keep(tensor: torch.Tensor) -> torch.Tensor:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in own:
            seen[storage.data_ptr()] = storage.nbytes(), tensor  # held, so that no address is used twice
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda t: t):
        model.compute(pack(batch.select("prompt_ids", "response_ids")), ("log_probs",))
    return sum(size for size, _ in seen.values())


class _Sees:
    """An attention that only looks: what a layer's products take is measured."""

    def attend(self, module: Any, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, **given: Any) -> torch.Tensor:
        return query.transpose(1, 2)


def test_a_rollout_s_pass_through_adapted_modules_takes_what_is_planned() -> None:
    from torch.profiler import ProfilerActivity, profile

    model, tokens = tiny_model("qwen2", hidden_size=64, intermediate_size=256), 2048
    add_lora(model, LoraSettings(rank=8))
    base = base_of(model)
    run = {"input_ids": torch.zeros(1, tokens, dtype=torch.int64), "use_cache": False, "podium_context": _Sees()}
    with generating(model, base, Products()):
        base(**run)
        with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as taken:
            base(**run)
    events = taken.profiler.kineto_results.events()  # type: ignore[union-attr]
    sizes = [size for _, size in sorted((e.start_ns(), e.nbytes()) for e in events if e.name() == "[memory]")]
    peak = max(accumulate(sizes))
    assert _adapted_pass(spec(model, lora=8), tokens) == pytest.approx(peak, rel=0.03)


# ------------------------------------------------------------------ layouts


def shape_70b() -> ModelShape:
    from transformers import AutoConfig

    return shape_of(AutoConfig.for_model(**LLAMA_70B), "70b")


def test_layouts_divide_what_they_cut() -> None:
    shape = shape_70b()
    one = RoleSpec("actor", shape, 2, True)
    assert one.weights == 2 * shape.total and one.masters == 4 * shape.total and one.moments == 8 * shape.total
    sharded = RoleSpec("actor", shape, 2, True, Ranks(shard=64), single=False)
    assert sharded.weights == pytest.approx(4 * shape.total / 64) and sharded.masters == 0
    assert sharded.moments == pytest.approx(8 * shape.total / 64)
    tensor = RoleSpec("actor", shape, 2, True, Ranks(tensor=8), single=False)
    assert 2 * shape.total / 8 < tensor.weights < 2 * shape.total / 6.5  # embedding, head and norms are whole
    assert generation_copy(sharded, 8) == pytest.approx(tensor.weights) and generation_copy(one, 1) == 0
    offloaded = RoleSpec("actor", shape, 2, True, Ranks(shard=64), single=False, offload=True)
    assert offloaded.stays == offloaded.weights and offloaded.on_host == pytest.approx(12 * shape.total / 64)


def test_an_optimizer_in_the_hosts_memory_on_one_device() -> None:
    """7B on one device of 141 GB, 1.5B on one of 24: 2 bytes a weight stay, 4 more while gradients are summed."""
    from transformers import AutoConfig

    for sizes, memory, tokens in ((QWEN_7B, 141e9, 16_384), (QWEN_1B, 24e9, 4_096)):
        shape = shape_of(AutoConfig.for_model(**sizes), "model")
        spec = RoleSpec("actor", shape, 2, True, offload=True, recompute="full")
        assert spec.stays == 2 * shape.total and spec.gradients == 4 * shape.total
        assert 12 * shape.total < spec.on_host < 12 * shape.total + 12 * max(1 << 25, shape.vocabulary * shape.hidden) + 1
        assert spec.stays + spec.update_bytes(tokens, tokens, 2) < memory
        whole = replace(spec, offload=False)
        assert whole.stays + whole.update_bytes(tokens, tokens, 2) > 0.95 * memory
    adapter = RoleSpec("actor", shape, 2, True, offload=True, lora=8)
    assert adapter.stays == adapter.weights and adapter.masters == 4 * adapter.adapter
    on_cpu = RoleSpec("actor", shape, 4, True, offload=True, cuda=False)
    assert on_cpu.on_host == 0 and on_cpu.stays == 16 * shape.total  # a second copy: nothing is won there


def test_four_bits_take_half_a_byte() -> None:
    shape = shape_70b()
    planned = RoleSpec("actor", shape, 2, True, lora=16, quantization="4bit")
    assert 0.5 < planned.weights / shape.total < 0.62


def test_decoding_one_row_reads_the_weights_once() -> None:
    role, device = RoleSpec("actor", shape_70b(), 2, False), DEVICES["H200"]
    once = 2 * (role.shape.total - role.shape.vocabulary * role.shape.hidden) / device.bandwidth
    assert decode_step_seconds(role, device, 1, 1) == pytest.approx(once, rel=0.01)
    assert decode_step_seconds(role, device, 64, 1) < 1.2 * once


# ------------------------------------------------------------------ plans


RECIPE = """
algorithm: grpo
model: {path: model}
data: {path: rows.jsonl}
rewards: [{function: exact_match}]
kl: {coef: 0.01}
batch: {prompts_per_step: 64, group_size: 8}
rollout: {max_new_tokens: 1024}
"""


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "recipe.yaml").write_text(RECIPE)
    (tmp_path / "model").mkdir()
    (tmp_path / "model/config.json").write_text(json.dumps(QWEN_7B))
    shape_at.cache_clear()
    return tmp_path


def planned(cluster: str, *overrides: str) -> Any:
    Path("cluster.yaml").write_text(cluster)
    return plan_of(load("recipe.yaml", overrides), cluster=Path("cluster.yaml"))


def test_a_7b_does_not_fit_one_h100_and_the_change_makes_it_fit(folder: Path) -> None:
    plan = planned("{nodes: 1, devices_per_node: 8, device: H100}")
    assert not plan.fits and "update actor" in plan.problems[0] and "too much" in short(plan) + plan.problems[0]
    assert any("parallel.shard=" in c for c in plan.change)
    changed = planned("{nodes: 1, devices_per_node: 8, device: H100}", *plan.change)
    assert changed.fits and changed.pools[0].devices > 1
    assert "it does not fit" in short(plan) and "it does not fit" not in short(changed)


def test_the_smallest_change_comes_first(folder: Path) -> None:
    size = "{nodes: 1, devices_per_node: 1, device: big, memory_gb: %s, flops: 7.0e+14, bandwidth: 4.0e+12}"
    plan = planned(size % 168)
    assert not plan.fits and plan.change and plan.change[0].startswith("batch.microbatch_tokens=") and len(plan.change) == 1
    alone = planned("{nodes: 1, devices_per_node: 1, device: A100}")
    assert alone.change[-1] == "optimizer.offload=true"  # it changes no number
    assert planned("{nodes: 1, devices_per_node: 1, device: A100}", *alone.change).fits
    small = planned("{nodes: 1, devices_per_node: 1, device: A100-40}")
    assert "model.lora.rank=16" in small.change
    nothing = planned("{nodes: 1, devices_per_node: 1, device: tiny, memory_gb: 3, flops: 1.0e+13, bandwidth: 1.0e+11}")
    assert not nothing.fits and nothing.change is None


def test_layers_computed_again_are_a_small_change(folder: Path) -> None:
    """It changes no number, so it comes before another layout; and 70B on one node needs all at once."""
    size = "{nodes: 1, devices_per_node: 1, device: big, memory_gb: %s, flops: 7.0e+14, bandwidth: 4.0e+12}"
    given = ("batch.microbatch_tokens=2048", "rollout.max_concurrent=16")
    cluster = next(size % memory for memory in range(200, 100, -1) if not planned(size % memory, *given).fits)
    change = planned(cluster, *given).change
    assert change == ["batch.activation_checkpointing=selective"] and planned(cluster, *given, *change).fits
    (folder / "model/config.json").write_text(json.dumps(LLAMA_70B))
    shape_at.cache_clear()
    node = "{nodes: 1, devices_per_node: 8, device: H200, host_memory_gb: 2000}"
    plan = planned(node, "executor.kind=ray", "resource_pool.actor.gpus_per_node=8", "kl.coef=0")
    assert "batch.activation_checkpointing=full" in plan.change and "optimizer.offload=true" in plan.change
    assert planned(node, "executor.kind=ray", "resource_pool.actor.gpus_per_node=8", "kl.coef=0", *plan.change).fits


def test_the_host_s_memory_counts_the_parts_that_workers_read(folder: Path) -> None:
    node = "{nodes: 1, devices_per_node: 8, device: H200, host_memory_gb: 2000}"
    given = ("executor.kind=ray", "resource_pool.actor={gpus_per_node: 8, backend: fsdp}", "kl.coef=0")
    parts, whole = planned(node, *given), planned(node, *given, "model.lora.rank=16")
    each = whole.pools[0].roles[0].shape.total * 2
    assert parts.host_bytes - parts.checkpoint_bytes == pytest.approx(each + 8 * PROCESS)
    assert whole.host_bytes - whole.checkpoint_bytes == pytest.approx(8 * each + 8 * PROCESS)


def test_where_the_host_s_memory_is_short_its_state_shrinks(folder: Path) -> None:
    node = "{nodes: 1, devices_per_node: 1, device: H200, host_memory_gb: 130}"
    given = ("optimizer.offload=true", "batch.microbatch_tokens=2048", "batch.activation_checkpointing=full", "kl.coef=0")
    plan = planned(node, *given)
    assert [p.split(":")[0] for p in plan.problems] == ["host memory"]
    assert plan.change and planned(node, *given, *plan.change).fits


def test_an_automatic_budget_is_planned_with_what_fits(folder: Path) -> None:
    size = "{nodes: 1, devices_per_node: 1, device: big, memory_gb: %s, flops: 7.0e+14, bandwidth: 4.0e+12}"
    found = []
    for memory in (168, 260):
        plan = planned(size % memory, "batch.microbatch_tokens=auto")
        assert plan.fits
        note = next(note for note in plan.notes if "auto" in note)
        found.append(int(note.split()[-1].replace(",", "")))
        assert planned(size % memory, f"batch.microbatch_tokens={found[-1]}").fits
        assert not planned(size % memory, f"batch.microbatch_tokens={2 * found[-1]}").fits or found[-1] == 131_072
    assert found[0] < found[1]
    none = planned("{nodes: 1, devices_per_node: 1, device: A100}", "batch.microbatch_tokens=auto")
    assert not none.fits and not any("microbatch_tokens" in change for change in none.change)


def test_thousands_of_devices(folder: Path) -> None:
    pool = (
        "resource_pool={actor: {nodes: 256, gpus_per_node: 8, parallel: {shard: 64}}, reference: {nodes: 2, gpus_per_node: 8}}"
    )
    cluster = "{nodes: 300, devices_per_node: 8, device: H100, host_memory_gb: 1000}"
    plan = planned(cluster, pool, "batch.prompts_per_step=4096", "executor.kind=ray")
    assert plan.fits, plan.problems
    assert [(p.name, p.devices, p.nodes) for p in plan.pools] == [("actor", 2048, 256), ("reference", 16, 2)]
    names = [phase.name for phase in plan.pools[0].phases]
    assert names[0] == "rollout" and "load actor" not in names and "hand-over" in names and "update actor" in names
    one_step = planned(cluster, pool.replace("256", "16"), "batch.prompts_per_step=4096", "executor.kind=ray")
    assert plan.step_seconds < one_step.step_seconds


def test_a_70b_is_read_in_parts_and_generates_in_a_layout_of_its_own(folder: Path) -> None:
    (folder / "model/config.json").write_text(json.dumps(LLAMA_70B))
    cluster = "{nodes: 32, devices_per_node: 8, device: H100, host_memory_gb: 2000}"
    actor = "actor: {nodes: 32, gpus_per_node: 8, parallel: {shard: 32, tensor: 8}}"
    # With an adapter it is whole on each device while it is loaded; and a copy for each device to generate with is too much.
    adapted = planned(cluster, f"resource_pool={{{actor}}}", "model.lora={rank: 16}")
    assert not adapted.fits and "load actor" in [phase.name for phase in adapted.pools[0].phases]
    whole = planned(cluster, f"resource_pool={{{actor}}}")
    assert not whole.fits and "load actor" not in [phase.name for phase in whole.pools[0].phases]
    with pytest.raises(ConfigError, match=r"resource_pool.rollout.parallel.tensor: .*8 key/value heads .*tensor=16(?s:.*)8\]"):
        planned(cluster, f"resource_pool={{{actor}, rollout: {{parallel: {{tensor: 16}}}}}}")
    plan = planned(cluster, f"resource_pool={{{actor}, rollout: {{parallel: {{tensor: 8}}}}}}")
    held = [next(p.stays for p in each.pools[0].phases if p.name == "rollout") for each in (whole, plan)]
    assert held[0] - held[1] > 0.85 * 140e9  # the reference is whole either way
    assert plan.pools[0].roles[0].stays < 6e9 and plan.pools[0].peak.name == "update actor"


def test_heads_that_do_not_divide(folder: Path) -> None:
    with pytest.raises(ConfigError, match="tensor=8"):
        planned(
            "{nodes: 1, devices_per_node: 8, device: H100}",
            "resource_pool={actor: {gpus_per_node: 8, parallel: {tensor: 8}}}",
        )


def test_more_devices_than_there_are(folder: Path) -> None:
    with pytest.raises(ResourceError, match="gpus_per_node"):
        planned("{nodes: 1, devices_per_node: 2, device: H100}", "resource_pool={actor: {gpus_per_node: 8}}")


def test_roles_apart_and_ppo(folder: Path) -> None:
    (folder / "recipe.yaml").write_text(RECIPE.replace("grpo", "ppo").replace("group_size: 8", "group_size: 1"))
    pools = "resource_pool={actor: {gpus: [0]}, critic: {gpus: [1]}, reference: critic}"
    plan = planned("{nodes: 1, devices_per_node: 2, device: B200}", pools, "executor.kind=ray")
    by_name = {pool.name: pool for pool in plan.pools}
    assert {r.role for r in by_name["critic"].roles} == {"critic", "reference"}
    critic = next(r for r in by_name["critic"].roles if r.role == "critic")
    actor = by_name["actor"].roles[0]
    assert critic.shape.total == actor.shape.total - 152064 * 3584 + 3584  # a value head instead of the LM head
    assert {phase.name for phase in by_name["critic"].phases} == {"values", "update critic", "ref_log_probs"}


def test_lora_shares_one_base(folder: Path) -> None:
    plan = planned("{nodes: 1, devices_per_node: 1, device: H100}", "model.lora.rank=16", "batch.microbatch_tokens=4096")
    actor, reference = plan.pools[0].roles
    assert reference.shares == "actor" and reference.weights == 0
    assert plan.fits and plan.checkpoint_bytes == 12 * actor.adapter


def test_disk_that_is_too_small(folder: Path) -> None:
    plan = planned("{nodes: 1, devices_per_node: 8, device: B200, disk_gb: 250}")
    assert any(problem.startswith("disk:") for problem in plan.problems)


def test_bad_clusters(folder: Path) -> None:
    for text, message in (
        ("{nodes: 1, devices_per_node: 1, device: H10}", "not in the table"),
        ("{nodes: 1, device: H100}", "give both"),
        ("{nodes: 1, devices_per_node: 1, device: H100, memroy_gb: 80}", "memory_gb"),
        ("{nodes: []}", "nodes"),
    ):
        Path("bad.yaml").write_text(text)
        with pytest.raises(ConfigError, match=message):
            load_cluster("bad.yaml")
    kinds = "nodes: [{count: 2, device: H100, devices: 8}, {count: 1, device: T4, devices: 4}, {device: CPU, cpus: 8}]"
    Path("good.yaml").write_text(kinds)
    assert load_cluster("good.yaml").devices == 20


def test_this_machine() -> None:
    machine = this_machine("cpu").machines[0]
    assert machine.cpus >= 1 and machine.memory > 1e8 and machine.disk is not None


def test_a_cluster_file_that_is_not_there_is_called_one(folder: Path) -> None:
    with pytest.raises(ConfigError, match=r"--cluster: no such file: none.yaml\n  -> give the path of a YAML cluster"):
        load_cluster("none.yaml")
