"""Whole updates on a GPU by the fast path against the plain one: every loss, shared prompts, recomputation."""

from __future__ import annotations

from unittest.mock import patch

import pytest
import torch
from torch import Tensor
from transformers import PreTrainedModel

from podium.core.batch import Batch
from podium.engines.base import Request, RolloutEngine, SamplingParams, Trajectory
from podium.models.fused_layers import fused_hidden_states, why_not_fused
from podium.models.heads import ActorModel
from podium.models.lm_head import base_of, run_base
from podium.models.packed import pack
from podium.models.packed_attention import PackedAttention
from tests.tiny import tiny_model

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU"),
]


def _rows() -> Batch:
    draw = torch.Generator().manual_seed(3)
    prompts = [torch.randint(3, 90, (n,), generator=draw) for n in (40, 7, 12)]
    responses = [torch.randint(3, 90, (5 + 11 * i % 60,), generator=draw) for i in range(8)]
    return Batch({"prompt_ids": [prompts[i] for i in (0, 0, 0, 1, 1, 2, 0, 1)], "response_ids": responses})


def _check(model: ActorModel, recompute: str, tolerance: float) -> None:
    """Hidden states and gradients of the fused pass against those of the model's own modules, relative."""
    base, packed = base_of(model.model), pack(_rows())
    assert why_not_fused(base) is None
    results: list[list[Tensor]] = []
    for fused in (False, True):
        base.zero_grad()
        context = PackedAttention(packed.lengths, packed.parents)
        ids, positions = packed.ids.cuda(), packed.positions.cuda()
        hidden = (
            fused_hidden_states(base, ids, positions, context, recompute)  # type: ignore[arg-type]
            if fused
            else run_base(base, ids, positions, context)
        )
        (hidden * torch.randn(hidden.shape, generator=torch.Generator().manual_seed(0)).cuda()).sum().backward()
        results.append([hidden.detach(), *(p.grad.clone() for p in base.parameters() if p.grad is not None)])
    for want, got in zip(*results, strict=True):
        assert float((want - got).norm() / want.norm().clamp(min=1e-9)) < tolerance


@pytest.mark.parametrize("recompute", ["none", "selective", "full", "offload"])
@pytest.mark.parametrize("family", ["llama", "mistral", "qwen2", "qwen3"])
def test_hidden_states_and_gradients_equal_the_models_own_code(family: str, recompute: str) -> None:
    _check(ActorModel(tiny_model(family).cuda()), recompute, 1e-5)


@pytest.mark.parametrize("shared", [True, False])
def test_bf16_is_as_near_to_fp32_as_the_models_own_code(shared: bool) -> None:
    packed = pack(_rows() if shared else _rows().index(torch.tensor([0, 3, 5])))
    exact, errors = None, []
    for dtype, fused in ((torch.float32, False), (torch.bfloat16, False), (torch.bfloat16, True)):
        model = ActorModel(tiny_model("qwen2", dtype=dtype).cuda())
        reason = None if fused else "off"
        with patch("podium.models.lm_head.why_not_fused", lambda _, reason=reason: reason):
            out = model.compute(packed, ("log_probs", "entropy"))
        (out["log_probs"].sum() + out["entropy"].sum()).backward()
        grads = torch.cat([p.grad.float().flatten() for p in model.parameters() if p.grad is not None])
        exact = grads if exact is None else exact
        errors.append(float((grads - exact).norm() / exact.norm()))
    assert errors[2] < max(1.5 * errors[1], 0.01)


@pytest.mark.parametrize("targets", ["all-linear", ("q_proj", "v_proj")])
@pytest.mark.parametrize("recompute", ["none", "selective", "full", "offload"])
@pytest.mark.parametrize("family", ["llama", "mistral", "qwen2", "qwen3"])
def test_adapters_have_the_gradients_of_pefts_own_layers(family: str, recompute: str, targets: object) -> None:
    _check(ActorModel(_adapted(family, torch.float32, targets)), recompute, 5e-5)


@pytest.mark.parametrize("shared", [True, False])
def test_adapters_in_bf16_are_as_near_to_fp32_as_pefts_own_layers(shared: bool) -> None:
    packed = pack(_rows() if shared else _rows().index(torch.tensor([0, 3, 5])))
    exact, errors = None, []
    for dtype, fused in ((torch.float32, False), (torch.bfloat16, False), (torch.bfloat16, True)):
        model = ActorModel(_adapted("qwen2", dtype, "all-linear"))
        assert why_not_fused(base_of(model.model)) is None
        reason = None if fused else "off"
        with patch("podium.models.lm_head.why_not_fused", lambda _, reason=reason: reason):
            out = model.compute(packed, ("log_probs", "entropy"))
        (out["log_probs"].sum() + out["entropy"].sum()).backward()
        grads = [p.grad for p in model.parameters() if p.grad is not None]
        assert all(g.dtype == torch.float32 for g in grads)
        flat = torch.cat([g.flatten() for g in grads])
        exact = flat if exact is None else exact
        errors.append(float((flat - exact).norm() / exact.norm()))
    assert errors[2] < max(1.5 * errors[1], 0.01)


def test_lora_trains_beside_a_rollout_engine_that_recorded_its_weights() -> None:
    """The training pass moves no weight that graphs read; what an update writes into the adapters is what is sampled next."""
    from podium.engines.rollout.native.choose import native_engine
    from tests.tiny import tiny_tokenizer

    model = _adapted("qwen2", torch.float32, "all-linear")
    rollout = native_engine(model, tiny_tokenizer(), max_concurrent=4)
    texts = [_greedy(rollout)]
    ActorModel(model).compute(pack(_rows()), ("log_probs",))["log_probs"].sum().backward()
    rollout.update_weights(1)
    texts.append(_greedy(rollout))
    assert texts[0] == texts[1]
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if ".lora_B." in name:
                parameter.zero_()
    rollout.update_weights(2)
    plain = native_engine(tiny_model("qwen2").cuda(), tiny_tokenizer(), max_concurrent=4)
    assert _greedy(rollout) == _greedy(plain) != texts[0]


def _greedy(rollout: RolloutEngine) -> list[int]:
    rollout.submit(Request((5, 6, 7, 8), SamplingParams(max_new_tokens=12, temperature=0.0)))
    done: list[Trajectory] = []
    while rollout.pending:
        done += rollout.step()
    return done[0].response_ids


def _adapted(family: str, dtype: torch.dtype, targets: object) -> PreTrainedModel:
    """A model with an adapter that changes something, on the GPU."""
    pytest.importorskip("peft")
    from podium.core.settings import LoraSettings
    from podium.models.adapters import adapter_layers, add_lora

    model = tiny_model(family, dtype=dtype)
    add_lora(model, LoraSettings(rank=8, alpha=16, target_modules=targets))  # type: ignore[arg-type]
    draw = torch.Generator().manual_seed(7)
    for layer in adapter_layers(model).values():
        for factor in (*layer.lora_A.values(), *layer.lora_B.values()):
            factor.weight.data.copy_(0.1 * torch.randn(factor.weight.shape, generator=draw))
    return model.cuda()
