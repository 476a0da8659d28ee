"""LoRA: what trains, what every engine sees, the reference over the same weights, checkpoints and exports."""

from __future__ import annotations

import copy
import json
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import AutoModelForCausalLM

from podium import Trainer
from podium.algorithms import Loss, supervised_loss, value_loss
from podium.core.batch import Batch
from podium.core.errors import CheckpointError, ConfigError, ModelError
from podium.core.settings import LoraSettings, ModelSettings, OptimizerSettings
from podium.engines.base import Request, SamplingParams, Trajectory
from podium.engines.rollout import create_rollout_engine
from podium.engines.rollout.hf import HFEngine
from podium.engines.rollout.native.engine import NativeEngine
from podium.engines.rollout.native.paged_engine import PagedEngine
from podium.engines.rollout.native.passes import FusedForward
from podium.engines.train import SingleDeviceEngine
from podium.models.adapters import (
    WithoutAdapter,
    adapter_layers,
    adapter_off,
    add_lora,
    is_silent,
    merged,
    remove_adapter,
    sharing_copy,
)
from podium.models.fused import can_fuse, fuse
from podium.models.heads import ActorModel, CriticModel, RewardModel
from podium.models.lm_head import base_of
from podium.models.storage import moved_parameters, storage_fingerprint
from podium.models.wrapper import ModelWrapper, unwrapped
from podium.workers.reference import ReferenceWorker
from tests.tiny import tiny_model, tiny_tokenizer

peft = pytest.importorskip("peft", reason="the extra `lora` is not installed")

LORA = LoraSettings(rank=4, alpha=8)
FAST = OptimizerSettings(lr=1e-2)


def rows() -> Batch:
    draw = torch.Generator().manual_seed(3)
    ids = {
        name: [torch.randint(3, 100, (n,), generator=draw).tolist() for n in lengths]
        for name, lengths in (("prompt_ids", (5, 3, 12, 5)), ("response_ids", (7, 2, 20, 9)))
    }
    ids["prompt_ids"][3] = ids["prompt_ids"][0]
    return Batch({**ids, "loss_mask": [[True] * len(r) for r in ids["response_ids"]]})


def adapted(family: str = "llama", *, trained: bool = False, **fields: Any) -> Any:
    """A tiny model with an adapter; `trained`: one that changes something."""
    model = tiny_model(family, **fields)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(1)
        add_lora(model, LORA)
        if trained:
            for layer in adapter_layers(model).values():
                torch.nn.init.normal_(layer.lora_B["default"].weight, std=0.1)
    return model


def log_probs(model: Any) -> Tensor:
    return SingleDeviceEngine(ActorModel(model)).compute(rows(), ("log_probs",))["log_probs"].values


def sft(engine: SingleDeviceEngine, updates: int = 1) -> Any:
    return [engine.update(rows(), supervised_loss()) for _ in range(updates)][-1]


# ------------------------------------------------------------------ training


def test_only_the_adapter_trains_and_the_base_gets_no_gradient() -> None:
    model = adapted(dtype=torch.bfloat16)
    base = {n: p.detach().clone() for n, p in model.named_parameters() if not p.requires_grad}
    engine = SingleDeviceEngine(ActorModel(model), optimizer=FAST)
    losses = [sft(engine).mean("loss") for _ in range(8)]
    assert losses[-1] < losses[0] - 0.5
    now = dict(model.named_parameters())
    assert all(torch.equal(now[n], p) and now[n].grad is None for n, p in base.items())
    trained = {n for n, p in now.items() if p.requires_grad}
    assert trained == {n for n in now if ".lora_" in n} and all(now[n].dtype == torch.float32 for n in trained)
    optimizer = engine.state_dict()["optimizer"]
    assert set(optimizer["moments"]) == {f"model.{n}" for n in trained} and not optimizer["masters"]


def test_a_new_adapter_changes_nothing_and_a_trained_one_does() -> None:
    plain = log_probs(tiny_model())
    assert is_silent(adapted()) and torch.equal(log_probs(adapted()), plain)
    model = adapted(trained=True)
    assert not is_silent(model) and float((log_probs(model) - plain).abs().max()) > 0.1


@pytest.mark.parametrize("family", ["llama", "gemma2", "qwen2"])
def test_the_gradient_is_the_same_for_any_micro_batches(family: str) -> None:
    gradients = []
    for budget in (10_000, 30, 1):
        engine = SingleDeviceEngine(ActorModel(adapted(family, trained=True)), optimizer=FAST, microbatch_tokens=budget)
        seen: dict[str, Tensor] = {}
        step = engine._optimizer.step  # type: ignore[union-attr]

        def watched(engine: Any = engine, seen: dict[str, Tensor] = seen, step: Any = step) -> Any:
            seen.update({n: p.grad.clone() for n, p in engine.model.named_parameters() if p.grad is not None})
            return step()

        engine._optimizer.step = watched  # type: ignore[union-attr, method-assign]
        sft(engine)
        gradients.append(seen)
    assert gradients[0] and set(gradients[0]) == set(gradients[1])
    for other in gradients[1:]:
        for name, gradient in gradients[0].items():
            torch.testing.assert_close(other[name], gradient, rtol=1e-4, atol=1e-6)


def paged(model: Any, tokenizer: Any) -> Any:
    return create_rollout_engine("native", model, tokenizer, page_size=16)


@pytest.mark.parametrize("kind", [NativeEngine, HFEngine, paged])
def test_rollout_engines_see_the_adapted_weights(kind: Any) -> None:
    model = adapted(trained=True)
    engine = kind(model, tiny_tokenizer())
    prompts, sampling = rows()["prompt_ids"].to_list()[:3], SamplingParams(max_new_tokens=8, temperature=0.0)
    for prompt in prompts:
        engine.submit(Request(tuple(prompt), sampling))
    done = []
    while engine.pending:
        done += engine.step()
    done.sort(key=lambda t: t.request_id)
    sampled = Batch({"prompt_ids": prompts, "response_ids": [t.response_ids for t in done]})
    want = SingleDeviceEngine(ActorModel(model)).compute(sampled, ("log_probs",))["log_probs"].values
    got = torch.tensor([p for t in done for s in t.segments for p in s.log_probs])
    torch.testing.assert_close(got, want, rtol=1e-4, atol=1e-4)
    other = SingleDeviceEngine(ActorModel(tiny_model())).compute(sampled, ("log_probs",))["log_probs"].values
    assert float((got - other).abs().max()) > 0.1


def test_over_a_base_in_fp16_the_loss_is_scaled() -> None:
    """The adapter is in fp32, but its gradient comes through layers whose small numbers fp16 would lose."""
    gradients = []
    for dtype in (torch.float32, torch.float16):
        engine = SingleDeviceEngine(ActorModel(adapted(dtype=dtype, trained=True)), optimizer=FAST)
        optimizer = engine._optimizer
        assert optimizer is not None and (optimizer.loss_scale is not None) == (dtype == torch.float16)
        taken: list[Tensor] = []
        own = optimizer._apply

        def apply(optimizer: Any = optimizer, taken: list[Tensor] = taken, own: Any = own) -> None:
            taken += [master.grad.clone() for master in optimizer._masters.values()]
            own()

        optimizer._apply = apply  # type: ignore[method-assign]
        tiny = Loss("tiny", lambda outputs, _: (-1e-6 * outputs["log_probs"], {}), ("log_probs",), ())
        engine.update(rows(), tiny)
        gradients.append(torch.cat([g.flatten() for g in taken]))
    assert float((gradients[1] - gradients[0]).norm() / gradients[0].norm()) < 0.05


def test_paged_rollout_runs_fused_layers_with_adapters_and_follows_their_updates() -> None:
    model = adapted(trained=True)
    trained, sampling = SingleDeviceEngine(ActorModel(model), optimizer=FAST), SamplingParams(max_new_tokens=8, temperature=0.0)
    engine = PagedEngine(model, tiny_tokenizer())
    assert isinstance(engine._forward, FusedForward) and engine._forward.model.layers[0].beside
    prompt = rows()["prompt_ids"].to_list()[0]
    samples = []
    for _ in range(2):
        engine.submit(Request(tuple(prompt), sampling))
        done = []
        while engine.pending:
            done += engine.step()
        got = torch.tensor([p for s in done[0].segments for p in s.log_probs])
        sampled = Batch({"prompt_ids": [prompt], "response_ids": [done[0].response_ids]})
        want = trained.compute(sampled, ("log_probs",))["log_probs"].values
        torch.testing.assert_close(got, want, rtol=1e-4, atol=1e-4)
        samples.append(got)
        sft(trained)
        engine.update_weights(trained.policy_version)
    assert samples[0].shape != samples[1].shape or float((samples[0] - samples[1]).abs().max()) > 1e-3


def test_fused_names_are_those_of_parameters() -> None:
    model = adapted()
    base = base_of(ActorModel(model).model)
    assert can_fuse(base) is not None and can_fuse(base, adapters=True) is None
    known = dict(base.named_parameters())
    names = fuse(base, 16).names
    assert all(part in known for parts in names.values() for part in parts)


def test_native_rollout_goes_on_after_updates_over_the_same_memory() -> None:
    model = adapted()
    rollout = NativeEngine(model, tiny_tokenizer())
    engine = SingleDeviceEngine(ActorModel(model), optimizer=FAST)
    sft(engine)
    rollout.update_weights(engine.policy_version)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_native_rollout_sees_what_an_update_made_of_the_adapter(dtype: torch.dtype) -> None:
    model = adapted(dtype=dtype)
    rollout = NativeEngine(model, tiny_tokenizer())
    request = Request((5, 6, 7), SamplingParams(max_new_tokens=12), seed=3)
    before = sampled(rollout, request)
    engine = SingleDeviceEngine(ActorModel(model), optimizer=FAST)
    sft(engine)
    rollout.update_weights(engine.policy_version)
    after = sampled(rollout, request)
    fresh = sampled(NativeEngine(model, tiny_tokenizer()), request)
    assert after.response_ids == fresh.response_ids
    assert after.segments[0].log_probs == fresh.segments[0].log_probs != before.segments[0].log_probs


def sampled(engine: NativeEngine, request: Request) -> Trajectory:
    engine.submit(request)
    while engine.pending:
        for trajectory in engine.step():
            return trajectory
    raise AssertionError


def test_critic_trains_its_adapter_and_its_head() -> None:
    model = tiny_model()
    critic = CriticModel.from_causal_lm(model)
    add_lora(critic.base, LORA)
    engine = SingleDeviceEngine(critic, optimizer=OptimizerSettings(lr=3e-3))
    batch = rows().with_columns({"returns": [torch.full((len(r),), 0.7) for r in rows()["loss_mask"]]})
    batch = batch.union(engine.compute(batch, ("values",)))
    losses = [engine.update(batch, value_loss()).mean("loss") for _ in range(8)]
    assert losses[-1] < 0.5 * losses[0]
    trained = {n for n, p in critic.named_parameters() if p.requires_grad}
    assert {"head.weight", "head.bias"} < trained and all("lora" in n or n.startswith("head.") for n in trained)


def test_exported_critic_and_reward_model_are_merged(tmp_path: Path) -> None:
    critic = CriticModel.from_causal_lm(tiny_model())
    add_lora(critic.base, LORA)
    reward = RewardModel.from_causal_lm(tiny_model(), heads=["a", "b"])
    add_lora(base_of(reward.model), LORA)
    for model in (critic, reward):
        for layer in adapter_layers(model).values():
            torch.nn.init.normal_(layer.lora_B["default"].weight, std=0.1)
        model.save_pretrained(tmp_path / type(model).__name__)
    for model, output in ((critic, "values"), (reward, "scores")):
        again = type(model).from_pretrained(tmp_path / type(model).__name__, dtype="float32")
        assert not adapter_layers(again)
        got, want = (SingleDeviceEngine(m).compute(rows(), (output,)) for m in (again, model))
        for name in want.names:
            values = [getattr(b[name], "values", b[name]) if output == "values" else b[name] for b in (got, want)]
            torch.testing.assert_close(*values, rtol=1e-4, atol=1e-4)


# ------------------------------------------------------------------ the reference


def test_the_reference_is_the_same_memory_with_the_adapter_off() -> None:
    model = adapted()
    actor = SingleDeviceEngine(ActorModel(model), optimizer=FAST)
    reference = ReferenceWorker(SingleDeviceEngine(WithoutAdapter(actor.model)))
    untouched = log_probs(tiny_model())
    start = actor.compute(rows(), ("log_probs",))["log_probs"].values
    assert torch.equal(start, untouched)  # the ratio to the reference is 1, their KL 0
    digest = reference.weights_digest()
    sft(actor, updates=3)
    moved = actor.compute(rows(), ("log_probs",))["log_probs"].values
    assert float((moved - start).abs().max()) > 0.01
    got = reference.compute_log_probs(rows())["ref_log_probs"].values
    assert torch.equal(got, untouched)
    assert (
        reference.weights_digest() == digest == ReferenceWorker(SingleDeviceEngine(ActorModel(tiny_model()))).weights_digest()
    )
    mine = {p.data_ptr() for p in actor.model.parameters()}
    assert all(p.data_ptr() in mine for _, p in reference.engine.model.named_parameters())
    assert all(p.requires_grad for n, p in model.named_parameters() if ".lora_" in n)
    sft(actor)


def test_switching_off_leaves_what_trains_as_it_was() -> None:
    model = adapted(trained=True)
    layers = adapter_layers(model)
    frozen = next(iter(layers.values())).lora_A["default"].weight.requires_grad_(False)
    on = log_probs(model)
    with pytest.raises(RuntimeError, match="inside"), adapter_off(model):
        assert torch.equal(log_probs(model), log_probs(tiny_model()))
        raise RuntimeError("inside")
    assert torch.equal(log_probs(model), on)
    assert not frozen.requires_grad and sum(p.requires_grad for p in model.parameters()) == 2 * len(layers) - 1


def test_a_second_role_over_the_same_base_shares_its_memory() -> None:
    model = adapted(trained=True)
    critic = CriticModel.from_causal_lm(sharing_copy(model))
    add_lora(critic.base, LORA)
    base = {p.data_ptr() for p in model.parameters() if not p.requires_grad}
    assert {p.data_ptr() for p in critic.base.parameters() if not p.requires_grad} <= base
    assert torch.equal(log_probs(remove_adapter(copy.deepcopy(model))), log_probs(tiny_model()))
    assert len(adapter_layers(model)) == len(adapter_layers(critic.base)) and not is_silent(model)


# ------------------------------------------------------------------ checkpoints, export


def test_a_checkpoint_holds_what_trains_and_resumes_bit_for_bit() -> None:
    first = SingleDeviceEngine(ActorModel(adapted()), optimizer=FAST)
    sft(first, updates=2)
    saved = copy.deepcopy(first.state_dict())
    assert all(".lora_" in name for name in saved["model"]) and len(saved["frozen"]) == 32
    sft(first, updates=2)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(99)
        model = tiny_model()
        add_lora(model, LORA)
    second = SingleDeviceEngine(ActorModel(model), optimizer=FAST)
    second.load_state_dict(saved)
    sft(second, updates=2)
    for name, tensor in first.state_dict()["model"].items():
        assert torch.equal(second.state_dict()["model"][name], tensor)
    other = SingleDeviceEngine(ActorModel(adapted(seed=5)), optimizer=FAST)
    with pytest.raises(CheckpointError, match="the base under the adapter"):
        other.load_state_dict(saved)


@pytest.mark.parametrize(("family", "fields"), [("llama", {}), ("gemma3", {}), ("llama", {"tie_word_embeddings": False})])
def test_export_is_a_plain_folder_and_an_adapter(tmp_path: Path, family: str, fields: dict[str, Any]) -> None:
    model = adapted(family, trained=True, **fields)
    actor = ActorModel(model)
    places = storage_fingerprint(model)
    values = {n: p.detach().clone() for n, p in model.named_parameters()}
    actor.save_pretrained(tmp_path / "m", tiny_tokenizer())
    assert not moved_parameters(places, storage_fingerprint(model))
    assert all(torch.equal(p, values[n]) for n, p in model.named_parameters())
    ids = torch.randint(3, 100, (2, 30), generator=torch.Generator().manual_seed(0))
    model.set_attn_implementation("eager")
    with torch.no_grad():
        want = model(ids).logits
        plain = AutoModelForCausalLM.from_pretrained(tmp_path / "m", attn_implementation="eager")
        torch.testing.assert_close(plain(ids).logits, want, rtol=1e-5, atol=1e-5 * float(want.abs().max()))
        assert not adapter_layers(plain)
        base = tiny_model(family, **fields)
        base.set_attn_implementation("eager")
        loaded = peft.PeftModel.from_pretrained(base, tmp_path / "m" / "adapter")
        torch.testing.assert_close(loaded(ids).logits, want, rtol=1e-5, atol=1e-5 * float(want.abs().max()))


def test_gpt2s_own_layers_merge(tmp_path: Path) -> None:
    from transformers import AutoConfig

    torch.manual_seed(0)
    config = AutoConfig.for_model("gpt2", n_embd=32, n_layer=2, n_head=4, vocab_size=64, n_positions=64)
    model = AutoModelForCausalLM.from_config(config).eval()
    add_lora(model, LORA)
    for layer in adapter_layers(model).values():
        torch.nn.init.normal_(layer.lora_B["default"].weight, std=0.1)
    ids = torch.arange(20)[None]
    want = model(ids).logits
    with merged(model):
        assert not adapter_layers(model)
        torch.testing.assert_close(model(ids).logits, want, rtol=1e-5, atol=1e-5)
    assert torch.equal(model(ids).logits, want)


# ------------------------------------------------------------------ models that come with peft


def test_peft_models_and_wrappers_are_looked_through() -> None:
    config = peft.LoraConfig(r=4, lora_alpha=8, target_modules=["q_proj", "v_proj"])
    wrapped = ModelWrapper(tiny_model(), peft_config=config)
    assert unwrapped(wrapped) is wrapped.model and len(adapter_layers(wrapped.model)) == 4
    outer = peft.get_peft_model(tiny_model(), config)
    assert unwrapped(outer) is unwrapped(ActorModel(outer)) is outer.get_base_model()
    assert torch.equal(log_probs(outer), log_probs(tiny_model()))
    assert adapter_layers(CriticModel.from_causal_lm(outer))
    assert NativeEngine(outer, tiny_tokenizer()).base is outer.get_base_model().model
    sft(SingleDeviceEngine(ActorModel(outer), optimizer=FAST))


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"target_modules": ["q_proj", "lm_head"]}, "LM head"),
        ({"target_modules": ["no_such"]}, r"(?s)no adapter fits.*q_proj"),
        ({"target_modules": ["q_proj"], "lora_dropout": 0.1}, "same probability"),
        ({"target_modules": ["q_proj"], "use_dora": True}, "no plain LoRA"),
        ({"target_modules": ["q_proj"], "modules_to_save": ["lm_head"]}, "modules_to_save"),
    ],
)
def test_what_podium_does_not_train_is_refused(fields: dict[str, Any], message: str) -> None:
    with pytest.raises(ModelError, match=message):
        ModelWrapper(tiny_model(tie_word_embeddings=False), peft_config=peft.LoraConfig(**fields))


def test_a_second_adapter_is_refused() -> None:
    with pytest.raises(ModelError, match="has an adapter already"):
        add_lora(adapted(), LORA)


def test_without_peft_the_remedy_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(__import__("sys").modules, "peft", None)
    with pytest.raises(ConfigError, match=r"pip install 'podium\[lora\]'"):
        add_lora(tiny_model(), LORA)


def test_settings_say_what_cannot_be() -> None:
    with pytest.raises(ValueError, match="same probability"):
        LoraSettings(dropout=0.1)
    with pytest.raises(ValueError, match="needs lora"):
        ModelSettings(quantization="4bit")


# ------------------------------------------------------------------ whole runs

PROMPTS = [{"prompt": f"What is {a} plus {b}?"} for a in range(3) for b in range(4)]


def length_reward(prompts: list[str], completions: list[str], **columns: Any) -> list[float]:
    return [float(len(c) % 5) / 4 for c in completions]


@pytest.fixture(scope="module")
def model_folder(tmp_path_factory: pytest.TempPathFactory) -> str:
    folder = tmp_path_factory.mktemp("model")
    tiny_model().save_pretrained(folder)
    tiny_tokenizer().save_pretrained(folder)
    return str(folder)


def trainer(algorithm: str, folder: Path, steps: int = 2, *, model: dict[str, Any], **given: Any) -> Trainer:
    config = {
        "algorithm": algorithm,
        "model": {"dtype": "float32", **model},
        "rewards": [{"function": length_reward}],
        "kl": {"coef": 0.1},
        "rollout": {"max_new_tokens": 6},
        "batch": {"prompts_per_step": 4, "group_size": 2, "microbatch_tokens": 64},
        "optimizer": {"lr": 1e-3},
        "run": {"folder": str(folder), "name": "run", "steps": steps, "trackers": [], "progress": False},
    }
    return Trainer(config=config, data=PROMPTS, **given)


def worker(trained: Trainer, role: str) -> Any:
    return trained.roles[role].workers[0]


def test_one_base_serves_actor_reference_and_critic(model_folder: str, tmp_path: Path) -> None:
    run = trainer("ppo", tmp_path, model={"path": model_folder, "lora": {"rank": 4}}).prepare()
    actor = {p.data_ptr(): p for p in worker(run, "actor").engine.model.parameters() if not p.requires_grad}
    assert all(p.data_ptr() in actor for _, p in worker(run, "reference").engine.model.named_parameters())
    critic = worker(run, "critic").engine.model
    assert all(p.data_ptr() in actor for p in critic.parameters() if not p.requires_grad)
    trained = [p for role in ("actor", "critic") for p in worker(run, role).engine.model.parameters() if p.requires_grad]
    assert len({p.data_ptr() for p in trained}) == len(trained)
    before = copy.deepcopy([p.detach() for p in trained])
    result = run.train()
    assert all(not torch.equal(p, b) for p, b in zip(trained, before, strict=True) if p.ndim == 2 and b.any())
    plain = AutoModelForCausalLM.from_pretrained(result.run_folder / "model")
    assert not torch.equal(plain.model.layers[0].mlp.up_proj.weight, tiny_model().model.layers[0].mlp.up_proj.weight)
    assert torch.equal(plain.model.embed_tokens.weight, tiny_model().model.embed_tokens.weight)
    files = sum(f.stat().st_size for f in (result.run_folder / "checkpoints").rglob("role_actor.safetensors"))
    assert files < 0.5 * sum(p.numel() * 4 for p in tiny_model().parameters())


def test_a_resumed_lora_run_gives_the_same_numbers(model_folder: str, tmp_path: Path) -> None:
    def rows(folder: Path) -> list[dict[str, float]]:
        lines = (folder / "run" / "metrics.jsonl").read_text().splitlines()
        return [{k: v for k, v in json.loads(line).items() if not k.startswith(("time", "speed", "memory"))} for line in lines]

    model = {"path": model_folder, "lora": {"rank": 4, "target_modules": ["q_proj", "v_proj"]}}
    trainer("grpo", tmp_path / "whole", 3, model=model).train()
    trainer("grpo", tmp_path / "parts", 1, model=model).train()
    trainer("grpo", tmp_path / "parts", 3, model=model).train(resume=True)
    whole, parts = rows(tmp_path / "whole"), rows(tmp_path / "parts")
    assert whole == parts and len(whole) == 3
    assert whole[0]["actor/ref_kl"] == 0.0 and whole[2]["actor/ref_kl"] > 0.0


def test_a_wrapped_model_trains_and_its_reference_is_what_it_was(tmp_path: Path) -> None:
    config = peft.LoraConfig(r=4, lora_alpha=8, target_modules="all-linear")
    for trained in (False, True):
        model = ModelWrapper(tiny_model(), peft_config=config)
        if trained:  # an adapter that was trained before: the reference starts from it, so it is a copy
            torch.nn.init.normal_(next(iter(adapter_layers(model.model).values())).lora_B["default"].weight, std=0.1)
        start = log_probs(model.model)
        run = trainer("grpo", tmp_path / str(trained), model={}, models={"actor": model}, tokenizer=tiny_tokenizer())
        run.train()
        got = worker(run, "reference").compute_log_probs(rows())["ref_log_probs"].values
        torch.testing.assert_close(got, start)
        assert isinstance(worker(run, "reference").engine.model, WithoutAdapter) != trained


def test_reward_model_trains_with_an_adapter(model_folder: str, tmp_path: Path) -> None:
    config = {
        "algorithm": "reward_model",
        "model": {"path": model_folder, "dtype": "float32", "lora": {"rank": 4}},
        "batch": {"prompts_per_step": 4},
        "run": {"folder": str(tmp_path), "steps": 2, "trackers": [], "progress": False},
    }
    pairs = [{**row, "chosen": " yes", "rejected": " no"} for row in PROMPTS]
    run = Trainer(config=config, data=pairs)
    result = run.train()
    trained = {n for n, p in worker(run, "reward").engine.model.named_parameters() if p.requires_grad}
    assert "model.score.weight" in trained and all(".lora_" in n or ".score." in n for n in trained)
    RewardModel.from_pretrained(result.run_folder / "model", dtype="float32")
