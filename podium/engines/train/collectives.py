"""Collectives inside a forward pass, each with its own backward."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd.function import once_differentiable


class _SumBackward(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, group: Any) -> Tensor:
        ctx.group = group
        return x.view_as(x)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        grad = grad.contiguous().clone()
        dist.all_reduce(grad, group=ctx.group)
        return grad, None


class _ScaleBackward(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, factor: float) -> Tensor:
        ctx.factor = factor
        return x.view_as(x)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return grad * ctx.factor, None


class _AllToAll(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, group: Any) -> Tensor:
        ctx.group = group
        return _exchanged(x, group)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return _exchanged(grad, ctx.group), None


class _Gather(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, owner: Tensor, rank: int, group: Any) -> Tensor:
        ctx.mine = (owner == rank).nonzero()[:, 0].to(x.device)
        counts = torch.bincount(owner, minlength=dist.get_world_size(group))
        most = int(counts.max())
        padded = x.new_zeros(most, *x.shape[1:])
        padded[: len(x)] = x
        parts = [torch.empty_like(padded) for _ in counts]
        dist.all_gather(parts, padded, group=group)
        # Pieces come one after another, rank by rank; a stable sort of the owners says where each entry belongs.
        joined = torch.cat([part[:count] for part, count in zip(parts, counts.tolist(), strict=True)])
        order = torch.argsort(owner, stable=True).to(x.device)
        return torch.empty_like(joined).index_copy_(0, order, joined)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None, None]:
        return grad.index_select(0, ctx.mine), None, None, None


def sum_backward(x: Tensor, group: Any) -> Tensor:
    """`x` as it is; its gradient is summed over the group."""
    return _SumBackward.apply(x, group)


def scale_backward(x: Tensor, factor: float) -> Tensor:
    """`x` as it is; its gradient is multiplied by `factor`."""
    return _ScaleBackward.apply(x, factor)


def all_to_all(x: Tensor, group: Any) -> Tensor:
    """`x [ranks, ...]`: entry `j` goes to rank `j`; entry `i` of the result came from rank `i`."""
    return _AllToAll.apply(x, group)


def gather(x: Tensor, owner: Tensor, rank: int, group: Any) -> Tensor:
    """All entries `[M, ...]` on every rank, from the entries `x` that this rank owns, in their order.

    The gradient of an entry goes to its owner as it is: every rank computes the same from the whole, so it is not summed.

    Args:
        owner: `[M]` int64 on the CPU: the rank of the group that has each entry.
        rank: this rank in the group.
    """
    return _Gather.apply(x, owner, rank, group)


def _exchanged(x: Tensor, group: Any) -> Tensor:
    out = torch.empty_like(x, memory_format=torch.contiguous_format)
    dist.all_to_all_single(out, x.contiguous(), group=group)
    return out
