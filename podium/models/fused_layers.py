"""The training pass of decoder layers of the common form, over the model's own parameters.

Llama, Mistral, Qwen2 and Qwen3 layers are all norm, attention with rotary embedding, norm, gated MLP. For these the pass
runs here, in fewer and larger steps (see `layer_ops`); any other model runs its own code. The parameters are the model's
own objects; q, k and v (and gate and up) become views of one tensor each, as for rollout (see `fused.together`).
"""

from __future__ import annotations

import weakref
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import PreTrainedModel

from podium.models.attention import AttentionContext
from podium.models.fused import _Asked as Asked
from podium.models.fused import can_fuse
from podium.models.layer_ops import AddNorm, GatedMLP, NormLinear, Rotate
from podium.models.low_rank import AdaptedLinear, adapters_of
from podium.models.recompute import WHOLE_LAYERS, Recompute, again

_asked: weakref.WeakKeyDictionary[nn.Module, Asked] = weakref.WeakKeyDictionary()


def why_not_fused(base: PreTrainedModel) -> str | None:
    """Why a base's training pass does not run here; None where it does."""
    if base.device.type != "cuda":
        return "it is not on a GPU"
    reason = can_fuse(base, adapters=True)
    if reason is not None:
        return reason
    if any(type(p) is not nn.Parameter for p in base.parameters()):
        return "its parameters are spread over ranks"
    if any(m._forward_hooks or m._forward_pre_hooks for m in base.modules()):
        return "its modules have hooks"
    return None


def fused_hidden_states(
    base: PreTrainedModel, ids: Tensor, positions: Tensor, context: AttentionContext, recompute: Recompute = "none"
) -> Tensor:
    """Every token's last hidden state `[N, D]` from ids and positions `[N]`; differentiable with respect to the parameters."""
    asked = _what_layers_ask(base)
    x = F.embedding(ids, base.embed_tokens.weight)
    cosine, sine = (a[0].contiguous() for a in base.rotary_emb(x, positions[None]))
    delta: Tensor | None = None
    whole = recompute in WHOLE_LAYERS and torch.is_grad_enabled()
    for layer in base.layers:
        run = partial(_layer, layer, cosine=cosine, sine=sine, context=context, asked=asked, recompute=recompute)
        x, delta = again(run, x, delta, recompute=recompute) if whole else run(x, delta)
    return AddNorm.apply(x, delta, base.norm.weight, base.norm.variance_epsilon)


def _layer(
    layer: Any,
    x: Tensor,
    delta: Tensor | None,
    *,
    cosine: Tensor,
    sine: Tensor,
    context: AttentionContext,
    asked: Asked,
    recompute: Recompute,
) -> tuple[Tensor, Tensor]:
    """The stream `x [N, D]`, to which the last layer's `delta` is yet to be added -> the same after this layer."""
    a, m = layer.self_attn, layer.mlp
    norm = layer.input_layernorm
    three = [a.q_proj, a.k_proj, a.v_proj]
    places, factors = adapters_of(three)
    parameters = [*(p.weight for p in three), *(p.bias for p in three if p.bias is not None), *factors]
    x, qkv = NormLinear.apply(x, delta, norm.weight, norm.variance_epsilon, 3, places, *parameters)
    heads = a.q_proj.weight.shape[0] // a.head_dim
    qkv = qkv.unflatten(1, (-1, a.head_dim))
    if hasattr(a, "q_norm"):
        qkv = _heads_normed(a, qkv, heads)
    q, k, v = (t.transpose(0, 1).unsqueeze(0) for t in Rotate.apply(qkv, heads, cosine, sine))
    out = context.attend(a, q, k, v, scaling=asked.scaling, sliding_window=asked.windows[a.layer_idx])
    delta = _projected(a.o_proj, out.squeeze(0).flatten(1))
    norm = layer.post_attention_layernorm
    places, factors = adapters_of([m.gate_proj, m.up_proj])
    down_places, down_factors = adapters_of([m.down_proj])
    parameters = [m.gate_proj.weight, m.up_proj.weight, m.down_proj.weight, *factors, *down_factors]
    keep = recompute == "none"
    return GatedMLP.apply(x, delta, norm.weight, norm.variance_epsilon, keep, places, down_places, *parameters)


def _projected(layer: Any, x: Tensor) -> Tensor:
    """A linear layer, adapted or not."""
    places, factors = adapters_of([layer])
    if not places:
        return F.linear(x, layer.weight, layer.bias)
    return AdaptedLinear.apply(x, layer.weight, layer.bias, places, *factors)


def _heads_normed(a: Any, qkv: Tensor, heads: int) -> Tensor:
    """Each query and key head normalised (Qwen3)."""
    kv = (qkv.shape[1] - heads) // 2
    q, k, v = qkv.split([heads, kv, kv], 1)
    q, k = (
        AddNorm.apply(x.reshape(-1, a.head_dim), None, norm.weight, norm.variance_epsilon).view(x.shape)
        for x, norm in ((q, a.q_norm), (k, a.k_norm))
    )
    return torch.cat([q, k, v], 1)


@torch.no_grad()
def _what_layers_ask(base: PreTrainedModel) -> Asked:
    """Each layer's sliding window and the scale of the scores, as the model's own code asks for them."""
    if base not in _asked:
        asked = Asked()
        base(input_ids=torch.zeros(1, 1, dtype=torch.int64, device=base.device), use_cache=False, podium_context=asked)
        _asked[base] = asked
    return _asked[base]
