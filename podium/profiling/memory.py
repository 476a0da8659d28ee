"""Memory by owner: weights, masters, moments, gradients, the rollout's cache, and what the largest update adds."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn


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
        state = optimizer.state_dict()
        self._add("fp32 masters", role, _tensors(state.get("masters")))
        self._add("AdamW's moments", role, _tensors(state.get("moments")))

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
    """Bytes of the gradients that an optimizer is about to use: all, and those of parameters that are their own masters.

    None for an optimizer that does not show them.
    """
    masters = getattr(optimizer, "_masters", None)
    if not isinstance(masters, dict):
        return None
    parameters = getattr(optimizer, "_parameters", {})
    sizes = {name: m.grad.nbytes for name, m in masters.items() if getattr(m, "grad", None) is not None}
    return sum(sizes.values()), sum(n for name, n in sizes.items() if masters[name] is parameters.get(name))


def largest_rise(recorded: Any) -> int:
    """By how much a CPU's memory rose at most above where it stood, in bytes, from a profile with `profile_memory`."""
    events = [e for e in recorded.profiler.kineto_results.events() if e.name() == "[memory]"]
    held = most = 0
    for event in sorted(events, key=lambda e: e.start_ns()):
        if event.device_type() == torch.autograd.DeviceType.CPU:
            held += event.nbytes()
            most = max(most, held)
    return most
