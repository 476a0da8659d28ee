"""The hand-over's transfer over NCCL on two GPUs: collectives, messages in place and packed ones give the same bits."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from tests.parallel import test_transfer as on_cpus
from tests.parallel.processes import on_ranks

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.timeout(300),
    pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs"),
]

LARGE: dict[str, tuple[int, ...]] = {"even": (8192, 4096), "uneven": (8193, 4096), "cut": (4096, 8192), "vector": (4098,)}


def every_way(rank: int) -> dict[str, Any]:
    return on_cpus.every_way(rank, 2, f"cuda:{rank}")


def large_ones(rank: int) -> None:
    """As they travel in a run: with the sizes that are set, several rounds of them."""
    on_cpus.SHAPES = LARGE
    for kind in ("whole", "cut"):
        for trained in (torch.bfloat16, torch.float32):
            plan = on_cpus.planned(kind, trained, torch.bfloat16, 2)
            on_cpus.moves(rank, plan, (4 << 20, 32 << 20), f"cuda:{rank}")


def test_every_way_gives_the_same_bits_over_nccl() -> None:
    on_cpus.check(on_ranks(every_way, 2, timeout=200, backend="nccl"))


def test_large_tensors_over_nccl() -> None:
    on_ranks(large_ones, 2, timeout=200, backend="nccl")
