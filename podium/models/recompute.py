"""What the backward pass computes again instead of keeping it: memory for time."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from functools import partial
from typing import Any, Literal

import torch
from torch.autograd.graph import save_on_cpu
from torch.utils.checkpoint import checkpoint
from transformers import PreTrainedModel
from transformers.modeling_layers import GradientCheckpointingLayer

Recompute = Literal["none", "selective", "full", "offload"]
"""none: only what is cheap (norms, activations), where Podium runs the layers. selective: the MLP's first products too, which
are the larger part of what a layer keeps. full: whole layers, of which only the input is kept. offload: as full, and those
inputs wait in the CPU's memory. In a model that runs its own code `selective` is `full`.
"""

WHOLE_LAYERS = ("full", "offload")


def again(function: Callable[..., Any], *arguments: Any, recompute: Recompute = "full") -> Any:
    """`function(*arguments)`, of which the arguments alone are kept for the backward pass, and the rest computed again."""
    kept = save_on_cpu(pin_memory=torch.cuda.is_available()) if recompute == "offload" else nullcontext()
    with kept:
        return checkpoint(function, *arguments, use_reentrant=False, preserve_rng_state=False)


@contextmanager
def recomputing(base: PreTrainedModel, recompute: Recompute) -> Iterator[None]:
    """While it lasts, a forward pass of the model's own code keeps its layers' inputs alone (unless `recompute` is none)."""
    layers = [m for m in base.modules() if isinstance(m, GradientCheckpointingLayer)] if recompute != "none" else []
    if not torch.is_grad_enabled():
        layers = []
    before = [(layer.gradient_checkpointing, layer.training) for layer in layers]
    for layer in layers:
        # Only the layer's own flag: it is what the library asks; the modules inside stay as they are.
        layer.gradient_checkpointing = layer.training = True
        layer._gradient_checkpointing_func = partial(again, recompute=recompute)
    try:
        yield
    finally:
        for layer, (was_on, training) in zip(layers, before, strict=True):
            layer.gradient_checkpointing, layer.training = was_on, training
