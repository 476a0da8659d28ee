# mypy: disable-error-code="no-untyped-def,no-untyped-call,untyped-decorator,import-untyped,import-not-found"
"""Kernels that set up while the one before them still runs (programmatic dependent launch: Hopper and later).

A decode step is some hundred kernels of a few microseconds. Each begins with `after_previous`: it waits until all that was
launched before it has written what it writes, then lets the next one come onto the device, which waits there. So their order
is as before, and half a microsecond of each launch is hidden.
"""

from __future__ import annotations

from functools import cache
from typing import Any

import torch
import triton
import triton.language as tl


@triton.jit
def after_previous(EARLY: tl.constexpr):
    """Must stand before a kernel's first access to memory."""
    if EARLY:
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()


def early(device: torch.device) -> dict[str, Any]:
    """The launch arguments of a kernel whose constant EARLY goes to `after_previous`."""
    return _early(device.index or 0) if device.type == "cuda" else {"EARLY": False}


@cache
def _early(index: int) -> dict[str, Any]:
    able = torch.version.hip is None and torch.cuda.get_device_capability(index) >= (9, 0)
    return {"EARLY": True, "launch_pdl": True} if able else {"EARLY": False}
