"""Seeds: one run seed gives every sample its own, so that no result depends on order or batch."""

from __future__ import annotations

import hashlib
import random

_MASK63 = (1 << 63) - 1


def derive_seed(*parts: int | str) -> int:
    """A 63-bit seed that depends on every part and on their order, the same on every machine.

    Used as `derive_seed(run_seed, "rollout", step, row, index)`: each sample has its own.
    """
    text = "\x1f".join(f"{type(p).__name__}:{p}" for p in parts)
    digest = hashlib.blake2b(text.encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little") & _MASK63


def seed_everything(seed: int) -> None:
    """Seeds python, NumPy and torch (the generators that libraries use without asking)."""
    import numpy as np
    import torch

    random.seed(seed)
    np.random.seed(seed % (1 << 32))
    torch.manual_seed(seed)
