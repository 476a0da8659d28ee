"""Weights of another process on the same device, read where they lie (CUDA IPC): no message, one copy on the device.

NCCL has one rank a device, so processes that share one (roles of two pools on one GPU) have a gloo group between them; by
that they exchange handles once, and say at every hand-over when the weights may be read, and when they have been.
"""

from __future__ import annotations

import pickle
import socket
from collections import defaultdict
from collections.abc import Mapping, Sequence
from multiprocessing.reduction import ForkingPickler
from typing import Any

import torch
from torch import Tensor

from podium.hybrid.plan import Plan, Transfer

Place = tuple[str, str, int]
"""A GPU: its host, its uuid, its number in the process (handles are opened by that)."""


def place_of(device: torch.device) -> Place | None:
    """Where a device's memory is, for processes that may share it; None for a CPU, whose processes exchange messages."""
    if device.type != "cuda":
        return None
    index = torch.cuda.current_device() if device.index is None else device.index
    uuid = getattr(torch.cuda.get_device_properties(index), "uuid", None)
    return None if uuid is None else (socket.gethostname(), str(uuid), index)


def places_of(device: torch.device, group: Any) -> list[Place | None]:
    """Every rank's. Collective."""
    import torch.distributed as dist

    places: list[Any] = [None] * dist.get_world_size(group)
    dist.all_gather_object(places, place_of(device), group=group)
    return places


def is_near(transfer: Transfer, places: Sequence[Place | None]) -> bool:
    """Whether a transfer is between processes of one device."""
    return places[transfer.sender] is not None and places[transfer.sender] == places[transfer.receiver]


class Neighbours:
    """One rank's reading from processes of its own device.

    Args:
        plan, rank, group: see `Transport`.
        source: this rank's training tensors. They stay where they are: their handles are given out once, here.
        places: of all ranks.

    Collective, where any two ranks of the plan are near each other.
    """

    def __init__(self, plan: Plan, rank: int, source: Mapping[str, Tensor], places: Sequence[Place | None], group: Any) -> None:
        import torch.distributed as dist

        near = [transfer for transfer in plan.sent if is_near(transfer, places)]
        self.any = bool(near)
        self.reads = [transfer for transfer in near if transfer.receiver == rank]
        self.sent_bytes = sum(transfer.bytes for transfer in near if transfer.sender == rank)
        self._held = plan.source.tensors
        self._opened: dict[tuple[int, str], Tensor] = {}
        if not near:
            return
        # A handle is made for each reader apart: the library counts them.
        mine: dict[int, dict[str, bytes]] = defaultdict(dict)
        for transfer in near:
            if transfer.sender == rank and transfer.name not in mine[transfer.receiver]:
                mine[transfer.receiver][transfer.name] = bytes(ForkingPickler.dumps(source[transfer.name]))
        everyone: list[Any] = [None] * len(places)
        dist.all_gather_object(everyone, dict(mine), group=group)
        for sender, handles in enumerate(everyone):
            for name, handle in handles.get(rank, {}).items():
                self._opened[sender, name] = pickle.loads(handle)

    def value(self, transfer: Transfer) -> Tensor:
        """The sender's values, where they lie; in its dtype."""
        held = self._held[transfer.name].boxes[transfer.sender]
        assert held is not None
        return self._opened[transfer.sender, transfer.name][transfer.box.within(held)]
