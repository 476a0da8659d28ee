"""The door through which Podium's attention enters a `transformers` model: the library's attention interface.

A model whose attention implementation is "podium" computes each layer's attention by the context that the caller hands
over (`podium_context=`, which `transformers` passes down to the attention function). Training, prefill and decode are
three contexts over one module: nothing is patched, no model file is rewritten.
"""

from __future__ import annotations

from typing import Any, Protocol

from torch import Tensor, nn
from transformers import PreTrainedModel
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from podium.core.errors import ModelError

IMPLEMENTATION = "podium"


class AttentionContext(Protocol):
    """What one forward pass knows about its tokens."""

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
        """Attention of one layer (`module.layer_idx`).

        Args:
            query: `[R, H, N, D]` after rotary embedding (R rows, N tokens a row).
            key, value: `[R, K, N, D]`, K the key/value heads.

        Returns:
            `[R, N, H, D]`.
        """
        ...


def _attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    scaling: float | None = None,
    *,
    podium_context: AttentionContext | None = None,
    sliding_window: int | None = None,
    softcap: float | None = None,
    **_: Any,
) -> tuple[Tensor, None]:
    if podium_context is None:
        raise ModelError(
            f"{type(module).__name__} did not hand Podium's context to its attention",
            remedy="use rollout.engine=hf, or a model whose forward passes keyword arguments down",
        )
    scaling = query.shape[-1] ** -0.5 if scaling is None else scaling
    out = podium_context.attend(module, query, key, value, scaling=scaling, sliding_window=sliding_window, softcap=softcap)
    return out, None


# Without a mask function of the same name, transformers builds no mask: the context knows what may see what.
ALL_ATTENTION_FUNCTIONS.register(IMPLEMENTATION, _attention)


def use_podium_attention(model: PreTrainedModel) -> None:
    """Switches the model's attention to the contexts (a setting of its config; weights are untouched)."""
    model.set_attn_implementation(IMPLEMENTATION)
