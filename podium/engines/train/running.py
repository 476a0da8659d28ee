"""Sums kept on the device, read once."""

from __future__ import annotations

import torch
from torch import Tensor


class RunningSums:
    """Named scalar sums that stay on their device until `read`: one transfer, however many micro-batches there were."""

    def __init__(self) -> None:
        self._sums: dict[str, Tensor] = {}

    def add(self, name: str, value: Tensor) -> None:
        """Adds a scalar tensor to `name`, in fp64 where the device has it."""
        value = value.double() if value.device.type != "mps" else value.float()
        self._sums[name] = self._sums[name] + value if name in self._sums else value

    def read(self) -> dict[str, float]:
        """All sums as Python numbers."""
        if not self._sums:
            return {}
        return dict(zip(self._sums, torch.stack(list(self._sums.values())).tolist(), strict=True))
