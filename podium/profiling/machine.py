"""What this machine can do at best, measured: the rate of a matrix product, the bandwidth of a copy."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import torch

# Sides of the product, and bytes of the copy: large enough that a GPU is busy for milliseconds, and a CPU for tenths.
_SIDE = {"cuda": 8192, "cpu": 1024}
_COPY = {"cuda": 2**31, "cpu": 2**27}


def synchronize(device: str | torch.device) -> None:
    """Waits until the device's queue is empty; a CPU has none."""
    if torch.device(device).type == "cuda":
        torch.cuda.synchronize(device)


def timed(call: Callable[[], Any], steps: int, warmup: int, device: str | torch.device) -> float:
    """Mean seconds of a call, the device's queue drained before and after."""
    for _ in range(warmup):
        call()
    synchronize(device)
    started = time.perf_counter()
    for _ in range(steps):
        call()
    synchronize(device)
    return (time.perf_counter() - started) / steps


def matrix_rate(device: str | torch.device, dtype: torch.dtype = torch.bfloat16) -> float:
    """FLOP/s of a square product of random matrices (8192 on a GPU, 1024 on a CPU with the threads that torch has)."""
    kind = torch.device(device).type
    side = _SIDE.get(kind, _SIDE["cpu"])
    a, b = (torch.randn(side, side, device=device, dtype=dtype) for _ in range(2))
    steps, warmup = (20, 3) if kind == "cuda" else (3, 1)
    return 2 * side**3 / timed(lambda: a @ b, steps, warmup, device)


def copy_rate(device: str | torch.device) -> float:
    """Bytes/s of a copy within the device's memory, read and written both counted (2 GiB on a GPU, 128 MiB on a CPU)."""
    kind = torch.device(device).type
    source = torch.empty(_COPY.get(kind, _COPY["cpu"]), dtype=torch.uint8, device=device).zero_()
    to = torch.empty_like(source)
    steps, warmup = (20, 3) if kind == "cuda" else (3, 1)
    return 2 * source.nbytes / timed(lambda: to.copy_(source), steps, warmup, device)
