"""Weights that decoding multiplies together laid out together: q, k, v in one matrix, gate and up in one.

The parameters stay what they are: the same objects under the model's own names, each now a view of the rows of one larger
tensor. So training, the optimizer, checkpoints and `save_pretrained` see nothing new, an update changes both, and the
rollout engine reads one product where the model's own code has three (or two). `FusedModel.names` says which of the
model's parameters lie in which tensor.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from podium.models.divided import SummedLinear
from podium.models.low_rank import Beside, plain_linear, why_not_low_rank

# Decoder layers of this form: norm, attention with rotary embedding, add, norm, gated SiLU MLP, add.
_LAYERS = ("LlamaDecoderLayer", "MistralDecoderLayer", "Qwen2DecoderLayer", "Qwen3DecoderLayer")
# Rotary embeddings whose angles depend on the position alone.
_FIXED_ROPE = ("default", "linear", "llama3", "yarn")


@dataclass(frozen=True)
class FusedLayer:
    """One decoder layer's weights: `qkv [(H + 2K) D, hidden]`, `out`, `gate_up [2 I, hidden]`, `down`, and its norms.

    `q_norm`, `k_norm` `[D]` are there where the model normalises heads (Qwen3). `window`: the sliding window in tokens.
    """

    qkv: Tensor
    qkv_bias: Tensor | None
    out: Tensor
    out_bias: Tensor | None
    gate_up: Tensor
    down: Tensor
    input_norm: Tensor
    post_norm: Tensor
    q_norm: Tensor | None
    k_norm: Tensor | None
    window: int | None
    beside: dict[str, Beside] = field(default_factory=dict)
    """What adapters add to the products `qkv`, `out`, `gate_up` and `down`, where they have any."""

    @property
    def norms(self) -> tuple[Tensor, Tensor] | None:
        """Those of queries and keys, where there are any."""
        return None if self.q_norm is None or self.k_norm is None else (self.q_norm, self.k_norm)

    def plus(self, name: str, product: Tensor, x: Tensor) -> Tensor:
        """A product with what the adapters add to it for `x [N, width]`."""
        beside = self.beside.get(name)
        return product if beside is None else beside.add_(product, x)


@dataclass(frozen=True)
class FusedModel:
    """A base whose layers are all of that form. H query heads, K key/value heads, width D; `rotary [P, D]` fp32 holds the
    cosines, then the sines, of each position's D/2 angles (rounded as the model rounds them).
    """

    embedding: Tensor
    layers: list[FusedLayer]
    norm: Tensor
    eps: float
    heads: int
    kv_heads: int
    width: int
    scaling: float
    rotary: Tensor
    names: dict[str, tuple[str, ...]] = field(default_factory=dict)
    """A fused tensor's name to the names of the model's parameters that are its rows, in order."""

    def refresh(self) -> None:
        """Takes the adapters' values of now, after an update wrote them."""
        for layer in self.layers:
            for beside in layer.beside.values():
                beside.refresh()


def can_fuse(base: PreTrainedModel, *, adapters: bool = False) -> str | None:
    """Why this base has no fused form; None where it has one. `adapters`: the caller computes LoRA beside the weights."""
    config = base.config.get_text_config()
    layers: Any = getattr(base, "layers", None)
    if not isinstance(layers, nn.ModuleList) or not len(layers):
        return "it has no list of decoder layers"
    odd = next((type(layer).__name__ for layer in layers if type(layer).__name__ not in _LAYERS), None)
    if odd is not None:
        return f"its layers are {odd}"
    if getattr(config, "hidden_act", None) != "silu":
        return f"its activation is {getattr(config, 'hidden_act', None)}"
    kind = (getattr(config, "rope_parameters", None) or {}).get("rope_type", "default")
    if kind not in _FIXED_ROPE:
        return f"its rotary embedding is of type {kind}"
    linears = [[plain_linear(m) if adapters else m for m in _linears(layer)] for layer in layers]
    kinds = {type(m) for layer in linears for m in layer} - {SummedLinear}
    if kinds != {nn.Linear}:  # peft's adapted layers and bitsandbytes' quantised ones are more than their weight
        return f"its linear layers are {', '.join(sorted(f'{kind.__module__}.{kind.__name__}' for kind in kinds))}"
    if any(m.bias is not None for layer in linears for m in layer[4:]):
        return "its MLP has biases"
    odd = next((reason for layer in layers for m in _linears(layer) if (reason := why_not_low_rank(m))), None)
    if odd is not None:
        return odd
    dtypes = {p.dtype for name, p in base.named_parameters() if ".lora_" not in name}
    return f"its parameters have several dtypes: {sorted(map(str, dtypes))}" if len(dtypes) > 1 else None


def _linears(layer: Any) -> list[Any]:
    a, m = layer.self_attn, layer.mlp
    return [a.q_proj, a.k_proj, a.v_proj, a.o_proj, m.gate_proj, m.up_proj, m.down_proj]


@torch.no_grad()
def fuse(base: PreTrainedModel, positions: int) -> FusedModel:
    """Lays the weights of `base` out together (once; again is free) and describes the result.

    Parameters move: make it before anything keeps their addresses.

    Args:
        base: one for which `can_fuse` returns None, with Podium's attention.
        positions: how many positions the table of rotary angles holds.
    """
    config = base.config.get_text_config()
    width = base.layers[0].self_attn.head_dim
    names: dict[str, tuple[str, ...]] = {}
    asked = _Asked()
    base(input_ids=torch.zeros(1, 1, dtype=torch.int64, device=base.device), use_cache=False, podium_context=asked)
    layers = [_fused_layer(f"layers.{i}", layer, asked.windows[i], names) for i, layer in enumerate(base.layers)]
    return FusedModel(
        embedding=base.embed_tokens.weight,
        layers=layers,
        norm=base.norm.weight,
        eps=base.norm.variance_epsilon,
        heads=config.num_attention_heads,
        kv_heads=config.num_key_value_heads,
        width=width,
        scaling=asked.scaling,
        rotary=_rotary(base, positions, width),
        names=names,
    )


class _Asked:
    """An attention context that only notes what each layer asks for."""

    def __init__(self) -> None:
        self.windows: dict[int, int | None] = {}
        self.scaling = 0.0

    def attend(
        self,
        module: nn.Module,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        *,
        scaling: float,
        sliding_window: int | None = None,
        softcap: float | None = None,
    ) -> Tensor:
        index: Any = module.layer_idx
        self.windows[index], self.scaling = sliding_window, scaling
        return query.transpose(1, 2)


def _fused_layer(name: str, layer: Any, window: int | None, names: dict[str, tuple[str, ...]]) -> FusedLayer:
    a, m = layer.self_attn, layer.mlp
    three, two = [a.q_proj, a.k_proj, a.v_proj], [m.gate_proj, m.up_proj]
    names[f"{name}.self_attn.qkv"] = _rows_of(name, ["self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"], three)
    names[f"{name}.mlp.gate_up"] = _rows_of(name, ["mlp.gate_proj", "mlp.up_proj"], two)
    bias = None
    if a.q_proj.bias is not None:
        names[f"{name}.self_attn.qkv_bias"] = tuple(
            weight.removesuffix("weight") + "bias" for weight in names[f"{name}.self_attn.qkv"]
        )
        bias = together([p.bias for p in three])
    products = {"qkv": three, "out": [a.o_proj], "gate_up": two, "down": [m.down_proj]}
    beside = {name: Beside(layers, a.q_proj.weight.dtype) for name, layers in products.items()}
    return FusedLayer(
        qkv=together([p.weight for p in three]),
        qkv_bias=bias,
        out=a.o_proj.weight,
        out_bias=a.o_proj.bias,
        gate_up=together([p.weight for p in two]),
        down=m.down_proj.weight,
        input_norm=layer.input_layernorm.weight,
        post_norm=layer.post_attention_layernorm.weight,
        q_norm=a.q_norm.weight if hasattr(a, "q_norm") else None,
        k_norm=a.k_norm.weight if hasattr(a, "k_norm") else None,
        window=window,
        beside={name: adapters for name, adapters in beside.items() if adapters.places},
    )


def _rows_of(layer: str, parts: Sequence[str], linears: Sequence[Any]) -> tuple[str, ...]:
    """The names of the weights of a layer's linear maps; an adapted one has its weight inside."""
    inside = ["" if linear is plain_linear(linear) else ".base_layer" for linear in linears]
    return tuple(f"{layer}.{part}{inner}.weight" for part, inner in zip(parts, inside, strict=True))


def lay_together(base: PreTrainedModel) -> None:
    """Moves q, k, v into one tensor, and gate and up, in each layer whose training pass wants them so (else nothing).

    For an engine that keeps the parameters' addresses and runs the modules: the first training pass would move them.
    """
    if can_fuse(base, adapters=True) is not None:
        return
    layers: Any = base.layers
    for layer in layers:
        q, k, v, _, gate, up, _ = [plain_linear(m) for m in _linears(layer)]
        together([q.weight, k.weight, v.weight])
        together([gate.weight, up.weight])
        if q.bias is not None:
            together([q.bias, k.bias, v.bias])


@torch.no_grad()
def together(parameters: Sequence[nn.Parameter]) -> Tensor:
    """One tensor of all rows, which the parameters (the same objects, same values) become views of."""
    whole = _joined(parameters)
    if whole is None:
        with torch.inference_mode(False):  # they shall be trained
            whole = torch.cat([p.data for p in parameters]).contiguous()
        for parameter, rows in zip(parameters, whole.split([len(p) for p in parameters]), strict=True):
            parameter.data = rows
    return whole


def _joined(parameters: Sequence[nn.Parameter]) -> Tensor | None:
    """The tensor that they are the consecutive rows of already, if they are."""
    first, at = parameters[0], parameters[0].data_ptr()
    for p in parameters:
        if not p.is_contiguous() or p.data_ptr() != at or p.untyped_storage().data_ptr() != first.untyped_storage().data_ptr():
            return None
        at += p.numel() * p.element_size()
    return first.data.as_strided((sum(map(len, parameters)), *first.shape[1:]), first.stride(), first.storage_offset())


def _rotary(base: PreTrainedModel, positions: int, width: int) -> Tensor:
    dtype, device = base.embed_tokens.weight.dtype, base.device
    like = torch.empty(1, dtype=dtype, device=device)
    cosines, sines = base.rotary_emb(like, torch.arange(positions, device=device)[None])
    half = width // 2
    return torch.cat([cosines[0, :, :half], sines[0, :, :half]], -1).float().contiguous()
