"""Log-probs on an accelerator: one tile of the vocabulary at a time, for all tokens.

Where `ChunkedLogProbs` goes through the tokens, this goes through the vocabulary: a tile is all tokens' logits for some
rows of the weight. So the weight's gradient comes out tile by tile, whole, from one product each, and no second [V, D] in
fp32 is needed to sum it; what is summed (in fp32) is the gradient of the hidden states, [N, D], which is small. The
elementwise work on a tile is one kernel forward and one backward.

Logits that memory has room for are kept for the backward pass (three matrix products); the others are multiplied again
(four). The bits of the result are the same.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from podium.algorithms._chunked_log_probs import LogitTransform

# Kept logits leave this much of the free memory to others.
_LEFT_FREE = 0.5


def tiles(vocabulary: int, tokens: int, elements: int) -> list[slice]:
    """The vocabulary in tiles of nearly equal width, of at most `elements` logits for all tokens; multiples of 128."""
    count = max(1, -(-vocabulary * max(tokens, 1) // elements))
    width = min(vocabulary, -(-vocabulary // count // 128) * 128 if count > 1 else vocabulary)
    width = max(width, 128)
    return [slice(start, min(start + width, vocabulary)) for start in range(0, vocabulary, width)]


class TiledLogProbs(torch.autograd.Function):
    """hidden `[N, D]`, weight `[V, D]`, bias `[V]` or None, targets `[N]` -> log-probs `[N]`, entropy `[N]` or None.

    `elements`: logits in a tile. `keep`: the logits kept for the backward pass, in tiles; None: as many as memory has room
    for; at least the last tile.
    """

    @staticmethod
    def forward(
        ctx: Any,
        hidden: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        targets: Tensor,
        transform: LogitTransform,
        with_entropy: bool,
        elements: int,
        keep: int | None,
    ) -> tuple[Tensor, Tensor | None]:
        from podium.algorithms._log_prob_kernels import Statistics

        parts = tiles(weight.shape[0], len(hidden), elements)
        kept = _tiles_kept(hidden, parts, keep) if any(ctx.needs_input_grad[:3]) else 0
        statistics, buffers = Statistics(targets, with_entropy), {}
        scratch: Tensor | None = None
        for number, part in enumerate(parts):
            of_weight = weight[part]
            if number >= len(parts) - kept or scratch is None or scratch.shape[1] != len(of_weight):
                scratch = hidden.new_empty(len(hidden), len(of_weight))
            raw = torch.mm(hidden, of_weight.t(), out=scratch)
            statistics.add(raw, part.start, bias, transform)
            if number >= len(parts) - kept:
                buffers[number] = raw
        log_probs, normaliser, entropy = statistics.results()
        ctx.save_for_backward(hidden, weight, bias, targets, normaliser, entropy)
        ctx.transform, ctx.parts, ctx.buffers = transform, parts, buffers
        ctx.set_materialize_grads(False)
        return log_probs, entropy

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, of_log_probs: Tensor | None, of_entropy: Tensor | None) -> tuple[Tensor | None, ...]:
        from podium.algorithms._log_prob_kernels import gradient_

        hidden, weight, bias, targets, normaliser, entropy = ctx.saved_tensors
        wants_hidden, wants_weight, wants_bias = ctx.needs_input_grad[:3]
        upstream = torch.zeros_like(normaliser) if of_log_probs is None else of_log_probs.contiguous()
        with_entropy = None if of_entropy is None else (entropy, of_entropy.contiguous())
        of_hidden = torch.zeros(hidden.shape, dtype=torch.float32, device=hidden.device) if wants_hidden else None
        of_weight = torch.empty_like(weight, memory_format=torch.contiguous_format) if wants_weight else None
        of_bias = torch.empty_like(bias) if wants_bias else None
        # The last tiles are those that were kept: each is freed as soon as it is used.
        buffers, ctx.buffers = ctx.buffers, {}
        for number in reversed(range(len(ctx.parts))):
            part = ctx.parts[number]
            raw = buffers.pop(number, None)
            if raw is None:
                raw = hidden @ weight[part].t()
            gradient_(raw, part.start, bias, ctx.transform, targets, normaliser, upstream, with_entropy)
            if of_bias is not None:
                of_bias[part] = raw.sum(0)
            if of_hidden is not None:
                _add_product(of_hidden, raw, weight[part])
            if of_weight is not None:
                torch.mm(raw.t(), hidden, out=of_weight[part])
            del raw
        return None if of_hidden is None else of_hidden.to(hidden.dtype), of_weight, of_bias, *(None,) * 5


def _tiles_kept(hidden: Tensor, parts: list[slice], keep: int | None) -> int:
    each = len(hidden) * max(part.stop - part.start for part in parts)
    if keep is None:
        keep = int(_free_bytes(hidden.device) * (1 - _LEFT_FREE)) // hidden.dtype.itemsize
    return max(1, min(len(parts), keep // max(each, 1)))


def _free_bytes(device: torch.device) -> int:
    """Memory that could be taken: the device's, and what the allocator holds without using it."""
    if device.type != "cuda":
        return 0
    free, _ = torch.cuda.mem_get_info(device)
    return free + torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)


def _add_product(total: Tensor, a: Tensor, b: Tensor) -> None:
    """`total += a @ b`, in fp32 also for operands in 16 bits."""
    if a.dtype == total.dtype:
        total.addmm_(a, b)
    elif a.is_cuda:
        torch.addmm(total, a, b, out_dtype=total.dtype, out=total)
    else:
        total.add_(a.float() @ b.float())
