"""The paged engine on a GPU: the oracle, graphs and the plain path, new weights under graphs, sleep and wake, log-probs."""

from __future__ import annotations

import random

import pytest
import torch

from podium.engines.base import Request, SamplingParams, Trajectory
from podium.engines.rollout.hf import HFEngine
from podium.engines.rollout.native.paged_engine import PagedEngine
from tests.parity.test_native_vs_hf import assert_same, mixed_requests, run
from tests.tiny import FAMILIES, VOCAB_SIZE, tiny_model, tiny_tokenizer

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU"),
]
TOKENIZER = tiny_tokenizer()


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("graphs", [True, False])
def test_greedy_tokens_equal_the_oracles_in_fp32(family: str, graphs: bool) -> None:
    model = tiny_model(family).cuda()
    theirs = run(HFEngine(model, TOKENIZER), mixed_requests())
    ours = run(PagedEngine(model, TOKENIZER, max_concurrent=6, graphs=graphs, page_size=16), mixed_requests())
    assert_same(ours, theirs)


def sampled(count: int = 24, dtype: torch.dtype = torch.float32) -> list[Request]:
    rng = random.Random(1)
    prompts = [tuple(rng.randrange(5, VOCAB_SIZE) for _ in range(rng.randint(1, 70))) for _ in range(6)]
    return [Request(prompts[i % 6], SamplingParams(max_new_tokens=rng.randint(1, 40)), i) for i in range(count)]


def _same(a: list[Trajectory], b: list[Trajectory]) -> None:
    assert [t.response_ids for t in a] == [t.response_ids for t in b]
    for x, y in zip(a, b, strict=True):
        values = [[v for s in t.segments for v in s.log_probs] for t in (x, y)]
        assert values[0] == pytest.approx(values[1], abs=1e-4)


@pytest.mark.parametrize("fused", [True, False])
def test_graphs_and_the_plain_path_agree(fused: bool) -> None:
    model = tiny_model("qwen3").cuda()
    results = [
        run(PagedEngine(model, TOKENIZER, max_concurrent=9, graphs=graphs, fused=fused), sampled()) for graphs in (True, False)
    ]
    _same(*results)


def test_the_gpus_samples_are_the_cpus() -> None:
    """But for draws on the border between two tokens, where the two round apart."""
    ours = run(PagedEngine(tiny_model().cuda(), TOKENIZER), sampled())
    theirs = run(PagedEngine(tiny_model(), TOKENIZER), sampled())
    assert sum(a.response_ids == b.response_ids for a, b in zip(ours, theirs, strict=True)) >= len(ours) - 3


def test_graphs_stay_valid_over_new_weights_and_release() -> None:
    model = tiny_model().cuda()
    engine = PagedEngine(model, TOKENIZER, max_concurrent=8)
    before = run(engine, sampled())
    recorded = len(engine._decode._recorded)
    engine.release()
    assert engine.cache_bytes == 0
    blocker = torch.empty(1 << 28, device="cuda")  # so that the cache comes to lie elsewhere
    with torch.no_grad():
        for p, q in zip(model.parameters(), tiny_model(seed=1).parameters(), strict=True):
            p.copy_(q)
    engine.update_weights(1)
    after = run(engine, sampled())
    assert len(engine._decode._recorded) == recorded
    assert [t.response_ids for t in after] != [t.response_ids for t in before]
    _same(after, run(PagedEngine(tiny_model(seed=1).cuda(), TOKENIZER, max_concurrent=8), sampled()))
    del blocker


def _groups(samples: int, tokens: int, count: int = 3) -> list[Request]:
    rng = random.Random(2)
    prompts = [tuple(rng.randrange(5, VOCAB_SIZE) for _ in range(tokens + i)) for i in range(count)]
    return [Request(p, SamplingParams(max_new_tokens=rng.randint(10, 60)), i) for i, p in enumerate(prompts * samples)]


def test_a_groups_shared_prompt_read_once_changes_no_sample(monkeypatch: pytest.MonkeyPatch) -> None:
    """Groups that shrink as their samples end, next to requests without a group, with and without graphs."""
    model = tiny_model("qwen3", max_position_embeddings=1024, head_dim=64).cuda()
    requests = [*_groups(9, 600), *sampled()]
    cascade = PagedEngine(model, TOKENIZER, max_concurrent=64)
    ours = run(cascade, requests)
    assert any(shape.shared is not None for shape in cascade._decode._recorded)
    plain = run(PagedEngine(model, TOKENIZER, max_concurrent=64, graphs=False), requests)
    _same(ours, plain)
    monkeypatch.setattr("podium.engines.rollout.native.sharing._LEAST_SAVED", 2.0)
    each = PagedEngine(model, TOKENIZER, max_concurrent=64)
    theirs = run(each, requests)
    assert all(shape.shared is None for shape in each._decode._recorded)
    same = sum(a.response_ids == b.response_ids for a, b in zip(ours, theirs, strict=True))
    assert same >= len(ours) - 3  # but for draws on a border: the sums are in another order


def _steered(count: int = 24) -> list[Request]:
    """Truncated in every way, biased, with bad words of one and of several tokens."""
    kinds: list[dict[str, object]] = [
        {"top_k": 5}, {"top_p": 0.8}, {"min_p": 0.1}, {"top_k": 40, "top_p": 0.9, "temperature": 0.7},
        {"logit_bias": ((9, 4.0), (20, float("-inf")))}, {"bad_words": ("the", " fox jumps")}, {},
    ]  # fmt: skip
    requests = sampled(count)
    return [
        Request(r.prompt_ids, SamplingParams(max_new_tokens=r.sampling.max_new_tokens, **kinds[i % 7]), r.seed)  # type: ignore[arg-type]
        for i, r in enumerate(requests)
    ]


def test_truncated_and_steered_samples_are_the_cpus() -> None:
    ours = run(PagedEngine(tiny_model().cuda(), TOKENIZER), _steered())
    theirs = run(PagedEngine(tiny_model(), TOKENIZER), _steered())
    assert sum(a.response_ids == b.response_ids for a, b in zip(ours, theirs, strict=True)) >= len(ours) - 3


def test_truncation_is_inside_the_graph() -> None:
    """No look of the host within a window."""
    engine = PagedEngine(tiny_model().cuda(), TOKENIZER, steps_per_look=8)
    run(engine, [Request((7, 8, 9), SamplingParams(max_new_tokens=40, top_p=0.9, stop_token_ids=()), i) for i in range(4)])
    assert any(shape.draws.truncated for shape in engine._decode._recorded)


def test_the_same_samples_when_memory_runs_out() -> None:
    model = tiny_model().cuda()
    rng = random.Random(0)
    prompts = [tuple(rng.randrange(5, VOCAB_SIZE) for _ in range(8)) for _ in range(8)]
    requests = [Request(p, SamplingParams(max_new_tokens=40), i) for i, p in enumerate(prompts)]
    small = PagedEngine(model, TOKENIZER, page_size=16, max_cache_tokens=112, steps_per_look=4)
    ours = run(small, requests)
    assert small.preemptions
    _same(ours, run(PagedEngine(model, TOKENIZER), requests))


@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.bfloat16, 0.01), (torch.float32, 1e-4)])
def test_log_probs_are_those_of_a_training_forward(dtype: torch.dtype, tolerance: float) -> None:
    shape = {"hidden_size": 512, "intermediate_size": 1024, "num_hidden_layers": 6, "num_attention_heads": 8, "head_dim": 64}
    model = tiny_model("qwen2", dtype=dtype, initializer_range=0.02, vocab_size=4096, **shape).cuda()
    out = run(PagedEngine(model, TOKENIZER), sampled())
    model.set_attn_implementation("sdpa")
    off = []
    for t in out:
        ids = torch.tensor([[*t.prompt_ids, *t.response_ids]], device="cuda")
        with torch.no_grad():
            logits = model(ids).logits[0, len(t.prompt_ids) - 1 : -1].float()
        want = logits.log_softmax(-1).gather(-1, torch.tensor(t.response_ids, device="cuda")[:, None])[:, 0]
        off.append((want.cpu() - torch.tensor(t.segments[0].log_probs)).abs())
    assert float(torch.cat(off).mean()) < tolerance


def test_long_prompts_in_pieces_in_bf16() -> None:
    shape = {"hidden_size": 256, "num_attention_heads": 4, "head_dim": 64, "max_position_embeddings": 8192}
    model = tiny_model("llama", dtype=torch.bfloat16, initializer_range=0.05, **shape).cuda()
    rng = random.Random(0)
    request = Request(tuple(rng.randrange(5, VOCAB_SIZE) for _ in range(3000)), SamplingParams(max_new_tokens=1), 3)
    whole = run(PagedEngine(model, TOKENIZER), [request])[0]
    pieces = run(PagedEngine(model, TOKENIZER, prefill_tokens=700), [request])[0]
    assert whole.response_ids == pieces.response_ids
    assert whole.segments[0].log_probs == pytest.approx(pieces.segments[0].log_probs, abs=0.05)


def test_decoding_along_with_prefill_changes_no_sample() -> None:
    model = tiny_model().cuda()
    mixed = PagedEngine(model, TOKENIZER, prefill_tokens=33, page_size=16)
    _same(run(mixed, sampled()), run(PagedEngine(model, TOKENIZER), sampled()))
