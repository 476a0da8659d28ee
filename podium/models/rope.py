"""Longer contexts by another rotary embedding: a change of the model's config, before its weights are read."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from transformers import PreTrainedConfig

from podium.core.errors import ModelError

# What belongs to the embedding itself, whatever its scaling.
_KEPT = ("rope_theta", "partial_rotary_factor")


def scale_rope(config: PreTrainedConfig, scaling: Mapping[str, Any]) -> None:
    """Sets the config's rotary scaling, in place, and raises `max_position_embeddings` to the original's times `factor`.

    Every limit on lengths reads that field, and an exported folder holds both. Where the layers differ in their embedding
    (Gemma 3), those with full attention are scaled: the others never look that far.

    Args:
        config: of a model with rotary embeddings.
        scaling: `rope_type` (linear, yarn, llama3), `factor`, and the type's own fields, by the names of `transformers`
            (Peng et al. 2023, arXiv:2309.00071, for yarn); None counts as not given.

    Raises ModelError for a model without rotary embeddings.
    """
    text = config.get_text_config()
    own = getattr(text, "rope_parameters", None)
    if not own:
        raise ModelError(
            f"'{text.model_type}' has no rotary embedding to scale", where="model.rope_scaling", remedy="leave it out"
        )
    fields = {name: value for name, value in scaling.items() if value is not None}
    nested = own.get("full_attention") if isinstance(own.get("full_attention"), dict) else None
    before = own if nested is None else nested
    original = fields.pop("original_max_position_embeddings", None) or _original(text, before)
    after = {**{name: before[name] for name in _KEPT if name in before}, **fields}
    if fields["rope_type"] != "linear":
        after["original_max_position_embeddings"] = original
    text.rope_parameters = after if nested is None else {**own, "full_attention": after}
    text.max_position_embeddings = int(original * fields["factor"])


def _original(config: PreTrainedConfig, rope: Mapping[str, Any]) -> int:
    """The context that the model was trained for: where it is scaled already, that before."""
    return rope.get("original_max_position_embeddings") or config.max_position_embeddings
