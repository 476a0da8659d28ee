"""LoRA beside a product of several frozen weights: `x @ W.T` for all of them at once, and what each adapter adds to it.

An adapter adds `scale * (x A.T) B.T` to the columns of its own weight. The A of all are one product, the B one each, in place;
in the backward pass the base needs no gradient of its weights, so an adapter's step costs little beside the two products of
the base. Products are in the dtype of the base; the factors and their gradients are in their own (fp32).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn


@dataclass(frozen=True)
class Place:
    """The columns `start..stop` of a product, to which an adapter of a rank adds."""

    start: int
    stop: int
    rank: int
    scale: float


Places = tuple[Place, ...]


def plain_linear(layer: Any) -> Any:
    """The linear layer inside an adapted one; any other layer as it is."""
    return layer.base_layer if hasattr(layer, "base_layer") else layer


def why_not_low_rank(layer: Any) -> str | None:
    """Why an adapted layer is more than what is computed here; None for a plain LoRA."""
    if layer is plain_linear(layer):
        return None
    if getattr(layer, "merged", False):
        return "an adapter is merged into its weight"
    if any(getattr(layer, "lora_variant", {}).values()):
        return "an adapter is no plain LoRA"
    if any(getattr(dropout, "p", 0.0) for dropout in layer.lora_dropout.values()):
        return "an adapter has dropout"
    if any(up.bias is not None for up in layer.lora_B.values()):
        return "an adapter has biases"
    return None


def adapters_of(layers: Sequence[Any]) -> tuple[Places, list[nn.Parameter]]:
    """The active adapters of layers whose weights' rows make up one product: where each adds, and A, B of each in turn."""
    places: list[Place] = []
    factors: list[nn.Parameter] = []
    start = 0
    for layer in layers:
        stop = start + plain_linear(layer).weight.shape[0]
        if layer is not plain_linear(layer) and not layer.disable_adapters:
            for name in layer.active_adapters:
                if name in layer.lora_A:
                    down, up = layer.lora_A[name].weight, layer.lora_B[name].weight
                    places.append(Place(start, stop, down.shape[0], float(layer.scaling[name])))
                    factors += [down, up]
        start = stop
    return tuple(places), factors


def add_(out: Tensor, x: Tensor, places: Places, factors: Sequence[Tensor]) -> Tensor | None:
    """Adds the adapters' products with `x [N, D]` to `out [N, all rows]`; returns `x A.T` of all, `[N, sum of ranks]`."""
    if not places:
        return None
    low = x @ _down(factors, x.dtype).t()
    for place, part, up in zip(places, _split(low, places), factors[1::2], strict=True):
        out[:, place.start : place.stop].addmm_(part, _up(up, place, x.dtype).t())
    return low


def back_(into: Tensor, grad: Tensor, places: Places, factors: Sequence[Tensor]) -> Tensor | None:
    """Adds to `into [N, D]`, the gradient of x, what comes through the adapters; returns the gradient of `x A.T`."""
    if not places:
        return None
    parts = [
        grad[:, place.start : place.stop] @ _up(up, place, grad.dtype) for place, up in zip(places, factors[1::2], strict=True)
    ]
    of_low = torch.cat(parts, 1) if len(parts) > 1 else parts[0]
    into.addmm_(of_low, _down(factors, grad.dtype))
    return of_low


def of_factors(grad: Tensor, low: Tensor | None, of_low: Tensor | None, x: Tensor, places: Places) -> list[Tensor]:
    """The gradients of A, B of each adapter in turn, in fp32 or wider: `grad` is that of the product, `low` is `x A.T`."""
    if low is None or of_low is None:
        return []
    downs = _wide(of_low.t(), x).split([place.rank for place in places])
    out: list[Tensor] = []
    for place, down, part in zip(places, downs, _split(low, places), strict=True):
        out += [down, _wide(grad[:, place.start : place.stop].t(), part).mul_(place.scale)]
    return out


class Beside:
    """What adapters add to a product, for passes that need no gradient: two products, from copies in the base's dtype.

    The copies stay where they are (a recorded graph reads them); `refresh` writes the adapters' values of now into them.

    Args:
        layers: those whose weights' rows make up the product.
        dtype: of the product.
    """

    def __init__(self, layers: Sequence[Any], dtype: torch.dtype) -> None:
        self.places, self.factors = adapters_of(layers)
        rows = sum(plain_linear(layer).weight.shape[0] for layer in layers)
        weight = plain_linear(layers[0]).weight
        ranks = sum(place.rank for place in self.places)
        with torch.inference_mode(False):  # they shall be written again
            self.down = torch.zeros(ranks, weight.shape[1], dtype=dtype, device=weight.device)
            self.up = torch.zeros(rows, ranks, dtype=dtype, device=weight.device)
        self.refresh()

    @torch.no_grad()
    def refresh(self) -> None:
        """Takes the factors' values. Whoever writes those calls it: torch does not count what a fused optimizer writes."""
        at = 0
        for place, down, up in zip(self.places, self.factors[::2], self.factors[1::2], strict=True):
            self.down[at : at + place.rank].copy_(down)
            self.up[place.start : place.stop, at : at + place.rank].copy_(up * place.scale)
            at += place.rank

    def add_(self, out: Tensor, x: Tensor) -> Tensor:
        """`out [N, rows]` and what the adapters add to it for `x [N, D]`, in place."""
        return out.addmm_(x @ self.down.t(), self.up.t())


def _down(factors: Sequence[Tensor], dtype: torch.dtype) -> Tensor:
    downs = factors[::2]
    return (torch.cat(tuple(downs)) if len(downs) > 1 else downs[0]).to(dtype)


def _up(up: Tensor, place: Place, dtype: torch.dtype) -> Tensor:
    return (up if place.scale == 1.0 else up * place.scale).to(dtype)


def _split(low: Tensor, places: Places) -> tuple[Tensor, ...]:
    return low.split([place.rank for place in places], 1)


def _wide(a: Tensor, b: Tensor) -> Tensor:
    """`a @ b`, the sum over all tokens not rounded to 16 bits."""
    if a.dtype.itemsize >= 4:
        return a @ b
    return torch.mm(a, b, out_dtype=torch.float32) if a.is_cuda else a.float() @ b.float()


class AdaptedLinear(torch.autograd.Function):
    """`x @ weight.T + bias` and the adapters' products: `[N, D]` to `[N, rows]`."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None, places: Places, *factors: Tensor) -> Tensor:
        out = nn.functional.linear(x, weight, bias)
        low = add_(out, x, places, factors)
        ctx.save_for_backward(x, weight, low, *factors)
        ctx.places = places
        return out

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        x, weight, low, *factors = ctx.saved_tensors
        into = grad @ weight
        of_low = back_(into, grad, ctx.places, factors)
        of_weight = grad.t() @ x if ctx.needs_input_grad[1] else None
        of_bias = grad.sum(0) if ctx.needs_input_grad[2] else None
        return into, of_weight, of_bias, None, *of_factors(grad, low, of_low, x, ctx.places)
