"""A decoder layer's two halves as autograd functions that keep little and copy nothing.

`NormLinear` adds, normalises and multiplies (one product for q, k and v); `Rotate` splits and turns; `GatedMLP` is the whole
second half. What is cheap to compute again (norms, activations) is computed again in the backward pass, so that a layer
keeps its two sums, q, k, v, the attention's output and gate and up, and nothing twice.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.nn import Parameter

from podium.models.fused import together


def _ops(x: Tensor) -> Any:
    """The kernels on CUDA, torch elsewhere."""
    if x.is_cuda:
        from podium.models import layer_kernels

        return layer_kernels
    from podium.models import layer_plain

    return layer_plain


def _rows(weights: Sequence[Tensor], grad: Tensor, hidden: Tensor, wanted: Sequence[bool]) -> list[Tensor | None]:
    """The gradient of each weight, from one product for all: `grad [N, all rows]`, `hidden [N, D]`."""
    if not any(wanted):
        return [None] * len(weights)
    parts = grad.t().mm(hidden).split([len(w) for w in weights])
    return [part if want else None for part, want in zip(parts, wanted, strict=True)]


class NormLinear(torch.autograd.Function):
    """`(x + delta, rms_norm(x + delta) @ weights.T + biases)`: `[N, D]` and `[N, all rows]`.

    `delta` None: nothing is added. `count` weights, whose rows lie in one tensor (`together`), then as many biases or none.
    """

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, delta: Tensor | None, norm: Tensor, eps: float, count: int, *parameters: Parameter
    ) -> tuple[Tensor, Tensor]:
        weights, biases = parameters[:count], parameters[count:]
        weight, bias = together(weights), together(biases) if biases else None
        total, hidden, rstd = _ops(x).add_norm(x, delta, norm, eps)
        ctx.save_for_backward(total, rstd, norm, *weights)
        ctx.count, ctx.added = count, delta is not None
        ctx.bias_rows = [len(b) for b in biases]
        out = F.linear(hidden, weight, bias)
        return (total.view_as(total) if delta is None else total), out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_total: Tensor, grad: Tensor) -> tuple[Tensor | None, ...]:
        total, rstd, norm, *weights = ctx.saved_tensors
        wants = ctx.needs_input_grad
        into, hidden, of_norm = _ops(total).norm_backward(grad @ together(weights), grad_total, total, norm, rstd)
        of_weights = _rows(weights, grad, hidden, wants[5 : 5 + ctx.count])
        of_biases = grad.sum(0).split(ctx.bias_rows) if ctx.bias_rows else ()
        return into, into if ctx.added else None, of_norm if wants[2] else None, None, None, *of_weights, *of_biases


class Rotate(torch.autograd.Function):
    """`qkv [N, H + 2K, D]` -> q `[N, H, D]`, k `[N, K, D]` (both turned by their positions' angles) and v."""

    @staticmethod
    def forward(ctx: Any, qkv: Tensor, heads: int, cosine: Tensor, sine: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        ctx.save_for_backward(cosine, sine)
        return _ops(qkv).rotate(qkv, heads, cosine, sine)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dq: Tensor, dk: Tensor, dv: Tensor) -> tuple[Tensor | None, ...]:
        return _ops(dq).rotate_back(dq, dk, dv, *ctx.saved_tensors), None, None, None


class GatedMLP(torch.autograd.Function):
    """`(x + delta, down(silu(gate(h)) * up(h)))` with `h = rms_norm(x + delta)`.

    `keep` False: gate and up are not kept for the backward pass but multiplied again.
    """

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, delta: Tensor, norm: Tensor, eps: float, keep: bool, gate: Parameter, up: Parameter, down: Tensor
    ) -> tuple[Tensor, Tensor]:
        ops, both = _ops(x), together([gate, up])
        total, hidden, rstd = ops.add_norm(x, delta, norm, eps)
        gate_up = hidden @ both.t()
        ctx.save_for_backward(total, rstd, norm, gate, up, down, gate_up if keep else None)
        return total, ops.swiglu(gate_up) @ down.t()

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_total: Tensor, grad: Tensor) -> tuple[Tensor | None, ...]:
        total, rstd, norm, gate, up, down, gate_up = ctx.saved_tensors
        ops, wants, both = _ops(total), ctx.needs_input_grad, together([gate, up])
        if gate_up is None:
            gate_up = ops.norm_again(total, norm, rstd) @ both.t()
        of_gate_up, activation = ops.swiglu_backward(gate_up, grad @ down)
        del gate_up
        (of_down,) = _rows([down], grad, activation, wants[7:8])
        del activation
        into, hidden, of_norm = ops.norm_backward(of_gate_up @ both, grad_total, total, norm, rstd)
        of_gate, of_up = _rows([gate, up], of_gate_up, hidden, wants[5:7])
        return into, into, of_norm if wants[2] else None, None, None, of_gate, of_up, of_down


class AddNorm(torch.autograd.Function):
    """`rms_norm(x + delta)`, or of x alone where delta is None."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, delta: Tensor | None, weight: Tensor, eps: float) -> Tensor:
        total, out, rstd = _ops(x).add_norm(x, delta, weight, eps)
        ctx.save_for_backward(total, rstd, weight)
        ctx.added = delta is not None
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        total, rstd, weight = ctx.saved_tensors
        into, _, of_weight = _ops(total).norm_backward(grad, None, total, weight, rstd)
        return into, into if ctx.added else None, of_weight if ctx.needs_input_grad[2] else None, None
