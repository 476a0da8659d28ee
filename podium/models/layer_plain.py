"""The elementwise parts of a decoder layer in torch: the same functions as `layer_kernels`, for any device and dtype."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor


def add_norm(x: Tensor, delta: Tensor | None, weight: Tensor, eps: float) -> tuple[Tensor, Tensor, Tensor]:
    """`x + delta` `[N, D]` (x itself where delta is None), its RMSNorm, and 1 / rms `[N]` (fp32)."""
    total = x if delta is None else x + delta
    wide = total.float() if total.dtype.itemsize < 4 else total
    rstd = torch.rsqrt(wide.square().mean(-1) + eps)
    return total, norm_again(total, weight, rstd), rstd


def norm_again(x: Tensor, weight: Tensor, rstd: Tensor) -> Tensor:
    """The RMSNorm of `x` `[N, D]`, whose 1 / rms is known."""
    return (x * rstd[:, None]).to(x.dtype) * weight


def norm_backward(
    grad: Tensor, residual: Tensor | None, x: Tensor, weight: Tensor, rstd: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients of `x` (that of the norm, plus `residual`) and of the weight; and the norm itself, made again."""
    normed = x * rstd[:, None]
    rounded = normed.to(x.dtype)
    of_weight = (grad * rounded).sum(0, dtype=normed.dtype).to(weight.dtype)
    scaled = grad * weight
    share = (scaled * normed).sum(-1, keepdim=True, dtype=normed.dtype).div_(x.shape[1])
    out = normed.mul_(-share).add_(scaled).mul_(rstd[:, None])
    if residual is not None:
        out.add_(residual)
    return out.to(x.dtype), rounded.mul_(weight) if rounded is not normed else _normed_again(x, rstd, weight), of_weight


def _normed_again(x: Tensor, rstd: Tensor, weight: Tensor) -> Tensor:
    return (x * rstd[:, None]).mul_(weight)


def rotate(qkv: Tensor, heads: int, cosine: Tensor, sine: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """`qkv [N, H + 2K, D]` into q `[N, H, D]` and k, rotated by the angles whose cosines and sines are `[N, D]`, and v."""
    kv = (qkv.shape[1] - heads) // 2
    q, k, v = qkv.split([heads, kv, kv], 1)
    return _turned(q, cosine, sine), _turned(k, cosine, sine), v.clone()


def rotate_back(dq: Tensor, dk: Tensor, dv: Tensor, cosine: Tensor, sine: Tensor) -> Tensor:
    """The gradient of `qkv` from those of q, k and v."""
    return torch.cat([_turned(dq, cosine, -sine), _turned(dk, cosine, -sine), dv], 1)


def _turned(x: Tensor, cosine: Tensor, sine: Tensor) -> Tensor:
    low, high = x.chunk(2, -1)
    half = x.shape[-1] // 2
    c, s = cosine[:, None, :half], sine[:, None, :half]
    return torch.cat([low * c - high * s, high * c + low * s], -1)


def swiglu(gate_up: Tensor) -> Tensor:
    """`silu(gate) * up` from `[N, 2 I]`: `[N, I]`."""
    gate, up = gate_up.chunk(2, -1)
    return F.silu(gate).mul_(up)


def swiglu_backward(gate_up: Tensor, grad: Tensor) -> tuple[Tensor, Tensor]:
    """The gradient of `gate_up`, and the activation itself, made again."""
    gate, up = gate_up.chunk(2, -1)
    silu = F.silu(gate)
    out = torch.empty_like(gate_up)
    of_gate, of_up = out.chunk(2, -1)
    torch.mul(grad, silu, out=of_up)
    of_gate.copy_(torch.ops.aten.silu_backward(grad * up, gate))
    return out, silu.mul_(up)
