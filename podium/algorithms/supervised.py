"""Losses of supervised training."""

from __future__ import annotations

from torch import Tensor


def negative_log_likelihood(log_probs: Tensor) -> Tensor:
    """`-log p(token)`, elementwise: any shape in, the same out. Its mean over tokens is the cross-entropy in nats."""
    return -log_probs
