"""QLoRA: adapters over a base in 4 or 8 bits; on the CPU, where bitsandbytes runs there."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

from podium import Trainer
from podium.algorithms import supervised_loss
from podium.core.errors import ConfigError, ModelError
from podium.core.settings import LoraSettings, OptimizerSettings
from podium.engines.base import Request, SamplingParams
from podium.engines.rollout.native.engine import NativeEngine
from podium.engines.train import SingleDeviceEngine
from podium.models import lm_head
from podium.models.adapters import WithoutAdapter, adapter_layers, add_lora
from podium.models.heads import ActorModel
from podium.models.loading import load_causal_lm
from podium.models.quantization import quantized_loading
from tests.tiny import tiny_model, tiny_tokenizer
from tests.unit.test_adapters import PROMPTS, length_reward, rows, worker

pytest.importorskip("bitsandbytes", reason="the extra `lora` is not installed")

KINDS = {"4bit": torch.uint8, "8bit": torch.int8}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> str:
    made = tmp_path_factory.mktemp("model")
    tiny_model().save_pretrained(made)
    tiny_tokenizer().save_pretrained(made)
    return str(made)


def quantised(folder: str, kind: str) -> Any:
    model = load_causal_lm(folder, dtype="float32", quantization=kind)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(1)
        add_lora(model, LoraSettings(rank=4, alpha=8))
    return model


@pytest.mark.parametrize("kind", KINDS)
def test_the_base_stays_in_its_bits_and_the_adapter_learns(folder: str, kind: str) -> None:
    model = quantised(folder, kind)
    layer = model.model.layers[0].mlp.up_proj
    assert layer.base_layer.weight.dtype == KINDS[kind] and model.lm_head.weight.dtype == torch.float32
    base = layer.base_layer.weight.detach().clone()
    rollout = NativeEngine(model, tiny_tokenizer())
    engine = SingleDeviceEngine(ActorModel(model), optimizer=OptimizerSettings(lr=1e-2))
    losses = [engine.update(rows(), supervised_loss()).mean("loss") for _ in range(6)]
    assert losses[-1] < losses[0] - 0.2
    assert torch.equal(layer.base_layer.weight, base)
    assert all(".lora_" in name for name in engine.state_dict()["model"])
    rollout.update_weights(engine.policy_version)
    rollout.submit(Request((5, 6, 7), SamplingParams(max_new_tokens=5)))
    while rollout.pending:
        rollout.step()


def test_a_pass_in_evaluation_mode_takes_no_gradient_away(folder: str) -> None:
    norms = []
    for evaluated in (False, True):
        model = quantised(folder, "4bit")
        if evaluated:
            with torch.no_grad():
                model.eval()(torch.tensor([[5, 6, 7]]))
        engine = SingleDeviceEngine(ActorModel(model), optimizer=OptimizerSettings(lr=1e-3))
        norms.append(engine.update(rows(), supervised_loss()).mean("grad_norm"))
    assert norms[0] == norms[1]


@pytest.mark.parametrize("kind", KINDS)
def test_the_gradient_is_the_same_for_any_micro_batches(folder: str, kind: str) -> None:
    norms = []
    for budget in (10_000, 25):
        engine = SingleDeviceEngine(
            ActorModel(quantised(folder, kind)), optimizer=OptimizerSettings(lr=1e-3), microbatch_tokens=budget
        )
        norms.append(engine.update(rows(), supervised_loss()).mean("grad_norm"))
    assert norms[0] == pytest.approx(norms[1], rel=1e-4 if kind == "4bit" else 1e-2)


def test_the_reference_is_the_quantised_base(folder: str) -> None:
    actor = SingleDeviceEngine(ActorModel(quantised(folder, "4bit")), optimizer=OptimizerSettings(lr=1e-2))
    reference = SingleDeviceEngine(WithoutAdapter(actor.model))
    start = actor.compute(rows(), ("log_probs",))["log_probs"].values
    saved = copy.deepcopy(actor.state_dict())
    actor.update(rows(), supervised_loss())
    assert torch.equal(reference.compute(rows(), ("log_probs",))["log_probs"].values, start)
    again = SingleDeviceEngine(ActorModel(quantised(folder, "4bit")), optimizer=OptimizerSettings(lr=1e-2))
    again.load_state_dict(saved)
    again.update(rows(), supervised_loss())
    for name, tensor in actor.state_dict()["model"].items():
        assert torch.equal(again.state_dict()["model"][name], tensor)


@pytest.mark.parametrize("kind", KINDS)
def test_export_is_a_plain_folder_with_the_numbers_that_were_trained(folder: str, tmp_path: Path, kind: str) -> None:
    model = quantised(folder, kind)
    for layer in adapter_layers(model).values():
        torch.nn.init.normal_(layer.lora_B["default"].weight, std=0.1)
    actor = ActorModel(model)
    ids = torch.arange(3, 40)[None]
    model.set_attn_implementation("eager")
    want = model(ids).logits.detach()
    actor.save_pretrained(tmp_path / "m", tiny_tokenizer())
    assert torch.equal(model(ids).logits, want) and model.config.quantization_config is not None
    plain = AutoModelForCausalLM.from_pretrained(tmp_path / "m", attn_implementation="eager")
    assert not hasattr(plain.config, "quantization_config")
    assert {p.dtype for p in plain.parameters()} == {torch.float32}
    if kind == "4bit":
        torch.testing.assert_close(plain(ids).logits.detach(), want, rtol=1e-4, atol=1e-4 * float(want.abs().max()))
    # In 8 bits a layer's inputs are rounded too; its weights are the original's, rounded to 1/127 of the row's largest.
    layer = model.model.layers[1].mlp.down_proj
    original = tiny_model().model.layers[1].mlp.down_proj.weight.detach() + layer.get_delta_weight("default")
    off = (plain.model.layers[1].mlp.down_proj.weight - original).detach().abs().max()
    assert float(off) < (0.5 / 127 if kind == "8bit" else 0.2) * 1.1 * float(
        tiny_model().model.layers[1].mlp.down_proj.weight.abs().max()
    )
    assert (tmp_path / "m" / "adapter" / "adapter_model.safetensors").is_file()


def test_what_is_rounded_to_8_bits_may_differ_by_a_step(folder: str) -> None:
    """The check at loading takes it for rounding; in a plain fp32 model the same difference is an error."""
    logits = torch.randn(5, 16, generator=torch.Generator().manual_seed(0))
    off = logits + 0.015 * logits.abs().max()
    lm_head._compare(quantised(folder, "8bit"), "logits", off, logits)
    with pytest.raises(ModelError, match="differ by"):
        lm_head._compare(tiny_model(), "logits", off, logits)


@pytest.mark.parametrize("algorithm", ["grpo", "ppo"])
def test_a_whole_run(folder: str, tmp_path: Path, algorithm: str) -> None:
    config = {
        "algorithm": algorithm,
        "model": {"path": folder, "dtype": "float32", "quantization": "4bit", "lora": {"rank": 4}},
        "rewards": [{"function": length_reward}],
        "kl": {"coef": 0.1},
        "rollout": {"max_new_tokens": 6},
        "batch": {"prompts_per_step": 4, "group_size": 2},
        "optimizer": {"lr": 1e-3},
        "run": {"folder": str(tmp_path), "steps": 2, "trackers": [], "progress": False},
    }
    run = Trainer(config=config, data=PROMPTS)
    result = run.train()
    assert isinstance(worker(run, "reference").engine.model, WithoutAdapter)
    AutoModelForCausalLM.from_pretrained(result.run_folder / "model")


def test_unknown_kinds_and_a_missing_package(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ConfigError, match="did you mean '4bit'"):
        quantized_loading("4bits", torch.float32, "cpu")
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(ConfigError, match=r"podium\[lora\]"):
        quantized_loading("4bit", torch.float32, "cpu")
