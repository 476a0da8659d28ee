"""The native engine against the oracle: greedy tokens equal, log-probs within 1e-4 (fp32), for every family of models."""

from __future__ import annotations

import random

import pytest
import torch

from podium.engines.base import Request, RolloutEngine, SamplingParams, Trajectory
from podium.engines.rollout.hf import HFEngine
from podium.engines.rollout.native.engine import NativeEngine
from podium.engines.rollout.native.paged_engine import PagedEngine
from tests.tiny import FAMILIES, VOCAB_SIZE, tiny_model, tiny_tokenizer

TOKENIZER = tiny_tokenizer()


def run(engine: RolloutEngine, requests: list[Request]) -> list[Trajectory]:
    ids = [engine.submit(request) for request in requests]
    done: dict[int, Trajectory] = {}
    while engine.pending:
        done.update({t.request_id: t for t in engine.step()})
    return [done[i] for i in ids]


def assert_same(ours: list[Trajectory], theirs: list[Trajectory], tolerance: float = 1e-4) -> None:
    for a, b in zip(ours, theirs, strict=True):
        assert a.response_ids == b.response_ids
        assert a.finish_reason == b.finish_reason
        assert a.segments[0].log_probs == pytest.approx(b.segments[0].log_probs, abs=tolerance)


def mixed_requests(seed: int = 0) -> list[Request]:
    """Seven prompts of 1 to 60 tokens (beyond the windows of 8), in groups of 1 to 4, three lengths, interleaved."""
    rng = random.Random(seed)
    requests = []
    for length in (1, 2, 7, 8, 9, 23, 60):
        prompt = tuple(rng.randrange(5, VOCAB_SIZE) for _ in range(length))
        for _ in range(rng.randint(1, 4)):
            sampling = SamplingParams(max_new_tokens=rng.choice([1, 6, 24]), temperature=0, stop_token_ids=(21, 77, 300))
            requests.append(Request(prompt, sampling, seed=len(requests)))
    rng.shuffle(requests)
    return requests


@pytest.mark.parametrize("family", FAMILIES)
def test_greedy_tokens_and_log_probs(family: str) -> None:
    model = tiny_model(family)
    requests = mixed_requests()
    theirs = run(HFEngine(model, TOKENIZER), requests)
    ours = run(NativeEngine(model, TOKENIZER, max_concurrent=5), requests)
    assert_same(ours, theirs)


SIZES: list[dict[str, object]] = [
    {},
    {"hidden_size": 96, "num_attention_heads": 6, "num_key_value_heads": 3, "head_dim": 16},
]


@pytest.mark.parametrize("size", SIZES, ids=["small", "larger"])
@pytest.mark.parametrize("family", FAMILIES)
def test_greedy_tokens_and_log_probs_over_pages(family: str, size: dict[str, object]) -> None:
    model = tiny_model(family, **size)
    requests = mixed_requests()
    theirs = run(HFEngine(model, TOKENIZER), requests)
    paged = PagedEngine(model, TOKENIZER, max_concurrent=6, page_size=8, prefill_tokens=40, steps_per_look=5)
    assert_same(run(paged, requests), theirs)


def test_early_stops_are_there() -> None:
    """What the comparison is about happens in it: some responses stop, some run to their length."""
    reasons = {t.finish_reason for seed in range(3) for t in run(NativeEngine(tiny_model(), TOKENIZER), mixed_requests(seed))}
    assert reasons == {"stop", "length"}


@pytest.mark.parametrize("overrides", [{"num_key_value_heads": 1}, {"num_key_value_heads": 4}, {"tie_word_embeddings": False}])
def test_head_layouts(overrides: dict[str, object]) -> None:
    model = tiny_model("llama", **overrides)
    requests = mixed_requests(1)
    assert_same(run(NativeEngine(model, TOKENIZER), requests), run(HFEngine(model, TOKENIZER), requests))


def test_stop_strings() -> None:
    model = tiny_model()
    rng = random.Random(3)
    requests = []
    for i in range(12):
        prompt = tuple(rng.randrange(5, 400) for _ in range(6))
        stop = tuple(rng.sample(["e", " a", "th", "1", ".", "o"], 2))
        requests.append(Request(prompt, SamplingParams(max_new_tokens=30, temperature=0, stop=stop), seed=i))
    ours = run(NativeEngine(model, TOKENIZER), requests)
    assert_same(ours, run(HFEngine(model, TOKENIZER), requests))
    assert sum(t.finish_reason == "stop" for t in ours) > 3


def test_long_responses_over_growing_caches_and_uneven_lengths() -> None:
    """Capacity doubles several times; rows are sorted and cut into parts."""
    model = tiny_model("mistral", max_position_embeddings=1024)
    rng = random.Random(5)
    requests = [
        Request(
            tuple(rng.randrange(5, VOCAB_SIZE) for _ in range(length)),
            SamplingParams(max_new_tokens=most, temperature=0),
            seed=length,
        )
        for length, most in ((600, 40), (3, 150), (5, 30), (4, 30), (500, 30), (9, 60), (2, 30), (3, 30))
    ]
    native = NativeEngine(model, TOKENIZER, max_concurrent=7, prefill_tokens=100)
    assert_same(run(native, requests), run(HFEngine(model, TOKENIZER), requests))


def test_bfloat16_is_near() -> None:
    model = tiny_model(dtype=torch.bfloat16)
    request = [Request(tuple(range(5, 25)), SamplingParams(max_new_tokens=1, temperature=0))]
    (ours,), (theirs,) = run(NativeEngine(model, TOKENIZER), request), run(HFEngine(model, TOKENIZER), request)
    assert ours.response_ids == theirs.response_ids
    assert ours.segments[0].log_probs == pytest.approx(theirs.segments[0].log_probs, abs=0.1)


def test_the_oracle_samples_at_the_temperature_and_leaves_the_model_as_it_was() -> None:
    model = tiny_model().train()
    NativeEngine(model, TOKENIZER)
    model.generation_config.top_k = 3
    engine = HFEngine(model, TOKENIZER, max_concurrent=4)
    requests = [
        Request((7, 8, 9), SamplingParams(max_new_tokens=2, temperature=1.3, top_p=0.9, min_p=0.01), i) for i in range(6)
    ]
    before = torch.random.get_rng_state()
    first, again = run(engine, requests), run(engine, requests)
    assert torch.equal(before, torch.random.get_rng_state())
    assert [t.response_ids for t in first] == [t.response_ids for t in again]
    assert len({tuple(t.response_ids) for t in first}) > 1
    assert model.training
    assert model.generation_config.top_k == 3
    assert model.config._attn_implementation == "podium"
    with torch.no_grad():
        logits = tiny_model()(torch.tensor([[7, 8, 9]])).logits[0, -1]
    expected = (logits / 1.3).log_softmax(-1)
    for t in first:
        assert t.segments[0].log_probs[0] == pytest.approx(float(expected[t.response_ids[0]]), abs=1e-5)
