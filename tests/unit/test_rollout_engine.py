"""The native engine: seeds, groups, interruption, new weights, errors, and random requests."""

from __future__ import annotations

import random

import pytest
import torch

from podium.core.errors import ConfigError, ResourceError, RolloutError
from podium.engines.base import Request, SamplingParams, Trajectory
from podium.engines.rollout import ROLLOUT_ENGINES, create_rollout_engine
from podium.engines.rollout.native.engine import NativeEngine
from podium.engines.rollout.requests import join, resume
from podium.hybrid.verify import check_shared_storage, storage_fingerprint
from tests.tiny import VOCAB_SIZE, tiny_model, tiny_tokenizer

TOKENIZER = tiny_tokenizer()


def _engine(family: str = "llama", **options: int) -> NativeEngine:
    return NativeEngine(tiny_model(family), TOKENIZER, **options)  # type: ignore[arg-type]


def _finish(engine: NativeEngine) -> dict[int, Trajectory]:
    done: dict[int, Trajectory] = {}
    while engine.pending:
        done.update({t.request_id: t for t in engine.step()})
    return done


def _run(engine: NativeEngine, *requests: Request) -> list[Trajectory]:
    ids = [engine.submit(request) for request in requests]
    done = _finish(engine)
    return [done[i] for i in ids]


def _prompt(rng: random.Random, low: int = 1, high: int = 30) -> tuple[int, ...]:
    return tuple(rng.randrange(5, VOCAB_SIZE) for _ in range(rng.randint(low, high)))


SAMPLED = Request((11, 12, 13, 14), SamplingParams(max_new_tokens=20, stop_token_ids=(1,)), seed=1234)


def _log_probs(trajectory: Trajectory) -> list[float]:
    return [value for segment in trajectory.segments for value in segment.log_probs]


# ---------------------------------------------------------------------- one seed, one sample


def test_the_same_sample_in_any_batch() -> None:
    engine = _engine(max_concurrent=17)
    (alone,) = _run(engine, SAMPLED)
    assert len(alone.response_ids) > 5
    rng = random.Random(0)
    others = [Request(_prompt(rng), SamplingParams(max_new_tokens=rng.randint(1, 30)), seed=i) for i in range(16)]
    crowd = _run(engine, *others[:9], SAMPLED, *others[9:])
    assert crowd[9].response_ids == alone.response_ids
    assert _log_probs(crowd[9]) == pytest.approx(_log_probs(alone), abs=1e-5)
    for request in others:
        engine.submit(request)
    for _ in range(4):
        engine.step()
    late = engine.submit(SAMPLED)
    assert _finish(engine)[late].response_ids == alone.response_ids


def test_other_seeds_give_other_samples() -> None:
    requests = [Request(SAMPLED.prompt_ids, SAMPLED.sampling, seed) for seed in range(8)]
    assert len({tuple(t.response_ids) for t in _run(_engine(), *requests)}) == 8


@pytest.mark.parametrize("steps", [0, 1, 7])
def test_the_same_sample_after_abort_and_resume(steps: int) -> None:
    engine = _engine()
    (whole,) = _run(engine, SAMPLED)
    request_id = engine.submit(SAMPLED)
    companion = engine.submit(Request((9, 9), SamplingParams(max_new_tokens=25), 5))
    for _ in range(steps):
        engine.step()
    partial = engine.abort(request_id)
    assert partial is not None
    assert partial.finish_reason == "aborted"
    assert partial.response_ids == whole.response_ids[:steps]
    assert engine.abort(request_id) is None
    assert engine.pending == 1
    again = engine.submit(resume(SAMPLED, partial))
    done = _finish(engine)
    assert companion in done
    joined = join(partial, done[again])
    assert joined.response_ids == whole.response_ids
    assert joined.finish_reason == whole.finish_reason
    assert _log_probs(joined) == pytest.approx(_log_probs(whole), abs=1e-5)


# ---------------------------------------------------------------------- work done once


def test_a_groups_prompt_is_prefilled_once_also_when_slots_run_out() -> None:
    rng = random.Random(1)
    prompts = [_prompt(rng, 5, 12) for _ in range(4)]
    requests = [
        Request(p, SamplingParams(max_new_tokens=rng.randint(2, 9), stop_token_ids=()), seed=i)
        for i, p in enumerate(p for p in prompts for _ in range(5))
    ]
    wide, narrow = _engine(), _engine(max_concurrent=3)
    expected = _run(wide, *requests)
    assert wide.counters.prefill_tokens == sum(map(len, prompts))
    got = _run(narrow, *requests)
    assert narrow.counters.prefill_tokens == sum(map(len, prompts))
    assert [t.response_ids for t in got] == [t.response_ids for t in expected]
    assert not narrow._prefixes
    assert narrow.counters.sampled_tokens == sum(len(t.response_ids) for t in got)


def test_a_step_advances_by_at_most_one_token() -> None:
    engine = _engine(max_concurrent=2)
    ids = [engine.submit(Request((5, 6, i + 7), SamplingParams(max_new_tokens=3), i)) for i in range(4)]
    ended = {}
    for step in range(1, 20):
        for trajectory in engine.step():
            ended[trajectory.request_id] = step
        if not engine.pending:
            break
    # Two run three steps; where one ends, the next starts in the same step.
    assert [ended[i] for i in ids] == [3, 3, 5, 5]
    assert engine.step() == []


def test_release_frees_the_cache_and_running_requests_go_on() -> None:
    engine = _engine()
    (whole,) = _run(engine, SAMPLED)
    request_id = engine.submit(SAMPLED)
    for _ in range(3):
        engine.step()
    assert engine.cache_bytes > 0
    engine.release()
    assert engine.cache_bytes == 0
    assert _finish(engine)[request_id].response_ids == whole.response_ids


# ---------------------------------------------------------------------- weights


def test_log_probs_are_those_of_a_training_forward() -> None:
    model = tiny_model("qwen3")
    sampling = SamplingParams(max_new_tokens=20, temperature=0.7, top_p=0.9)
    prompts = [(7, 8, 9), (20, 21, 22, 23, 24, 25, 26, 27), (7, 8, 9)]
    out = _run(NativeEngine(model, TOKENIZER), *(Request(p, sampling, i) for i, p in enumerate(prompts)))
    model.set_attn_implementation("eager")
    for t in out:
        ids = torch.tensor([[*t.prompt_ids, *t.response_ids]])
        logits = model(ids).logits[0, len(t.prompt_ids) - 1 : -1] / 0.7
        expected = logits.log_softmax(-1).gather(-1, torch.tensor(t.response_ids)[:, None])[:, 0]
        assert expected.requires_grad
        assert _log_probs(t) == pytest.approx(expected.tolist(), abs=1e-4)


def test_new_weights_start_a_segment_and_no_old_key_is_used() -> None:
    model = tiny_model()
    engine = NativeEngine(model, TOKENIZER, max_concurrent=3)
    sampling = SamplingParams(max_new_tokens=12, temperature=0)
    prompts = [(5, 6, 7), (8, 9), (5, 6, 7), (5, 6, 7), (5, 6, 7)]
    ids = [engine.submit(Request(p, sampling, i)) for i, p in enumerate(prompts)]
    for _ in range(4):
        assert engine.step() == []
    with torch.no_grad():
        for p, q in zip(model.parameters(), tiny_model(seed=1).parameters(), strict=True):
            p.copy_(q)
    engine.update_weights(7)
    done = _finish(engine)
    new = tiny_model(seed=1)
    for i, prompt in zip(ids, prompts, strict=True):
        segments = done[i].segments
        started = [s.policy_version for s in segments]
        assert started in ([0, 7], [7])
        if started == [0, 7]:
            assert len(segments[0].token_ids) == 4
        assert sum(len(s.token_ids) for s in segments) == 12 or done[i].finish_reason == "stop"
        # What came after the update is the new model's greedy continuation of the whole text so far.
        kept = len(segments[0].token_ids) if started == [0, 7] else 0
        ids_so_far = [*prompt, *done[i].response_ids]
        logits = new(torch.tensor([ids_so_far])).logits[0, len(prompt) + kept - 1 : -1]
        assert logits.argmax(-1).tolist() == segments[-1].token_ids
        expected = logits.log_softmax(-1).amax(-1).tolist()
        assert segments[-1].log_probs == pytest.approx(expected, abs=1e-4)


def test_moved_parameters_are_an_error() -> None:
    model = tiny_model()
    engine = NativeEngine(model, TOKENIZER)
    with torch.no_grad():
        model.model.norm.weight.mul_(2)
    engine.update_weights(1)
    model.model.norm.weight = torch.nn.Parameter(model.model.norm.weight.clone())
    with pytest.raises(RolloutError, match=r"1 of the model's parameters moved.*model.norm.weight"):
        engine.update_weights(2)
    assert engine.policy_version == 1


def test_shared_storage_check() -> None:
    model = tiny_model()
    check_shared_storage(model, model)
    assert storage_fingerprint(model)["lm_head.weight"] == storage_fingerprint(model)["model.embed_tokens.weight"]
    with pytest.raises(RolloutError, match="not shared"):
        check_shared_storage(model, tiny_model())


def test_the_model_is_left_as_it_was() -> None:
    model = tiny_model(attention_dropout=0.5).train()
    model.model.norm.eval()
    before = {name: p.clone() for name, p in model.named_parameters()}
    (trained,) = _run(NativeEngine(model, TOKENIZER), SAMPLED)
    assert trained.response_ids == _run(_engine(), SAMPLED)[0].response_ids
    assert model.training
    assert model.model.layers[0].training
    assert not model.model.norm.training
    assert all(torch.equal(before[name], p) for name, p in model.named_parameters())
    # And it can still be trained: nothing of inference mode sticks to it.
    model.set_attn_implementation("eager")
    model(torch.tensor([[5, 6, 7]]), labels=torch.tensor([[5, 6, 7]])).loss.backward()


# ---------------------------------------------------------------------- bad input


@pytest.mark.parametrize(
    ("request_", "message"),
    [
        (Request((), SamplingParams()), "prompt is empty"),
        (Request((5,) * 200, SamplingParams(max_new_tokens=57)), r"200 tokens \+ max_new_tokens=57 = 257.*=256"),
        (Request((5, VOCAB_SIZE), SamplingParams(max_new_tokens=9)), f"token id {VOCAB_SIZE} is outside"),
        (Request((5, -1), SamplingParams(max_new_tokens=9)), "token id -1 is outside"),
        (Request((5,), SamplingParams(max_new_tokens=0)), "leaves nothing to generate"),
        (Request((5,), SamplingParams(max_new_tokens=2), response_ids=(6, 7)), "leaves nothing to generate after 2"),
        (Request((5,), SamplingParams(max_new_tokens=2, top_p=0.0)), "top_p=0.0 is out of range"),
        (Request((5,), SamplingParams(max_new_tokens=2, temperature=-1)), "temperature=-1"),
        (Request((5,), SamplingParams(max_new_tokens=2, stop=("",))), "stop="),
    ],
)
def test_requests_that_cannot_be_served(request_: Request, message: str) -> None:
    engine = _engine()
    with pytest.raises(RolloutError, match=message):
        engine.submit(request_)
    assert engine.pending == 0


def test_longrope_ends_where_its_rotation_changes() -> None:
    factors = {"short_factor": [1.0] * 8, "long_factor": [4.0] * 8}
    rope = {"rope_type": "longrope", "rope_theta": 1e4, "original_max_position_embeddings": 64, "factor": 4.0, **factors}
    engine = NativeEngine(tiny_model(rope_parameters=rope), TOKENIZER)
    engine.submit(Request((5,) * 60, SamplingParams(max_new_tokens=4)))
    with pytest.raises(RolloutError, match=r"65, beyond the model's original_max_position_embeddings \(longrope\)=64"):
        engine.submit(Request((5,) * 61, SamplingParams(max_new_tokens=4)))


def test_the_longest_request_that_fits() -> None:
    (t,) = _run(_engine(), Request((5,) * 200, SamplingParams(max_new_tokens=56), 1))
    assert len(t.response_ids) == 56 or t.finish_reason == "stop"


def test_logits_that_are_not_finite_name_request_and_position() -> None:
    model = tiny_model()
    engine = NativeEngine(model, TOKENIZER)
    request_id = engine.submit(SAMPLED)
    waiting_token = model.model.embed_tokens.weight[SAMPLED.prompt_ids[0]]
    good = waiting_token.detach().clone()
    with torch.no_grad():
        waiting_token.fill_(float("nan"))
    with pytest.raises(RolloutError, match=f"request {request_id} at response position 0"):
        engine.step()
    assert engine.pending == 1
    with torch.no_grad():
        waiting_token.copy_(good)
    engine.step()
    engine.step()
    with torch.no_grad():
        model.model.norm.weight.fill_(float("inf"))
    with pytest.raises(RolloutError, match=f"request {request_id} at response position 2"):
        engine.step()
    aborted = engine.abort(request_id)
    assert aborted is not None
    assert len(aborted.response_ids) == 2
    assert engine.pending == 0


def test_engines_by_name() -> None:
    model = tiny_model()
    assert isinstance(create_rollout_engine("native", model, TOKENIZER, max_concurrent=3), NativeEngine)
    assert {"native", "hf", "vllm", "sglang"} <= set(ROLLOUT_ENGINES)
    for name in ("vllm", "sglang"):
        with pytest.raises(ResourceError, match=f"'{name}' is not in this version"):
            create_rollout_engine(name, model, TOKENIZER)
    with pytest.raises(ConfigError, match="did you mean 'native'"):
        create_rollout_engine("nativ", model, TOKENIZER)
    with pytest.raises(ConfigError, match="did you mean 'max_cache_tokens'"):
        create_rollout_engine("native", model, TOKENIZER, max_cache_token=3)


# ---------------------------------------------------------------------- random requests


@pytest.mark.parametrize("seed", range(6))
def test_random_requests_all_end_right(seed: int) -> None:
    rng = random.Random(seed)
    model = tiny_model(rng.choice(["llama", "mistral"]))
    options = {"max_concurrent": rng.randint(1, 6), "prefill_tokens": rng.choice([1, 20, 8192])}
    if seed % 2:
        options["max_cache_tokens"] = rng.randint(10, 200)
    engine, reference = NativeEngine(model, TOKENIZER, **options), NativeEngine(model, TOKENIZER)
    prompts = [_prompt(rng, 1, 20) for _ in range(4)]
    requests: dict[int, Request] = {}
    ended: dict[int, Trajectory] = {}
    for turn in range(60):
        for _ in range(rng.choice([0, 0, 1, 3]) if turn < 30 else 0):
            sampling = SamplingParams(
                max_new_tokens=rng.randint(1, 15),
                temperature=rng.choice([0.0, 1.0, 0.8]),
                top_k=rng.choice([0, 0, 20]),
                stop=rng.choice([(), ("e",)]),
                stop_token_ids=tuple(rng.sample(range(5, VOCAB_SIZE), 30)),
            )
            request = Request(rng.choice(prompts), sampling, rng.randrange(1 << 62))
            requests[engine.submit(request)] = request
        if requests and rng.random() < 0.15:
            victim = rng.choice(list(requests))
            partial = engine.abort(victim)
            assert (partial is None) == (victim in ended)
            if partial is not None:
                ended[victim] = partial
        if rng.random() < 0.05:
            engine.release()
        ended.update({t.request_id: t for t in engine.step()})
    while engine.pending:
        ended.update({t.request_id: t for t in engine.step()})
    assert ended.keys() == requests.keys()
    assert not engine._scheduler.running
    assert not engine._prefixes
    whole = _run(reference, *requests.values())
    for (request_id, request), expected in zip(requests.items(), whole, strict=True):
        got = ended[request_id]
        if got.finish_reason == "aborted":
            assert got.response_ids == expected.response_ids[: len(got.response_ids)]
        else:
            assert got.response_ids == expected.response_ids
            assert got.finish_reason == expected.finish_reason
            assert len(got.response_ids) <= request.sampling.max_new_tokens
