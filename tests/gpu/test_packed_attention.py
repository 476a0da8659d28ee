"""Packed attention on a GPU: the variable-length kernel, and fp32, against the CPU."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from podium.core.batch import Batch
from podium.core.settings import OptimizerSettings
from podium.engines.train import SingleDeviceEngine
from podium.models.heads import ActorModel
from podium.models.packed_attention import PackedAttention
from tests.tiny import FAMILIES, tiny_model

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU"),
]

LENGTHS = torch.tensor([5, 1, 300, 64, 33, 129])


@pytest.mark.parametrize("window", [None, 17])
@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.bfloat16, 2e-2), (torch.float32, 1e-4)])
def test_attention_and_its_gradient_equal_the_cpus(dtype: torch.dtype, tolerance: float, window: int | None) -> None:
    generator = torch.Generator().manual_seed(0)
    total = int(LENGTHS.sum())
    host = [torch.randn(1, heads, total, 64, generator=generator).to(dtype).float() for heads in (8, 2, 2)]
    upstream = torch.randn(1, total, 8, 64, generator=generator)
    results = []
    for device, kind in (("cpu", torch.float32), ("cuda", dtype)):
        inputs = [x.detach().to(device, kind).requires_grad_() for x in host]
        out = PackedAttention(LENGTHS).attend(nn.Module(), *inputs, scaling=0.125, sliding_window=window)
        (out.float() * upstream.to(device)).sum().backward()
        results.append([out.detach().float().cpu(), *(x.grad.float().cpu() for x in inputs if x.grad is not None)])
    for want, got in zip(*results, strict=True):
        assert float((want - got).norm() / want.norm()) < tolerance


def rows() -> Batch:
    generator = torch.Generator().manual_seed(1)
    ids = [torch.randint(3, 500, (4 + 9 * i,), generator=generator) for i in range(8)]
    mask = [torch.ones(len(r), dtype=torch.bool) for r in ids[4:]]
    return Batch({"prompt_ids": ids[:4], "response_ids": ids[4:], "loss_mask": mask})


@pytest.mark.parametrize("family", FAMILIES)
def test_log_probs_in_bf16_and_fp32(family: str) -> None:
    want = SingleDeviceEngine(ActorModel(tiny_model(family))).compute(rows(), ("log_probs",))["log_probs"].values
    exact = SingleDeviceEngine(ActorModel(tiny_model(family).cuda())).compute(rows(), ("log_probs",))["log_probs"].values
    torch.testing.assert_close(exact, want, rtol=1e-3, atol=1e-3)
    low = SingleDeviceEngine(ActorModel(tiny_model(family, dtype=torch.bfloat16).cuda()))
    got = low.compute(rows(), ("log_probs",))["log_probs"].values
    assert float((got - want).abs().mean()) < 0.1


def test_training_lowers_the_loss() -> None:
    from podium.algorithms import supervised_loss

    model = ActorModel(tiny_model("qwen2", dtype=torch.bfloat16).cuda())
    engine = SingleDeviceEngine(model, optimizer=OptimizerSettings(lr=3e-3), microbatch_tokens=100)
    losses = [engine.update(rows(), supervised_loss()).mean("loss") for _ in range(8)]
    assert losses[-1] < 0.7 * losses[0]
