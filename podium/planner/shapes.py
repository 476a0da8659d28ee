"""A model's sizes from its config alone: the modules are made on torch's meta device, where they take no memory."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cache
from typing import Any

from podium.core.errors import ModelError


@dataclass(frozen=True)
class ModelShape:
    """Counts of parameters, and the widths that activations and caches are made of.

    Attributes:
        total: parameters, tied ones once.
        layers: decoder layers; hidden, heads, kv_heads, head_dim, ff, vocabulary: their widths.
        tied: the LM head is the embedding.
        in_layers: parameters of all layers.
        cut: those of them that tensor parallelism divides (`engines.train.tensor_parallel`).
        linear: weights of the layers' linear maps: what is multiplied for each token, and what quantisation shrinks.
        active: the share of `linear` that one token uses (mixture of experts; else 1).
        edges: inputs plus outputs of all linear maps below the head: a LoRA of rank r has r * edges parameters.
        rows: outputs of all linear maps (8-bit quantisation keeps a scale for each).
        tensors: how many parameters there are.
        heads_normed: queries and keys are normalised (Qwen3).
        common: layers of the common form, which run fused on a GPU (`models.fused_layers`).
        positions: the longest sequence; 0: not said.
        scores: outputs of a score or value head (0: an LM head).
    """

    name: str
    total: int
    layers: int
    hidden: int
    heads: int
    kv_heads: int
    head_dim: int
    ff: int
    vocabulary: int
    tied: bool
    in_layers: int
    cut: int
    linear: int
    active: float
    edges: int
    rows: int
    tensors: int
    heads_normed: bool
    common: bool
    positions: int
    scores: int = 0

    @property
    def head(self) -> int:
        """Parameters of an LM head of its own."""
        return 0 if self.tied or self.scores else self.vocabulary * self.hidden

    @property
    def outside(self) -> int:
        """Parameters outside the layers: embedding, head, last norm."""
        return self.total - self.in_layers

    def kv_bytes(self, itemsize: int) -> int:
        """Keys and values of one token in all layers."""
        return 2 * self.layers * self.kv_heads * self.head_dim * itemsize

    def local(self, tensor: int) -> int:
        """Parameters on one of `tensor` ranks that divide the layers."""
        return self.total - self.cut + -(-self.cut // tensor)

    def with_scores(self, heads: int) -> ModelShape:
        """The same base under a head of so many scores."""
        total = self.total - (0 if self.tied else self.vocabulary * self.hidden) + heads * self.hidden
        return replace(self, total=total, scores=heads)


@cache
def shape_at(path: str, trust_remote_code: bool = False) -> ModelShape:
    """The shape of a causal LM at a folder (its config.json will do), hub name or GGUF file. Raises ModelError."""
    from podium.models.loading import load_config

    return shape_of(load_config(path, trust_remote_code=trust_remote_code), name=str(path))


def shape_of(config: Any, name: str = "model") -> ModelShape:
    """The shape of a `transformers` config. Raises ModelError for what is no causal LM with a list of layers."""
    import torch
    from torch import nn
    from transformers import AutoModelForCausalLM

    from podium.engines.train.tensor_parallel import decoder_layers, split_of
    from podium.models.lm_head import base_of

    try:
        with torch.device("meta"):
            model = AutoModelForCausalLM.from_config(config)
    except Exception as error:
        first = (str(error).strip() or type(error).__name__).splitlines()[0][:200]
        raise ModelError(
            f"no model could be made from the config of '{name}': {first}", where="model.path", remedy="give a causal LM"
        ) from error
    text: Any = config.get_text_config()
    layers = decoder_layers(base_of(model))
    if layers is None:
        raise ModelError(f"{type(model).__name__} has no list of layers that a plan could count", where="model.path")
    inside = dict(layers.named_parameters())
    head = model.get_output_embeddings()
    linear = [m for m in layers.modules() if isinstance(m, nn.Linear)]
    experts = sum(p.numel() for n, p in inside.items() if ".experts." in n)
    maps = sum(m.weight.numel() for m in linear)
    # Fused experts are one parameter of three dimensions.
    maps += sum(p.numel() for n, p in inside.items() if ".experts." in n and p.ndim == 3)
    many, few = getattr(text, "num_experts", None) or getattr(text, "num_local_experts", 0), 0
    if many:
        few = getattr(text, "num_experts_per_tok", 1)
    active = 1.0 if not many or not maps else (maps - experts + experts * few / many) / maps
    heads = text.num_attention_heads
    parameters = list(model.parameters())
    return ModelShape(
        name=name,
        total=sum(p.numel() for p in parameters),
        layers=len(layers),
        hidden=text.hidden_size,
        heads=heads,
        kv_heads=getattr(text, "num_key_value_heads", None) or heads,
        head_dim=getattr(text, "head_dim", None) or text.hidden_size // heads,
        ff=getattr(text, "intermediate_size", None) or 4 * text.hidden_size,
        vocabulary=text.vocab_size,
        tied=head is None or head.weight is model.get_input_embeddings().weight,
        in_layers=sum(p.numel() for p in inside.values()),
        cut=sum(p.numel() for n, p in inside.items() if split_of(n) is not None),
        linear=maps,
        active=active,
        edges=sum(m.in_features + m.out_features for m in linear),
        rows=sum(m.out_features for m in linear),
        tensors=len(parameters),
        heads_normed=any(n.endswith("q_norm.weight") for n in inside),
        common=config.model_type in ("llama", "mistral", "qwen2", "qwen3"),
        positions=getattr(text, "max_position_embeddings", 0) or 0,
    )
