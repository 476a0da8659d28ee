"""The elementwise parts of a decoder layer in Triton, forward and backward. `layer_plain` has the same functions in torch.

Each is one pass over its operands. Rounding follows the `transformers` modules: what they round to 16 bits is rounded here.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

# Programs that go over the rows of a norm's backward pass; each keeps its own sum for the weight's gradient.
_SUMS = 528

# ------------------------------------------------------------------ RMSNorm


@triton.jit
def _norm(X, DELTA, W, SUM, OUT, RSTD, eps, width, ADD: tl.constexpr, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    at = tl.arange(0, BLOCK)
    inside = at < width
    kind = X.dtype.element_ty
    x = tl.load(X + row * width + at, mask=inside, other=0.0).to(tl.float32)
    if ADD:
        x += tl.load(DELTA + row * width + at, mask=inside, other=0.0).to(tl.float32)
        x = x.to(kind).to(tl.float32)
        tl.store(SUM + row * width + at, x.to(kind), mask=inside)
    rstd = 1.0 / tl.sqrt(tl.sum(x * x, 0) / width + eps)
    tl.store(RSTD + row, rstd)
    w = tl.load(W + at, mask=inside, other=0.0).to(tl.float32)
    tl.store(OUT + row * width + at, (w * (x * rstd).to(kind).to(tl.float32)).to(kind), mask=inside)


@triton.jit
def _norm_again(X, W, RSTD, OUT, width, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    at = tl.arange(0, BLOCK)
    inside = at < width
    kind = X.dtype.element_ty
    x = tl.load(X + row * width + at, mask=inside, other=0.0).to(tl.float32)
    w = tl.load(W + at, mask=inside, other=0.0).to(tl.float32)
    tl.store(OUT + row * width + at, (w * (x * tl.load(RSTD + row)).to(kind).to(tl.float32)).to(kind), mask=inside)


@triton.jit(do_not_specialize=["rows"])
def _norm_backward(GRAD, RESIDUAL, X, W, RSTD, OUT, NORMED, SUMS, rows, width, ADD: tl.constexpr, BLOCK: tl.constexpr):
    at = tl.arange(0, BLOCK)
    inside = at < width
    kind = X.dtype.element_ty
    w = tl.load(W + at, mask=inside, other=0.0).to(tl.float32)
    total = tl.zeros([BLOCK], tl.float32)
    for row in range(tl.program_id(0), rows, tl.num_programs(0)):
        base = row * width.to(tl.int64)
        x = tl.load(X + base + at, mask=inside, other=0.0).to(tl.float32)
        grad = tl.load(GRAD + base + at, mask=inside, other=0.0).to(tl.float32)
        rstd = tl.load(RSTD + row)
        normed = x * rstd
        rounded = normed.to(kind).to(tl.float32)
        total += grad * rounded
        tl.store(NORMED + base + at, (w * rounded).to(kind), mask=inside)
        scaled = grad * w
        out = rstd * (scaled - normed * (tl.sum(scaled * normed, 0) / width))
        if ADD:
            out += tl.load(RESIDUAL + base + at, mask=inside, other=0.0).to(tl.float32)
        tl.store(OUT + base + at, out.to(kind), mask=inside)
    tl.store(SUMS + tl.program_id(0) * width + at, total, mask=inside)


def _warps(block: int) -> int:
    return min(16, max(1, block // 512))


def add_norm(x: Tensor, delta: Tensor | None, weight: Tensor, eps: float) -> tuple[Tensor, Tensor, Tensor]:
    """`x + delta` `[N, D]` (x itself where delta is None), its RMSNorm, and 1 / rms `[N]` (fp32)."""
    rows, width = x.shape
    total = x if delta is None else torch.empty_like(x)
    out, rstd = torch.empty_like(x), x.new_empty(rows, dtype=torch.float32)
    block = triton.next_power_of_2(width)
    kept: Any = x if delta is None else delta
    if rows:
        _norm[(rows,)](
            x, kept, weight, total, out, rstd, eps, width, ADD=delta is not None, BLOCK=block, num_warps=_warps(block)
        )
    return total, out, rstd


def norm_again(x: Tensor, weight: Tensor, rstd: Tensor) -> Tensor:
    """The RMSNorm of `x` `[N, D]`, whose 1 / rms is known."""
    out = torch.empty_like(x)
    block = triton.next_power_of_2(x.shape[1])
    if len(x):
        _norm_again[(len(x),)](x, weight, rstd, out, x.shape[1], BLOCK=block, num_warps=_warps(block))
    return out


def norm_backward(
    grad: Tensor, residual: Tensor | None, x: Tensor, weight: Tensor, rstd: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients of `x` (that of the norm, plus `residual`) and of the weight; and the norm itself, made again."""
    rows, width = x.shape
    out, normed = torch.empty_like(x), torch.empty_like(x)
    programs = min(_SUMS, rows)
    sums = x.new_empty(programs, width, dtype=torch.float32)
    block = triton.next_power_of_2(width)
    added: Any = grad if residual is None else residual
    if rows:
        _norm_backward[(programs,)](
            grad, added, x, weight, rstd, out, normed, sums, rows, width,
            ADD=residual is not None, BLOCK=block, num_warps=_warps(block),
        )  # fmt: skip
    return out, normed, sums.sum(0).to(weight.dtype)


# ------------------------------------------------------------------ rotary embedding


@triton.jit(do_not_specialize=["count"])
def _rotate(
    FROM, Q, K, V, COS, SIN, count, HEADS: tl.constexpr, KV: tl.constexpr, D: tl.constexpr, BACK: tl.constexpr,
    ROWS: tl.constexpr, HALF: tl.constexpr,
):  # fmt: skip
    """Programs: (block of tokens, head). Forward: FROM `[N, H + 2K, D]` to Q, K, V. Backward: their gradients into FROM."""
    token = (tl.program_id(0) * ROWS + tl.arange(0, ROWS)).to(tl.int64)
    head = tl.program_id(1)
    half = tl.arange(0, HALF)
    inside = (token < count)[:, None] & (half < D // 2)[None, :]
    kind = Q.dtype.element_ty
    whole = FROM + token[:, None] * ((HEADS + 2 * KV) * D) + head * D + half[None, :]
    if head < HEADS:
        part = Q + token[:, None] * (HEADS * D) + head * D + half[None, :]
    elif head < HEADS + KV:
        part = K + token[:, None] * (KV * D) + (head - HEADS) * D + half[None, :]
    else:
        part = V + token[:, None] * (KV * D) + (head - HEADS - KV) * D + half[None, :]
    if BACK:
        source, to = part, whole
    else:
        source, to = whole, part
    low = tl.load(source, mask=inside, other=0.0).to(tl.float32)
    high = tl.load(source + D // 2, mask=inside, other=0.0).to(tl.float32)
    if head < HEADS + KV:
        angle = token[:, None] * D + half[None, :]
        cosine = tl.load(COS + angle, mask=inside, other=0.0).to(tl.float32)
        sine = tl.load(SIN + angle, mask=inside, other=0.0).to(tl.float32)
        if BACK:
            sine = -sine
        low, high = low * cosine - high * sine, high * cosine + low * sine
    tl.store(to, low.to(kind), mask=inside)
    tl.store(to + D // 2, high.to(kind), mask=inside)


def _launch_rotate(whole: Tensor, q: Tensor, k: Tensor, v: Tensor, cosine: Tensor, sine: Tensor, back: bool) -> None:
    count, heads, width = q.shape
    half = triton.next_power_of_2(width // 2)
    rows = max(1, 2048 // half)
    if count:
        _rotate[(triton.cdiv(count, rows), heads + 2 * k.shape[1])](
            whole, q, k, v, cosine, sine, count,
            HEADS=heads, KV=k.shape[1], D=width, BACK=back, ROWS=rows, HALF=half, num_warps=4,
        )  # fmt: skip


def rotate(qkv: Tensor, heads: int, cosine: Tensor, sine: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """`qkv [N, H + 2K, D]` into q `[N, H, D]` and k, rotated by the angles whose cosines and sines are `[N, D]`, and v."""
    count, all_heads, width = qkv.shape
    kv = (all_heads - heads) // 2
    q, k, v = (qkv.new_empty(count, n, width) for n in (heads, kv, kv))
    _launch_rotate(qkv, q, k, v, cosine, sine, False)
    return q, k, v


def rotate_back(dq: Tensor, dk: Tensor, dv: Tensor, cosine: Tensor, sine: Tensor) -> Tensor:
    """The gradient of `qkv` from those of q, k and v."""
    dq, dk, dv = dq.contiguous(), dk.contiguous(), dv.contiguous()
    whole = dq.new_empty(len(dq), dq.shape[1] + 2 * dk.shape[1], dq.shape[2])
    _launch_rotate(whole, dq, dk, dv, cosine, sine, True)
    return whole


# ------------------------------------------------------------------ SwiGLU


@triton.jit
def _swiglu(X, OUT, width, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    at = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = at < width
    kind = X.dtype.element_ty
    gate = tl.load(X + row * 2 * width + at, mask=inside, other=0.0).to(tl.float32)
    up = tl.load(X + row * 2 * width + width + at, mask=inside, other=0.0).to(tl.float32)
    act = (gate / (1.0 + tl.exp(-gate))).to(kind).to(tl.float32)
    tl.store(OUT + row * width + at, (act * up).to(kind), mask=inside)


@triton.jit
def _swiglu_backward(X, GRAD, OUT, ACT, width, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    at = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = at < width
    kind = X.dtype.element_ty
    gate = tl.load(X + row * 2 * width + at, mask=inside, other=0.0).to(tl.float32)
    up = tl.load(X + row * 2 * width + width + at, mask=inside, other=0.0).to(tl.float32)
    grad = tl.load(GRAD + row * width + at, mask=inside, other=0.0).to(tl.float32)
    sigmoid = 1.0 / (1.0 + tl.exp(-gate))
    silu = gate * sigmoid
    rounded = silu.to(kind).to(tl.float32)
    tl.store(ACT + row * width + at, (rounded * up).to(kind), mask=inside)
    tl.store(OUT + row * 2 * width + at, (grad * up * sigmoid * (1.0 + gate - silu)).to(kind), mask=inside)
    tl.store(OUT + row * 2 * width + width + at, (grad * rounded).to(kind), mask=inside)


def swiglu(gate_up: Tensor) -> Tensor:
    """`silu(gate) * up` from `[N, 2 I]`: `[N, I]`."""
    rows, width = gate_up.shape[0], gate_up.shape[1] // 2
    out = gate_up.new_empty(rows, width)
    block = min(2048, triton.next_power_of_2(width))
    if rows:
        _swiglu[(rows, triton.cdiv(width, block))](gate_up, out, width, BLOCK=block, num_warps=4)
    return out


def swiglu_backward(gate_up: Tensor, grad: Tensor) -> tuple[Tensor, Tensor]:
    """The gradient of `gate_up`, and the activation itself, made again."""
    rows, width = grad.shape
    out, act = torch.empty_like(gate_up), torch.empty_like(grad)
    block = min(2048, triton.next_power_of_2(width))
    if rows:
        _swiglu_backward[(rows, triton.cdiv(width, block))](gate_up, grad, out, act, width, BLOCK=block, num_warps=4)
    return out, act


# ------------------------------------------------------------------ attention in two parts


@triton.jit(do_not_specialize=["count"])
def _merge(A, LA, B, LB, count, HEADS: tl.constexpr, D: tl.constexpr, BLOCK: tl.constexpr):
    token, head = tl.program_id(0).to(tl.int64), tl.program_id(1)
    at = tl.arange(0, BLOCK)
    inside = at < D
    la, lb = tl.load(LA + head.to(tl.int64) * count + token), tl.load(LB + head.to(tl.int64) * count + token)
    # A query without keys has a normaliser that is infinite, of either sign.
    if tl.abs(lb) != float("inf"):
        most = tl.maximum(la, lb)
        wa, wb = tl.exp(la - most), tl.exp(lb - most)
        place = (token * HEADS + head) * D + at
        a = tl.load(A + place, mask=inside, other=0.0).to(tl.float32)
        b = tl.load(B + place, mask=inside, other=0.0).to(tl.float32)
        tl.store(A + place, ((a * wa + b * wb) / (wa + wb)).to(A.dtype.element_ty), mask=inside)
        tl.store(LA + head.to(tl.int64) * count + token, most + tl.log(wa + wb))


def merge_(out: Tensor, normaliser: Tensor, other: Tensor, other_normaliser: Tensor) -> None:
    """Attention over two sets of keys from that over each: `[N, H, D]` and log-normalisers `[H, N]`, into the first."""
    count, heads, width = out.shape
    if count:
        _merge[(count, heads)](
            out, normaliser, other, other_normaliser, count,
            HEADS=heads, D=width, BLOCK=triton.next_power_of_2(width), num_warps=1,
        )  # fmt: skip
