"""Tensors that every rank needs whole and has an equal stretch of: collectives bring each rank just what it lacks.

From FSDP to whole copies that is nearly all of a model. Many tensors go into one launch: of 7B over two H200, a collective for
each tensor took 32.8 ms, in groups of 2 GiB 26.3 ms; one all-gather of as many bytes takes 24.2 ms, messages 31 ms and more.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

from torch import Tensor

from podium.engines.layout import Box
from podium.hybrid.messages import UnderWay
from podium.hybrid.plan import Plan

GROUP_BYTES = 2 << 30
"""Of whole tensors in one launch: the first groups are on their way while later ones are cast."""


def gathered_names(plan: Plan) -> list[str]:
    """The tensors that can be gathered: of the plan's ranks each holds the rows that are its turn, and needs all."""
    ranks = plan.source.ranks
    if ranks != plan.target.ranks or ranks == 1:
        return []
    names = []
    for name, wanted in plan.target.tensors.items():
        whole = Box.whole(wanted.shape)
        rows = wanted.shape[0] if wanted.shape else 0
        if not rows or rows % ranks or any(box != whole for box in wanted.boxes):
            continue
        each = rows // ranks
        turns = tuple(Box((r * each, *whole.start[1:]), ((r + 1) * each, *whole.stop[1:])) for r in range(ranks))
        if plan.source.tensors[name].boxes == turns:
            names.append(name)
    return names


@dataclass(frozen=True)
class Gather:
    """One tensor's, on one rank.

    Args:
        source: this rank's rows, as training holds them.
        whole: the generation tensor.
        own: its rows that are this rank's.
    """

    source: Tensor
    whole: Tensor
    own: Tensor

    def ready(self) -> tuple[Tensor, Tensor]:
        """Where the collective writes, and what this rank gives: memory of the generation tensor's dtype, in one piece.

        What has to be cast is cast into the generation tensor, where this rank needs it anyway, and sent from there.
        """
        out = self.whole if self.whole.is_contiguous() else self.whole.new_empty(self.whole.shape)
        if self.source.dtype == out.dtype and self.source.is_contiguous():
            return out, self.source
        mine = self.own if out is self.whole else self.own.new_empty(self.own.shape)
        return out, mine.copy_(self.source)


@dataclass(frozen=True)
class GatherStep:
    """Tensors that are gathered by one launch.

    Args:
        ranks: how many there are.
    """

    gathers: Sequence[Gather]
    ranks: int

    @property
    def sent(self) -> int:
        """Bytes: each other rank gets this one's rows."""
        return self.copied * (self.ranks - 1)

    @property
    def received(self) -> int:
        return sum(gather.whole.nbytes for gather in self.gathers) - self.copied

    @property
    def copied(self) -> int:
        """Bytes that this rank has already, in the generation tensors' dtype."""
        return sum(gather.own.nbytes for gather in self.gathers)

    @property
    def messages(self) -> int:
        return len(self.gathers)

    def start(self, group: Any) -> UnderWay:
        """Sends this rank's rows to all, and gets theirs. Collective."""
        ready = [gather.ready() for gather in self.gathers]
        arrived = [
            partial(gather.whole.copy_, out)
            for gather, (out, _) in zip(self.gathers, ready, strict=True)
            if out is not gather.whole
        ]
        return UnderWay(all_gather(ready, group), range(self.ranks), ready, arrived)


def gather_steps(gathers: Sequence[Gather], ranks: int) -> list[GatherStep]:
    """Those of one dtype go together, in their order. Every rank cuts alike, as a whole tensor has the same size on all."""
    steps: list[list[Gather]] = []
    room = 0
    for gather in sorted(gathers, key=lambda gather: str(gather.whole.dtype)):
        if not steps or gather.whole.nbytes > room or gather.whole.dtype != steps[-1][0].whole.dtype:
            steps.append([])
            room = GROUP_BYTES
        steps[-1].append(gather)
        room -= gather.whole.nbytes
    return [GatherStep(step, ranks) for step in steps]


def all_gather(pairs: Sequence[tuple[Tensor, Tensor]], group: Any = None) -> list[Any]:
    """For each (`whole`, `own`), every rank's `own` end to end in `whole`, in one launch: the works to wait for. Collective.

    `own` may be its own part of `whole`.
    """
    import torch.distributed as dist

    # The older name still works in torch 2.13, with a warning; 2.11 has no other. The manager is private, but it is the one
    # way to several collectives in one launch that both have.
    call = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
    with dist._coalescing_manager(group, async_ops=True) as manager:
        for whole, own in pairs:
            call(whole, own, group=group)
    return list(manager.works)
