"""The training pass of common layers, and recomputation, against the models' own code; on the CPU, in fp32."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any
from unittest.mock import patch

import pytest
import torch
from torch import Tensor
from torch.autograd.graph import save_on_cpu
from transformers import PreTrainedModel

from podium.algorithms.losses import LOSSES
from podium.core.batch import Batch
from podium.models.cudnn_attention import rounded_up
from podium.models.fused_layers import fused_hidden_states, why_not_fused
from podium.models.heads import ActorModel
from podium.models.lm_head import base_of, run_base
from podium.models.packed import pack
from podium.models.packed_attention import PackedAttention
from podium.models.recompute import Recompute, recomputing
from podium.models.shared_attention import make_layout
from tests.properties.test_train_invariance import BATCHES, CASES, Captured, actor, assert_same_gradients, plain
from tests.tiny import tiny_model

FUSED = ["llama", "mistral", "qwen2", "qwen3"]
ROWS = Batch({"prompt_ids": [[5, 6, 7]] * 2 + [[9, 8]], "response_ids": [[11, 12, 13, 14], [15, 16], [17] * 9]})


def _hidden_and_gradients(base: PreTrainedModel, run: Callable[[PackedAttention, Tensor, Tensor], Tensor]) -> list[Tensor]:
    packed = pack(ROWS)
    base.zero_grad()
    hidden = run(PackedAttention(packed.lengths, packed.parents), packed.ids, packed.positions)
    (hidden * torch.randn(hidden.shape, generator=torch.Generator().manual_seed(0))).sum().backward()
    return [hidden.detach(), *(p.grad.clone() for p in base.parameters() if p.grad is not None)]


def _same(got: list[Tensor], want: list[Tensor]) -> None:
    assert len(got) == len(want)
    for a, b in zip(got, want, strict=True):
        assert float((a - b).norm() / b.norm().clamp(min=1e-9)) < 1e-5


@pytest.mark.parametrize("recompute", ["none", "selective", "full", "offload"])
@pytest.mark.parametrize("family", FUSED)
def test_fused_layers_equal_the_models_own_code(family: str, recompute: Recompute) -> None:
    base = base_of(ActorModel(tiny_model(family)).model)
    want = _hidden_and_gradients(base, lambda context, ids, positions: run_base(base, ids, positions, context))
    got = _hidden_and_gradients(
        base, lambda context, ids, positions: fused_hidden_states(base, ids, positions, context, recompute)
    )
    _same(got, want)


@pytest.mark.parametrize("family", ["llama", "gemma2"])
def test_a_models_own_code_recomputes_to_the_same(family: str) -> None:
    base = base_of(ActorModel(tiny_model(family)).model)
    want = _hidden_and_gradients(base, lambda context, ids, positions: run_base(base, ids, positions, context))
    calls = 0

    def run(context: PackedAttention, ids: Tensor, positions: Tensor) -> Tensor:
        nonlocal calls
        with recomputing(base, "full"):
            hidden = run_base(base, ids, positions, context)
        calls = context.calls
        hidden.register_hook(lambda _: None)
        run.context = context  # type: ignore[attr-defined]
        return hidden

    got = _hidden_and_gradients(base, run)
    _same(got, want)
    assert run.context.calls == 2 * calls  # type: ignore[attr-defined]
    assert not base.training
    assert not any(getattr(m, "gradient_checkpointing", False) for m in base.modules())


@pytest.mark.parametrize("fused", [True, False])
def test_with_offload_only_the_layers_inputs_are_kept_and_on_the_cpu(fused: bool) -> None:
    """The same bits as `full`; each layer's input (fused: and what is yet to be added) goes to the CPU, nothing else."""
    base, packed = base_of(ActorModel(tiny_model("llama")).model), pack(ROWS)
    moved: list[tuple[int, ...]] = []

    class Watched(save_on_cpu):
        def __init__(self, pin_memory: bool) -> None:
            super().__init__(pin_memory)
            pack_it = self.pack_hook
            self.pack_hook = lambda tensor: (moved.append(tuple(tensor.shape)), pack_it(tensor))[1]

    results = []
    for recompute in ("full", "offload"):

        def run(context: PackedAttention, ids: Tensor, positions: Tensor, recompute: Any = recompute) -> Tensor:
            if fused:
                return fused_hidden_states(base, ids, positions, context, recompute)
            with recomputing(base, recompute):
                return run_base(base, ids, positions, context)

        with patch("podium.models.recompute.save_on_cpu", Watched):
            results.append(_hidden_and_gradients(base, run))
    assert all(torch.equal(a, b) for a, b in zip(*results, strict=True))
    size = len(packed.ids) * 64
    assert [math.prod(shape) for shape in moved] == [size] * (3 if fused else 2)  # the first has nothing to be added


EVERY = {**CASES, "preference": (actor, LOSSES["preference"]()), "gspo": (actor, LOSSES["policy"](objective="gspo"))}


@pytest.mark.parametrize("kind", BATCHES)
@pytest.mark.parametrize("recompute", ["none", "selective"])
@pytest.mark.parametrize("case", EVERY)
def test_every_loss_has_the_gradient_of_a_plain_padded_forward(case: str, recompute: Recompute, kind: str) -> None:
    make, loss = EVERY[case]
    with patch.dict(CASES, EVERY):
        _, want = plain(case, BATCHES[kind]())
    model = make()
    model.recompute = recompute  # type: ignore[assignment]
    with patch("podium.models.lm_head.why_not_fused", lambda _: None):
        engine = Captured(model, 60)
        engine.update(BATCHES[kind](), loss)
    assert_same_gradients(engine.gradients, want)


def test_what_runs_its_own_code() -> None:
    assert why_not_fused(base_of(tiny_model("llama"))) == "it is not on a GPU"


def test_sizes_are_rounded_up_to_few() -> None:
    assert [rounded_up(n) for n in (1, 2, 3, 4, 5, 7, 9, 12, 13, 1000, 1025)] == [1, 2, 3, 4, 6, 8, 12, 12, 16, 1024, 1536]
    assert all(n <= rounded_up(n) <= 1.5 * n + 1 for n in range(1, 5000))


def test_segments_of_shared_prompts() -> None:
    layout = make_layout(torch.tensor([5, 2, 3, 7, 4, 1]), torch.tensor([-1, 0, 0, -1, -1, 4]), torch.device("cpu"))
    assert layout is not None
    assert layout.queries.diff().tolist() == [5, 5, 0, 7, 0, 4, 1, 0]
    assert layout.keys.diff().tolist() == [0, 5, 5, 0, 7, 0, 4, 1]
    assert (layout.longest, layout.most_queries, layout.most_keys) == (7, 7, 7)
    assert make_layout(torch.tensor([5, 4, 2]), torch.tensor([-1, -1, 0]), torch.device("cpu")) is None
