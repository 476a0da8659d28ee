"""What the paged engine is made of for one model: its cache's shape, how it runs, and the check that both are right."""

from __future__ import annotations

import logging
from types import ModuleType
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel

from podium.core.errors import ModelError, RolloutError
from podium.engines.rollout.native.paged_cache import PagedCache, RowState
from podium.engines.rollout.native.passes import FusedForward, ModuleForward, Piece, PrefillPass
from podium.models.divided import TensorRanks, tensor_ranks_of
from podium.models.fused import can_fuse, fuse
from podium.models.lm_head import base_of, podium_attention, verify_head
from podium.models.packed import Packed

_log = logging.getLogger(__name__)

Forward = FusedForward | ModuleForward


def check_options(page_size: int, **counts: int) -> None:
    """Raises RolloutError for an option out of range."""
    for name, value in counts.items():
        if value < 1:
            raise RolloutError(f"{name}={value} must be at least 1")
    if page_size < 1 or page_size & (page_size - 1):
        raise RolloutError(f"page_size={page_size} must be a power of two")


def operations(device: torch.device, ranks: TensorRanks | None = None) -> Any:
    """The layers' small operations for a device: `kernels` (Triton) on CUDA, `plain` (torch) elsewhere.

    Args:
        ranks: those that have the model between them: what the first one draws, all have drawn.
    """
    ops: ModuleType
    if device.type == "cuda":
        from podium.engines.rollout.native import kernels as ops
    else:
        from podium.engines.rollout.native import plain as ops
    return ops if ranks is None else _DrawnTogether(ops, ranks)


class _DrawnTogether:
    """The operations, with draws that are the same on every rank."""

    def __init__(self, ops: ModuleType, ranks: TensorRanks) -> None:
        self._ops, self._ranks = ops, ranks

    def __getattr__(self, name: str) -> Any:
        return getattr(self._ops, name)

    def sample(self, logits: Tensor, which: Tensor, slots: Tensor, state: RowState, *args: Any, **kwargs: Any) -> None:
        self._ops.sample(logits, which, slots, state, *args, **kwargs)
        self._ranks.agree(state.live, state.tokens_out, state.scores_out)


def cache_for(base: PreTrainedModel, page_size: int) -> PagedCache:
    """An empty cache of the base's layers, heads and dtype."""
    config = base.config.get_text_config()
    heads = config.num_attention_heads
    width = getattr(config, "head_dim", None) or config.hidden_size // heads
    kv_heads = getattr(config, "num_key_value_heads", None) or heads
    dtype = base.get_input_embeddings().weight.dtype
    return PagedCache(config.num_hidden_layers, kv_heads, width, page_size, dtype, base.device)


def queries_of_a_key(base: PreTrainedModel) -> int:
    """Query heads of each key head."""
    config = base.config.get_text_config()
    return config.num_attention_heads // (getattr(config, "num_key_value_heads", None) or config.num_attention_heads)


def forward_for(model: PreTrainedModel, ops: ModuleType, positions: int, *, fused: bool) -> Forward:
    """The fused layers where the architecture has them and `fused` asks for them; else its own modules."""
    base = base_of(model)
    reason = can_fuse(base, adapters=True) if fused else "fused=False"
    if reason is None:
        with podium_attention(model):
            return FusedForward(fuse(base, positions), ops, tensor_ranks_of(base))
    if fused:
        _log.warning("%s runs its own modules in rollout, slower: %s", type(model).__name__, reason)
    return ModuleForward(base)


@torch.inference_mode()
def check(model: PreTrainedModel, forward: Forward, ops: ModuleType, cache: PagedCache) -> None:
    """Compares with the model's own attention on a few tokens, through the cache (empty afterwards).

    Raises ModelError where they differ.
    """

    def hidden_of(base: PreTrainedModel, packed: Packed) -> Tensor:
        texts, counts = texts_of(packed)
        each = -(-max(map(len, texts)) // cache.page_size)
        cache.allocate(each * len(texts))
        pieces = [Piece(text, list(range(i * each, (i + 1) * each)), 0, len(text)) for i, text in enumerate(texts)]
        return own_tokens(forward(PrefillPass(ops, cache, pieces, base.device)), texts, counts)

    try:
        with podium_attention(model):
            verify_head(model, hidden_of)
    except ModelError as error:
        raise ModelError(
            f"the native rollout engine cannot run {type(model).__name__}: {error.what}", remedy="set rollout.engine=hf"
        ) from error
    finally:
        cache.pages = None


def own_tokens(hidden: Tensor, texts: list[tuple[int, ...]], counts: list[int]) -> Tensor:
    """Of the hidden states of `texts_of`'s texts, one after the other, those of each run's own tokens."""
    parts = hidden.split([len(text) for text in texts])
    return torch.cat([part[-n:] for part, n in zip(parts, counts, strict=True)])


def texts_of(packed: Packed) -> tuple[list[tuple[int, ...]], list[int]]:
    """Each run of a packed row with its parent's tokens before it, and how many tokens are its own."""
    runs = [tuple(run.tolist()) for run in packed.ids.split(packed.lengths.tolist())]
    parents = packed.parents.tolist()
    return [(runs[p] if p >= 0 else ()) + run for run, p in zip(runs, parents, strict=True)], packed.lengths.tolist()
