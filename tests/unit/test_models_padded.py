"""Architectures that cannot run packed rows: padded rows give the numbers of a plain forward of each sequence."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from tokenizers import Tokenizer, models, pre_tokenizers, processors
from torch import Tensor
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoModelForSequenceClassification,
    PreTrainedModel,
    PreTrainedTokenizerFast,
)

from podium.core.batch import Batch
from podium.core.errors import ModelError, RewardError
from podium.engines.base import Request, SamplingParams
from podium.engines.rollout.hf import HFEngine
from podium.engines.rollout.native.engine import NativeEngine
from podium.engines.train.single import SingleDeviceEngine
from podium.models.heads import ActorModel, CriticModel, RewardModel, load_reward_model
from podium.models.lm_head import base_of, own_attention
from podium.models.packed import pack
from podium.models.padded import padded_hidden_states
from podium.workers.reward import RewardWorker
from tests.recipes.test_recipes import numbers, trainer
from tests.tiny import VOCAB_SIZE, tiny_model, tiny_tokenizer

SMALL: dict[str, Any] = {
    "vocab_size": VOCAB_SIZE,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 128,
    "initializer_range": 0.2,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
FAMILIES: dict[str, tuple[str, dict[str, Any]]] = {
    "bloom": ("bloom", {"n_layer": 2, "n_head": 4}),
    "stablelm": ("stablelm", {}),
    "falcon": ("falcon", {}),
    "falcon, alibi": ("falcon", {"alibi": True}),
    "mamba": ("mamba", {"state_size": 4}),
}


def small(family: str, auto: Any = AutoModelForCausalLM, **fields: Any) -> PreTrainedModel:
    name, own = FAMILIES.get(family, (family, {}))
    torch.manual_seed(0)
    return auto.from_config(AutoConfig.for_model(name, **{**SMALL, **own, **fields})).eval()


def rows() -> Batch:
    """Shared prompts mixed up, one of them with an empty response, one prompt alone; many lengths."""
    generator = torch.Generator().manual_seed(3)

    def draw(n: int) -> list[int]:
        return torch.randint(3, 100, (n,), generator=generator).tolist()

    prompts = [draw(n) for n in (5, 22, 1)]
    return Batch(
        {
            "prompt_ids": [prompts[i] for i in (0, 1, 0, 2, 1, 0)],
            "response_ids": [draw(n) for n in (7, 2, 0, 30, 4, 1)],
        }
    )


def sequences(batch: Batch) -> list[Tensor]:
    return [torch.cat(pair)[None] for pair in zip(batch["prompt_ids"], batch["response_ids"], strict=True)]


def plain_log_probs(model: PreTrainedModel, batch: Batch) -> Tensor:
    parts = []
    for ids, prompt in zip(sequences(batch), batch.lengths("prompt").tolist(), strict=True):
        logits = model(ids, use_cache=False).logits[0, prompt - 1 : -1].log_softmax(-1)
        parts.append(logits.gather(1, ids[0, prompt:, None])[:, 0])
    return torch.cat(parts)


def gradients(model: torch.nn.Module, output: Tensor) -> dict[str, Tensor]:
    model.zero_grad()
    # The mean of squares: a gradient that differs from token to token.
    output.square().mean().backward()
    return {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}


def assert_gradients_equal(got: dict[str, Tensor], want: dict[str, Tensor]) -> None:
    assert got.keys() == want.keys()
    for name, gradient in want.items():
        size = max(1.0, float(gradient.abs().max()))
        torch.testing.assert_close(got[name] / size, gradient / size, rtol=1e-5, atol=1e-5, msg=name)


@pytest.mark.parametrize("family", FAMILIES)
def test_log_probs_and_gradients_equal_a_plain_forward_of_each_sequence(family: str) -> None:
    actor = ActorModel(small(family))
    assert not actor.packs
    got, want = actor.compute(pack(rows()), ("log_probs",))["log_probs"], plain_log_probs(actor.model, rows())
    torch.testing.assert_close(got, want, rtol=1e-5, atol=1e-5)
    assert_gradients_equal(gradients(actor.model, got), gradients(actor.model, want))


def test_every_token_of_the_row_has_its_state() -> None:
    """The packed path of a model that packs is the second opinion, token by token."""
    base, packed = base_of(tiny_model()), pack(rows())
    states = padded_hidden_states(base, packed)
    at = 0
    starts = torch.cumsum(packed.lengths, 0) - packed.lengths
    for start, length, parent in zip(starts.tolist(), packed.lengths.tolist(), packed.parents.tolist(), strict=True):
        before = packed.ids[starts[parent] : starts[parent] + packed.lengths[parent]] if parent >= 0 else packed.ids[:0]
        whole = torch.cat([before, packed.ids[start : start + length]])
        want = base(whole[None]).last_hidden_state[0, len(before) :]
        torch.testing.assert_close(states[at : at + length], want, rtol=1e-5, atol=1e-5)
        at += length
    assert at == len(states)


def test_critic_values_and_gradients() -> None:
    critic = CriticModel.from_causal_lm(small("bloom"))
    assert not critic.packs
    got = critic.compute(pack(rows()), ("values",))["values"]
    prompts = rows().lengths("prompt").tolist()
    states = [critic.base(i).last_hidden_state[0, p - 1 : -1] for i, p in zip(sequences(rows()), prompts, strict=True)]
    want = critic.head(torch.cat(states))[:, 0]
    torch.testing.assert_close(got, want, rtol=1e-5, atol=1e-5)
    assert_gradients_equal(gradients(critic, got), gradients(critic, want))


def test_an_unknown_head_is_still_refused_and_attention_put_back() -> None:
    model = small("stablelm")
    model.config.logit_scale = 0.5  # StableLM knows no such factor
    with pytest.raises(ModelError, match="differ"):
        ActorModel(model)
    assert model.config._attn_implementation == "sdpa"


def test_own_attention_puts_back_what_was_there() -> None:
    model = small("stablelm")
    with own_attention(model):
        assert model.config._attn_implementation == "eager"
    assert model.config._attn_implementation == base_of(model).config._attn_implementation == "sdpa"


def test_microbatches_count_a_shared_prompt_for_every_row(monkeypatch: pytest.MonkeyPatch) -> None:
    actor = ActorModel(small("bloom"))
    seen: list[int] = []
    own = actor.compute

    def compute(packed: Any, outputs: Any) -> Any:
        seen.append(int(packed.lengths.sum()))
        return own(packed, outputs)

    monkeypatch.setattr(actor, "compute", compute)
    batch = Batch({"prompt_ids": [[5] * 20] * 4, "response_ids": [[6, 7], [8, 9], [10, 11], [12, 13]]})
    SingleDeviceEngine(actor, microbatch_tokens=44).compute(batch, ("log_probs",))
    assert len(seen) == 2


# ------------------------------------------------------------------ rollout and training


@pytest.mark.parametrize("family", [*FAMILIES, "rwkv"])
def test_hf_engine_on_a_wrapped_model_equals_a_plain_forward(family: str) -> None:
    fields = {"attention_hidden_size": 32} if family == "rwkv" else {}  # takes no mask, so no padding either
    model = ActorModel(small(family, **fields)).model
    engine = HFEngine(model, tiny_tokenizer())
    for prompt in ((5, 6, 7, 8, 9), (11,), (3, 4, 20, 30, 40, 50, 60, 70)):
        engine.submit(Request(prompt, SamplingParams(max_new_tokens=5, temperature=0.0)))
    done = []
    while engine.pending:
        done += engine.step()
    assert len(done) == 3
    for trajectory in done:
        ids = torch.tensor([[*trajectory.prompt_ids, *trajectory.response_ids]])
        with torch.no_grad():
            logits = model(ids, use_cache=False).logits[0, len(trajectory.prompt_ids) - 1 : -1].log_softmax(-1)
        best = logits.max(-1)
        assert best.indices.tolist() == list(trajectory.response_ids)
        torch.testing.assert_close(torch.tensor(trajectory.segments[0].log_probs), best.values, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("family", ["bloom", "stablelm", "mamba"])
def test_native_engine_refuses_with_the_remedy_and_leaves_the_model_as_it_was(family: str) -> None:
    model = small(family)
    own = model.config._attn_implementation
    with pytest.raises(ModelError, match=r"rollout\.engine=hf"):
        NativeEngine(model, tiny_tokenizer())
    assert model.config._attn_implementation == own


def test_two_steps_of_grpo_on_bloom_with_an_encoder_as_reward(tmp_path: Path) -> None:
    encoder = tmp_path / "encoder"
    small("bert", AutoModelForSequenceClassification, num_labels=1).save_pretrained(encoder)
    encoder_tokenizer(types=True).save_pretrained(encoder)
    folder = tmp_path / "bloom"
    small("bloom").save_pretrained(folder)
    tiny_tokenizer().save_pretrained(folder)
    result = trainer("grpo", str(folder), tmp_path, "rollout.engine=hf", f"model.reward_path={encoder}").train()
    steps = numbers(result.run_folder)[1:]
    assert result.steps == 2 and all(row["actor/grad_norm"] > 0 for row in steps)
    # The rollout's log-probs are those of training: the first update's ratio is 1.
    assert all(row["actor/ratio"] == pytest.approx(1.0, abs=1e-5) for row in steps)


# ------------------------------------------------------------------ reward models

TEXTS = [("the quick fox", "jumps over the dog"), ("the quick fox", "runs"), ("stop", "the answer is the dog"), ("the", "")]
WORDS = ["<pad>", "[CLS]", "[SEP]", "[UNK]", *sorted({word for pair in TEXTS for text in pair for word in text.split()})]


def encoder_tokenizer(*, types: bool, **options: Any) -> PreTrainedTokenizerFast:
    """Words, framed as BERT frames them; no begin or end token."""
    made = Tokenizer(models.WordLevel({word: i for i, word in enumerate(WORDS)}, unk_token="[UNK]"))
    made.pre_tokenizer = pre_tokenizers.Whitespace()
    second = 1 if types else 0
    made.post_processor = processors.TemplateProcessing(
        single="[CLS] $A [SEP]",
        pair=f"[CLS]:0 $A:0 [SEP]:0 $B:{second} [SEP]:{second}",
        special_tokens=[("[CLS]", 1), ("[SEP]", 2)],
    )
    names = ["input_ids", "attention_mask", *(["token_type_ids"] if types else [])]
    special = {"pad_token": "<pad>", "cls_token": "[CLS]", "sep_token": "[SEP]", "unk_token": "[UNK]"}
    return PreTrainedTokenizerFast(tokenizer_object=made, model_input_names=names, **special, **options)


ENCODERS: dict[str, dict[str, Any]] = {
    "bert": {"type_vocab_size": 2},
    "roberta": {"type_vocab_size": 1, "max_position_embeddings": 130},
    "deberta-v2": {"relative_attention": True, "pos_att_type": ["p2c", "c2p"], "pooler_hidden_size": 32},
}


@pytest.mark.parametrize("name", ENCODERS)
def test_an_encoders_scores_equal_the_plain_models(name: str, tmp_path: Path) -> None:
    plain = small(name, AutoModelForSequenceClassification, num_labels=1, **ENCODERS[name])
    plain.save_pretrained(tmp_path / "rm")
    encoder_tokenizer(types=name == "bert").save_pretrained(tmp_path / "rm")
    model = load_reward_model(tmp_path / "rm", dtype="float32")
    assert not model.packs and model.tokenizer is not None and model.tokenizer.eos_token_id is None
    policy = tiny_tokenizer()
    ids = [[policy(text)["input_ids"] for text in side] for side in zip(*TEXTS, strict=True)]
    worker = RewardWorker(SingleDeviceEngine(model), tokenizer=model.tokenizer, policy_tokenizer=policy)
    got = worker.score(Batch({"prompt_ids": ids[0], "response_ids": ids[1]}))["rewards"]
    with torch.no_grad():
        want = torch.cat([plain(**model.tokenizer(*pair, return_tensors="pt")).logits[:, 0] for pair in TEXTS])
    assert len(want.unique()) == len(TEXTS)
    torch.testing.assert_close(got, want, rtol=1e-5, atol=1e-5)


def test_an_encoders_rows_of_its_own_tokens_keep_their_order_and_heads() -> None:
    model = RewardModel(small("bert", AutoModelForSequenceClassification, num_labels=3))
    got = model.compute(pack(rows()), ("scores",))["scores"]
    want = torch.cat([model.model(ids).logits for ids in sequences(rows())])
    assert got.shape == (6, 3) == (len(rows()), model.heads)
    torch.testing.assert_close(got, want, rtol=1e-5, atol=1e-5)
    assert_gradients_equal(gradients(model, got), gradients(model, want))


def test_texts_longer_than_the_reward_model_are_an_error() -> None:
    model = RewardModel(small("bert", AutoModelForSequenceClassification))
    tokenizer = encoder_tokenizer(types=True, model_max_length=6)
    worker = RewardWorker(SingleDeviceEngine(model), tokenizer=tokenizer, policy_tokenizer=tiny_tokenizer())
    ids = tiny_tokenizer()("the quick fox jumps over the dog")["input_ids"]
    with pytest.raises(RewardError, match="takes 6"):
        worker.score(Batch({"prompt_ids": [ids], "response_ids": [ids]}))


@pytest.mark.parametrize("pad", [0, None])
def test_a_decoder_whose_score_is_no_linear_layer_is_asked_whole(pad: int | None) -> None:
    plain = small("llama", AutoModelForSequenceClassification, num_labels=1, pad_token_id=pad)
    plain.score = torch.nn.Sequential(plain.score, torch.nn.Tanh())
    model = RewardModel(plain)
    assert not model.packs and plain.config._attn_implementation == "sdpa"
    want = torch.cat([plain(ids).logits[:, 0] for ids in sequences(rows())])
    torch.testing.assert_close(model.compute(pack(rows()), ("scores",))["scores"], want, rtol=1e-5, atol=1e-5)


def test_a_score_that_is_changed_after_its_layer_is_found() -> None:
    """A linear layer of the right name is not enough: this class does more after it."""

    def louder(module: Any, args: Any, out: Any) -> Any:
        out.logits = 2 * out.logits
        return out

    plain = small("llama", AutoModelForSequenceClassification, num_labels=1)
    plain.register_forward_hook(louder)
    model = RewardModel(plain)
    assert not model.packs
    want = torch.cat([plain(ids).logits[:, 0] for ids in sequences(rows())])
    torch.testing.assert_close(model.compute(pack(rows()), ("scores",))["scores"], want, rtol=1e-5, atol=1e-5)


def test_a_decoder_reward_model_that_cannot_pack() -> None:
    model = RewardModel(small("bloom", AutoModelForSequenceClassification, num_labels=1))
    assert not model.packs
    want = torch.cat([model.model(ids).logits[:, 0] for ids in sequences(rows())])
    torch.testing.assert_close(model.compute(pack(rows()), ("scores",))["scores"], want, rtol=1e-5, atol=1e-5)
