"""How a model's work divides into products for each token, the LM head for each predicted one, and attention."""

from __future__ import annotations

from typing import Any

from torch import nn

from podium.core.errors import ModelError
from podium.core.work import Work
from podium.models.lm_head import base_of


def trunk_of(model: nn.Module) -> Any:
    """The part of a role's model that gives hidden states; None for a class of the user's own."""
    if hasattr(model, "base"):
        return model.base
    try:
        return base_of(model.model)  # type: ignore[arg-type]
    except (ModelError, AttributeError):
        return None


def work_of(model: nn.Module) -> Work:
    """The cost of a row under a role's model, from its shape. Tokens are counted where the shape is not known.

    The unit is what one token's query does in a layer with half a key: 2 operations for each number of all heads (4 for a
    whole key: scores, and their sum of values). A causal row has n * n / 2 pairs of query and key.
    """
    trunk = trunk_of(model)
    if trunk is None:
        return Work()
    config = trunk.config.get_text_config()
    heads, layers, hidden = (getattr(config, name, None) for name in _WIDTHS)
    if not heads or not layers or not hidden:
        return Work()
    width = heads * (getattr(config, "head_dim", None) or hidden // heads)
    window = getattr(config, "sliding_window", None) or 0
    kinds = getattr(config, "layer_types", None) or ["sliding_attention" if window else "full_attention"] * layers
    return Work(
        token=max(1, round(_multiplied(trunk, config) / width)),
        predicted=round(_head(model) / width),
        pair=sum(kind == "full_attention" for kind in kinds),
        near=sum(kind == "sliding_attention" for kind in kinds) if window else 0,
        window=window,
    )


_WIDTHS = ("num_attention_heads", "num_hidden_layers", "hidden_size")


def _multiplied(trunk: nn.Module, config: Any) -> int:
    """Weights that one token is multiplied by. Of several experts (their names hold `.experts.`) it meets a few."""
    experts = getattr(config, "num_experts", None) or getattr(config, "num_local_experts", None)
    share = getattr(config, "num_experts_per_tok", 1) / experts if experts else 1.0
    total = 0.0
    for name, module in trunk.named_modules():
        if isinstance(module, nn.Embedding):
            continue
        if isinstance(module, nn.Linear):  # by its widths: a quantised weight has fewer numbers
            weights = module.in_features * module.out_features
        else:
            weights = sum(p.numel() for p in module.parameters(recurse=False) if p.ndim >= 2)
        total += weights * (share if ".experts" in name else 1.0)
    return round(total)


def _head(model: nn.Module) -> int:
    """Weights of the LM head, which a predicted token is multiplied by; 0 where the head is a score."""
    inner: Any = getattr(model, "model", None)
    head = inner.get_output_embeddings() if hasattr(inner, "get_output_embeddings") else None
    weight = getattr(head, "weight", None)
    return weight.numel() if weight is not None and weight.ndim == 2 else 0
