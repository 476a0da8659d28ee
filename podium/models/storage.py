"""Where a module's parameters lie in memory: how two users of one set of weights know that they still share it."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import nn


@dataclass(frozen=True)
class Place:
    """A tensor's address, shape, dtype and device."""

    address: int
    shape: tuple[int, ...]
    dtype: torch.dtype
    device: torch.device


def storage_fingerprint(module: nn.Module) -> dict[str, Place]:
    """The place of every parameter, by name (a tied one under each of its names).

    Two fingerprints are equal exactly when nothing moved, changed shape or dtype, came or went; values may differ.
    """
    return {
        name: Place(p.data_ptr(), tuple(p.shape), p.dtype, p.device)
        for name, p in module.named_parameters(remove_duplicate=False)
    }


def moved_parameters(before: dict[str, Place], now: dict[str, Place]) -> list[str]:
    """Names whose place differs between two fingerprints, in the order of `before`, then new ones."""
    return [name for name in {**before, **now} if before.get(name) != now.get(name)]
