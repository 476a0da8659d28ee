"""Thousands of requests of random lengths, stops, cancellations and memory pressure: each ends right, no page is lost."""

from __future__ import annotations

import os
import random
import resource

import pytest

from podium.engines.base import Request, SamplingParams, Trajectory
from podium.engines.rollout.native.paged_engine import PagedEngine
from tests.tiny import VOCAB_SIZE, tiny_model, tiny_tokenizer

TOKENIZER = tiny_tokenizer()
REQUESTS = int(os.environ.get("PODIUM_PROPERTY_REQUESTS", "130"))
"""Of each seed; 1250 makes 10,000 in all (three minutes)."""
SMALL = {"hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2, "num_key_value_heads": 1}


def _request(rng: random.Random, prompts: list[tuple[int, ...]]) -> Request:
    sampling = SamplingParams(
        max_new_tokens=rng.choice([1, 2, 5, 9, 20]),
        temperature=rng.choice([0.0, 1.0, 1.0, 0.8]),
        top_k=rng.choice([0, 0, 0, 7]),
        top_p=rng.choice([1.0, 1.0, 1.0, 0.8]),
        bad_words=("The", "is two") if rng.random() < 0.05 else (),
        stop=rng.choice([(), (), (), ("e",)]),
        stop_token_ids=tuple(rng.sample(range(5, VOCAB_SIZE), rng.choice([0, 3, 5, 30]))),
    )
    return Request(rng.choice(prompts), sampling, rng.randrange(1 << 62))


def _assert_right(request: Request, got: Trajectory) -> None:
    tokens, sampling = got.response_ids, request.sampling
    ends = {2, *sampling.stop_token_ids}
    assert all(len(s.token_ids) == len(s.log_probs) for s in got.segments)
    assert not any(t in ends for t in tokens[:-1])
    if got.finish_reason == "length":
        assert len(tokens) == sampling.max_new_tokens
    elif got.finish_reason == "stop":
        assert tokens[-1] in ends or any(s in TOKENIZER.decode(tokens) for s in sampling.stop)
    else:
        assert len(tokens) < sampling.max_new_tokens


@pytest.mark.parametrize("seed", range(8))
def test_random_requests_all_end_right(seed: int) -> None:
    """Samples do not depend on what happened around them: a request's tokens are those it has alone."""
    rng = random.Random(seed)
    options = {
        "max_concurrent": rng.choice([5, 16, 40]),
        "page_size": rng.choice([1, 4, 16]),
        "steps_per_look": rng.choice([1, 3, 8]),
        "prefill_tokens": rng.choice([7, 64, 1000]),
        "max_cache_tokens": rng.choice([64, 200, 600]),
    }
    model = tiny_model("llama", **SMALL)
    engine = PagedEngine(model, TOKENIZER, **options)
    prompts = [tuple(rng.randrange(5, 9) for _ in range(rng.randint(1, 40))) for _ in range(12)]
    requests: dict[int, Request] = {}
    ended: dict[int, Trajectory] = {}
    memory = 0
    while len(requests) < REQUESTS or engine.pending:
        for _ in range(min(rng.choice([0, 1, 5, 40]), REQUESTS - len(requests))):
            request = _request(rng, prompts)
            requests[engine.submit(request)] = request
        if requests and rng.random() < 0.3:
            victim = max(requests) - rng.randrange(40)
            partial = engine.abort(victim)
            if partial is not None:
                assert victim not in ended
                ended[victim] = partial
        if rng.random() < 0.02:
            engine.release()
        for t in engine.step():
            assert t.request_id not in ended
            ended[t.request_id] = t
        _assert_pages(engine)
        if not memory and len(requests) > REQUESTS // 3:
            memory = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss < memory + 50_000  # KiB
    assert ended.keys() == requests.keys()
    for request_id, request in requests.items():
        _assert_right(request, ended[request_id])
    pool = engine._scheduler.pool
    assert pool is None or (pool.free == pool.pages and not pool._known and not any(pool._references))
    assert not engine._looks
    assert not engine._scheduler.waiting
    reference = PagedEngine(model, TOKENIZER)
    some = rng.sample(sorted(requests), 40)
    again = {reference.submit(requests[i]): i for i in some}
    while reference.pending:
        for t in reference.step():
            got = ended[again[t.request_id]]
            assert got.response_ids == t.response_ids[: len(got.response_ids)]
            assert got.finish_reason in ("aborted", t.finish_reason)


def _assert_pages(engine: PagedEngine) -> None:
    """Every page is free, or held by exactly the rows that list it."""
    pool = engine._scheduler.pool
    if pool is None:
        return
    held = [0] * pool.pages
    rows = {id(r): r for r in engine._scheduler.rows}
    rows |= {id(r): r for look in engine._looks for r in look.rows}
    for row in rows.values():
        for page in row.pages:
            held[page] += 1
    assert held == pool._references
    assert pool.free == held.count(0)
