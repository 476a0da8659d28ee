"""What one rank sends to and receives from each other rank, cut into rounds of messages."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property, partial
from typing import Any

import torch
from torch import Tensor

from podium.engines.layout import Box
from podium.hybrid.patience import Patience
from podium.hybrid.plan import Transfer


@dataclass(frozen=True)
class Message:
    """Transfers to one peer or from it, end to end in the target's dtype.

    Args:
        places: this rank's side of each transfer: views, maybe strided or (of a sender) in another dtype.
        device: where messages lie.
    """

    peer: int
    places: list[Tensor]
    dtype: torch.dtype
    device: torch.device

    @cached_property
    def elements(self) -> int:
        return sum(place.numel() for place in self.places)

    @property
    def bytes(self) -> int:
        return self.elements * self.dtype.itemsize

    @cached_property
    def lies(self) -> Tensor | None:
        """The message as it lies in this rank's memory: it is sent from there, or received there, without a copy."""
        place = self.places[0]
        there = place.is_contiguous() and place.dtype == self.dtype and place.device == self.device
        return place.view(-1) if there and len(self.places) == 1 else None

    def buffer(self) -> Tensor:
        """Flat memory for it: its own place, or new."""
        if self.lies is not None:
            return self.lies
        return torch.empty(self.elements, dtype=self.dtype, device=self.device)

    def pack(self, flat: Tensor) -> None:
        """Copies (and casts) this rank's values into `buffer()`."""
        if flat is not self.lies:
            torch._foreach_copy_(self._parts(flat), self.places)

    def unpack(self, flat: Tensor) -> None:
        """Copies what arrived in `buffer()` to where it belongs."""
        if flat is not self.lies:
            torch._foreach_copy_(self.places, self._parts(flat))

    def _parts(self, flat: Tensor) -> list[Tensor]:
        parts = flat.split([place.numel() for place in self.places])
        return [part.view(place.shape) for part, place in zip(parts, self.places, strict=True)]


@dataclass(frozen=True)
class UnderWay:
    """What was started and is not waited for yet.

    Args:
        works: of the process group: one for all operations (NCCL), or one for each.
        peers: of each operation.
        kept: memory that must last until then.
        arrived: what is to be done afterwards.
    """

    works: Sequence[Any]
    peers: Sequence[int]
    kept: Sequence[Any]
    arrived: Sequence[Callable[[], Any]]

    def finish(self, patience: Patience) -> None:
        each = len(self.works) == len(self.peers)
        for number, work in enumerate(self.works):
            patience.work(work, "weights", [self.peers[number]] if each else self.peers)
        for after in self.arrived:
            after()


@dataclass(frozen=True)
class Round:
    """Messages that are under way together."""

    sends: list[Message]
    receives: list[Message]

    @property
    def sent(self) -> int:
        """Bytes."""
        return sum(message.bytes for message in self.sends)

    @property
    def received(self) -> int:
        return sum(message.bytes for message in self.receives)

    @property
    def copied(self) -> int:
        return 0

    @property
    def messages(self) -> int:
        return len(self.sends)

    def start(self, group: Any) -> UnderWay:
        """Packs what is to be sent, and posts all; what arrived is unpacked when that is finished."""
        outgoing = [message.buffer() for message in self.sends]
        for message, flat in zip(self.sends, outgoing, strict=True):
            message.pack(flat)
        incoming = [message.buffer() for message in self.receives]
        unpack = [partial(m.unpack, flat) for m, flat in zip(self.receives, incoming, strict=True)]
        return self.post(group, outgoing, incoming, unpack)

    def post(
        self, group: Any, outgoing: Sequence[Tensor], incoming: Sequence[Tensor], arrived: Sequence[Callable[[], Any]] = ()
    ) -> UnderWay:
        """Sends and receives buffers as they are."""
        import torch.distributed as dist

        operations = [
            dist.P2POp(way, flat, group=group, group_peer=message.peer)
            for way, messages, flats in ((dist.isend, self.sends, outgoing), (dist.irecv, self.receives, incoming))
            for message, flat in zip(messages, flats, strict=True)
        ]
        peers = [message.peer for message in (*self.sends, *self.receives)]
        return UnderWay(dist.batch_isend_irecv(operations) if operations else [], peers, operations, arrived)


def rounds_of(
    transfers: Sequence[Transfer],
    rank: int,
    cut: Cut,
    make: Callable[[int, bool, Sequence[Transfer]], Message],
) -> list[Round]:
    """A rank's transfers between each pair of ranks, in the plan's order; the k-th bucket of each pair goes in round k.

    Both ends cut alike, as they see the same list.

    Args:
        make: of (peer, whether it is sent, transfers), its message.
    """
    pairs: dict[tuple[int, int], list[Transfer]] = defaultdict(list)
    for transfer in transfers:
        if rank in (transfer.sender, transfer.receiver):
            pairs[transfer.sender, transfer.receiver].append(transfer)
    buckets = {pair: cut.buckets(pairs[pair]) for pair in sorted(pairs)}
    rounds = []
    for k in range(max(map(len, buckets.values()), default=0)):
        made = Round([], [])
        for (sender, receiver), of_pair in buckets.items():
            for members in cut.messages(of_pair[k]) if k < len(of_pair) else ():
                if sender == rank:
                    made.sends.append(make(receiver, True, members))
                else:
                    made.receives.append(make(sender, False, members))
        rounds.append(made)
    return rounds


@dataclass(frozen=True)
class Cut:
    """How transfers are put together.

    Args:
        bucket_bytes: of one pair of ranks in one round, at most; a larger transfer is cut.
        alone_bytes: a transfer of so many is a message of its own, so that it need not be copied; smaller ones go together.
        dtypes: of each tensor, on the way.
    """

    bucket_bytes: int
    alone_bytes: int
    dtypes: Mapping[str, torch.dtype]

    def buckets(self, transfers: Iterable[Transfer]) -> list[list[Transfer]]:
        """The transfers of a pair of ranks, by rounds."""
        buckets: list[list[Transfer]] = []
        room = 0
        for transfer in transfers:
            for piece in _pieces(transfer, self.bucket_bytes):
                if piece.bytes > room:
                    buckets.append([])
                    room = self.bucket_bytes
                buckets[-1].append(piece)
                room -= piece.bytes
        return buckets

    def messages(self, bucket: Iterable[Transfer]) -> list[list[Transfer]]:
        """The messages of a bucket: large transfers alone, small ones by dtype."""
        alone: list[list[Transfer]] = []
        small: dict[torch.dtype, list[Transfer]] = defaultdict(list)
        for transfer in bucket:
            if transfer.bytes >= self.alone_bytes:
                alone.append([transfer])
            else:
                small[self.dtypes[transfer.name]].append(transfer)
        return alone + list(small.values())


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
