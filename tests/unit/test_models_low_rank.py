"""LoRA through the fused layers against peft's own layers: the same output and gradients; nothing computed for the base."""

from __future__ import annotations

from typing import Any
from unittest.mock import patch

import pytest
import torch
from torch import Tensor

from podium.core.settings import LoraSettings
from podium.models.adapters import adapter_layers, adapter_off, add_lora
from podium.models.fused import can_fuse, lay_together
from podium.models.fused_layers import fused_hidden_states
from podium.models.heads import ActorModel
from podium.models.lm_head import base_of, run_base
from podium.models.packed import pack
from podium.models.packed_attention import PackedAttention
from podium.models.recompute import Recompute
from podium.models.storage import moved_parameters, storage_fingerprint
from tests.properties.test_train_invariance import CASES, Captured, assert_same_gradients, rows, shared_rows
from tests.tiny import tiny_model
from tests.unit.test_models_fused_layers import FUSED, ROWS

pytest.importorskip("peft")


def adapted(family: str, targets: Any = "all-linear", *, rank: int = 3, alpha: float = 5.0, **options: Any) -> Any:
    """A tiny model with an adapter that changes something."""
    model = tiny_model(family, **options)
    add_lora(model, LoraSettings(rank=rank, alpha=alpha, target_modules=targets))
    draw = torch.Generator().manual_seed(7)
    for layer in adapter_layers(model).values():
        for factor in (*layer.lora_A.values(), *layer.lora_B.values()):
            factor.weight.data.copy_(0.1 * torch.randn(factor.weight.shape, generator=draw))
    return model


def outputs_and_gradients(base: Any, fused: bool, recompute: Recompute = "none") -> list[Tensor]:
    packed = pack(ROWS)
    context = PackedAttention(packed.lengths, packed.parents)
    base.zero_grad()
    if fused:
        hidden = fused_hidden_states(base, packed.ids, packed.positions, context, recompute)
    else:
        hidden = run_base(base, packed.ids, packed.positions, context)
    (hidden * torch.randn(hidden.shape, generator=torch.Generator().manual_seed(0))).sum().backward()
    assert all((p.grad is not None) == p.requires_grad for p in base.parameters())
    return [hidden.detach(), *(p.grad.clone() for p in base.parameters() if p.grad is not None)]


def _same(got: list[Tensor], want: list[Tensor]) -> None:
    assert len(got) == len(want) > 1
    for a, b in zip(got, want, strict=True):
        assert a.dtype == b.dtype and float((a - b).norm() / b.norm().clamp(min=1e-9)) < 1e-5


@pytest.mark.parametrize("recompute", ["none", "selective", "full"])
@pytest.mark.parametrize("family", FUSED)
def test_adapters_of_every_layer(family: str, recompute: Recompute) -> None:
    base = base_of(ActorModel(adapted(family)).model)
    _same(outputs_and_gradients(base, True, recompute), outputs_and_gradients(base, False))


@pytest.mark.parametrize(
    "targets", [("q_proj", "v_proj"), ("k_proj",), ("o_proj",), ("gate_proj", "down_proj"), ("up_proj",), ("down_proj",)]
)
def test_adapters_of_some_layers(targets: tuple[str, ...]) -> None:
    base = base_of(ActorModel(adapted("qwen2", targets)).model)
    _same(outputs_and_gradients(base, True, "selective"), outputs_and_gradients(base, False))


@pytest.mark.parametrize("case", ["policy", "supervised"])
@pytest.mark.parametrize("made", [rows, shared_rows])
def test_a_loss_has_the_gradient_of_pefts_layers(case: str, made: Any) -> None:
    _, loss = CASES[case]
    gradients = []
    for reason in ("peft's own layers", None):
        with patch("podium.models.lm_head.why_not_fused", lambda _, reason=reason: reason):
            engine = Captured(ActorModel(adapted("qwen2"), temperature=0.8), 60)
            engine.update(made(), loss)
        gradients.append(engine.gradients)
    assert all(".lora_" in name for name in gradients[1])
    assert_same_gradients(gradients[1], gradients[0])


def test_no_product_makes_a_gradient_of_the_base() -> None:
    """Matrix products of the backward pass: none has the shape of a base weight, and there is one for each input's gradient."""
    base = base_of(ActorModel(adapted("llama", num_hidden_layers=1)).model)
    packed = pack(ROWS)
    hidden = fused_hidden_states(base, packed.ids, packed.positions, PackedAttention(packed.lengths, packed.parents))
    shapes: list[tuple[int, ...]] = []

    class Watch(torch.utils._python_dispatch.TorchDispatchMode):
        def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            out = function(*args, **(kwargs or {}))
            if function in (torch.ops.aten.mm.default, torch.ops.aten.addmm_.default):
                shapes.append(tuple(out.shape))
            return out

    with Watch():
        hidden.sum().backward()
    weights = {tuple(p.shape) for name, p in base.named_parameters() if p.ndim == 2 and ".lora_" not in name}
    assert shapes and not weights & set(shapes), shapes
    tokens = len(packed.ids)
    # The gradient of the input of q, k, v, of o, of gate and up: one product, and what their adapters add; that of down's.
    assert shapes.count((tokens, 64)) == 3 + 3 and shapes.count((tokens, 128)) == 1 + 1


def test_off_is_the_base_alone_and_changes_nothing_for_later() -> None:
    model, plain = adapted("qwen3"), tiny_model("qwen3")
    on = outputs_and_gradients(base_of(ActorModel(model).model), True)
    packed = pack(ROWS)
    with adapter_off(model), torch.no_grad():
        off, want = (
            fused_hidden_states(base_of(m), packed.ids, packed.positions, PackedAttention(packed.lengths, packed.parents))
            for m in (model, ActorModel(plain).model)
        )
    assert torch.equal(off, want) and not torch.allclose(off, on[0])
    _same(outputs_and_gradients(base_of(model), True), on)


def test_weights_laid_together_before_stay_where_they_are() -> None:
    base = base_of(ActorModel(adapted("qwen2")).model)
    want = outputs_and_gradients(base, False)
    lay_together(base)
    before = storage_fingerprint(base)
    _same(outputs_and_gradients(base, True), want)
    assert not moved_parameters(before, storage_fingerprint(base))


def test_what_is_more_than_low_rank_runs_its_own_layers() -> None:
    model = adapted("llama")
    assert can_fuse(base_of(model), adapters=True) is None
    assert "lora.layer.Linear" in str(can_fuse(base_of(model)))
    layer = next(iter(adapter_layers(model).values()))
    layer.lora_dropout["default"] = torch.nn.Dropout(0.1)
    assert can_fuse(base_of(model), adapters=True) == "an adapter has dropout"


def test_in_16_bits_the_adapters_gradients_are_in_fp32() -> None:
    """And as near to those in fp32 as peft's layers come."""
    exact = outputs_and_gradients(base_of(ActorModel(adapted("qwen2")).model), False)[1:]
    errors = []
    for fused in (False, True):
        base = base_of(ActorModel(adapted("qwen2", dtype=torch.bfloat16)).model)
        got = outputs_and_gradients(base, fused)[1:]
        assert all(g.dtype == torch.float32 for g in got)
        errors.append(float(torch.stack([(g - e).norm() / e.norm() for g, e in zip(got, exact, strict=True)]).mean()))
    assert errors[1] < 1.3 * errors[0] + 1e-3
