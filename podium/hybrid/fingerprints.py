"""A number for the bits of a box of a tensor, the same wherever it is computed: on a CPU, on a GPU, whole or in parts."""

from __future__ import annotations

import importlib.util

import torch
from torch import Tensor

from podium.engines.layout import Box, Shape

# On a CPU what is between stays in its caches: six times as fast as all at once.
_AT_ONCE_ON_A_CPU, _AT_ONCE = 1 << 17, 1 << 26
_BITS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int32}


def fingerprint(values: Tensor, box: Box) -> Tensor:
    """A sum over the elements' bits, each weighted by its place in the whole tensor: int64 scalar on their device.

    Fingerprints of boxes that do not overlap add up to that of their union (modulo 2^64), so two layouts of one tensor can
    be compared without moving it. A changed bit always changes it; two elements that are exchanged change it but for a
    chance of about 2^-32.

    Args:
        values: the box's values, in the dtype that generates.
        box: their places.
    """
    found = Fingerprints(1, values.device)
    found.add(0, values, box)
    return found.sums[0]


class Fingerprints:
    """Several fingerprints, computed without waiting for the device.

    On a GPU each tensor is read once, by one kernel (Triton); elsewhere torch does the same sums.

    Args:
        count: how many.
        device: of all values.
    """

    def __init__(self, count: int, device: torch.device) -> None:
        self.sums = torch.zeros(count, dtype=torch.int64, device=device)
        """`[count]` int64."""
        self._fused = device.type == "cuda" and importlib.util.find_spec("triton") is not None
        # The layers of a model have the same borders again and again.
        self._weights: dict[tuple[int, int, int], Tensor] = {}
        self._columns: dict[tuple[int, int], Tensor] = {}
        self._rows: dict[tuple[Shape, Shape], Tensor] = {}

    @torch.no_grad()
    def add(self, number: int, values: Tensor, box: Box) -> None:
        """Adds the fingerprint of a box to `sums[number]`."""
        if not values.numel():
            return
        matrix = values.reshape(-1, values.shape[-1]) if values.ndim else values.reshape(1, 1)
        start, stop = box.start or (0,), box.stop or (1,)
        rows, columns = self._of_rows(start[:-1], stop[:-1]), self._of_columns(start[-1], stop[-1])
        if self._fused and matrix.element_size() in (2, 4):
            from podium.hybrid.fingerprint_kernel import add

            add(matrix.view(_BITS[matrix.element_size()]), rows, columns, self.sums, number)
        else:
            self.sums[number] += _sum(matrix, rows, columns)

    def _of_columns(self, start: int, stop: int) -> Tensor:
        """Odd pseudo-random weights, `[C]` int32."""
        if (start, stop) not in self._columns:
            self._columns[start, stop] = self._odd(start, stop, 1).to(torch.int32)
        return self._columns[start, stop]

    def _of_rows(self, start: Shape, stop: Shape) -> Tensor:
        """`[R]` int64, for all dimensions but the last: products of odd pseudo-random weights."""
        if (start, stop) not in self._rows:
            rows = torch.ones(1, dtype=torch.int64, device=self.sums.device)
            for dim, (a, b) in enumerate(zip(start, stop, strict=True)):
                rows = (rows[:, None] * self._odd(a, b, dim + 2)).reshape(-1)
            self._rows[start, stop] = rows
        return self._rows[start, stop]

    def _odd(self, start: int, stop: int, salt: int) -> Tensor:
        key = (start, stop, salt)
        if key not in self._weights:
            self._weights[key] = _mixed(torch.arange(start, stop, device=self.sums.device), salt) | 1
        return self._weights[key]


def _sum(matrix: Tensor, rows: Tensor, columns: Tensor) -> Tensor:
    """Of `[R, C]` values; also what the kernel computes."""
    total = torch.zeros((), dtype=torch.int64, device=matrix.device)
    step = max(1, (_AT_ONCE_ON_A_CPU if matrix.device.type == "cpu" else _AT_ONCE) // matrix.shape[1])
    for first in range(0, len(matrix), step):
        part = matrix[first : first + step]
        if part.element_size() == 8:
            bits = part.contiguous().view(torch.int32).view(len(part), -1, 2).sum(-1, dtype=torch.int32)
        else:
            bits = part.view(_BITS[part.element_size()])
        by_row = (bits * columns).sum(1, dtype=torch.int64)  # the product is int32: modulo 2^32
        total += (by_row * rows[first : first + step]).sum()
    return total


def _mixed(index: Tensor, salt: int) -> Tensor:
    """A 32-bit mix of an index (the finalizer of MurmurHash3), as int64 in [0, 2^32)."""
    mask = 0xFFFFFFFF
    x = (index + salt * 0x9E3779B9) & mask
    x = ((x ^ (x >> 16)) * 0x45D9F3B) & mask
    x = ((x ^ (x >> 16)) * 0x45D9F3B) & mask
    return x ^ (x >> 16)
