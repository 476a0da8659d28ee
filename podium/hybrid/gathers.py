"""Tensors that every rank needs whole and has an equal stretch of: one collective brings each rank just what it lacks.

From FSDP to whole copies that is nearly all of a model. By messages, FSDP2 over two H200 to whole copies of 7B took 40.0 ms;
one all-gather of as many bytes takes 25.2 ms.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from torch import Tensor

from podium.engines.layout import Box
from podium.hybrid.messages import UnderWay
from podium.hybrid.plan import Plan


def gathered_names(plan: Plan, least_bytes: int) -> list[str]:
    """The tensors that can be gathered: of the plan's ranks each holds the rows that are its turn, and needs all.

    Args:
        least_bytes: of a rank's stretch; smaller tensors travel together, in messages.
    """
    ranks = plan.source.ranks
    if ranks != plan.target.ranks or ranks == 1:
        return []
    names = []
    for name, wanted in plan.target.tensors.items():
        whole = Box.whole(wanted.shape)
        rows = wanted.shape[0] if wanted.shape else 0
        if rows % ranks or wanted.bytes_of(whole) < least_bytes * ranks or any(box != whole for box in wanted.boxes):
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
        ranks: how many there are.
    """

    source: Tensor
    whole: Tensor
    own: Tensor
    ranks: int

    @property
    def sent(self) -> int:
        """Bytes: each other rank gets this one's rows."""
        return self.copied * (self.ranks - 1)

    @property
    def received(self) -> int:
        return self.whole.nbytes - self.copied

    @property
    def copied(self) -> int:
        """Bytes that this rank has already, in the generation tensor's dtype."""
        return self.own.numel() * self.own.element_size()

    @property
    def messages(self) -> int:
        return 1

    def start(self, group: Any) -> UnderWay:
        """Sends this rank's rows to all, and gets theirs. Collective.

        What has to be cast is cast into the generation tensor first, where this rank needs it anyway, and sent from there.
        """
        out = self.whole if self.whole.is_contiguous() else self.whole.new_empty(self.whole.shape)
        mine = self.source
        if mine.dtype != out.dtype or not mine.is_contiguous():
            mine = self.own if out is self.whole else self.own.new_empty(self.own.shape)
            mine.copy_(self.source)
        work = all_gather(out, mine, group)
        arrived = [] if out is self.whole else [lambda: self.whole.copy_(out)]
        return UnderWay([work], range(self.ranks), [out, mine], arrived)


def all_gather(whole: Tensor, own: Tensor, group: Any = None) -> Any:
    """Every rank's `own`, end to end in `whole`: the work to wait for. Collective; `own` may be its own part of `whole`."""
    import torch.distributed as dist

    # The older name still works in torch 2.13, with a warning; 2.11 has no other.
    call = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
    return call(whole, own, group=group, async_op=True)
