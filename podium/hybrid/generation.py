"""Generation by ranks that have one copy of the model between them, from whatever layout training has."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import torch
from torch import Tensor

from podium.core.ranks import Ranks, WorkerContext
from podium.engines.layout import box_of, gathered_layout, local_of
from podium.engines.rollout.divided import WHERE, DividedModel, tensor_layout
from podium.engines.train.single import own_tensors
from podium.hybrid.engine import HandOver, MovedHandOver, SharedHandOver, prefix_of
from podium.hybrid.plan import place_generation
from podium.models.divided import TensorRanks


@dataclass(frozen=True)
class GenerationGroups:
    """Which ranks generate with which copy.

    Args:
        copies: for each copy of the model its ranks, by their tensor rank.
    """

    copies: tuple[tuple[int, ...], ...]

    @classmethod
    def placed(cls, rank_of: Sequence[int], size: int) -> GenerationGroups:
        """From the rank that takes each position of a layout (`place_generation`)."""
        return cls(tuple(tuple(rank_of[at : at + size]) for at in range(0, len(rank_of), size)))

    def tensor_ranks(self, rank: int, timeout: timedelta) -> TensorRanks:
        """This rank's copy, with process groups of its own. Collective over all ranks."""
        import torch.distributed as dist

        if all(len(ranks) == 1 for ranks in self.copies):
            return TensorRanks(0, 1, None, None)
        found: TensorRanks | None = None
        for ranks in self.copies:
            group = dist.new_group(list(ranks), timeout=timeout)
            control = dist.new_group(list(ranks), timeout=timeout, backend="gloo")
            if rank in ranks:
                found = TensorRanks(ranks.index(rank), len(ranks), group, control)
        assert found is not None
        return found


class DividedGeneration:
    """The generation side of an actor whose weights are laid out otherwise than generation needs them.

    `model` is this rank's part (all of it, where a copy is one rank's), a `transformers` model for the rollout engine, with
    training's present weights. A tensor that training holds as generation needs it (TP training of the same size) is
    training's own memory; others are new memory, which every hand-over fills. Collective.

    Args:
        divided: made from the model before the engine cut it.
        engine: the actor's train engine.
        context: this worker's place.
        timeout: of the ranks' waits for each other.
        options: of the hand-over (`verify`, `canary`, `canary_every`, `canary_tolerance`, `bucket_bytes`, `deadline_seconds`).

    Raises ResourceError where the workers do not divide by the size.
    """

    def __init__(
        self, divided: DividedModel, engine: Any, context: WorkerContext, *, timeout: timedelta, **options: Any
    ) -> None:
        self._engine, self._rank, self._options = engine, context.rank, options
        ranks = Ranks.fit({"tensor": divided.size}, context.world_size, WHERE)
        tensors = own_tensors(engine.model)
        self._prefix = prefix_of(tensors, divided.shapes)
        self._trained = {name: tensors[self._prefix + name] for name in divided.shapes}
        wanted = tensor_layout(divided.shapes, ranks.tensor, ranks.data)
        self.layout, rank_of = place_generation(gathered_layout(self._trained), wanted)
        self.groups = GenerationGroups.placed(rank_of, ranks.tensor)
        self.ranks = self.groups.tensor_ranks(context.rank, timeout)
        device = torch.device(context.device)
        # FSDP keeps views of its own of the memory that it shards.
        in_place = context.ranks.shard == 1
        self._shared = [name for name in divided.shapes if in_place and self._is_there(name)]
        self._all_shared = _on_all(len(self._shared) == len(divided.shapes))
        own = {name: self._memory(name, device) for name in divided.shapes}
        self.model = divided.join(self.ranks, own)
        self._hand_over()(engine.policy_version)

    def _is_there(self, name: str) -> bool:
        """Whether training holds just what generation needs."""
        shards, tensor = self.layout.tensors[name], self._trained[name]
        same = box_of(tensor) == shards.boxes[self._rank] and tensor.dtype == shards.dtype
        return same and local_of(tensor).is_contiguous()

    def _memory(self, name: str, device: torch.device) -> Tensor:
        if name in self._shared:
            return local_of(self._trained[name])
        shards = self.layout.tensors[name]
        box = shards.boxes[self._rank]
        return torch.empty(box.shape if box else (0,), dtype=shards.dtype, device=device)

    def hand_over(self) -> HandOver:
        """What gives this side training's weights from now on; to be made when the rollout engine has laid out its model.

        Where the engine moved a tensor that is shared (it lays some out together), training follows. Collective.
        """
        for name in self._shared:
            place = self.model.get_parameter(name).detach()
            if place.data_ptr() != local_of(self._trained[name]).data_ptr():
                self._engine.follow(self._prefix + name, place)
        tensors = own_tensors(self._engine.model)
        self._trained = {name: tensors[self._prefix + name] for name in self._trained}
        return self._hand_over()

    def _hand_over(self) -> HandOver:
        if self._all_shared:
            kept = {name: value for name, value in self._options.items() if name.startswith("canary")}
            return SharedHandOver(self._engine.model, self.model, **kept)
        target = {name: self.model.get_parameter(name).detach() for name in self._trained}
        return MovedHandOver(self._trained, target, target_layout=self.layout, rank=self._rank, **self._options)


def _on_all(flag: bool) -> bool:
    import torch.distributed as dist

    flags: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(flags, flag)
    return all(flags)
