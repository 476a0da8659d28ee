"""A small model of the same kind: what an architecture can do is tried on it, where the real one has no numbers yet."""

from __future__ import annotations

import copy
from typing import Any

import torch
from torch import nn

from podium.core.errors import ModelError

_HIDDEN, _WIDTH, _VOCABULARY = 64, 96, 128


def has_no_numbers(model: nn.Module) -> bool:
    """Whether its parameters are on the meta device."""
    return any(p.is_meta for p in model.parameters())


def small_of(model: Any) -> Any:
    """A model of the same class with random weights: narrow, with few layers (of every kind that the config names), as many
    heads, and a small vocabulary. In fp32 on the CPU.

    Raises ModelError where the class cannot be made so.
    """
    config = copy.deepcopy(model.config)
    text = config.get_text_config()
    text.head_dim = getattr(text, "head_dim", None) or text.hidden_size // text.num_attention_heads
    kinds = getattr(text, "layer_types", None)
    layers = min(text.num_hidden_layers, 2 if not kinds else max(2, max(kinds.index(kind) for kind in kinds) + 1))
    if kinds:
        text.layer_types = kinds[:layers]
    text.num_hidden_layers = layers
    text.hidden_size, text.intermediate_size, text.vocab_size = _HIDDEN, _WIDTH, _VOCABULARY
    for name in ("pad_token_id", "bos_token_id", "eos_token_id"):
        setattr(text, name, None)
    text.initializer_range = 0.2  # so that a difference shows
    try:
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(0)
            return type(model)(config).float().eval()
    except Exception as error:  # whatever a class makes of such sizes
        raise ModelError(f"no small {type(model).__name__} can be made to try it on: {error}") from error
