"""Losses of the critic. Elementwise, like the policy losses."""

from __future__ import annotations

import torch
from torch import Tensor


def clipped_value_loss(
    values: Tensor, old_values: Tensor, returns: Tensor, *, clip: float | None = None
) -> tuple[Tensor, dict[str, Tensor]]:
    """Half the squared error of the value, with PPO's value clip if `clip` is given.

    loss = 1/2 max((V - R)^2, (clip(V, V_old - clip, V_old + clip) - R)^2); without `clip` just 1/2 (V - R)^2.

    The clip is from OpenAI's baselines; the paper (arXiv:1707.06347) doesn't have it. Shapes: all alike, any shape; the loss
    has that shape and gradients for `values`. Metrics, detached: `value_error`, (V - R)^2; with `clip` also
    `value_clip_fraction`, 1 where the clipped error was the larger. Raises `ValueError` for a negative clip.
    """
    if clip is not None and clip < 0:
        raise ValueError(f"clip must not be negative, or None for no clip; got {clip}.")
    error = (values - returns).square()
    metrics = {"value_error": error.detach()}
    if clip is None:
        return 0.5 * error, metrics
    clipped = torch.clamp(values, old_values - clip, old_values + clip)
    clipped_error = (clipped - returns).square()
    metrics["value_clip_fraction"] = (clipped_error > error).to(error.dtype)
    return 0.5 * torch.maximum(error, clipped_error), metrics
