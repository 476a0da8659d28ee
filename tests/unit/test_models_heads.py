"""The role models over packed rows against plain `transformers`, one sequence at a time."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoModelForSequenceClassification,
    AutoTokenizer,
    PreTrainedModel,
)

from podium.algorithms import Loss, pairwise_reward_loss
from podium.core.batch import Batch
from podium.core.errors import ModelError
from podium.core.settings import OptimizerSettings
from podium.engines.train import SingleDeviceEngine
from podium.models.heads import ActorModel, CriticModel, RewardHead, RewardModel, load_reward_model
from podium.models.lm_head import base_of, lm_head_of, own_attention
from podium.models.packed import pack
from tests.tiny import FAMILIES, PAD_ID, tiny_model, tiny_tokenizer

SMALL: dict[str, Any] = {
    "vocab_size": 128,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 128,
    "initializer_range": 0.2,
    "pad_token_id": 0,
}


def small(name: str, **fields: Any) -> PreTrainedModel:
    torch.manual_seed(0)
    return AutoModelForCausalLM.from_config(AutoConfig.for_model(name, **{**SMALL, **fields})).eval()


def rows(vocabulary: int = 100) -> Batch:
    """Prompts and responses of many lengths, one response empty, past every sliding window of the tiny models."""
    generator = torch.Generator().manual_seed(3)

    def draw(n: int) -> list[int]:
        return torch.randint(3, vocabulary, (n,), generator=generator).tolist()

    return Batch(
        {
            "prompt_ids": [draw(n) for n in (5, 3, 30, 12, 1)],
            "response_ids": [draw(n) for n in (7, 2, 0, 20, 40)],
        }
    )


def plain_log_probs(model: PreTrainedModel, batch: Batch, temperature: float = 1.0) -> Tensor:
    """By the library's own eager attention, without packing or padding."""
    parts = []
    with torch.no_grad(), own_attention(model):
        for prompt, response in zip(batch["prompt_ids"], batch["response_ids"], strict=True):
            logits = model(torch.cat([prompt, response])[None], use_cache=False).logits[0].float() / temperature
            predicted = logits[len(prompt) - 1 : len(prompt) + len(response) - 1].log_softmax(-1)
            parts.append(predicted.gather(1, response[:, None])[:, 0])
    return torch.cat(parts)


@pytest.mark.parametrize("family", FAMILIES)
def test_log_probs_equal_a_plain_forward_of_each_sequence(family: str) -> None:
    actor = ActorModel(tiny_model(family))
    got = actor.compute(pack(rows()), ("log_probs",))["log_probs"]
    torch.testing.assert_close(got, plain_log_probs(actor.model, rows()), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize(
    ("name", "fields"),
    [
        ("granite", {"logits_scaling": 4.0}),
        ("cohere", {}),
        ("gpt2", {"n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": 128}),
        ("phi", {}),  # a head with a bias
        ("qwen2", {"use_sliding_window": True, "sliding_window": 6, "max_window_layers": 1}),
    ],
)
def test_other_heads_and_scales(name: str, fields: dict[str, Any]) -> None:
    actor = ActorModel(small(name, **fields))
    got = actor.compute(pack(rows()), ("log_probs",))["log_probs"]
    torch.testing.assert_close(got, plain_log_probs(actor.model, rows()), rtol=1e-5, atol=1e-5)


def test_temperature_and_entropy() -> None:
    actor = ActorModel(tiny_model(), temperature=0.7)
    out = actor.compute(pack(rows()), ("log_probs", "entropy"))
    torch.testing.assert_close(out["log_probs"], plain_log_probs(actor.model, rows(), 0.7), rtol=1e-5, atol=1e-5)
    packed = pack(rows())
    with own_attention(actor.model), torch.no_grad():
        first = actor.model(packed.ids[None, :12]).logits[0, 4:11] / 0.7
    entropy = torch.distributions.Categorical(logits=first).entropy()
    torch.testing.assert_close(out["entropy"][:7], entropy, rtol=1e-5, atol=1e-5)


def test_temperature_zero_counts_as_one() -> None:
    actor = ActorModel(tiny_model(), temperature=0.0)
    got = actor.compute(pack(rows()), ("log_probs",))["log_probs"]
    torch.testing.assert_close(got, plain_log_probs(actor.model, rows()), rtol=1e-5, atol=1e-5)


def test_softcap_and_scale_are_found() -> None:
    assert lm_head_of(tiny_model("gemma2")).softcap == 30.0
    assert lm_head_of(small("granite", logits_scaling=4.0)).scale == 0.25
    assert lm_head_of(small("cohere", logit_scale=0.5)).scale == 0.5


@pytest.mark.parametrize(
    ("name", "fields"),
    [
        ("bloom", {"n_layer": 2, "n_head": 4}),  # attention of its own
        ("mamba", {"state_size": 4}),  # no attention
        ("gpt_oss", {"num_local_experts": 2, "num_experts_per_tok": 1, "head_dim": 8}),  # sinks, which we lack
    ],
)
def test_architectures_that_cannot_be_packed_are_marked(
    name: str, fields: dict[str, Any], caplog: pytest.LogCaptureFixture
) -> None:
    model = small(name, **fields)
    own = model.config._attn_implementation
    with caplog.at_level("WARNING", logger="podium"):
        actor = ActorModel(model)
    assert not actor.packs and model.config._attn_implementation == own
    (warning,) = [r.getMessage() for r in caplog.records if r.name.startswith("podium")]
    assert type(model).__name__ in warning and "padded rows, slower" in warning


def test_a_model_that_does_not_pass_keywords_down_is_marked(monkeypatch: pytest.MonkeyPatch) -> None:
    model = tiny_model()
    attention = type(model.model.layers[0].self_attn)
    own = attention.forward

    def deaf(self: Any, *args: Any, **kwargs: Any) -> Any:
        kwargs.pop("podium_context", None)
        return own(self, *args, **kwargs)

    monkeypatch.setattr(attention, "forward", deaf)
    actor = ActorModel(model)
    assert not actor.packs and model.config._attn_implementation == "sdpa"
    got = actor.compute(pack(rows()), ("log_probs",))["log_probs"]
    torch.testing.assert_close(got, plain_log_probs(model, rows()), rtol=1e-5, atol=1e-5)


def test_a_head_that_differs_from_the_models_own_is_refused() -> None:
    model = tiny_model()
    model.config.logit_scale = 0.5  # Llama knows no such factor
    with pytest.raises(ModelError, match="differ"):
        ActorModel(model)


def test_unknown_output_is_named() -> None:
    with pytest.raises(ModelError, match="does not compute values"):
        ActorModel(tiny_model()).compute(pack(rows()), ("values",))


# ------------------------------------------------------------------ critic


def test_critic_values_come_from_the_state_before_each_token() -> None:
    critic = CriticModel.from_causal_lm(tiny_model())
    values = critic.compute(pack(rows()), ("values",))["values"]
    assert values.dtype == torch.float32
    assert float(values.detach().abs().max()) < 0.2
    prompt, response = rows()["prompt_ids"][0], rows()["response_ids"][0]
    with own_attention(critic.base):
        hidden = critic.base(torch.cat([prompt, response])[None]).last_hidden_state[0]
    torch.testing.assert_close(values[:7], critic.head(hidden[4:11])[:, 0], rtol=1e-5, atol=1e-5)


def test_critic_round_trip_and_start_from_a_language_model(tmp_path: Path) -> None:
    tiny_model().save_pretrained(tmp_path / "lm")
    critic = CriticModel.from_pretrained(tmp_path / "lm", dtype="float32")
    critic.save_pretrained(tmp_path / "critic", tiny_tokenizer())
    again = CriticModel.from_pretrained(tmp_path / "critic", dtype="float32")
    want = critic.compute(pack(rows()), ("values",))["values"]
    assert torch.equal(again.compute(pack(rows()), ("values",))["values"], want)


def test_critic_head_stays_in_fp32_over_a_bf16_base() -> None:
    critic = CriticModel.from_causal_lm(tiny_model(dtype=torch.bfloat16))
    assert critic.head.weight.dtype == torch.float32
    assert critic.compute(pack(rows()), ("values",))["values"].dtype == torch.float32


# ------------------------------------------------------------------ reward model


def test_reward_model_equals_plain_transformers_after_saving(tmp_path: Path) -> None:
    reward = RewardModel.from_causal_lm(tiny_model())
    assert torch.equal(base_of(reward.model).embed_tokens.weight, tiny_model().model.embed_tokens.weight)
    scores = reward.compute(pack(rows()), ("scores",))["scores"]
    assert scores.shape == (5,)
    reward.save_pretrained(tmp_path / "rm", tiny_tokenizer())
    plain = AutoModelForSequenceClassification.from_pretrained(tmp_path / "rm").eval()
    pairs = zip(rows()["prompt_ids"], rows()["response_ids"], strict=True)
    padded = torch.nn.utils.rnn.pad_sequence([torch.cat(p) for p in pairs], batch_first=True, padding_value=PAD_ID)
    with torch.no_grad():
        want = plain(padded, attention_mask=(padded != PAD_ID).long()).logits[:, 0]
    torch.testing.assert_close(scores, want, rtol=1e-5, atol=1e-5)
    again = RewardModel.from_pretrained(tmp_path / "rm", dtype="float32")
    assert torch.equal(again.compute(pack(rows()), ("scores",))["scores"], scores)


def test_reward_model_with_several_heads() -> None:
    reward = RewardModel.from_causal_lm(tiny_model("qwen2"), heads=3)
    assert reward.compute(pack(rows()), ("scores",))["scores"].shape == (5, 3)


def test_head_names_are_kept_in_the_folder(tmp_path: Path) -> None:
    names = ["helpful", "honest", "harmless"]
    tiny_model().save_pretrained(tmp_path / "lm")
    reward = RewardModel.from_pretrained(tmp_path / "lm", heads=names, dtype="float32")
    reward.save_pretrained(tmp_path / "rm", tiny_tokenizer())
    again = load_reward_model(tmp_path / "rm", dtype="float32")
    assert again.head_names == names
    want = reward.compute(pack(rows()), ("scores",))["scores"]
    assert torch.equal(again.compute(pack(rows()), ("scores",))["scores"], want)
    head = load_reward_model(tmp_path / "rm", head="honest", dtype="float32")
    assert isinstance(head, RewardHead) and head.name == "honest" and head.model.head_names == names
    assert AutoConfig.from_pretrained(tmp_path / "rm").id2label == dict(enumerate(names))
    with pytest.raises(ModelError, match=r"(?s)called helpful, honest, harmless, not honest, helpful.*in that order"):
        RewardModel.from_pretrained(tmp_path / "rm", heads=["honest", "helpful", "harmless"])


def test_heads_without_names_are_numbered_and_can_be_named(tmp_path: Path) -> None:
    reward = RewardModel.from_causal_lm(tiny_model(), heads=2)
    assert reward.head_names == ["0", "1"]
    with pytest.raises(ModelError, match=r"no head '2'"):
        reward.head("2")
    reward.save_pretrained(tmp_path / "rm")
    named = RewardModel.from_pretrained(tmp_path / "rm", heads=["a", "b"], dtype="float32")
    assert named.head_names == ["a", "b"]
    assert torch.equal(named.model.score.weight, reward.model.score.weight)


def head_loss() -> Loss:
    """Bradley-Terry on the score that each pair is about."""

    def function(outputs: Any, columns: Any) -> Any:
        scores = outputs["scores"].gather(1, columns["head"][:, None])[:, 0]
        return pairwise_reward_loss().function({"scores": scores}, columns)

    return Loss("pairwise", function, ("scores",), ("pair_id", "chosen", "head"), mask="chosen", keep_together="pair_id")


def test_heads_learn_from_their_own_pairs_whatever_the_micro_batches() -> None:
    draw = torch.Generator().manual_seed(0)
    ids = {n: [torch.randint(3, 100, (int(k),), generator=draw).tolist() for k in (4, 9, 6, 5) * 2] for n in ("p", "r")}
    pairs = Batch(
        {"prompt_ids": ids["p"], "response_ids": ids["r"], "pair_id": [0, 0, 1, 1, 2, 2, 3, 3], "head": [0] * 4 + [1] * 4}
    )
    pairs = pairs.with_columns({"chosen": [True, False] * 4})
    gradients = []
    for budget in (10_000, 20):
        reward = RewardModel.from_causal_lm(tiny_model(), heads=["a", "b", "c"])
        reward.model.score.weight.data.copy_(torch.linspace(-1, 1, 3 * 64).view(3, 64))
        engine = SingleDeviceEngine(reward, optimizer=OptimizerSettings(lr=1e-3), microbatch_tokens=budget)
        before = reward.model.score.weight.detach().clone()
        metrics = [engine.update(pairs, head_loss()) for _ in range(4)]
        gradients.append(metrics[0].mean("grad_norm"))
        assert metrics[-1].mean("loss") < metrics[0].mean("loss")
        moved = (reward.model.score.weight - before).abs().sum(1) > 0
        assert moved.tolist() == [True, True, False]
        assert engine.compute(pairs, ("scores",)).names == ["scores.a", "scores.b", "scores.c"]
    assert gradients[0] == pytest.approx(gradients[1], rel=1e-5)


@pytest.mark.parametrize("heads", [0, [], ["a", "a"], "helpful", [""]])
def test_heads_that_are_none_are_refused(heads: Any) -> None:
    with pytest.raises(ModelError, match="heads="):
        RewardModel.from_causal_lm(tiny_model(), heads=heads)


def test_reward_model_from_a_language_models_folder_needs_to_be_asked(tmp_path: Path) -> None:
    tiny_model().save_pretrained(tmp_path / "lm")
    with pytest.raises(ModelError, match=r"lacks the weights score\.weight"):
        RewardModel.from_pretrained(tmp_path / "lm")
    assert RewardModel.from_pretrained(tmp_path / "lm", heads=1).heads == 1


def test_a_saved_head_is_kept_when_training_goes_on(tmp_path: Path) -> None:
    reward = RewardModel.from_causal_lm(tiny_model())
    reward.save_pretrained(tmp_path / "rm")
    again = RewardModel.from_pretrained(tmp_path / "rm", heads=1, dtype="float32")
    assert torch.equal(again.model.score.weight, reward.model.score.weight)


def test_an_encoder_is_refused_as_a_policy() -> None:
    with pytest.raises(ModelError, match="not causal"):
        ActorModel(small("bert"))


def test_saved_actor_gives_equal_log_probs_in_plain_transformers(tmp_path: Path) -> None:
    actor = ActorModel(tiny_model("qwen3"))
    actor.save_pretrained(tmp_path / "actor", tiny_tokenizer())
    plain = AutoModelForCausalLM.from_pretrained(tmp_path / "actor").eval()
    assert plain.config._attn_implementation == "sdpa"
    ours = actor.compute(pack(rows()), ("log_probs",))["log_probs"]
    ids = torch.cat([rows()["prompt_ids"][0], rows()["response_ids"][0]])
    with torch.no_grad():
        theirs = plain(ids[None]).logits[0, 4:11].log_softmax(-1).gather(1, ids[5:, None])[:, 0]
    torch.testing.assert_close(ours[:7], theirs, rtol=1e-5, atol=1e-5)
    assert AutoTokenizer.from_pretrained(tmp_path / "actor")("fox")["input_ids"] == tiny_tokenizer()("fox")["input_ids"]
