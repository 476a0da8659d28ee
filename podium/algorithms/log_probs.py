"""Log-probabilities (and entropy) of given tokens, from hidden states or from logits."""

from __future__ import annotations

import importlib.util
from functools import cache
from typing import Literal, overload

import torch
from torch import Tensor

from podium.algorithms._chunked_log_probs import ChunkedLogProbs, LogitTransform
from podium.algorithms._tiled_log_probs import TiledLogProbs

# Elements of a [chunk, V] piece of logits in the weight's dtype, and of a [block, V] piece in fp32. The CPU's are measured
# (576 x 49152 weight, one thread, fp32: flat within a few percent from 2**24 to 2**27, but what fits one chunk saves a
# product); the accelerator's are not yet.
CHUNK_ELEMENTS = {"cpu": 2**26, "accelerator": 2**28}
BLOCK_ELEMENTS = {"cpu": 2**21, "accelerator": 2**26}
# Logits in a tile of `TiledLogProbs`: 512 MiB in 16 bits.
TILE_ELEMENTS = 2**28


@cache
def _has_triton() -> bool:
    return importlib.util.find_spec("triton") is not None


def _tiled(hidden: Tensor) -> bool:
    return hidden.is_cuda and hidden.dtype in (torch.bfloat16, torch.float16, torch.float32) and _has_triton()


@overload
def log_probs_from_hidden(
    hidden: Tensor,
    weight: Tensor,
    targets: Tensor,
    *,
    bias: Tensor | None = ...,
    temperature: float = ...,
    softcap: float | None = ...,
    scale: float = ...,
    with_entropy: Literal[False] = ...,
    chunk_tokens: int | None = ...,
    keep_logits: int | None = ...,
) -> Tensor: ...


@overload
def log_probs_from_hidden(
    hidden: Tensor,
    weight: Tensor,
    targets: Tensor,
    *,
    bias: Tensor | None = ...,
    temperature: float = ...,
    softcap: float | None = ...,
    scale: float = ...,
    with_entropy: Literal[True],
    chunk_tokens: int | None = ...,
    keep_logits: int | None = ...,
) -> tuple[Tensor, Tensor]: ...


def log_probs_from_hidden(
    hidden: Tensor,
    weight: Tensor,
    targets: Tensor,
    *,
    bias: Tensor | None = None,
    temperature: float = 1.0,
    softcap: float | None = None,
    scale: float = 1.0,
    with_entropy: bool = False,
    chunk_tokens: int | None = None,
    keep_logits: int | None = None,
) -> Tensor | tuple[Tensor, Tensor]:
    """`log softmax(z)[target]` with `z = softcap(scale * (hidden @ weight.T + bias)) / temperature`, for each token.

    Shapes: `hidden` [N, D], `weight` [V, D], `bias` [V], `targets` [N] (int64). `N` may be 0. Returns `log_probs` [N],
    and with `with_entropy` also the entropy of the distribution, `-sum_v p_v log p_v` [N], in nats. Both are
    differentiable (once) with respect to `hidden`, `weight` and `bias`.

    Dtypes: `hidden`, `weight` and `bias` share one. The matrix products run in it and the logits are then raised to
    fp32, as `transformers` models do, so the results are fp32 (fp64 for fp64 inputs). The gradient of `weight` is summed
    over the chunks in fp32 and rounded to the weight's dtype once, which costs one temporary [V, D] in fp32.

    `chunk_tokens` is the number of tokens in a chunk; by default as many as keep `chunk_tokens * V` within
    `CHUNK_ELEMENTS`. The result depends on it only through rounding.

    On CUDA with Triton the vocabulary is cut instead (`TiledLogProbs`), unless `chunk_tokens` is given; `keep_logits` is
    then the number of logits that wait in memory for the backward pass (the others are multiplied again): None takes up to
    half of the free memory, 0 keeps one tile of `TILE_ELEMENTS`. It never changes the result.

    Raises `ValueError` for shapes or dtypes that don't fit together, a temperature that isn't positive, or a chunk size
    below 1.
    """
    _check(hidden, weight, targets, bias, temperature, softcap, chunk_tokens)
    kind = "cpu" if hidden.device.type == "cpu" else "accelerator"
    transform = LogitTransform(scale, softcap, temperature)
    if _tiled(hidden) and chunk_tokens is None:
        log_probs, entropy = TiledLogProbs.apply(  # type: ignore[no-untyped-call]
            hidden.contiguous(), weight, bias, targets.contiguous(), transform, with_entropy, TILE_ELEMENTS, keep_logits
        )
        return (log_probs, entropy) if with_entropy else log_probs
    chunk = chunk_tokens or max(1, CHUNK_ELEMENTS[kind] // weight.shape[0])
    block = max(1, BLOCK_ELEMENTS[kind] // weight.shape[0])
    log_probs, entropy = ChunkedLogProbs.apply(  # type: ignore[no-untyped-call]
        hidden, weight, bias, targets, transform, with_entropy, (chunk, block)
    )
    return (log_probs, entropy) if with_entropy else log_probs


def log_probs_from_logits(logits: Tensor, targets: Tensor, *, temperature: float = 1.0) -> Tensor:
    """`log softmax(logits / temperature)[target]`: `logits` [..., V], `targets` [...] (int64) -> [...] in fp32.

    The plain form, for logits that exist already.
    """
    scaled = logits.float() / temperature
    return torch.log_softmax(scaled, dim=-1).gather(-1, targets.unsqueeze(-1)).squeeze(-1)


def _check(
    hidden: Tensor,
    weight: Tensor,
    targets: Tensor,
    bias: Tensor | None,
    temperature: float,
    softcap: float | None,
    chunk_tokens: int | None,
) -> None:
    if hidden.dim() != 2 or weight.dim() != 2 or hidden.shape[1] != weight.shape[1]:
        raise ValueError(
            f"hidden must be [N, D] and weight [V, D]; got {list(hidden.shape)} and {list(weight.shape)}. "
            "Flatten the tokens first."
        )
    if targets.shape != hidden.shape[:1] or targets.dtype != torch.int64:
        raise ValueError(
            f"targets must be int64 of shape [{hidden.shape[0]}]; got {targets.dtype} of shape {list(targets.shape)}."
        )
    if bias is not None and bias.shape != weight.shape[:1]:
        raise ValueError(f"bias must have shape [{weight.shape[0]}]; got {list(bias.shape)}.")
    dtypes = {tensor.dtype for tensor in (hidden, weight, bias) if tensor is not None}
    if len(dtypes) > 1:
        raise ValueError(f"hidden, weight and bias must share a dtype; got {sorted(map(str, dtypes))}. Cast one of them.")
    if not temperature > 0:
        raise ValueError(f"temperature must be above 0; got {temperature}. Greedy log-probs use temperature=1.")
    if softcap is not None and not softcap > 0:
        raise ValueError(f"softcap must be above 0, or None for no cap; got {softcap}.")
    if chunk_tokens is not None and chunk_tokens < 1:
        raise ValueError(f"chunk_tokens must be at least 1; got {chunk_tokens}.")
