"""A model of which several ranks have a part each, for generation: plain modules with fewer heads and a narrower MLP.

Each rank's part is an ordinary `transformers` model whose config names its own heads. Its layers add up where products were
cut by rows (`SummedLinear`); all else is computed alike on every rank.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn


@dataclass(frozen=True)
class TensorRanks:
    """The ranks that have one copy of a model between them, and this one's place among them.

    Every method is collective: all of these ranks call it, in the same order.
    """

    rank: int
    size: int
    group: Any
    """For tensors on the device."""
    control: Any
    """For numbers of the host (gloo)."""

    def sum(self, partial: Tensor) -> Tensor:
        """The sum over the ranks, in place."""
        import torch.distributed as dist

        dist.all_reduce(partial, group=self.group)
        return partial

    def agree(self, *tensors: Tensor) -> None:
        """The first rank's values, in place: what is drawn from sums that may round otherwise is the same on all."""
        import torch.distributed as dist

        for tensor in tensors:
            dist.broadcast(tensor, group=self.group, group_src=0)

    def least(self, number: int) -> int:
        """The smallest of the ranks' numbers. It waits for the host, not for the device."""
        import torch.distributed as dist

        if self.size == 1:
            return number
        value = torch.tensor(number)
        dist.all_reduce(value, dist.ReduceOp.MIN, group=self.control)
        return int(value)


class SummedLinear(nn.Linear):
    """A linear layer whose input columns are divided over ranks: their products are added up, then the bias once."""

    def __init__(self, in_features: int, out_features: int, bias: bool, ranks: TensorRanks) -> None:
        super().__init__(in_features, out_features, bias=bias, device="meta")
        self.ranks = ranks

    def forward(self, x: Tensor) -> Tensor:
        """`x [..., in]`, this rank's columns -> `[..., out]`, whole."""
        out = self.ranks.sum(F.linear(x, self.weight))
        return out if self.bias is None else out + self.bias


def tensor_ranks_of(model: nn.Module) -> TensorRanks | None:
    """The ranks that have this model between them; None where it is whole."""
    return next((module.ranks for module in model.modules() if isinstance(module, SummedLinear)), None)
