"""The hand-over of weights from a train engine to a rollout engine, verified each time."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from podium.core.errors import RolloutError
from podium.engines.layout import Box, Layout, TensorShards, gathered_layout, local_of
from podium.engines.train.single import own_tensors
from podium.hybrid.patience import Patience
from podium.hybrid.plan import Plan, make_plan
from podium.hybrid.transfer import Moved, Transport, is_nccl
from podium.hybrid.verify import check_canary, mismatched_tensors

Canary = Callable[[], tuple[Tensor, Tensor]]
"""Log-probs of a few fixed tokens: by the training side, by the generation side. Collective where the engines are."""


@dataclass(frozen=True)
class HandOverReport:
    """What a hand-over did on this rank: its version, bytes, seconds of the move, of the fingerprints, of the canary."""

    version: int
    moved: Moved
    seconds: float
    verify_seconds: float
    canary_seconds: float = 0.0


class HandOver(Protocol):
    """Gives the generation side the training side's weights of a version."""

    def __call__(self, version: int) -> HandOverReport: ...


class _WithCanary:
    """Runs the canary at every n-th hand-over."""

    def __init__(self, canary: Canary | None, every: int, tolerance: float) -> None:
        self._canary, self._every, self._tolerance, self._count = canary, every, tolerance, 0

    def run(self) -> float:
        """Seconds that it took. Raises RolloutError where the two sides differ."""
        self._count += 1
        if self._canary is None or not self._every or (self._count - 1) % self._every:
            return 0.0
        start = time.perf_counter()
        check_canary(*self._canary(), self._tolerance)
        return time.perf_counter() - start


class SharedHandOver:
    """Training and generation are the same memory: nothing moves. Checks that it still is.

    Raises RolloutError, naming the tensor, where the two sides' parameters are not the same memory, then and at any hand-over.
    """

    def __init__(
        self,
        trained: nn.Module,
        generating: nn.Module,
        *,
        canary: Canary | None = None,
        canary_every: int = 0,
        canary_tolerance: float = 0.05,
    ) -> None:
        self._canary = _WithCanary(canary, canary_every, canary_tolerance)
        addresses = {_address(p) for p in trained.parameters()}
        self._refuse([name for name, p in generating.named_parameters() if _address(p) not in addresses])
        # Walking a module's tree costs more than looking where its parameters were.
        self._places = [
            (f"{name}.{key}", module._parameters, key, _address(parameter))
            for side in (generating, trained)
            for name, module in side.named_modules()
            for key, parameter in module._parameters.items()
            if parameter is not None
        ]

    def __call__(self, version: int) -> HandOverReport:
        start = time.perf_counter()
        self._refuse([name for name, held, key, place in self._places if _address(held.get(key)) != place])
        seconds = time.perf_counter() - start
        return HandOverReport(version, Moved(), 0.0, seconds, self._canary.run())

    def _refuse(self, apart: list[str]) -> None:
        if apart:
            raise RolloutError(
                f"{len(apart)} parameters are not shared between training and generation, '{apart[0]}' first",
                where="hybrid.verify",
                remedy="give the rollout engine the very module that is trained, and update its parameters in place",
            )


def _address(parameter: Tensor | None) -> int | None:
    """Of a distributed one: of this rank's part. (To ask for that part in the usual way takes longer.)"""
    return None if parameter is None else getattr(parameter, "_local_tensor", parameter).data_ptr()


class MovedHandOver:
    """Training and generation have layouts of their own: carries out the plan between them, and checks what arrived.

    Args:
        source: this rank's training tensors by name, maybe distributed (`ShardedEngine.tensors()`).
        target: its generation tensors, by the same names; shards where `target_layout` says so.
        target_layout: of the generation side; None: every rank generates with the whole of what it was given.
        rank: this rank in `group`.
        only: names to move (the adapter's); None: all of the target's.
        rename: from a generation tensor's name to the training side's.
        verify: compare fingerprints after every hand-over.
        canary: log-probs of both sides, every `canary_every` hand-overs, within `canary_tolerance` nats.
        deadline_seconds: what moving and checking may take, each; 0: without end.

    Raises ConfigError where the two sides do not have the same tensors.
    """

    def __init__(
        self,
        source: Mapping[str, Tensor],
        target: Mapping[str, Tensor],
        *,
        target_layout: Layout | None = None,
        rank: int = 0,
        group: Any = None,
        only: Iterable[str] | None = None,
        rename: Callable[[str], str] = lambda name: name,
        verify: bool = True,
        canary: Canary | None = None,
        canary_every: int = 0,
        canary_tolerance: float = 0.05,
        bucket_bytes: int | None = None,
        deadline_seconds: float = 0.0,
    ) -> None:
        names = list(target if only is None else only)
        trained = {name: source[rename(name)] for name in names if rename(name) in source}
        have = gathered_layout(trained, group)
        want = (
            whole_on_every_rank({name: target[name] for name in names}, have.ranks) if target_layout is None else target_layout
        )
        self.plan: Plan = make_plan(have, want.select(names))
        self.rank, self.group, self._verify, self._deadline = rank, group, verify, deadline_seconds
        self.source = {name: local_of(tensor.detach()) for name, tensor in trained.items()}
        self.target = {name: target[name].detach() for name in names}
        options = {} if bucket_bytes is None else {"bucket_bytes": bucket_bytes}
        self.transport = Transport(self.plan, rank, self.source, self.target, group=group, **options)
        self._canary = _WithCanary(canary, canary_every, canary_tolerance)
        self._device = next((t.device for t in self.target.values()), torch.device("cpu"))

    def __call__(self, version: int) -> HandOverReport:
        """Moves and verifies.

        Raises RolloutError that names the tensor and rank where an element is not what it should be, DeadlineError that names
        the ranks that were waited for.
        """
        start = _now(self._device)
        moved = self.transport.run(self._patience())
        end = _now(self._device)
        if self._verify:
            self.check()
        verified = _now(self._device)
        return HandOverReport(version, moved, end - start, verified - end, self._canary.run())

    def check(self) -> None:
        """Compares fingerprints of both sides. Collective."""
        patience, everyone = self._patience(), range(self.plan.source.ranks)

        def wait(work: Any) -> None:
            patience.work(work, "fingerprints", everyone)
            patience.device(self._device, "fingerprints", everyone)

        odd = mismatched_tensors(self.plan, self.rank, self.source, self.target, self.group, wait)
        if odd:
            name, rank = odd[0]
            raise RolloutError(
                f"after the hand-over '{name}' on rank {rank} is not what training holds ({len(odd)} such shards)",
                where="hybrid.verify",
                remedy="nothing was sampled from it; resume from the last checkpoint, and report this",
            )

    def _patience(self) -> Patience:
        return Patience(self._deadline, self.rank, queued=is_nccl(self.group))


def hand_over_between(engine: Any, generating: nn.Module, **options: Any) -> HandOver:
    """The hand-over from an engine of a role's model to the module that a rollout engine runs.

    The same module: nothing moves. Another one, which has whole weights on every rank: what a rank lacks is sent to it. Of
    a model that trains in part (LoRA) everything is moved once, here, and the trained part from then on. Collective.

    Args:
        generating: the `transformers` model of the rollout engine, as the engine has laid it out.
        options: `verify`, `canary`, `canary_every`, `canary_tolerance`, `bucket_bytes`, `deadline_seconds`.
    """
    context = getattr(engine, "context", None)
    tensors = own_tensors(engine.model)
    mine = {id(module): name for name, module in engine.model.named_modules()}
    if id(generating) in mine and not any(hasattr(t, "placements") for t in tensors.values()):
        kept = {name: value for name, value in options.items() if name.startswith("canary")}
        return SharedHandOver(engine.model, generating, **kept)
    target = own_tensors(generating)
    prefix = prefix_of(tensors, target)
    rank = context.rank if context is not None else 0

    def moved(names: Iterable[str] | None, **how: Any) -> MovedHandOver:
        return MovedHandOver(tensors, target, rank=rank, rename=lambda name: prefix + name, only=names, **how)

    frozen = {name for name, p in engine.model.named_parameters() if not p.requires_grad}
    trained = [name for name in target if prefix + name not in frozen]
    if len(trained) == len(target):
        return moved(None, **options)
    moved(None)(engine.policy_version)
    return moved(trained, **options)


def prefix_of(tensors: Mapping[str, Tensor], target: Mapping[str, Any]) -> str:
    """What stands before the generation side's names on the training side (`model.` where a role's model is around it)."""
    first = next(iter(target))
    ends = [name.removesuffix(first) for name in tensors if name == first or name.endswith("." + first)]
    return next((prefix for prefix in ends if all(prefix + name in tensors for name in target)), "")


def whole_on_every_rank(tensors: Mapping[str, Tensor], ranks: int) -> Layout:
    """Every rank generates with all of these tensors."""
    shards = {
        name: TensorShards(tuple(t.shape), t.dtype, (Box.whole(t.shape),) * ranks if t.numel() else (None,) * ranks)
        for name, t in tensors.items()
    }
    return Layout(ranks, shards)


def _now(device: torch.device) -> float:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return time.perf_counter()
