"""A fault is planted; the doctor must name it."""

from __future__ import annotations

from copy import deepcopy
from dataclasses import replace
from typing import Any

import pytest
import torch

from podium.core.settings import LoraSettings
from podium.doctor.decide import CAUSES, Diagnosis, Evidence, Hypothesis, decide
from podium.doctor.replays import Replayer, Sample
from podium.engines.base import Request, SamplingParams
from podium.engines.rollout.native.engine import NativeEngine
from podium.models.adapters import add_lora
from podium.trainer.role_models import as_policy
from tests.tiny import BOS_ID, tiny_model, tiny_tokenizer

PROMPTS = ["What is two plus three?", "Stop here, please.", "The quick brown fox", "1 + 2 = 3, 10 - 4 ="]
SAMPLING = SamplingParams(max_new_tokens=16, temperature=0.7)


def models() -> tuple[Any, Any]:
    """Version 3, and what version 2 was."""
    new, old = tiny_model(initializer_range=0.15), tiny_model(initializer_range=0.15)
    with torch.no_grad():
        for i, p in enumerate(new.parameters()):
            p.add_(0.03 * torch.randn(p.shape, generator=torch.Generator().manual_seed(i)))
    return new, old


def rollout(model: Any, sampling: SamplingParams = SAMPLING, engine: Any = None) -> list[Sample]:
    tokenizer = tiny_tokenizer()
    engine = engine or NativeEngine(deepcopy(model), tokenizer)
    prompts = {engine.submit(Request(ids_of(text), sampling, 11 + i)): text for i, text in enumerate(PROMPTS)}
    out: dict[int, Sample] = {}
    while engine.pending:
        for t in engine.step():
            log_probs = torch.tensor([v for s in t.segments for v in s.log_probs])
            out[t.request_id] = Sample(t.prompt_ids, tuple(t.response_ids), log_probs, version=3, prompt=prompts[t.request_id])
    return [out[i] for i in sorted(out)]


def ids_of(text: str) -> tuple[int, ...]:
    return (BOS_ID, *tiny_tokenizer().encode(text, add_special_tokens=False))


def examined(model: Any, samples: list[Sample], old: Any = None, *, live: Any = True, **sampling: Any) -> Diagnosis:
    tokenizer = tiny_tokenizer()
    older = {2: {n: p.detach().clone() for n, p in old.named_parameters()}} if old is not None else {}
    replayer = Replayer(model, tokenizer, replace(SAMPLING, **sampling), as_policy(model, SAMPLING.temperature), older)
    trained = [replace(s, train_log_probs=s.train_log_probs) for s in samples]
    if all(s.train_log_probs is None for s in samples):
        trained = [replace(s, train_log_probs=t) for s, t in zip(samples, replayer.training(samples), strict=True)]
    before = {n: p.detach().clone() for n, p in model.named_parameters()}
    engine = NativeEngine(deepcopy(model), tokenizer) if live is True else live
    found = decide(replayer.evidence(trained, rollout_engine=engine))
    assert all(torch.equal(p, before[n]) for n, p in model.named_parameters())  # all was put back
    return found


def mixed(new: Any, old: Any, pick: Any) -> Any:
    model, theirs = deepcopy(new), dict(old.named_parameters())
    with torch.no_grad():
        for name, p in model.named_parameters():
            if pick(name):
                p.copy_(theirs[name])
    return model


# ------------------------------------------------------------------ planted faults


def nothing() -> tuple[Diagnosis, str, str]:
    new, old = models()
    return examined(new, rollout(new), old), "none", ""


def temperature_in_training_only() -> tuple[Diagnosis, str, str]:
    """The rollout samples (and reports) at 1; training divides by 0.7."""
    new, old = models()
    return examined(new, rollout(new, replace(SAMPLING, temperature=1.0)), old), "temperature", "1 instead of 0.7"


def temperature_in_rollout_only() -> tuple[Diagnosis, str, str]:
    new, old = models()
    samples = rollout(new)
    plain = Replayer(new, tiny_tokenizer(), replace(SAMPLING, temperature=1.0), as_policy(new, 1.0)).training(samples)
    samples = [replace(s, train_log_probs=t) for s, t in zip(samples, plain, strict=True)]
    found = examined(new, samples, old)
    assert found.side == "training"
    return found, "temperature", "1 instead of 0.7"


def one_tensor() -> tuple[Diagnosis, str, str]:
    new, old = models()
    name = "model.layers.1.mlp.up_proj.weight"
    return examined(new, rollout(mixed(new, old, lambda n: n == name)), old), "partial weights", name


def the_embedding() -> tuple[Diagnosis, str, str]:
    new, old = models()
    name = "model.embed_tokens.weight"
    return examined(new, rollout(mixed(new, old, lambda n: n == name)), old), "partial weights", name


def one_layer() -> tuple[Diagnosis, str, str]:
    new, old = models()
    return examined(new, rollout(mixed(new, old, lambda n: ".layers.0." in n)), old), "partial weights", "model.layers.0 is"


def whole_version() -> tuple[Diagnosis, str, str]:
    new, old = models()
    return examined(new, rollout(old), old), "stale weights", "version 2"


def a_version_that_is_gone() -> tuple[Diagnosis, str, str]:
    new, old = models()
    return examined(new, rollout(old)), "stale weights", "a fresh rollout agrees"


def adapter() -> tuple[Diagnosis, str, str]:
    base = tiny_model(initializer_range=0.15)
    samples = rollout(base)
    add_lora(base, LoraSettings(rank=4))
    with torch.no_grad():
        for i, (name, p) in enumerate(base.named_parameters()):
            if "lora_B" in name:
                p.add_(0.2 * torch.randn(p.shape, generator=torch.Generator().manual_seed(i)))
    return examined(base, samples), "adapter", ""


def swapped_tokens() -> tuple[Diagnosis, str, str]:
    """A text was decoded and encoded again: two tokens became two others, in the middle of the response."""
    new, old = models()
    samples = []
    for s in rollout(new):
        ids = list(s.response_ids)
        at = len(ids) // 2
        ids[at], ids[at - 1] = ids[at - 1], (ids[at] + 7) % 500
        samples.append(replace(s, response_ids=tuple(ids)))
    return examined(new, samples, old), "retokenisation", "agree up to one token"


def top_p() -> tuple[Diagnosis, str, str]:
    return _truncating({"top_p": 0.9}), "truncation", "top_p=0.9"


def top_k() -> tuple[Diagnosis, str, str]:
    return _truncating({"top_k": 20}), "truncation", "top_k=20"


def _truncating(cut: dict[str, Any]) -> Diagnosis:
    """A server that reports the log-probs of what was left after the cut."""
    from podium.doctor.replays import _picked, _truncated

    new, old = models()
    samples = rollout(new, replace(SAMPLING, **cut))
    replayer = Replayer(new, tiny_tokenizer(), SAMPLING, as_policy(new, SAMPLING.temperature))
    cut_log_probs = [_picked(_truncated(replayer.logits(s) / SAMPLING.temperature, **cut), s) for s in samples]
    return examined(new, [replace(s, rollout_log_probs=x) for s, x in zip(samples, cut_log_probs, strict=True)], old, **cut)


def lower_precision() -> tuple[Diagnosis, str, str]:
    new, old = models()
    return examined(new, rollout(deepcopy(new).to(torch.bfloat16)), old), "precision", ""


def another_prompt() -> tuple[Diagnosis, str, str]:
    """The rollout's server left out the start token."""
    new, old = models()
    engine = NativeEngine(deepcopy(new), tiny_tokenizer())
    submit = engine.submit
    engine.submit = lambda r: submit(replace(r, prompt_ids=r.prompt_ids[1:]))  # type: ignore[method-assign]
    samples = [replace(s, prompt_ids=ids_of(s.prompt)) for s in rollout(new, engine=engine)]
    return examined(new, samples, old), "template", "first token"


def chat_template() -> tuple[Diagnosis, str, str]:
    new, old = models()
    engine = NativeEngine(deepcopy(new), tiny_tokenizer())
    submit, tokenizer = engine.submit, tiny_tokenizer()

    def templated(request: Request) -> int:
        text = tokenizer.decode(request.prompt_ids[1:])
        turn = [{"role": "user", "content": text}]
        ids = tokenizer.encode(tokenizer.apply_chat_template(turn, tokenize=False, add_generation_prompt=True))
        return submit(replace(request, prompt_ids=tuple(ids)))

    engine.submit = templated  # type: ignore[method-assign]
    samples = [replace(s, prompt_ids=ids_of(s.prompt)) for s in rollout(new, engine=engine)]
    return examined(new, samples, old), "template", "chat template"


def rollout_kernel() -> tuple[Diagnosis, str, str]:
    """The rollout's attention scales its scores otherwise."""
    new, old = models()

    def wrong() -> NativeEngine:
        model = deepcopy(new)
        for layer in model.model.layers:
            layer.self_attn.scaling *= 0.5
        return NativeEngine(model, tiny_tokenizer())

    return examined(new, rollout(new, engine=wrong()), old, live=wrong()), "kernel", "fresh rollout"


KINDS = (
    nothing,
    temperature_in_training_only,
    temperature_in_rollout_only,
    one_tensor,
    the_embedding,
    one_layer,
    whole_version,
    a_version_that_is_gone,
    adapter,
    swapped_tokens,
    top_p,
    top_k,
    lower_precision,
    another_prompt,
    chat_template,
    rollout_kernel,
)


@pytest.mark.parametrize("kind", KINDS, ids=lambda k: k.__name__)
def test_the_planted_cause_is_named(kind: Any) -> None:
    found, cause, detail = kind()
    assert found.cause == cause and cause in CAUSES, found
    assert detail in found.detail, found


# ------------------------------------------------------------------ the decision alone


def rows(*values: list[float]) -> list[torch.Tensor]:
    return [torch.tensor(v) for v in values]


def test_the_simplest_of_equal_explanations() -> None:
    recorded = rows([-1.0, -2.0], [-3.0])
    same = [Hypothesis("stale weights", "old", recorded, 7), Hypothesis("temperature", "1", recorded, 1)]
    evidence = Evidence(recorded, None, rows([-2.0, -1.0], [-1.0]), hypotheses=same)
    assert decide(evidence).cause == "temperature"
    assert [row[0] for row in decide(evidence).table] == ["temperature", "stale weights"]


def test_nothing_explains_it() -> None:
    evidence = Evidence(rows([-1.0, -2.0]), None, rows([-2.0, -1.0]))
    assert decide(evidence).cause == "unknown"


def test_training_alone_differs_from_the_oracle() -> None:
    right = rows([-1.0, -2.0, -1.5])
    found = decide(Evidence(right, None, rows([-2.0, -1.0, -1.0]), right))
    assert (found.cause, found.side) == ("kernel", "training")


def test_weights_that_are_gone_and_no_record() -> None:
    assert decide(Evidence(rows([-1.0]))).cause == "unknown"
    assert decide(Evidence(rows([-1.0]), rows([-1.0]))).cause == "none"
    assert decide(Evidence(rows([-1.0]), rows([-2.0]), live_gap=0.0)).cause == "stale weights"
