"""The update of `AdamW8bit` as one Triton kernel: every number is read and written once."""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from podium.engines.train.adamw_8bit import BLOCK, STEP_FIRST, STEP_SECOND

_GROUPS = 8


@triton.jit(do_not_specialize=["count", "seed"])
def _update(
    P, G, M, MS, V, VS, count, lr, decay, beta1, beta2, unbias, eps, seed,
    STEP_M: tl.constexpr, STEP_V: tl.constexpr, BLOCK: tl.constexpr, GROUPS: tl.constexpr,
):  # fmt: skip
    block = tl.program_id(0) * GROUPS + tl.arange(0, GROUPS)
    at = block.to(tl.int64)[:, None] * BLOCK + tl.arange(0, BLOCK)[None, :]
    inside = at < count
    real = block.to(tl.int64) * BLOCK < count
    # One number of 32 bits for both roundings. Its counter may wrap: that repeats a draw far away, no more.
    bits = tl.randint(seed, at.to(tl.int32), 7)
    grad = tl.load(G + at, mask=inside, other=0.0)
    code = tl.load(M + at, mask=inside, other=0).to(tl.int32)
    level = (code & 127).to(tl.float32)
    m = tl.where(level > 0, tl.exp2((level - 127) * STEP_M), 0.0) * tl.load(MS + block, mask=real, other=0.0)[:, None]
    m = beta1 * tl.where(code >= 128, -m, m) + (1 - beta1) * grad
    level = tl.load(V + at, mask=inside, other=0).to(tl.float32)
    root = tl.where(level > 0, tl.exp2((level - 255) * STEP_V), 0.0) * tl.load(VS + block, mask=real, other=0.0)[:, None]
    root = tl.sqrt(beta2 * root * root + (1 - beta2) * grad * grad)
    p = tl.load(P + at, mask=inside, other=0.0)
    tl.store(P + at, p * decay - lr * m / (root * unbias + eps), mask=inside)

    size = tl.abs(m)
    scale = tl.max(size, 1)
    tl.store(MS + block, scale, mask=real)
    level = 127 + tl.log2(tl.maximum(size, 1e-37) / tl.maximum(scale, 1e-37)[:, None]) / STEP_M
    level = tl.minimum(tl.maximum(tl.floor(level + (bits & 65535).to(tl.float32) / 65536), 0.0), 127.0)
    level = tl.where(size > 0, level, 0.0)
    tl.store(M + at, (level + tl.where((m < 0) & (level > 0), 128.0, 0.0)).to(tl.int32).to(tl.uint8), mask=inside)
    scale = tl.max(root, 1)
    tl.store(VS + block, scale, mask=real)
    level = 255 + tl.log2(tl.maximum(root, 1e-37) / tl.maximum(scale, 1e-37)[:, None]) / STEP_V
    level = tl.minimum(tl.maximum(tl.floor(level + ((bits >> 16) & 65535).to(tl.float32) / 65536), 1.0), 255.0)
    tl.store(V + at, tl.where(root > 0, level, 0.0).to(tl.int32).to(tl.uint8), mask=inside)


def update(parameter: Tensor, grad: Tensor, moments: list[Tensor], rates: tuple[float, ...], seed: int) -> None:
    """As `adamw_8bit.update_plain`, with draws of its own."""
    count = parameter.numel()
    if not count:
        return
    _update[(triton.cdiv(count, BLOCK * _GROUPS),)](
        parameter, grad, *moments, count, *rates, seed,
        STEP_M=STEP_FIRST, STEP_V=STEP_SECOND, BLOCK=BLOCK, GROUPS=_GROUPS, num_warps=4,
    )  # fmt: skip
