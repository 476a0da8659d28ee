"""RoPE scaling: the config that it makes, and that the numbers are those of plain transformers with that config."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForSequenceClassification

from podium.core.config import parse
from podium.core.errors import ConfigError, ModelError, RolloutError
from podium.core.settings import ModelSettings, RopeScalingSettings
from podium.engines.base import Request, SamplingParams
from podium.engines.rollout.native.engine import NativeEngine
from podium.models.heads import ActorModel, RewardModel
from podium.models.loading import load_causal_lm
from podium.models.rope import scale_rope
from tests.tiny import tiny_model, tiny_tokenizer

YARN = {"rope_type": "yarn", "factor": 4.0}
LLAMA3 = {"rope_type": "llama3", "factor": 2.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    made = tmp_path_factory.mktemp("rope")
    tiny_model(max_position_embeddings=32).save_pretrained(made)
    tiny_tokenizer().save_pretrained(made)
    return made


@pytest.mark.parametrize("scaling", [YARN, LLAMA3, {"rope_type": "linear", "factor": 2.0}])
def test_the_numbers_are_those_of_plain_transformers(folder: Path, tmp_path: Path, scaling: dict[str, Any]) -> None:
    settings = RopeScalingSettings(
        rope_type=scaling["rope_type"],
        factor=scaling["factor"],
        options={name: value for name, value in scaling.items() if name not in ("rope_type", "factor")},
    )
    model = load_causal_lm(folder, dtype="float32", rope_scaling=settings.fields)
    config = AutoConfig.from_pretrained(folder)
    config.rope_parameters = {"rope_theta": config.rope_parameters["rope_theta"], **scaling}
    if scaling["rope_type"] != "linear":
        config.rope_parameters["original_max_position_embeddings"] = 32
    config.max_position_embeddings = int(32 * scaling["factor"])
    plain = AutoModelForCausalLM.from_pretrained(folder, config=config, dtype="float32")
    unscaled = load_causal_lm(folder, dtype="float32")
    ids = torch.randint(3, 100, (1, 60), generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        got, want, before = (m(ids).logits for m in (model, plain, unscaled))
    assert torch.equal(got, want)
    assert float((got - before)[0, 40:].abs().max()) > 0.01
    assert model.config.max_position_embeddings == 32 * scaling["factor"]
    ActorModel(model).save_pretrained(tmp_path / "m")
    again = AutoModelForCausalLM.from_pretrained(tmp_path / "m", dtype="float32")
    with torch.no_grad():
        assert torch.equal(again(ids).logits, want)


def test_the_native_engine_takes_the_longer_context(folder: Path) -> None:
    request = Request(tuple(range(3, 43)), SamplingParams(max_new_tokens=20))
    with pytest.raises(RolloutError, match="max_position_embeddings=32"):
        NativeEngine(load_causal_lm(folder, dtype="float32"), tiny_tokenizer()).submit(request)
    engine = NativeEngine(load_causal_lm(folder, dtype="float32", rope_scaling=YARN), tiny_tokenizer())
    engine.submit(request)
    while engine.pending:
        engine.step()
    with pytest.raises(RolloutError, match="max_position_embeddings=128"):
        engine.submit(Request(tuple(range(3, 120)), SamplingParams(max_new_tokens=20)))


def test_a_reward_head_comes_with_it(folder: Path) -> None:
    model = RewardModel.from_pretrained(folder, heads=["a", "b"], dtype="float32", rope_scaling=YARN)
    assert isinstance(model.model, AutoModelForSequenceClassification._model_mapping[type(model.model.config)])
    assert model.head_names == ["a", "b"] and model.model.config.rope_parameters["rope_type"] == "yarn"


def test_layers_that_look_no_further_keep_theirs() -> None:
    config = tiny_model("gemma3").config
    local = dict(config.rope_parameters["sliding_attention"])
    scale_rope(config, {"rope_type": "linear", "factor": 8.0})
    assert config.rope_parameters["sliding_attention"] == local
    assert config.rope_parameters["full_attention"]["factor"] == 8.0
    assert config.max_position_embeddings == 8 * 256


def test_scaling_again_starts_from_the_original(folder: Path) -> None:
    config = AutoConfig.from_pretrained(folder)
    scale_rope(config, YARN)
    scale_rope(config, {"rope_type": "yarn", "factor": 2.0, "beta_fast": None})
    assert config.max_position_embeddings == 64
    assert config.rope_parameters["original_max_position_embeddings"] == 32


def test_a_model_without_rotary_embedding_is_refused() -> None:
    config = AutoConfig.for_model("gpt2")
    with pytest.raises(ModelError, match="no rotary embedding"):
        scale_rope(config, YARN)


@pytest.mark.parametrize(
    ("scaling", "message"),
    [
        ({"rope_type": "yran", "factor": 2}, "did you mean 'yarn'"),
        ({"rope_type": "dynamic", "factor": 2}, "would depend on the micro-batches"),
        ({"rope_type": "yarn", "factor": 0.5}, "greater than 1"),
        ({"rope_type": "yarn", "factr": 2}, "did you mean 'factor'"),
        ({"rope_type": "linear", "factor": 2, "options": {"beta_fast": 32}}, "no meaning"),
        ({"rope_type": "yarn", "factor": 2, "options": {"beta_fats": 32}}, "did you mean 'beta_fast'"),
        ({"rope_type": "llama3", "factor": 2}, "low_freq_factor"),
    ],
)
def test_settings_that_cannot_be_meant(scaling: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        parse(ModelSettings, {"rope_scaling": scaling}, "settings")
