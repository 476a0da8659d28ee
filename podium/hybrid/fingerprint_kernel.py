# mypy: disable-error-code="no-untyped-def,no-untyped-call,untyped-decorator,import-untyped,import-not-found"

"""A fingerprint's sum as one Triton kernel: every element is read once. Sums of integers do not depend on their order."""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

_TILE = 4096
_WIDEST = 1024
_STEPS = 8


@triton.jit(do_not_specialize=["number"])
def _add_kernel(
    BITS, ROWS, COLUMNS, SUMS, number, rows, width, row_stride, column_stride,
    TALL: tl.constexpr, WIDE: tl.constexpr, STEPS: tl.constexpr,
):  # fmt: skip
    """Programs: (stretch of rows, block of columns). The columns' weights stay; rows go by, TALL at a time."""
    column = tl.program_id(1).to(tl.int64) * WIDE + tl.arange(0, WIDE)
    inside = column < width
    by_column = tl.load(COLUMNS + column, mask=inside, other=0)
    first = tl.program_id(0).to(tl.int64) * STEPS * TALL
    total = tl.zeros([TALL, WIDE], tl.int64)
    for step in range(STEPS):
        row = first + step * TALL + tl.arange(0, TALL)
        there = row < rows
        at = row[:, None] * row_stride + column[None, :] * column_stride
        bits = tl.load(BITS + at, mask=there[:, None] & inside[None, :], other=0).to(tl.int32)
        product = bits * by_column[None, :]  # modulo 2^32
        total += product.to(tl.int64) * tl.load(ROWS + row, mask=there, other=0)[:, None]
    tl.atomic_add(SUMS + number, tl.sum(tl.sum(total, 1), 0))


def add(bits: Tensor, rows: Tensor, columns: Tensor, sums: Tensor, number: int) -> None:
    """Adds to `sums[number]` the sum over `[R, C]` bits (int16 or int32, any strides), as `fingerprints._sum` does.

    Args:
        rows, columns: weights, `[R]` int64 and `[C]` int32.
    """
    count, width = bits.shape
    # A tile is wide along what lies side by side in memory.
    if bits.stride(0) == 1 and bits.stride(1) != 1:
        tall = min(_WIDEST, triton.next_power_of_2(count))
        wide = min(_TILE // tall, triton.next_power_of_2(width))
    else:
        wide = min(_WIDEST, triton.next_power_of_2(width))
        tall = min(_TILE // wide, triton.next_power_of_2(count))
    _add_kernel[(triton.cdiv(count, tall * _STEPS), triton.cdiv(width, wide))](
        bits, rows, columns, sums, number, count, width, bits.stride(0), bits.stride(1),
        TALL=tall, WIDE=wide, STEPS=_STEPS, num_warps=4,
    )  # fmt: skip
