"""Log-probabilities of given tokens, computed from hidden states chunk by chunk.

`log_softmax(hidden @ weight.T)` over `N` tokens and a vocabulary of `V` needs `[N, V]` numbers several times over, which
for a large vocabulary is more memory than the rest of the model. Here a `[chunk, V]` piece exists at a time: the forward
pass keeps two numbers a token, the backward pass computes the logits of each chunk again. That costs one matrix product
more than keeping them (four in place of three).
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Literal, overload

import torch
from torch import Tensor
from torch.autograd.function import FunctionCtx, once_differentiable

# Elements of a `[chunk, V]` piece. On a CPU the elementwise passes over a piece should find it in the cache, and the weight
# gradient (which every chunk adds to) wants many rows: benchmarks/chunked_log_probs.py is how the number was chosen. An
# accelerator wants larger matrix products; 2**27 elements are 512 MiB in fp32.
CPU_CHUNK_ELEMENTS = 2**24
ACCELERATOR_CHUNK_ELEMENTS = 2**27


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
) -> Tensor | tuple[Tensor, Tensor]:
    """`log softmax(z)[target]` with `z = softcap(scale * (hidden @ weight.T + bias)) / temperature`, for each token.

    Shapes: `hidden` [N, D], `weight` [V, D], `bias` [V], `targets` [N] (int64). `N` may be 0. Returns `log_probs` [N], and with
    `with_entropy` also the entropy of the distribution, `-sum_v p_v log p_v` [N], in nats; both are differentiable.

    Dtypes: `hidden`, `weight` and `bias` share one; the matrix products run in it and the logits are then raised to fp32, as
    `transformers` models do, so the results are fp32 (fp64 for fp64 inputs). The gradient of `weight` is summed over the
    chunks in fp32 and rounded to the weight's dtype once, which costs one temporary `[V, D]` in fp32.

    `chunk_tokens` is the number of tokens in a chunk; by default as many as keep `chunk_tokens * V` within
    `CPU_CHUNK_ELEMENTS` or `ACCELERATOR_CHUNK_ELEMENTS`. The result depends on it only through rounding.

    Raises `ValueError` for shapes or dtypes that don't fit together, a temperature that isn't positive, or a chunk size
    below 1.
    """
    _check(hidden, weight, targets, bias, temperature, softcap, chunk_tokens)
    if chunk_tokens is None:
        budget = CPU_CHUNK_ELEMENTS if hidden.device.type == "cpu" else ACCELERATOR_CHUNK_ELEMENTS
        chunk_tokens = max(1, budget // weight.shape[0])
    transform = LogitTransform(scale, softcap, temperature)
    log_probs, entropy = _LogProbs.apply(hidden, weight, bias, targets, transform, with_entropy, chunk_tokens)
    return (log_probs, entropy) if with_entropy else log_probs


def log_probs_from_logits(logits: Tensor, targets: Tensor, *, temperature: float = 1.0) -> Tensor:
    """`log softmax(logits / temperature)[target]`: `logits` [..., V], `targets` [...] (int64) -> [...] in fp32.

    The plain form, for logits that exist already.
    """
    scaled = logits.float() / temperature
    return torch.log_softmax(scaled, dim=-1).gather(-1, targets.unsqueeze(-1)).squeeze(-1)


class _LogProbs(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        hidden: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        targets: Tensor,
        transform: LogitTransform,
        with_entropy: bool,
        chunk_tokens: int,
    ) -> tuple[Tensor, Tensor | None]:
        chunks = _Chunks(hidden, weight, bias, transform, chunk_tokens)
        log_probs = hidden.new_empty(targets.shape, dtype=chunks.dtype)
        log_normaliser = torch.empty_like(log_probs)
        entropy = torch.empty_like(log_probs) if with_entropy else None
        for rows, logits in chunks:
            picked = logits.gather(1, targets[rows].unsqueeze(1)).squeeze(1)
            largest = logits.amax(dim=1, keepdim=True)
            logits.sub_(largest)
            exponentials = torch.exp(logits, out=chunks.second_buffer(logits)) if with_entropy else logits.exp_()
            total = exponentials.sum(dim=1)
            log_normaliser[rows] = total.log() + largest.squeeze(1)
            log_probs[rows] = picked - log_normaliser[rows]
            if entropy is not None:
                entropy[rows] = total.log() - exponentials.mul_(logits).sum(dim=1) / total
        ctx.save_for_backward(hidden, weight, bias, targets, log_normaliser, entropy)
        ctx.transform, ctx.chunk_tokens = transform, chunk_tokens
        ctx.set_materialize_grads(False)
        return log_probs, entropy

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_log_probs: Tensor | None, grad_entropy: Tensor | None) -> tuple[Tensor | None, ...]:
        hidden, weight, bias, targets, log_normaliser, entropy = ctx.saved_tensors
        wants_hidden, wants_weight, wants_bias = ctx.needs_input_grad[:3]
        grad_hidden = torch.empty_like(hidden) if wants_hidden else None
        weight_sum = _ProductSum(weight) if wants_weight else None
        chunks = _Chunks(hidden, weight, bias, ctx.transform, ctx.chunk_tokens)
        grad_bias = torch.zeros_like(bias, dtype=chunks.dtype) if wants_bias else None
        if grad_log_probs is None:
            grad_log_probs = torch.zeros_like(log_normaliser)
        for rows, logits in chunks:
            upstream = grad_log_probs[rows].unsqueeze(1)
            logits.sub_(log_normaliser[rows].unsqueeze(1))
            if grad_entropy is None:
                grad = _probabilities_in_place(chunks, logits).mul_(-upstream)
            else:
                # d entropy / d z_v = -p_v (log p_v + entropy)
                grad = torch.exp(logits, out=chunks.second_buffer(logits))
                coefficient = (logits + entropy[rows].unsqueeze(1)).mul_(grad_entropy[rows].unsqueeze(1)).add_(upstream)
                grad.mul_(coefficient.neg_())
            grad.scatter_add_(1, targets[rows].unsqueeze(1), upstream)
            if ctx.transform.softcap is not None:
                logits.add_(log_normaliser[rows].unsqueeze(1))
            ctx.transform.backward_(grad, logits)
            if grad_bias is not None:
                grad_bias += grad.sum(dim=0)
            grad_low = chunks.lower(grad)
            if grad_hidden is not None:
                torch.mm(grad_low, weight, out=grad_hidden[rows])
            if weight_sum is not None:
                weight_sum.add(grad_low, hidden[rows])
        return (
            grad_hidden,
            weight_sum.result() if weight_sum is not None else None,
            grad_bias.to(bias.dtype) if grad_bias is not None else None,
            *(None,) * 4,
        )
