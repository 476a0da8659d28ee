"""Carries out a plan: nothing where memory is shared, copies on the spot, messages between ranks in buckets.

Processes of one device read from each other's memory (`same_device.py`).
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from podium.engines.layout import Box
from podium.hybrid.patience import Patience
from podium.hybrid.plan import Plan, Transfer
from podium.hybrid.same_device import Neighbours, is_near, places_of

BUCKET_BYTES = 256 << 20
"""Messages are put together up to so many bytes."""
ALONE_BYTES = 1 << 20
"""A transfer of at least so many bytes is not copied together with others."""


@dataclass(frozen=True)
class Moved:
    """What one rank's part of a hand-over did, in bytes (of the generation's dtype), counted as it was done."""

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
        self._copies = [t for t in plan.kept if t.receiver == rank and not self._shared(t)]
        self._device = next(iter({**source, **target}.values())).device
        places = places_of(self._device, group) if plan.sent else []
        self._near = Neighbours(plan, rank, source, places, group)
        far = [t for t in plan.sent if not is_near(t, places)]
        self._wire = _wire(self._device, group) if plan.sent else self._device
        self._rounds = _rounds(far, rank, bucket_bytes)

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

    @torch.no_grad()
    def run(self, patience: Patience | None = None) -> Moved:
        """Moves the weights. Every rank of the plan must call it; returns when this rank's tensors are complete.

        Raises DeadlineError where it takes longer than it may.
        """
        patience = patience or Patience()
        sent = received = messages = 0
        under_way: list[_Round] = []
        for messages_of_round in self._rounds:
            under_way.append(self._start(messages_of_round))
            if len(under_way) > 1:
                self._finish(under_way.pop(0), patience)
            sent += sum(t.bytes for _, batch in messages_of_round.sends for t in batch)
            received += sum(t.bytes for _, batch in messages_of_round.receives for t in batch)
            messages += len(messages_of_round.sends)
        copied = 0
        for transfer in self._copies:  # while the last messages are under way
            self._to(transfer).copy_(self._from(transfer))
            copied += transfer.bytes
        for started in under_way:
            self._finish(started, patience)
        patience.device(self._device, "weights", self._peers)
        read = self._read_near(patience)
        return Moved(sent + self._near.sent_bytes, received + read, copied, messages, read)

    def _read_near(self, patience: Patience) -> int:
        """Copies from the memory of processes on this device, when their weights are complete."""
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

    @property
    def _peers(self) -> set[int]:
        return {peer for messages in self._rounds for peer, _ in (*messages.sends, *messages.receives)}

    # ------------------------------------------------------------------ messages

    def _start(self, messages: _Messages) -> _Round:
        import torch.distributed as dist

        operations: list[Any] = []
        peers: list[int] = []
        incoming: list[tuple[list[Transfer], Tensor]] = []
        for peer, batch in messages.sends:
            for members in self._operations(batch):
                operations.append(dist.P2POp(dist.isend, self._pack(members), group=self.group, group_peer=peer))
                peers.append(peer)
        for peer, batch in messages.receives:
            for members in self._operations(batch):
                buffer = self._buffer(members)
                operations.append(dist.P2POp(dist.irecv, buffer, group=self.group, group_peer=peer))
                incoming.append((members, buffer))
                peers.append(peer)
        return _Round(dist.batch_isend_irecv(operations) if operations else [], operations, peers, incoming)

    def _operations(self, batch: Sequence[Transfer]) -> list[list[Transfer]]:
        """Transfers that go together: large ones alone (from and to where they lie, if they lie in one piece), small ones by
        dtype. Both ends see the same.
        """
        alone = [[transfer] for transfer in batch if transfer.bytes >= ALONE_BYTES]
        small: dict[torch.dtype, list[Transfer]] = defaultdict(list)
        for transfer in batch:
            if transfer.bytes < ALONE_BYTES:
                small[self._dtype(transfer)].append(transfer)
        return alone + list(small.values())

    def _pack(self, members: Sequence[Transfer]) -> Tensor:
        """The transfers' values in the target's dtype, end to end."""
        if len(members) == 1:
            values = self._from(members[0])
            if values.is_contiguous() and values.dtype == self._dtype(members[0]) and values.device == self._wire:
                return values.view(-1)
        flat = self._empty(members)
        for transfer, part in _parts(members, flat):
            part.copy_(self._from(transfer))
        return flat

    def _buffer(self, members: Sequence[Transfer]) -> Tensor:
        if len(members) == 1 and (place := self._to(members[0])).is_contiguous() and place.device == self._wire:
            return place.view(-1)
        return self._empty(members)

    def _empty(self, members: Sequence[Transfer]) -> Tensor:
        return torch.empty(sum(t.box.size for t in members), dtype=self._dtype(members[0]), device=self._wire)

    def _finish(self, started: _Round, patience: Patience) -> None:
        # One work for all operations (NCCL), or one for each.
        each = len(started.works) == len(started.peers)
        for number, work in enumerate(started.works):
            patience.work(work, "weights", [started.peers[number]] if each else started.peers)
        for members, flat in started.incoming:
            if flat.data_ptr() == self._to(members[0]).data_ptr():
                continue
            for transfer, part in _parts(members, flat):
                self._to(transfer).copy_(part)

    def _dtype(self, transfer: Transfer) -> torch.dtype:
        return self.plan.target.tensors[transfer.name].dtype


@dataclass(frozen=True)
class _Messages:
    """One round of a rank: (peer, transfers) to send and to receive."""

    sends: list[tuple[int, list[Transfer]]]
    receives: list[tuple[int, list[Transfer]]]


@dataclass(frozen=True)
class _Round:
    works: list[Any]
    operations: list[Any]  # their buffers are kept until they are sent
    peers: list[int]  # of each operation
    incoming: list[tuple[list[Transfer], Tensor]]


def _wire(device: torch.device, group: Any) -> torch.device:
    """Where messages lie: gloo sends from the CPU's memory."""
    return torch.device("cpu") if device.type == "cuda" and not is_nccl(group) else device


def is_nccl(group: Any) -> bool:
    """Whether a process group sends from device to device."""
    import torch.distributed as dist

    return dist.is_initialized() and "nccl" in dist.get_backend(group)


def _rounds(transfers: Sequence[Transfer], rank: int, bucket_bytes: int) -> list[_Messages]:
    """Transfers between each pair of ranks, in the plan's order, cut into messages; the k-th of each pair go in round k.

    Both ends cut alike, as they see the same list.
    """
    pairs: dict[tuple[int, int], list[list[Transfer]]] = defaultdict(list)
    for transfer in transfers:
        if rank in (transfer.sender, transfer.receiver):
            messages = pairs[transfer.sender, transfer.receiver]
            for piece in _pieces(transfer, bucket_bytes):
                if not messages or sum(t.bytes for t in messages[-1]) + piece.bytes > bucket_bytes:
                    messages.append([])
                messages[-1].append(piece)
    count = max((len(messages) for messages in pairs.values()), default=0)
    rounds = []
    for k in range(count):
        now = [(pair, messages[k]) for pair, messages in sorted(pairs.items()) if k < len(messages)]
        sends = [(receiver, batch) for (sender, receiver), batch in now if sender == rank]
        rounds.append(_Messages(sends, [(sender, batch) for (sender, receiver), batch in now if receiver == rank]))
    return rounds


def _pieces(transfer: Transfer, most: int) -> list[Transfer]:
    """A transfer cut along its first dimension into pieces of at most `most` bytes, as far as that goes."""
    box = transfer.box
    if transfer.bytes <= most or not box.shape or box.shape[0] == 1:
        return [transfer]
    rows, each = box.shape[0], transfer.bytes // box.shape[0]
    step, pieces = max(1, most // each), []
    for first in range(0, rows, step):
        last = min(first + step, rows)
        part = Box((box.start[0] + first, *box.start[1:]), (box.start[0] + last, *box.stop[1:]))
        pieces.append(Transfer(transfer.name, part, transfer.sender, transfer.receiver, (last - first) * each))
    return pieces


def _parts(members: Sequence[Transfer], flat: Tensor) -> Iterator[tuple[Transfer, Tensor]]:
    """Each transfer's part of a flat buffer, in its shape."""
    at = 0
    for transfer in members:
        yield transfer, flat[at : at + transfer.box.size].view(transfer.box.shape)
        at += transfer.box.size


def _slice(tensor: Tensor, box: Box, held: Box | None) -> Tensor:
    assert held is not None
    return tensor[box.within(held)]
