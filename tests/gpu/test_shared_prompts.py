"""Shared prompts on a GPU: the variable-length kernel over gathered keys, and fp32, against the CPU."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from podium.models.packed_attention import PackedAttention

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU"),
]

LENGTHS = torch.tensor([100, 33, 7, 64, 129, 5, 5])
PARENTS = torch.tensor([-1, 0, 0, 0, -1, 4, 4])


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
        context = PackedAttention(LENGTHS, PARENTS)
        out = context.attend(nn.Module(), *inputs, scaling=0.125, sliding_window=window)
        (out.float() * upstream.to(device)).sum().backward()
        results.append([out.detach().float().cpu(), *(x.grad.float().cpu() for x in inputs if x.grad is not None)])
    for want, got in zip(*results, strict=True):
        assert float((want - got).norm() / want.norm()) < tolerance
