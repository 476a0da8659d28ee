"""The autograd function behind `log_probs_from_hidden`: one chunk of logits at a time.

`log_softmax(hidden @ weight.T)` over `N` tokens and a vocabulary of `V` needs [N, V] numbers several times over, which
for a large vocabulary is more memory than the rest of the model. Here a [chunk, V] piece exists at a time, in the
weight's dtype: the forward pass keeps one number a token (two with the entropy) and the last chunk, and the backward
pass computes the logits of the others again. That costs one matrix product more than keeping them (four in place of
three). The last chunk costs no memory that the two passes did not need anyway; where it is the only one, nothing is
computed twice.

Two sizes, for two reasons. The matrix products want long chunks, because each chunk adds a whole [V, D] to the gradient
of the weight. The elementwise passes in fp32 want short blocks that stay in the cache. So a chunk is walked in blocks,
and only a block is ever held in fp32 (unless the model itself is in fp32).
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable


@dataclass(frozen=True)
class LogitTransform:
    """What a model does to its raw logits: `x * scale`, then `softcap * tanh(x / softcap)`, then `x / temperature`."""

    scale: float = 1.0
    softcap: float | None = None
    temperature: float = 1.0

    def apply_(self, logits: Tensor) -> Tensor:
        """Transform `logits` in place."""
        if self.softcap is None:
            factor = self.scale / self.temperature
            return logits if factor == 1.0 else logits.mul_(factor)
        return logits.mul_(self.scale / self.softcap).tanh_().mul_(self.softcap / self.temperature)

    def backward_(self, grad: Tensor, transformed: Tensor | None) -> Tensor:
        """Turn the gradient with respect to the transformed logits into that of the raw ones, in place.

        `transformed` (changed in place too) is only needed with a softcap, whose derivative is `1 - tanh(x)^2`.
        """
        factor = self.scale / self.temperature
        if self.softcap is not None:
            assert transformed is not None
            grad.mul_(transformed.mul_(self.temperature / self.softcap).square_().neg_().add_(1.0))
        return grad if factor == 1.0 else grad.mul_(factor)


def _slices(length: int, size: int) -> Iterator[slice]:
    for start in range(0, length, size):
        yield slice(start, min(start + size, length))


def _logits(
    hidden: Tensor, weight: Tensor, bias: Tensor | None, chunks: list[slice], buffer: Tensor
) -> Iterator[tuple[slice, Tensor]]:
    """The raw logits of each chunk, in the weight's dtype, all in one buffer that the caller may overwrite."""
    for rows in chunks:
        logits = buffer[: rows.stop - rows.start]
        if bias is None:
            torch.mm(hidden[rows], weight.t(), out=logits)
        else:
            torch.addmm(bias, hidden[rows], weight.t(), out=logits)
        yield rows, logits


def _blocks(rows: slice, logits: Tensor, block: int, dtype: torch.dtype) -> Iterator[tuple[slice, Tensor, Tensor]]:
    """Walk a chunk: rows in the whole, the block in the weight's dtype, the block raised to `dtype` (a view if equal)."""
    for inner in _slices(logits.shape[0], block):
        yield slice(rows.start + inner.start, rows.start + inner.stop), logits[inner], logits[inner].to(dtype)


class ChunkedLogProbs(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        hidden: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        targets: Tensor,
        transform: LogitTransform,
        with_entropy: bool,
        sizes: tuple[int, int],
    ) -> tuple[Tensor, Tensor | None]:
        dtype = torch.promote_types(weight.dtype, torch.float32)
        log_probs = hidden.new_empty(targets.shape, dtype=dtype)
        log_normaliser = torch.empty_like(log_probs)
        entropy = torch.empty_like(log_probs) if with_entropy else None
        chunks = list(_slices(hidden.shape[0], sizes[0]))
        buffer = hidden.new_empty(min(sizes[0], hidden.shape[0]), weight.shape[0])
        for chunk_rows, chunk in _logits(hidden, weight, bias, chunks, buffer):
            for rows, _, z in _blocks(chunk_rows, chunk, sizes[1], dtype):
                transform.apply_(z)
                largest = z.amax(dim=1, keepdim=True)
                shifted = z - largest  # z itself stays as it is, for the backward pass
                picked = shifted.gather(1, targets[rows].unsqueeze(1)).squeeze(1)
                exponentials = shifted.exp() if with_entropy else shifted.exp_()
                total = exponentials.sum(dim=1)
                log_total = total.log()
                log_probs[rows] = picked - log_total
                log_normaliser[rows] = log_total + largest.squeeze(1)
                if entropy is not None:
                    entropy[rows] = log_total - exponentials.mul_(shifted).sum(dim=1) / total
        ctx.save_for_backward(hidden, weight, bias, targets, log_normaliser, entropy)
        ctx.transform, ctx.chunks, ctx.block, ctx.buffer = transform, chunks, sizes[1], buffer
        ctx.set_materialize_grads(False)
        return log_probs, entropy

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_log_probs: Tensor | None, grad_entropy: Tensor | None) -> tuple[Tensor | None, ...]:
        hidden, weight, bias, targets, log_normaliser, entropy = ctx.saved_tensors
        wants_hidden, wants_weight, wants_bias = ctx.needs_input_grad[:3]
        dtype = log_normaliser.dtype
        if grad_log_probs is None:
            grad_log_probs = torch.zeros_like(log_normaliser)
        grad_hidden = torch.empty_like(hidden) if wants_hidden else None
        weight_sum = _WeightGradient(weight) if wants_weight else None
        grad_bias = torch.zeros_like(bias, dtype=dtype) if wants_bias else None
        for chunk_rows, chunk, kept in _backward_chunks(ctx, hidden, weight, bias):
            for rows, low, z in _blocks(chunk_rows, chunk, ctx.block, dtype):
                if not (kept and low.dtype == dtype):  # in `dtype` the forward pass transformed it in place
                    ctx.transform.apply_(z)
                grad = _logit_gradient(
                    z,
                    log_normaliser[rows],
                    targets[rows],
                    grad_log_probs[rows],
                    None if grad_entropy is None else (entropy[rows], grad_entropy[rows]),
                    ctx.transform,
                )
                if grad_bias is not None:
                    grad_bias += grad.sum(dim=0)
                low.copy_(grad)
            if grad_hidden is not None:
                torch.mm(chunk, weight, out=grad_hidden[chunk_rows])
            if weight_sum is not None:
                weight_sum.add(chunk, hidden[chunk_rows])
        return (
            grad_hidden,
            weight_sum.total() if weight_sum is not None else None,
            grad_bias.to(bias.dtype) if grad_bias is not None else None,
            *(None,) * 4,
        )


def _backward_chunks(ctx: Any, hidden: Tensor, weight: Tensor, bias: Tensor | None) -> Iterator[tuple[slice, Tensor, bool]]:
    """Each chunk's logits, and whether they are those that the forward pass left; these come first, once."""
    buffer, ctx.buffer = ctx.buffer, None  # a second backward pass finds none: the first overwrites them
    again = list(ctx.chunks)
    if buffer is not None and again:
        last = again.pop()
        yield last, buffer[: last.stop - last.start], True
    elif again:
        buffer = hidden.new_empty(again[0].stop, weight.shape[0])
    for rows, logits in _logits(hidden, weight, bias, again, buffer):
        yield rows, logits, False


def _logit_gradient(
    z: Tensor,
    log_normaliser: Tensor,
    targets: Tensor,
    grad_log_probs: Tensor,
    with_entropy: tuple[Tensor, Tensor] | None,
    transform: LogitTransform,
) -> Tensor:
    """The gradient with respect to the raw logits of a block, given its transformed logits `z` (overwritten).

    d log p_y / d z_v = [v = y] - p_v        d entropy / d z_v = -p_v (log p_v + entropy)
    """
    softcapped = z.clone() if transform.softcap is not None else None
    z.sub_(log_normaliser.unsqueeze(1))
    upstream = grad_log_probs.unsqueeze(1)
    if with_entropy is None:
        grad = z.exp_().mul_(-upstream)
    else:
        entropy, grad_entropy = with_entropy
        probabilities = z.exp()
        grad = z.add_(entropy.unsqueeze(1)).mul_(grad_entropy.unsqueeze(1)).add_(upstream).mul_(probabilities).neg_()
    grad.scatter_add_(1, targets.unsqueeze(1), upstream)
    return transform.backward_(grad, softcapped)


class _WeightGradient:
    """The sum over chunks of `grad.T @ hidden`, [V, D]: in fp32 at least, rounded to the weight's dtype once."""

    def __init__(self, weight: Tensor) -> None:
        self._weight = weight
        self._sum: Tensor | None = None
        self._product: Tensor | None = None

    def add(self, grad: Tensor, hidden: Tensor) -> None:
        if self._product is None:
            self._product = grad.t().mm(hidden)  # one chunk: nothing to sum
            return
        if self._sum is None:
            self._sum = self._product.to(torch.promote_types(self._weight.dtype, torch.float32))
        if self._sum.dtype == grad.dtype:
            self._sum.addmm_(grad.t(), hidden)
        else:
            self._sum.add_(torch.mm(grad.t(), hidden, out=self._product))

    def total(self) -> Tensor:
        if self._product is None:  # no tokens
            return torch.zeros_like(self._weight)
        return self._product if self._sum is None else self._sum.to(self._weight.dtype)
