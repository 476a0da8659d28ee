"""The paged engine on a CPU: the same samples as the slot engine, sharing, preemption, interruption, weights, errors."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import pytest
import torch

from podium.core.errors import RolloutError
from podium.engines.base import Request, SamplingParams, Trajectory
from podium.engines.rollout import create_rollout_engine
from podium.engines.rollout.native import graphs
from podium.engines.rollout.native.engine import NativeEngine
from podium.engines.rollout.native.paged_engine import PagedEngine
from podium.engines.rollout.requests import join, resume
from podium.recipes import build, load
from tests.tiny import VOCAB_SIZE, tiny_model, tiny_tokenizer

TOKENIZER = tiny_tokenizer()


def _engine(family: str = "llama", **options: int) -> PagedEngine:
    return PagedEngine(tiny_model(family), TOKENIZER, **{"page_size": 8, "steps_per_look": 4, **options})  # type: ignore[arg-type]


def _finish(engine: PagedEngine | NativeEngine) -> dict[int, Trajectory]:
    done: dict[int, Trajectory] = {}
    while engine.pending:
        done.update({t.request_id: t for t in engine.step()})
    return done


def _run(engine: PagedEngine | NativeEngine, *requests: Request) -> list[Trajectory]:
    ids = [engine.submit(request) for request in requests]
    done = _finish(engine)
    return [done[i] for i in ids]


def _log_probs(trajectory: Trajectory) -> list[float]:
    return [value for segment in trajectory.segments for value in segment.log_probs]


def _prompt(rng: random.Random, low: int = 1, high: int = 30) -> tuple[int, ...]:
    return tuple(rng.randrange(5, VOCAB_SIZE) for _ in range(rng.randint(low, high)))


def _same(ours: list[Trajectory], theirs: list[Trajectory]) -> None:
    for a, b in zip(ours, theirs, strict=True):
        assert a.response_ids == b.response_ids
        assert a.finish_reason == b.finish_reason
        assert _log_probs(a) == pytest.approx(_log_probs(b), abs=1e-4)


def _mixed(count: int = 30, seed: int = 0) -> list[Request]:
    """All kinds: greedy, truncated, stop strings, more end tokens than the device looks for."""
    rng = random.Random(seed)
    prompts = [_prompt(rng) for _ in range(5)]
    kinds: list[dict[str, object]] = [
        {},
        {"temperature": 0.0},
        {"temperature": 0.7, "top_k": 20},
        {"top_p": 0.9},
        {"min_p": 0.05},
        {"stop": ("e", " a")},
        {"stop_token_ids": tuple(range(5, 60))},
        {"stop_token_ids": (7, 8, 9)},
    ]
    return [
        Request(rng.choice(prompts), SamplingParams(max_new_tokens=rng.randint(1, 30), **rng.choice(kinds)), i)  # type: ignore[arg-type]
        for i in range(count)
    ]


SAMPLED = Request((11, 12, 13, 14), SamplingParams(max_new_tokens=20, stop_token_ids=(1,)), seed=1234)


@pytest.mark.parametrize("family", ["llama", "gemma2"])
def test_the_samples_are_the_slot_engines(family: str) -> None:
    requests = _mixed()
    theirs = _run(NativeEngine(tiny_model(family), TOKENIZER), *requests)
    assert {t.finish_reason for t in theirs} == {"stop", "length"}
    _same(_run(_engine(family), *requests), theirs)


@pytest.mark.parametrize(
    "options",
    [
        {"max_concurrent": 3},
        {"page_size": 1, "steps_per_look": 1},
        {"page_size": 64, "steps_per_look": 16},
        {"prefill_tokens": 5},
        {"fused": False},
        {"max_cache_tokens": 80, "page_size": 4},
    ],
)
def test_the_same_samples_whatever_the_batch_the_pages_and_the_window(options: dict[str, int]) -> None:
    requests = _mixed(seed=1)
    _same(_run(_engine(**options), *requests), _run(_engine(), *requests))


def test_preemption_is_by_recomputing_and_changes_no_sample() -> None:
    requests = [Request(_prompt(random.Random(i), 8, 8), SamplingParams(max_new_tokens=40), i) for i in range(8)]
    small = _engine(page_size=4, max_cache_tokens=100)
    ours = _run(small, *requests)
    assert small.preemptions > 0
    assert small._scheduler.pool is not None
    assert small._scheduler.pool.free == small._scheduler.pool.pages == 25
    _same(ours, _run(_engine(), *requests))


# ---------------------------------------------------------------------- work done once


def test_a_groups_prompt_is_prefilled_once_and_its_full_pages_are_shared() -> None:
    prompt = tuple(range(10, 37))  # 27 tokens: three full pages of 8 and one that each has for itself
    engine = _engine()
    for seed in range(6):
        engine.submit(Request(prompt, SamplingParams(max_new_tokens=4), seed))
    engine.step()
    assert engine.counters.prefill_tokens == 27
    pages = [row.pages for row in engine._scheduler.rows]
    assert len(pages) == 6
    assert all(p[:3] == pages[0][:3] for p in pages)
    assert len({p[3] for p in pages}) == 6
    assert len(_finish(engine)) == 6


def test_a_common_start_is_computed_once_also_for_those_that_come_later() -> None:
    engine = _engine()
    common = tuple(range(10, 34))  # three pages
    first = [Request((*common, 40 + i), SamplingParams(max_new_tokens=30), i) for i in range(3)]
    late = [
        Request((*common, 50, 51), SamplingParams(max_new_tokens=5), 9),
        Request(common, SamplingParams(max_new_tokens=5), 8),
    ]
    ids = [engine.submit(r) for r in first]
    engine.step()
    assert engine.counters.prefill_tokens == 25 + 1 + 1
    ids += [engine.submit(r) for r in late]
    done = _finish(engine)
    assert engine.counters.prefill_tokens == 27 + 2 + 8  # of a text that is all known its last page is computed again
    _same([done[i] for i in ids], _run(NativeEngine(tiny_model(), TOKENIZER), *first, *late))


# ---------------------------------------------------------------------- interruption and weights


@pytest.mark.parametrize("steps", [0, 1, 3])
def test_the_same_sample_after_abort_and_resume(steps: int) -> None:
    engine = _engine()
    (whole,) = _run(engine, SAMPLED)
    request_id = engine.submit(SAMPLED)
    companion = engine.submit(Request((9, 9), SamplingParams(max_new_tokens=25), 5))
    for _ in range(steps):
        engine.step()
    partial = engine.abort(request_id)
    assert partial is not None
    assert partial.response_ids == whole.response_ids[: len(partial.response_ids)]
    assert (len(partial.response_ids) > 0) == (steps > 0)
    assert engine.abort(request_id) is None
    again = engine.submit(resume(SAMPLED, partial))
    done = _finish(engine)
    assert companion in done
    _same([join(partial, done[again])], [whole])


def test_release_gives_the_memory_back_and_running_requests_go_on() -> None:
    engine = _engine()
    (whole,) = _run(engine, SAMPLED)
    request_id = engine.submit(SAMPLED)
    engine.step()
    assert engine.cache_bytes > 0
    engine.release()
    assert engine.cache_bytes == 0
    assert engine.pending == 1
    _same([_finish(engine)[request_id]], [whole])


def _of(tokens: int, new: int, seed: int) -> Request:
    return Request(tuple(range(5, 5 + tokens)), SamplingParams(max_new_tokens=new, temperature=1.0), seed)


@pytest.mark.parametrize("running", [False, True])
def test_a_cache_that_short_requests_sized_grows_for_a_longer_one(running: bool) -> None:
    short, long = _of(6, 9, 1), _of(20, 60, 2)
    engine = _engine(max_concurrent=2)
    first = engine.submit(short)
    engine.step()
    before = engine.cache_bytes
    done = {} if running else _finish(engine)
    second = engine.submit(long)
    done |= _finish(engine)
    assert engine.cache_bytes > before
    _same([done[first], done[second]], _run(_engine(max_concurrent=2), short, long))


def test_a_cache_that_has_all_it_may_have_stays() -> None:
    engine = _engine(max_concurrent=2, max_cache_tokens=64)
    _run(engine, _of(6, 30, 1))
    held = engine.cache_bytes
    _run(engine, _of(10, 40, 2))
    assert engine.cache_bytes == held


def test_new_weights_start_a_segment_and_no_old_key_is_used() -> None:
    model = tiny_model()
    engine = PagedEngine(model, TOKENIZER, max_concurrent=3, page_size=4, steps_per_look=4)
    sampling = SamplingParams(max_new_tokens=16, temperature=0)
    prompts = [(5, 6, 7), (8, 9), (5, 6, 7), (5, 6, 7), (5, 6, 7, 5, 6, 7, 8)]
    ids = [engine.submit(Request(p, sampling, i)) for i, p in enumerate(prompts)]
    engine.step()
    with torch.no_grad():
        for p, q in zip(model.parameters(), tiny_model(seed=1).parameters(), strict=True):
            p.copy_(q)
    engine.update_weights(7)
    done = _finish(engine)
    new, switched = tiny_model(seed=1), 0
    for i, prompt in zip(ids, prompts, strict=True):
        segments = done[i].segments
        versions = [s.policy_version for s in segments]
        assert versions in ([0, 7], [7])
        switched += versions == [0, 7]
        kept = len(segments[0].token_ids) if versions == [0, 7] else 0
        logits = new(torch.tensor([[*prompt, *done[i].response_ids]])).logits[0, len(prompt) + kept - 1 : -1]
        assert logits.argmax(-1).tolist() == segments[-1].token_ids
        assert segments[-1].log_probs == pytest.approx(logits.log_softmax(-1).amax(-1).tolist(), abs=1e-4)
    assert switched == 3


def test_moved_parameters_are_an_error() -> None:
    model = tiny_model()
    engine = PagedEngine(model, TOKENIZER)
    model.model.norm.weight = torch.nn.Parameter(model.model.norm.weight.clone())
    with pytest.raises(RolloutError, match=r"1 of the model's parameters moved.*model.norm.weight"):
        engine.update_weights(2)


def test_the_model_is_left_as_it_was() -> None:
    model = tiny_model(attention_dropout=0.5).train()
    before = {name: p.clone() for name, p in model.named_parameters()}
    (trained,) = _run(PagedEngine(model, TOKENIZER), SAMPLED)
    assert trained.response_ids == _run(_engine(), SAMPLED)[0].response_ids
    assert all(module.training for module in model.modules())
    assert all(torch.equal(before[name], p) for name, p in model.named_parameters())
    model.set_attn_implementation("eager")
    model(torch.tensor([[5, 6, 7]]), labels=torch.tensor([[5, 6, 7]])).loss.backward()


# ---------------------------------------------------------------------- bad input


@pytest.mark.parametrize(
    ("request_", "message"),
    [
        (Request((), SamplingParams()), "prompt is empty"),
        (Request((5,) * 200, SamplingParams(max_new_tokens=57)), r"200 tokens \+ max_new_tokens=57 = 257.*=256"),
        (Request((5,), SamplingParams(max_new_tokens=0)), "leaves nothing to generate"),
    ],
)
def test_requests_that_cannot_be_served(request_: Request, message: str) -> None:
    engine = _engine()
    with pytest.raises(RolloutError, match=message):
        engine.submit(request_)
    assert engine.pending == 0


def test_a_request_beyond_the_cache_is_an_error_that_says_the_numbers() -> None:
    engine = _engine(max_cache_tokens=64)
    engine.submit(Request((5,) * 10, SamplingParams(max_new_tokens=100), 0))
    message = "request 0 may come to 110 tokens = 14 pages of 8; the cache has 8"
    with pytest.raises(RolloutError, match=message):
        engine.step()
    assert engine.abort(0) is not None
    with pytest.raises(RolloutError, match="may come to 110 tokens"):
        engine.submit(Request((5,) * 10, SamplingParams(max_new_tokens=100), 0))
    (fits,) = _run(engine, Request((5,) * 10, SamplingParams(max_new_tokens=54), 0))
    assert fits.response_ids


def test_a_stop_string_that_spans_tokens() -> None:
    (free,) = _run(_engine(), Request((11, 12), SamplingParams(max_new_tokens=20), 3))
    text = TOKENIZER.decode(free.response_ids[4:7])
    stop = text[1:-1] if len(text) > 2 else text
    (cut,) = _run(_engine(), Request((11, 12), SamplingParams(max_new_tokens=20, stop=(stop,)), 3))
    assert cut.finish_reason == "stop"
    assert cut.response_ids == free.response_ids[: len(cut.response_ids)]
    assert stop in TOKENIZER.decode(cut.response_ids)


def test_logits_that_are_not_finite_name_request_and_position() -> None:
    model = tiny_model()
    engine = PagedEngine(model, TOKENIZER, steps_per_look=1)
    (whole,) = _run(engine, SAMPLED)
    request_id = engine.submit(SAMPLED)
    engine.step()
    good = model.model.norm.weight.detach().clone()
    with torch.no_grad():
        model.model.norm.weight.fill_(float("inf"))
    with pytest.raises(RolloutError, match=f"request {request_id} at response position 2"):
        for _ in range(3):
            engine.step()
    with torch.no_grad():
        model.model.norm.weight.copy_(good)
    _same([_finish(engine)[request_id]], [whole])


def test_options() -> None:
    assert isinstance(create_rollout_engine("native", tiny_model(), TOKENIZER, page_size=16), PagedEngine)
    with pytest.raises(RolloutError, match="page_size=12 must be a power of two"):
        _engine(page_size=12)
    with pytest.raises(RolloutError, match="steps_per_look=0"):
        _engine(steps_per_look=0)


def test_a_run_on_a_cpu_trains_what_it_samples_with(tmp_path: Path) -> None:
    """The policy's weights are laid out before the engine keeps their places, not after; with an adapter too."""
    for model in ({}, {"lora": {"rank": 2}}):
        values = {
            "algorithm": "grpo",
            "model": model,
            "batch": {"prompts_per_step": 2, "group_size": 2},
            "rollout": {"max_new_tokens": 4, "backend_options": {"page_size": 8}},
            "rewards": [{"function": _by_length}],
            "run": {"steps": 2, "trackers": [], "progress": False, "device": "cpu", "folder": str(tmp_path)},
        }
        rows = [{"prompt": f"What is {a} plus 3?"} for a in range(4)]
        trainer = build(load(values=values), models={"actor": tiny_model()}, tokenizer=TOKENIZER, data=rows)
        assert trainer.train().steps == 2
        worker = trainer.roles["actor"].workers[0]
        assert isinstance(worker.rollout, PagedEngine) and worker.rollout.policy_version == worker.engine.policy_version > 0


def _by_length(completions: list[str], **columns: Any) -> list[float]:
    return [float(len(text) % 5) for text in completions]


def test_graphs_used_longest_ago_make_room(monkeypatch: pytest.MonkeyPatch) -> None:
    class Recorded:
        def replay(self) -> None:
            pass

    monkeypatch.setattr(graphs, "_MOST_GRAPHS", 3)
    monkeypatch.setattr(torch.cuda, "graph_pool_handle", lambda: None)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: None)
    made: list[int] = []
    step = graphs.DecodeStep(None, None, None, None, None, graphs=True)  # type: ignore[arg-type]
    monkeypatch.setattr(step, "_record", lambda shape: made.append(shape.rows) or Recorded())
    for rows in (1, 2, 3, 1, 4, 1, 2):
        step(graphs.Shape(rows, 1))
    assert made == [1, 2, 3, 4, 2]  # 4 took the place of 2, not of 1
