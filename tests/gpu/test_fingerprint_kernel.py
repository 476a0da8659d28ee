"""The fingerprint's kernel gives torch's number, bit for bit. Runs on a GPU, or anywhere under Triton's interpreter."""

from __future__ import annotations

import os

import pytest
import torch
from torch import Tensor

from podium.engines.layout import Box
from podium.hybrid.fingerprints import Fingerprints, fingerprint
from podium.models.storage import by_columns

pytest.importorskip("triton")
INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not (torch.cuda.is_available() or INTERPRETED), reason="needs a GPU, or TRITON_INTERPRET=1"),
]
DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")

SHAPES = [(), (1,), (7,), (3, 5), (70, 1030), (2100, 9), (1, 3000), (4, 5, 66)]


def by_kernel(values: Tensor, box: Box) -> int:
    """As on a GPU, wherever this runs."""
    found = Fingerprints(3, DEVICE)
    found._fused = True
    found.add(1, values, box)
    assert found.sums[[0, 2]].tolist() == [0, 0]
    return int(found.sums[1])


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_the_kernel_gives_the_number_of_torch_on_a_cpu(shape: tuple[int, ...], dtype: torch.dtype) -> None:
    values = torch.randn(shape, generator=torch.Generator().manual_seed(len(shape))).to(dtype)
    start = tuple(range(5, 5 + len(shape)))  # a piece of something larger
    box = Box(start, tuple(a + n for a, n in zip(start, shape, strict=True)))
    want = int(fingerprint(values, box))
    assert by_kernel(values.to(DEVICE), box) == want
    if len(shape) == 2:
        assert by_kernel(by_columns(values.to(DEVICE)), box) == want


def test_a_part_of_a_tensor_is_read_where_it_lies() -> None:
    whole = torch.randn(300, 400, device=DEVICE).bfloat16()
    box = Box((37, 101), (299, 390))
    part = whole[box.within(Box.whole(whole.shape))]
    assert by_kernel(part, box) == int(fingerprint(part.cpu(), box))


@pytest.mark.skipif(INTERPRETED, reason="needs a GPU: the kernel is chosen there")
def test_a_gpu_and_a_cpu_agree_on_a_large_tensor() -> None:
    values = torch.randn(30_000, 3584, device=DEVICE).bfloat16()
    box = Box.whole(values.shape)
    want = int(fingerprint(values.cpu(), box))
    assert int(fingerprint(values, box)) == want
    values[29_999, 3583] += 1
    assert int(fingerprint(values, box)) != want
