"""Checks of a hand-over from training to generation: that every element arrived, and that both sides compute the same.

`storage_fingerprint` lives in the models room, because the rollout engine itself uses it; it is offered here as well.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from podium.core.errors import RolloutError
from podium.engines.layout import Box
from podium.hybrid.plan import Plan
from podium.models.storage import Place, moved_parameters, storage_fingerprint

__all__ = [
    "Place",
    "check_canary",
    "check_shared_storage",
    "fingerprint",
    "mismatched_tensors",
    "moved_parameters",
    "storage_fingerprint",
]

_ELEMENTS_AT_ONCE = 1 << 26
_BITS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int32}


def check_shared_storage(trained: nn.Module, generating: nn.Module) -> None:
    """Raises RolloutError unless both modules' parameters are the same memory, name by name."""
    apart = moved_parameters(storage_fingerprint(trained), storage_fingerprint(generating))
    if apart:
        raise RolloutError(
            f"{len(apart)} parameters are not shared between training and generation, '{apart[0]}' first",
            where="hybrid.verify",
            remedy="give the rollout engine the very module that is trained",
        )


@torch.no_grad()
def fingerprint(values: Tensor, box: Box) -> Tensor:
    """A sum over the elements' bits, each weighted by its place in the whole tensor: int64 scalar on their device.

    Fingerprints of boxes that do not overlap add up to that of their union (modulo 2^64), so two layouts of one tensor can
    be compared without moving it. A changed bit always changes it; two elements that are exchanged change it but for a
    chance of about 2^-32.

    Args:
        values: the box's values, in the dtype that generates.
        box: their places.
    """
    if not values.numel():
        return torch.zeros((), dtype=torch.int64, device=values.device)
    matrix = values.reshape(-1, values.shape[-1]) if values.ndim else values.reshape(1, 1)
    rows, columns = _weights(box, values.device)
    total = torch.zeros((), dtype=torch.int64, device=values.device)
    step = max(1, _ELEMENTS_AT_ONCE // max(matrix.shape[1], 1))
    for first in range(0, len(matrix), step):
        part = matrix[first : first + step].contiguous()
        bits = part.view(_BITS[part.element_size()])
        if part.element_size() == 8:
            bits = bits.view(len(part), -1, 2).sum(-1, dtype=torch.int32)
        by_row = (bits.to(torch.int32) * columns).sum(1, dtype=torch.int64)  # the product is modulo 2^32
        total += (by_row * rows[first : first + step]).sum()
    return total


def _weights(box: Box, device: torch.device) -> tuple[Tensor, Tensor]:
    """Odd pseudo-random weights of rows (all dimensions but the last, int64) and columns (int32)."""
    start, stop = box.start or (0,), box.stop or (1,)
    columns = _mixed(torch.arange(start[-1], stop[-1], device=device), 1).to(torch.int32) | 1
    rows = torch.ones(1, dtype=torch.int64, device=device)
    for dim, (a, b) in enumerate(zip(start[:-1], stop[:-1], strict=True)):
        rows = (rows[:, None] * (_mixed(torch.arange(a, b, device=device), dim + 2) | 1)).reshape(-1)
    return rows, columns


def _mixed(index: Tensor, salt: int) -> Tensor:
    """A 32-bit mix of an index (the finalizer of MurmurHash3), as int64 in [0, 2^32)."""
    mask = 0xFFFFFFFF
    x = (index + salt * 0x9E3779B9) & mask
    x = ((x ^ (x >> 16)) * 0x45D9F3B) & mask
    x = ((x ^ (x >> 16)) * 0x45D9F3B) & mask
    return x ^ (x >> 16)


@torch.no_grad()
def mismatched_tensors(
    plan: Plan,
    rank: int,
    source: Mapping[str, Tensor],
    target: Mapping[str, Tensor],
    group: Any = None,
    wait: Callable[[Any], None] = lambda work: work.wait(),
) -> list[tuple[str, int]]:
    """(name, rank) of the generation shards whose bits are not those of the training weights; on every rank the same list.

    What each rank keeps and sends is fingerprinted where training holds it, what each rank generates with where generation
    holds it; one small sum over ranks compares them. Collective where the plan has several ranks.

    Args:
        wait: how the sum over ranks is waited for.
    """
    names = list(plan.target.tensors)
    row = {name: i for i, name in enumerate(names)}
    device = next(iter({**source, **target}.values())).device
    difference = torch.zeros(plan.target.ranks, len(names), dtype=torch.int64, device=device)
    done: dict[tuple[str, Box], Tensor] = {}
    for transfer in (*plan.kept, *plan.sent):
        if transfer.sender == rank:
            key = (transfer.name, transfer.box)
            if key not in done:
                held = plan.source.tensors[transfer.name].boxes[rank]
                assert held is not None
                values = source[transfer.name][transfer.box.within(held)].to(plan.target.tensors[transfer.name].dtype)
                done[key] = fingerprint(values, transfer.box)
            difference[transfer.receiver, row[transfer.name]] += done[key]
    for name, shards in plan.target.tensors.items():
        box = shards.boxes[rank] if rank < plan.target.ranks else None
        if box is not None:
            difference[rank, row[name]] -= fingerprint(target[name], box)
    if max(plan.source.ranks, plan.target.ranks) > 1:
        import torch.distributed as dist

        if difference.is_cuda and "nccl" not in dist.get_backend(group):
            difference = difference.cpu()
        wait(dist.all_reduce(difference, group=group, async_op=True))
    return [(names[i], int(r)) for r, i in difference.nonzero().tolist()]


def check_canary(trained: Sequence[float] | Tensor, generating: Sequence[float] | Tensor, tolerance: float) -> None:
    """Raises RolloutError where log-probs of a few known tokens differ between the two sides by more than `tolerance` nats."""
    a, b = (torch.as_tensor(x, dtype=torch.float64).cpu() for x in (trained, generating))
    worst = float((a - b).abs().max()) if a.numel() else 0.0
    if not worst <= tolerance:
        raise RolloutError(
            f"after a hand-over, training and generation differ by {worst:.3g} nats on the canary tokens (at most {tolerance})",
            where="hybrid.verify",
            remedy="the weights are the same bits; look at dtype, attention and temperature: podium doctor numerics",
        )
