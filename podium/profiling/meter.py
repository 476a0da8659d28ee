"""Counts what the roles of a run do in a step: which role computed how many tokens, in which stage, of how many operations."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

from torch import nn

from podium.core.batch import Batch
from podium.profiling.flops import ModelCost, Rows
from podium.profiling.memory import gradients_of


@dataclass
class Count:
    """What one stage's calls came to."""

    tokens: int = 0
    flops: float = 0.0
    generated: int = 0
    """Tokens that were sampled."""


@dataclass
class Meter:
    """What was counted; `stage` is where the run is now (empty: in none)."""

    stage: str = ""
    gradients: dict[str, tuple[int, int]] = field(default_factory=dict)
    """By role, of its last update: all, and those of parameters that are their own masters (bytes)."""
    cache: int | None = None
    """The most that a rollout engine's cache held (bytes); None: no engine said."""
    costs: dict[str, ModelCost] = field(default_factory=dict)
    _passes: list[tuple[str, str, ModelCost, Batch]] = field(default_factory=list)

    def clear(self) -> None:
        """Forgets the passes; `cache` and `gradients` go on."""
        self._passes = []

    def saw(self, kind: str, cost: ModelCost, batch: Batch) -> None:
        """A pass over a batch. It is kept and counted later, so that counting takes no time from the step."""
        self._passes.append((self.stage, kind, cost, batch.select("prompt_ids", "response_ids")))

    def saw_cache(self, engine: Any) -> None:
        held = getattr(engine, "cache_bytes", None)
        if held is not None:
            self.cache = max(self.cache or 0, int(held))

    def counts(self) -> dict[str, Count]:
        """By stage."""
        found: dict[str, Count] = {}
        for stage, kind, cost, batch in self._passes:
            rows = Rows.of(batch, shared=cost.packs or kind == "generate")
            count = found.setdefault(stage, Count())
            count.tokens += rows.tokens
            count.flops += cost.update(rows) if kind == "update" else cost.forward(rows)
            count.generated += int(batch.lengths("response").sum()) if kind == "generate" else 0
        return found


@contextmanager
def counted(roles: Mapping[str, Any], meter: Meter) -> Iterator[None]:
    """While it lasts, the calls of these roles' workers (in this process) are counted in `meter`."""
    put: list[tuple[Any, str]] = []

    def wrap(owner: Any, name: str, make: Callable[[Callable[..., Any]], Callable[..., Any]]) -> None:
        setattr(owner, name, make(getattr(owner, name)))
        put.append((owner, name))

    try:
        for role, handle in roles.items():
            for worker in handle.workers:
                _wrap_worker(wrap, role, worker, meter)
        yield
    finally:
        for owner, name in put:
            delattr(owner, name)  # the instance's own attribute hides the class's method


def _wrap_worker(wrap: Callable[..., None], role: str, worker: Any, meter: Meter) -> None:
    engine = worker.engine
    if isinstance(getattr(engine, "model", None), nn.Module):
        cost = meter.costs[role] = ModelCost(engine.model)
        wrap(engine, "compute", lambda call: _pass(call, "forward", cost, meter))
        if getattr(engine, "_optimizer", None) is not None:
            wrap(engine, "update", lambda call: _pass(call, "update", cost, meter))
            wrap(engine._optimizer, "step", lambda call: _step(call, role, engine._optimizer, meter))
        if getattr(worker, "rollout", None) is not None:
            wrap(worker, "generate_sequences", lambda call: _generate(call, cost, worker, meter))


def _pass(call: Callable[..., Any], kind: str, cost: ModelCost, meter: Meter) -> Callable[..., Any]:
    def run(batch: Batch, *args: Any, **kwargs: Any) -> Any:
        meter.saw(kind, cost, batch)
        return call(batch, *args, **kwargs)

    return run


def _step(call: Callable[..., Any], role: str, optimizer: Any, meter: Meter) -> Callable[..., Any]:
    def step(*args: Any, **kwargs: Any) -> Any:
        found = gradients_of(optimizer)
        if found is not None:
            meter.gradients[role] = found
        return call(*args, **kwargs)

    return step


def _generate(call: Callable[..., Batch], cost: ModelCost, worker: Any, meter: Meter) -> Callable[..., Batch]:
    def generate_sequences(prompts: Batch, *args: Any, on_progress: Any = None, **kwargs: Any) -> Batch:
        def watched(done: int, total: int, tokens: int) -> None:
            meter.saw_cache(worker.rollout)
            if on_progress is not None:
                on_progress(done, total, tokens)

        out = call(prompts, *args, on_progress=watched, **kwargs)
        meter.saw("generate", cost, out)
        return out

    return generate_sequences
