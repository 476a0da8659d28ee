"""Memory by owner: weights, masters, moments, gradients, the rollout's cache, and what the largest update adds."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from podium.engines.train.optim import MasterAdamW


@dataclass
class Holding:
    """Bytes of one owner. `host`: of them outside the device (offloaded); None: not known."""

    owner: str
    role: str
    bytes: int | None
    host: int = 0


@dataclass
class Standing:
    """What of the roles' state stands at a step's border; storage that roles share counts for the first alone."""

    device: torch.device
    holdings: list[Holding] = field(default_factory=list)
    _seen: set[int] = field(default_factory=set)

    def add_role(self, role: str, engine: Any) -> None:
        model, optimizer = getattr(engine, "model", None), getattr(engine, "_optimizer", None)
        if not isinstance(model, nn.Module):
            self.holdings.append(Holding("weights", role, None))
            return
        self._add("weights", role, (*model.parameters(), *model.buffers()))
        if optimizer is None:
            return
        # A checkpoint leaves out masters that equal the weights; here it counts what is there. Both are seen once.
        self._add("fp32 masters", role, getattr(optimizer, "_masters", {}).values())
        self._add("AdamW's moments", role, _tensors(optimizer.state_dict().get("moments")))

    def _add(self, owner: str, role: str, tensors: Iterable[Tensor]) -> None:
        here = elsewhere = 0
        for tensor in tensors:
            tensor = getattr(tensor, "_local_tensor", tensor)
            storage = tensor.untyped_storage()
            if storage.data_ptr() in self._seen or not storage.nbytes():
                continue
            self._seen.add(storage.data_ptr())
            if tensor.device.type == self.device.type:
                here += storage.nbytes()
            else:
                elsewhere += storage.nbytes()
        if here or elsewhere:
            self.holdings.append(Holding(owner, role, here, elsewhere))

    @property
    def total(self) -> int:
        """Bytes on the device."""
        return sum(h.bytes or 0 for h in self.holdings)


def _tensors(state: Any) -> Iterator[Tensor]:
    """All tensors of nested dicts."""
    if isinstance(state, Tensor):
        yield state
    elif isinstance(state, dict):
        for value in state.values():
            yield from _tensors(value)


def gradients_of(optimizer: Any) -> tuple[int, int] | None:
    """Bytes of the gradients that an optimizer is about to use: all, and those that this update allocated.

    None for an optimizer that does not show them.
    """
    if not isinstance(optimizer, MasterAdamW):
        return None
    gradients = optimizer._gradients()
    total = sum(grad.nbytes for grad in gradients)
    if type(optimizer) is not MasterAdamW or not gradients or gradients[0].device.type != "cpu":
        return total, total
    # On a CPU the sum of a 16-bit parameter's gradients is kept from update to update.
    kept = {id(m) for name, m in optimizer._masters.items() if m is not optimizer._parameters[name]}
    return total, total - sum(m.grad.nbytes for m in optimizer._masters.values() if id(m) in kept and m.grad is not None)


def largest_rise(recorded: Any) -> int:
    """By how much a CPU's memory rose at most above where it stood, in bytes, from a profile with `profile_memory`."""
    events = [e for e in recorded.profiler.kineto_results.events() if e.name() == "[memory]"]
    held = most = 0
    for event in sorted(events, key=lambda e: e.start_ns()):
        if event.device_type() == torch.autograd.DeviceType.CPU:
            held += event.nbytes()
            most = max(most, held)
    return most
