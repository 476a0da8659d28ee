"""Loss and gradient do not depend on how a minibatch is cut, and are those of a plain padded forward pass."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from podium.algorithms import (
    Loss,
    pairwise_reward_loss,
    policy_loss,
    supervised_loss,
    token_weights,
    value_loss,
)
from podium.core.batch import Batch
from podium.core.metrics import Metrics
from podium.core.settings import OptimizerSettings
from podium.engines.train import SingleDeviceEngine
from podium.models.heads import ActorModel, CriticModel, RewardModel
from podium.models.lm_head import base_of, own_attention
from tests.tiny import FAMILIES, tiny_model

TEMPERATURE = 0.8
PROMPTS = [3, 9, 1, 20, 6, 14, 2, 5]
RESPONSES = [4, 0, 25, 11, 1, 30, 7, 7]


def rows() -> Batch:
    """Eight rows of very different lengths, one response empty; a mask with holes; all columns that the losses read."""
    generator = torch.Generator().manual_seed(5)
    total = sum(RESPONSES)

    def cut(values: Tensor, lengths: list[int] = RESPONSES) -> list[Tensor]:
        return list(values.split(lengths))

    def normal() -> list[Tensor]:
        return cut(torch.randn(total, generator=generator))

    return Batch(
        {
            "prompt_ids": cut(torch.randint(3, 500, (sum(PROMPTS),), generator=generator), PROMPTS),
            "response_ids": cut(torch.randint(3, 500, (total,), generator=generator)),
            "loss_mask": cut(torch.rand(total, generator=generator) < 0.8),
            "old_log_probs": cut(-5 + torch.randn(total, generator=generator)),
            "ref_log_probs": cut(-5 + torch.randn(total, generator=generator)),
            "advantages": normal(),
            "values": normal(),
            "returns": normal(),
            "pair_id": [0, 1, 2, 3, 0, 1, 2, 3],
            "chosen": [True, False, True, True, False, True, False, False],
        }
    )


GROUPS = [0, 1, 0, 2, 0, 3, 1, 2]
"""Which prompt each row of `shared_rows` has: mixed up, with a group of one, and an empty response in a group of two."""


def shared_rows() -> Batch:
    """The same rows, but groups of them share prompts."""
    prompts = rows()["prompt_ids"]
    return rows().with_columns({"prompt_ids": [prompts[group] for group in GROUPS]})


BATCHES: dict[str, Callable[[], Batch]] = {"distinct prompts": rows, "shared prompts": shared_rows}


def actor() -> nn.Module:
    return ActorModel(tiny_model("qwen2"), temperature=TEMPERATURE)


def critic() -> nn.Module:
    torch.manual_seed(1)
    made = CriticModel.from_causal_lm(tiny_model("llama"))
    nn.init.normal_(made.head.weight, std=0.2)
    return made


def reward() -> nn.Module:
    torch.manual_seed(1)
    return RewardModel.from_causal_lm(tiny_model("mistral"))


POLICY = {"dual_clip": 3.0, "entropy_coef": 0.01, "kl_coef": 0.1}
CASES: dict[str, tuple[Callable[[], nn.Module], Loss]] = {
    "policy": (actor, policy_loss(**POLICY)),
    "policy, sequence means": (actor, policy_loss(reduction="sequence_mean_token_mean")),
    "policy, constant": (actor, policy_loss(reduction="constant", constant_length=64)),
    "value": (critic, value_loss(clip=0.2)),
    "supervised": (actor, supervised_loss()),
    "pairwise reward": (reward, pairwise_reward_loss(margin=0.5)),
}


class Captured(SingleDeviceEngine):
    """Keeps the gradient that the optimizer would have used, before clipping."""

    def __init__(self, model: nn.Module, budget: int) -> None:
        super().__init__(model, optimizer=OptimizerSettings(lr=1e-3, max_grad_norm=1e9), microbatch_tokens=budget)
        assert self._optimizer is not None
        own = self._optimizer.step

        def step() -> Any:
            self.gradients = {n: p.grad.clone() for n, p in model.named_parameters() if p.grad is not None}
            return own()

        self._optimizer.step = step  # type: ignore[method-assign]


def run(case: str, budget: int, made: Callable[[], Batch] = rows) -> tuple[Metrics, dict[str, Tensor]]:
    make, loss = CASES[case]
    engine = Captured(make(), budget)
    return engine.update(made(), loss), engine.gradients


# ------------------------------------------------------------------ the plain reference: padded, the library's own attention


def plain_outputs(model: Any, batch: Batch) -> dict[str, Tensor]:
    """Left-aligned `[B, T]` rows with an attention mask, logits whole; then cut out what each response token needs."""
    both = [torch.cat(pair) for pair in zip(batch["prompt_ids"], batch["response_ids"], strict=True)]
    ids = torch.nn.utils.rnn.pad_sequence(both, batch_first=True)
    mask = torch.nn.utils.rnn.pad_sequence([torch.ones(len(row)) for row in both], batch_first=True).long()
    inner = model.base if isinstance(model, CriticModel) else model.model
    with own_attention(inner):
        base = inner if isinstance(model, CriticModel) else base_of(inner)
        hidden = base(input_ids=ids, attention_mask=mask, use_cache=False).last_hidden_state
    if isinstance(model, RewardModel):
        last = mask.sum(1) - 1
        return {"scores": model.model.score(hidden[torch.arange(len(ids)), last])[:, 0]}
    prompts, responses = batch.lengths("prompt"), batch.lengths("response")
    longest = int(responses.max())
    at = (prompts[:, None] - 1 + torch.arange(longest)).clamp(max=ids.shape[1] - 1)
    state = hidden.gather(1, at[..., None].expand(-1, -1, hidden.shape[-1]))
    if isinstance(model, CriticModel):
        return {"values": model.head(state)[..., 0]}
    log_softmax = (model.model.lm_head(state) / TEMPERATURE).log_softmax(-1)
    targets = batch.padded("response_ids")
    return {
        "log_probs": log_softmax.gather(-1, targets[..., None])[..., 0],
        "entropy": -(log_softmax.exp() * log_softmax).sum(-1),
    }


def plain(case: str, batch: Batch) -> tuple[float, dict[str, Tensor]]:
    make, loss = CASES[case]
    model = make()
    columns = {name: batch.padded(name) for name in loss.columns}
    mask = batch.padded(loss.mask)
    per_entry, _ = loss.function(plain_outputs(model, batch), columns)
    weights = token_weights(mask, loss.reduction, constant_length=loss.constant_length)
    total = per_entry[mask] @ weights[mask]
    total.backward()
    return float(total.detach()), {n: p.grad for n, p in model.named_parameters() if p.grad is not None}


def assert_same_gradients(got: dict[str, Tensor], want: dict[str, Tensor]) -> None:
    assert got.keys() == want.keys()
    for name in want:
        assert float((got[name] - want[name]).norm()) <= 1e-5 * float(want[name].norm()) + 1e-9, name


@pytest.mark.parametrize("kind", BATCHES)
@pytest.mark.parametrize("case", CASES)
def test_equals_a_plain_padded_forward(case: str, kind: str) -> None:
    metrics, gradients = run(case, 10**6, BATCHES[kind])
    loss, want = plain(case, BATCHES[kind]())
    assert metrics.mean("loss") == pytest.approx(loss, rel=1e-5)
    assert_same_gradients(gradients, want)


@pytest.mark.parametrize("kind", BATCHES)
@pytest.mark.parametrize("case", CASES)
def test_any_micro_batch_budget_gives_the_same(case: str, kind: str) -> None:
    whole, want = run(case, 10**6, BATCHES[kind])
    for budget in (1, 40, 77):  # at 1 no two rows go together, so nothing is shared
        metrics, got = run(case, budget, BATCHES[kind])
        assert_same_gradients(got, want)
        for name, (total, count) in whole.items():
            mine = dict(metrics.items())[name]
            assert mine[1] == count, name
            assert mine[0] == pytest.approx(total, rel=1e-5, abs=1e-6), name


@pytest.mark.parametrize("family", FAMILIES)
def test_sharing_a_prompt_changes_nothing_in_any_family(family: str) -> None:
    """Sliding windows that end within the prompt, soft-capped scores, norms of queries and keys."""
    batch, results = long_shared_rows(), []
    for budget in (10**6, 1):
        engine = Captured(ActorModel(tiny_model(family)), budget)
        metrics = engine.update(batch, supervised_loss())
        results.append((metrics, engine.gradients))
    assert results[0][0].mean("loss") == pytest.approx(results[1][0].mean("loss"), rel=1e-5)
    assert results[0][0].mean("tokens") == float(batch.lengths("prompt").sum() + batch.lengths("response").sum())
    assert_same_gradients(results[0][1], results[1][1])


def long_shared_rows() -> Batch:
    """Prompts of 30, 12, 47 and 5 tokens with 3, 2, 1 and 2 responses of 1 to 40 tokens."""
    generator = torch.Generator().manual_seed(7)
    prompts = [torch.randint(3, 500, (n,), generator=generator) for n in (30, 12, 47, 5)]
    responses = [torch.randint(3, 500, (n,), generator=generator) for n in (20, 9, 33, 1, 40, 11, 0, 18)]
    owners = [0, 1, 0, 1, 0, 2, 3, 3]
    return Batch(
        {
            "prompt_ids": [prompts[owner] for owner in owners],
            "response_ids": responses,
            "loss_mask": [torch.ones(len(r), dtype=torch.bool) for r in responses],
        }
    )


def test_a_shared_prompt_runs_once() -> None:
    seen: list[int] = []
    engine = SingleDeviceEngine(actor(), microbatch_tokens=10**6)
    inner = base_of(engine.model.model)
    inner.register_forward_pre_hook(lambda _, args, kwargs: seen.append(kwargs["input_ids"].numel()), with_kwargs=True)
    engine.compute(shared_rows(), ("log_probs",))
    assert seen == [sum(PROMPTS[:4]) + sum(RESPONSES)]


@pytest.mark.parametrize("case", ["policy", "value"])
def test_rows_in_another_order_give_the_same(case: str) -> None:
    make, loss = CASES[case]
    first, second = Captured(make(), 40), Captured(make(), 40)
    a = first.update(rows(), loss)
    b = second.update(rows().index([6, 2, 0, 7, 3, 1, 5, 4]), loss)
    assert a.mean("loss") == pytest.approx(b.mean("loss"), rel=1e-5)
    assert_same_gradients(first.gradients, second.gradients)


@pytest.mark.parametrize("kind", BATCHES)
def test_compute_gives_rows_back_in_their_order(kind: str) -> None:
    made = BATCHES[kind]
    engine = SingleDeviceEngine(actor(), microbatch_tokens=10**6)
    whole = engine.compute(made(), ("log_probs", "entropy"))
    engine.microbatch_tokens = 25
    parts = engine.compute(made(), ("log_probs", "entropy"))
    want = plain_outputs(engine.model, made())
    valid = made().mask("response")
    for name in ("log_probs", "entropy"):
        assert parts[name].lengths.tolist() == RESPONSES
        torch.testing.assert_close(parts[name].values, whole[name].values, rtol=1e-5, atol=1e-5)
        torch.testing.assert_close(parts[name].values, want[name][valid], rtol=1e-5, atol=1e-5)
    scorer = SingleDeviceEngine(reward(), microbatch_tokens=25)
    torch.testing.assert_close(
        scorer.compute(made(), ("scores",))["scores"], plain_outputs(scorer.model, made())["scores"], rtol=1e-5, atol=1e-5
    )


@pytest.mark.parametrize("kind", BATCHES)
def test_log_probs_of_compute_are_those_of_the_update(kind: str) -> None:
    """At the start of an update the ratio is 1 for every token: bit for bit the same forward, cut the same way."""
    engine = SingleDeviceEngine(actor(), optimizer=OptimizerSettings(lr=1e-3), microbatch_tokens=40)
    old = engine.compute(BATCHES[kind](), ("log_probs",))["log_probs"]
    metrics = engine.update(BATCHES[kind]().with_columns({"old_log_probs": old}), policy_loss())
    assert metrics.mean("ratio") == 1.0
    assert metrics.mean("approx_kl") == 0.0
