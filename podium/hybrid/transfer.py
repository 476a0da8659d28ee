"""Carries out a plan: nothing where memory is shared, copies on the spot, collectives and messages between ranks.

Processes of one device read from each other's memory (`same_device.py`).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from podium.engines.layout import Box
from podium.hybrid.gathers import Gather, GatherStep, gather_steps, gathered_names
from podium.hybrid.messages import Cut, Message, Round, UnderWay, rounds_of
from podium.hybrid.patience import Patience
from podium.hybrid.plan import Plan, Transfer
from podium.hybrid.same_device import Neighbours, Place, is_near, places_of

BUCKET_BYTES = 256 << 20
"""Messages are put together up to so many bytes."""
ALONE_BYTES = 4 << 20
"""A transfer of at least so many bytes travels alone, smaller ones together. (At 300 GB/s this many take 14 us; to start one
more takes about as long, a copy on the device a fraction. An estimate, not a measurement.)
"""


@dataclass(frozen=True)
class Moved:
    """What one rank's part of a hand-over did, in bytes (of the generation's dtype), counted as it was done.

    A tensor that is gathered counts as one message.
    """

    sent: int = 0
    received: int = 0
    copied: int = 0
    """Within the rank; 0 where both sides are the same memory."""
    messages: int = 0
    read: int = 0
    """Of those received: from the memory of another process on this device."""


class Transport:
    """One rank's part of a plan, prepared once and run at every hand-over.

    Args:
        plan: for all ranks.
        rank: this one.
        source: this rank's local training tensors by name; only those that the plan needs.
        target: its local generation tensors, written in place. The same memory as the source's is left alone.
        group: the process group whose ranks are the plan's; None: the default one.
        bucket_bytes: the largest message; a message is packed while the one before it is under way.

    To make one is collective where the plan has several ranks.
    """

    def __init__(
        self,
        plan: Plan,
        rank: int,
        source: Mapping[str, Tensor],
        target: Mapping[str, Tensor],
        *,
        group: Any = None,
        bucket_bytes: int = BUCKET_BYTES,
    ) -> None:
        self.plan, self.rank, self.group = plan, rank, group
        self.source, self.target = source, target
        self._device = next(iter({**source, **target}.values())).device
        places = places_of(self._device, group) if plan.sent else []
        self._near = Neighbours(plan, rank, source, places, group)
        self._wire = _wire(self._device, group) if plan.sent else self._device
        gathered = gathered_names(plan) if _can_gather(plan, places, group) else []
        lone = set(plan.target.tensors).difference(gathered)
        far = [t for t in plan.sent if not is_near(t, places) and t.name in lone]
        dtypes = {name: shards.dtype for name, shards in plan.target.tensors.items()}
        gathers = [Gather(source[name], target[name], self._own(name)) for name in gathered]
        rounds = rounds_of(far, rank, Cut(bucket_bytes, ALONE_BYTES, dtypes), self._message)
        self._steps: list[GatherStep | Round] = [*gather_steps(gathers, plan.target.ranks), *rounds]
        kept = [t for t in plan.kept if t.receiver == rank and t.name in lone and not self._shared(t)]
        self._copies = [(self._to(t), self._from(t)) for t in kept]

    def _shared(self, transfer: Transfer) -> bool:
        """Whether both sides of a transfer are the same memory already."""
        ours, theirs = self._from(transfer), self._to(transfer)
        same = ours.data_ptr() == theirs.data_ptr() and ours.stride() == theirs.stride()
        return same and ours.dtype == theirs.dtype and ours.device == theirs.device

    def _from(self, transfer: Transfer) -> Tensor:
        held = self.plan.source.tensors[transfer.name].boxes[self.rank]
        return _slice(self.source[transfer.name], transfer.box, held)

    def _to(self, transfer: Transfer) -> Tensor:
        held = self.plan.target.tensors[transfer.name].boxes[self.rank]
        return _slice(self.target[transfer.name], transfer.box, held)

    def _own(self, name: str) -> Tensor:
        """The part of a generation tensor that this rank holds for training."""
        box = self.plan.source.tensors[name].boxes[self.rank]
        assert box is not None
        return _slice(self.target[name], box, self.plan.target.tensors[name].boxes[self.rank])

    def _message(self, peer: int, sent: bool, transfers: Sequence[Transfer]) -> Message:
        places = [self._from(t) if sent else self._to(t) for t in transfers]
        dtype = self.plan.target.tensors[transfers[0].name].dtype
        return Message(peer, places, dtype, self._wire)

    @torch.no_grad()
    def run(self, patience: Patience | None = None) -> Moved:
        """Moves the weights. Every rank of the plan must call it; returns when this rank's tensors are complete.

        On a GPU all of it is put into queues: two steps are under way, and what is copied here (packing, unpacking, what this
        rank keeps) runs beside them. Raises DeadlineError where it takes longer than it may.
        """
        patience = patience or Patience()
        shares = _shares(self._copies, max(len(self._steps), 1))
        copied = _copy(shares.pop()) if not self._steps else 0
        sent = received = messages = 0
        under_way: list[UnderWay] = []
        peers: set[int] = set()
        for step, copies in zip(self._steps, shares, strict=True):
            under_way.append(step.start(self.group))
            peers.update(under_way[-1].peers)
            copied += _copy(copies) + step.copied
            sent, received, messages = sent + step.sent, received + step.received, messages + step.messages
            if len(under_way) > 1:
                under_way.pop(0).finish(patience)
        for started in under_way:
            started.finish(patience)
        patience.device(self._device, "weights", peers)
        read = self._read_near(patience)
        return Moved(sent + self._near.sent_bytes, received + read, copied, messages, read)

    def _read_near(self, patience: Patience) -> int:
        """Copies from the memory of processes on this device, when their weights are complete. Returns bytes."""
        if not self._near.any:
            return 0
        self._all_here(patience, "its weights")
        for transfer in self._near.reads:
            self._to(transfer).copy_(self._near.value(transfer))
        self._all_here(patience, "the end of its reading")  # the next update may write
        return sum(transfer.bytes for transfer in self._near.reads)

    def _all_here(self, patience: Patience, what: str) -> None:
        import torch.distributed as dist

        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)
        ranks = range(max(self.plan.source.ranks, self.plan.target.ranks))
        patience.work(dist.barrier(self.group, async_op=True), what, ranks)

    def parts(self) -> dict[str, Callable[[], None]]:
        """The steps of `run` one kind at a time, to measure what each costs alone; `gather` and `send` are collective.

        Together they take longer than `run`, in which they overlap. Messages hold what their memory happens to hold.
        """
        rounds = [step for step in self._steps if isinstance(step, Round)]
        gathers = [step for step in self._steps if isinstance(step, GatherStep)]
        patience = Patience()

        def gather() -> None:
            for started in [step.start(self.group) for step in gathers]:
                started.finish(patience)

        def pack() -> None:
            for step in rounds:
                for message in step.sends:
                    message.pack(message.buffer())

        def send() -> None:
            for step in rounds:
                outgoing, incoming = ([message.buffer() for message in side] for side in (step.sends, step.receives))
                step.post(self.group, outgoing, incoming).finish(patience)

        def unpack() -> None:
            for step in rounds:
                for message in step.receives:
                    message.unpack(message.buffer())

        def copy() -> None:
            _copy(self._copies)

        return {"gather": gather, "pack": pack, "send": send, "unpack": unpack, "copy": copy}


def _copy(copies: Sequence[tuple[Tensor, Tensor]]) -> int:
    """Returns the bytes written."""
    if copies:
        torch._foreach_copy_([to for to, _ in copies], [values for _, values in copies])
    return sum(to.numel() * to.element_size() for to, _ in copies)


def _shares(copies: Sequence[tuple[Tensor, Tensor]], count: int) -> list[list[tuple[Tensor, Tensor]]]:
    """The copies in `count` parts of about as many elements, so that each runs beside a step."""
    total = sum(to.numel() for to, _ in copies)
    shares: list[list[tuple[Tensor, Tensor]]] = [[] for _ in range(count)]
    done = 0
    for pair in copies:
        shares[done * count // total].append(pair)
        done += pair[0].numel()
    return shares


def _can_gather(plan: Plan, places: Sequence[Place | None], group: Any) -> bool:
    """Whether tensors are gathered by collectives, where they can be: with NCCL. (Gloo's take thrice the time of messages.)"""
    return is_nccl(group) and len(places) == plan.target.ranks


def _wire(device: torch.device, group: Any) -> torch.device:
    """Where messages lie: gloo sends from the CPU's memory."""
    return torch.device("cpu") if device.type == "cuda" and not is_nccl(group) else device


def is_nccl(group: Any) -> bool:
    """Whether a process group sends from device to device."""
    import torch.distributed as dist

    return dist.is_initialized() and "nccl" in dist.get_backend(group)


def _slice(tensor: Tensor, box: Box, held: Box | None) -> Tensor:
    assert held is not None
    return tensor[box.within(held)]
