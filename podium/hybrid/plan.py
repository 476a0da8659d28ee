"""From a training layout to a generation layout: who sends which box to whom. A pure function of two layouts.

What a rank needs and holds already is never sent. HybridFlow (arXiv:2409.19256, section 5.3) gets there with micro
data-parallel groups; here they follow from intersecting boxes, for any two layouts.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable
from dataclasses import dataclass
from functools import cached_property

from podium.core.errors import ConfigError
from podium.engines.layout import Box, Layout, TensorShards


@dataclass(frozen=True)
class Transfer:
    """A box of a tensor that `receiver` needs and `sender` holds. Equal ranks: a copy on the spot, or nothing."""

    name: str
    box: Box
    sender: int
    receiver: int
    bytes: int


@dataclass(frozen=True)
class Plan:
    """All transfers of one hand-over. `kept` are those from a rank to itself, `sent` the others."""

    source: Layout
    target: Layout
    kept: tuple[Transfer, ...]
    sent: tuple[Transfer, ...]

    def received_bytes(self, rank: int) -> int:
        return self._received[rank]

    def sent_bytes(self, rank: int) -> int:
        return self._sent[rank]

    @property
    def total_bytes(self) -> int:
        """Bytes that cross from one rank to another."""
        return sum(transfer.bytes for transfer in self.sent)

    def peak_bytes(self, rank: int) -> int:
        """Weights in a rank's memory while it generates: what it needs, and what it holds beyond that."""
        return self.target.bytes_of(rank) + self.redundant_bytes(rank)

    def redundant_bytes(self, rank: int) -> int:
        """What a rank holds for training that is no part of what it generates with: the paper's redundancy."""
        kept = sum(transfer.bytes for transfer in self.kept if transfer.receiver == rank)
        return self.source.bytes_of(rank) - kept

    @cached_property
    def _received(self) -> dict[int, int]:
        return _sums((transfer.receiver, transfer.bytes) for transfer in self.sent)

    @cached_property
    def _sent(self) -> dict[int, int]:
        return _sums((transfer.sender, transfer.bytes) for transfer in self.sent)


def _sums(items: Iterable[tuple[int, int]]) -> dict[int, int]:
    sums: dict[int, int] = defaultdict(int)
    for key, value in items:
        sums[key] += value
    return sums


def make_plan(source: Layout, target: Layout) -> Plan:
    """The transfers that give each rank of `target` its boxes, from the ranks of `source`.

    Each element that a rank lacks is sent to it once. Where several ranks hold a box, the one that has sent the least so
    far sends it (then the nearest rank, then the lowest). Bytes are in the target's dtype: the sender casts.

    Raises ConfigError where the layouts name other tensors or shapes, or an element that is needed is held by nobody.
    """
    _check(source, target)
    kept: list[Transfer] = []
    sent: list[Transfer] = []
    load: dict[int, int] = defaultdict(int)
    for name, wanted in target.tensors.items():
        for receiver, need in enumerate(wanted.boxes):
            if need is None:
                continue
            held = source.tensors[name].boxes[receiver] if receiver < source.ranks else None
            own = need & held if held is not None else None
            if own is not None:
                kept.append(Transfer(name, own, receiver, receiver, wanted.bytes_of(own)))
            for transfer in _fetch(name, need - own if own else [need], receiver, source.tensors[name], wanted, load):
                load[transfer.sender] += transfer.bytes
                sent.append(transfer)
    return Plan(source, target, tuple(kept), tuple(sent))


def _fetch(
    name: str, missing: list[Box], receiver: int, shards: TensorShards, wanted: TensorShards, load: dict[int, int]
) -> list[Transfer]:
    """Transfers that cover `missing`, each element once."""
    out: list[Transfer] = []
    order = sorted(
        (rank for rank, box in enumerate(shards.boxes) if box is not None and rank != receiver),
        key=lambda rank: (load[rank], abs(rank - receiver), rank),
    )
    for sender in order:
        holds, rest = shards.boxes[sender], []
        assert holds is not None
        for box in missing:
            common = box & holds
            if common is None:
                rest.append(box)
                continue
            out.append(Transfer(name, common, sender, receiver, wanted.bytes_of(common)))
            rest += box - common
        missing = rest
        if not missing:
            return out
    if missing:
        raise ConfigError(f"no rank holds {missing[0]} of '{name}'", where="hybrid.plan")
    return out


def _check(source: Layout, target: Layout) -> None:
    for name, wanted in target.tensors.items():
        there = source.tensors.get(name)
        if there is None or there.shape != wanted.shape:
            raise ConfigError(
                f"generation needs '{name}' of shape {list(wanted.shape)}; training has "
                + (f"the shape {list(there.shape)}" if there else "no such tensor"),
                where="hybrid.plan",
                remedy="build both engines from the same model",
            )


# ------------------------------------------------------------------ which rank generates with which shard


def place_generation(source: Layout, target: Layout) -> tuple[Layout, list[int]]:
    """The target's shards dealt to the ranks so that each keeps as much as it can of what it holds already.

    Positions of the target with the same boxes (copies) are interchangeable, so ranks are matched to such classes: best
    overlaps first, then pairs are exchanged as long as that keeps more. For the paper's layouts (training p-t-d, generation
    p_g-t_g with t_g dividing t and p_g dividing p) every rank's training shard lies within its generation shard.

    Returns:
        the target as it lies on the ranks, and for each of its positions the rank that takes it.
    """
    if source.ranks != target.ranks:
        raise ConfigError(
            f"training has {source.ranks} ranks and generation {target.ranks}",
            where="hybrid.place_generation",
            remedy="ranks can only be chosen among the same; split placements take the target as it is",
        )
    classes: dict[tuple[Box | None, ...], list[int]] = defaultdict(list)
    for position in range(target.ranks):
        classes[tuple(tensor.boxes[position] for tensor in target.tensors.values())].append(position)
    positions = list(classes.values())
    overlap = [[_overlap(source, rank, target, members[0]) for members in positions] for rank in range(source.ranks)]
    chosen = _match(overlap, [len(members) for members in positions])
    free = [list(members) for members in positions]
    rank_of = [0] * target.ranks
    for rank, number in enumerate(chosen):
        rank_of[free[number].pop(0)] = rank
    return target.placed(rank_of), rank_of


def _overlap(source: Layout, rank: int, target: Layout, position: int) -> int:
    total = 0
    for name, wanted in target.tensors.items():
        need, held = wanted.boxes[position], source.tensors[name].boxes[rank]
        if need is not None and held is not None:
            total += wanted.bytes_of(need & held)
    return total


def _match(overlap: list[list[int]], capacity: list[int]) -> list[int]:
    """A class for each rank, within the classes' capacities: greedy, then exchanges while any keeps more."""
    left, chosen = list(capacity), [-1] * len(overlap)
    pairs = sorted((-kept, rank, number) for rank, row in enumerate(overlap) for number, kept in enumerate(row))
    for _, rank, number in pairs:
        if chosen[rank] < 0 and left[number]:
            chosen[rank] = number
            left[number] -= 1
    better = True
    while better:
        better = False
        for a in range(len(chosen)):
            for b in range(a):
                x, y = chosen[a], chosen[b]
                if overlap[a][y] + overlap[b][x] > overlap[a][x] + overlap[b][y]:
                    chosen[a], chosen[b], better = y, x, True
    return chosen
