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
from podium.models.low_rank import Places, add_, back_, of_factors


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

    `delta` None: nothing is added. The parameters are `count` weights, whose rows lie in one tensor (`together`), as many
    biases or none, and the factors of the adapters at `places` (`low_rank`).
    """

    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        delta: Tensor | None,
        norm: Tensor,
        eps: float,
        count: int,
        places: Places,
        *parameters: Parameter,
    ) -> tuple[Tensor, Tensor]:
        rest = len(parameters) - 2 * len(places)
        weights, biases, factors = parameters[:count], parameters[count:rest], parameters[rest:]
        weight, bias = together(weights), together(biases) if biases else None
        total, hidden, rstd = _ops(x).add_norm(x, delta, norm, eps)
        out = F.linear(hidden, weight, bias)
        low = add_(out, hidden, places, factors)
        ctx.save_for_backward(total, rstd, norm, low, *weights, *factors)
        ctx.count, ctx.added, ctx.places = count, delta is not None, places
        ctx.bias_rows = [len(b) for b in biases]
        return (total.view_as(total) if delta is None else total), out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_total: Tensor, grad: Tensor) -> tuple[Tensor | None, ...]:
        total, rstd, norm, low, *parameters = ctx.saved_tensors
        weights, factors = parameters[: ctx.count], parameters[ctx.count :]
        wants = ctx.needs_input_grad
        of_hidden = grad @ together(weights)
        of_low = back_(of_hidden, grad, ctx.places, factors)
        into, hidden, of_norm = _ops(total).norm_backward(of_hidden, grad_total, total, norm, rstd)
        del of_hidden
        of_weights = _rows(weights, grad, hidden, wants[6 : 6 + ctx.count])
        biased = any(wants[6 + ctx.count : 6 + ctx.count + len(ctx.bias_rows)])
        of_biases = grad.sum(0).split(ctx.bias_rows) if biased else [None] * len(ctx.bias_rows)
        of_adapters = of_factors(grad, low, of_low, hidden, ctx.places)
        of_norm = of_norm if wants[2] else None
        return into, into if ctx.added else None, of_norm, None, None, None, *of_weights, *of_biases, *of_adapters


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

    `keep` False: gate and up are not kept for the backward pass but multiplied again. Adapters: of gate and up at
    `places`, of down at `down_places`; `factors` are those of the first, then of the others.
    """

    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        delta: Tensor,
        norm: Tensor,
        eps: float,
        keep: bool,
        places: Places,
        down_places: Places,
        gate: Parameter,
        up: Parameter,
        down: Tensor,
        *factors: Parameter,
    ) -> tuple[Tensor, Tensor]:
        ops, both, cut = _ops(x), together([gate, up]), 2 * len(places)
        total, hidden, rstd = ops.add_norm(x, delta, norm, eps)
        gate_up = hidden @ both.t()
        low = add_(gate_up, hidden, places, factors[:cut])
        activation = ops.swiglu(gate_up)
        out = activation @ down.t()
        low_down = add_(out, activation, down_places, factors[cut:])
        ctx.save_for_backward(total, rstd, norm, gate, up, down, gate_up if keep else None, low, low_down, *factors)
        ctx.places, ctx.down_places = places, down_places
        return total, out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_total: Tensor, grad: Tensor) -> tuple[Tensor | None, ...]:
        total, rstd, norm, gate, up, down, gate_up, low, low_down, *factors = ctx.saved_tensors
        ops, wants, both, cut = _ops(total), ctx.needs_input_grad, together([gate, up]), 2 * len(ctx.places)
        if gate_up is None:
            hidden = ops.norm_again(total, norm, rstd)
            gate_up = hidden @ both.t()
            add_(gate_up, hidden, ctx.places, factors[:cut])
            del hidden
        of_activation = grad @ down
        of_low_down = back_(of_activation, grad, ctx.down_places, factors[cut:])
        of_gate_up, activation = ops.swiglu_backward(gate_up, of_activation)
        del gate_up, of_activation
        (of_down,) = _rows([down], grad, activation, wants[9:10])
        of_down_factors = of_factors(grad, low_down, of_low_down, activation, ctx.down_places)
        del activation
        of_hidden = of_gate_up @ both
        of_low = back_(of_hidden, of_gate_up, ctx.places, factors[:cut])
        into, hidden, of_norm = ops.norm_backward(of_hidden, grad_total, total, norm, rstd)
        of_gate, of_up = _rows([gate, up], of_gate_up, hidden, wants[7:9])
        of_gate_up_factors = of_factors(of_gate_up, low, of_low, hidden, ctx.places)
        of_norm = of_norm if wants[2] else None
        rest = (of_gate, of_up, of_down, *of_gate_up_factors, *of_down_factors)
        return into, into, of_norm, None, None, None, None, *rest


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
