"""AdamW whose two moments take one byte a parameter each, in place of four.

The moments are kept on a logarithmic scale within blocks of 256 values (blockwise quantisation: Dettmers et al. 2022,
arXiv 2110.02861): the largest of a block is its scale, in fp32, and each value is that scale times a power of two whose
exponent is one of 126 steps over 12 octaves (first moment, with a sign) or 254 steps over 16 octaves (root of the second).
Rounding is stochastic, so that a change smaller than a step still counts on average; the draws depend on the update's number
alone. The update itself is computed in fp32, before the moments are rounded.
"""

from __future__ import annotations

import importlib.util
import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

BLOCK = 256
# Octaves between neighbouring codes.
STEP_FIRST, STEP_SECOND = 12 / 126, 16 / 254


class AdamW8bit(torch.optim.Optimizer):
    """AdamW with moments in 8 bits. Parameters and gradients are fp32.

    Args:
        params: parameters or groups, as for `torch.optim.AdamW`, whose other arguments these are.
    """

    def __init__(self, params: Any, lr: float, betas: tuple[float, float], eps: float, weight_decay: float = 0.0) -> None:
        super().__init__(params, {"lr": lr, "betas": betas, "eps": eps, "weight_decay": weight_decay})

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> None:  # type: ignore[override]
        """One update of every parameter that has a gradient."""
        assert closure is None
        number = 0
        for group in self.param_groups:
            for parameter in group["params"]:
                number += 1
                if parameter.grad is not None:
                    self._update(parameter, parameter.grad, group, number)

    def _update(self, parameter: Tensor, grad: Tensor, group: dict[str, Any], number: int) -> None:
        state = self.state[parameter]
        if not state:
            state.update(_new_state(parameter))
        state["step"] += 1
        step, (beta1, beta2) = int(state["step"]), group["betas"]
        rates = (
            group["lr"] / (1 - beta1**step),
            1 - group["lr"] * group["weight_decay"],
            beta1,
            beta2,
            1 / math.sqrt(1 - beta2**step),
            group["eps"],
        )
        moments = [state[name] for name in ("first", "first_scale", "second", "second_scale")]
        seed = (step * 1_000_003 + number) % 2**31
        in_order = parameter.is_contiguous() and grad.is_contiguous()
        update = _kernel if parameter.is_cuda and in_order and importlib.util.find_spec("triton") else update_plain
        update(parameter, grad, moments, rates, seed)


def _new_state(parameter: Tensor) -> dict[str, Tensor]:
    blocks = -(-parameter.numel() // BLOCK)
    codes = torch.zeros(2, parameter.numel(), dtype=torch.uint8, device=parameter.device)
    scales = torch.zeros(2, blocks, dtype=torch.float32, device=parameter.device)
    return {
        "step": torch.zeros((), dtype=torch.float32),
        "first": codes[0],
        "first_scale": scales[0],
        "second": codes[1],
        "second_scale": scales[1],
    }


def _kernel(parameter: Tensor, grad: Tensor, moments: list[Tensor], rates: tuple[float, ...], seed: int) -> None:
    from podium.engines.train.adamw_kernel import update

    update(parameter, grad, moments, rates, seed)


def update_plain(parameter: Tensor, grad: Tensor, moments: list[Tensor], rates: tuple[float, ...], seed: int) -> None:
    """The update in torch. `rates`: lr over the first moment's bias, the factor of decay, beta1, beta2, one over the root
    of the second moment's bias, eps.
    """
    lr, decay, beta1, beta2, unbias, eps = rates
    first, first_scale, second, second_scale = moments
    flat = grad.reshape(-1)
    m = beta1 * decode_first(first, first_scale) + (1 - beta1) * flat
    v = beta2 * decode_second(second, second_scale).square() + (1 - beta2) * flat.square()
    root = v.sqrt()
    parameter.mul_(decay).sub_((lr * m / (root * unbias + eps)).view_as(parameter))
    draw = torch.Generator(parameter.device).manual_seed(seed)
    uniforms = [torch.rand(len(flat), generator=draw, device=flat.device) for _ in range(2)]
    encode_first(m, first, first_scale, uniforms[0])
    encode_second(root, second, second_scale, uniforms[1])


def _blocks(values: Tensor) -> Tensor:
    """`[n]` as `[blocks, BLOCK]`, the rest filled with 0."""
    return torch.nn.functional.pad(values, (0, -len(values) % BLOCK)).view(-1, BLOCK)


def _spread(scale: Tensor, count: int) -> Tensor:
    return scale.repeat_interleave(BLOCK)[:count]


def decode_first(codes: Tensor, scale: Tensor) -> Tensor:
    """Signed values `[n]` of codes `[n]` and scales `[blocks]`. The highest bit is the sign; 0 is 0."""
    level = (codes & 127).float()
    size = torch.where(level > 0, torch.exp2((level - 127) * STEP_FIRST), 0.0) * _spread(scale, len(codes))
    return torch.where(codes >= 128, -size, size)


def decode_second(codes: Tensor, scale: Tensor) -> Tensor:
    """Values `[n]`, none negative."""
    level = codes.float()
    return torch.where(level > 0, torch.exp2((level - 255) * STEP_SECOND), 0.0) * _spread(scale, len(codes))


def encode_first(values: Tensor, codes: Tensor, scale: Tensor, uniforms: Tensor) -> None:
    """Writes `codes` and `scale`. What is too small for the lowest step becomes 0."""
    size = values.abs()
    scale.copy_(_blocks(size).amax(1))
    level = 127 + torch.log2(size / _spread(scale, len(values)).clamp(min=1e-38)) / STEP_FIRST
    level = (level + uniforms).floor().clamp(0, 127)
    codes.copy_(level + 128 * ((values < 0) & (level > 0)))


def encode_second(values: Tensor, codes: Tensor, scale: Tensor, uniforms: Tensor) -> None:
    """Writes `codes` and `scale`. What is too small for the lowest step gets that step: a divisor must not become 0."""
    scale.copy_(_blocks(values).amax(1))
    level = 255 + torch.log2(values / _spread(scale, len(values)).clamp(min=1e-38)) / STEP_SECOND
    codes.copy_(torch.where(values > 0, (level + uniforms).floor().clamp(1, 255), 0.0))
