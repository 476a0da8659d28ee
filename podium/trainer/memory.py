"""What a run's own process holds from step to step, and in which stage it grew: what the doctor finds leaks from."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator
from contextlib import contextmanager

import torch

from podium.core.metrics import Metrics
from podium.core.resident import resident_mb


class MemoryWatch:
    """Counts, since this process began the run, by how much its resident memory grew inside each stage.

    Stages that run at the same time in threads (Ray) share what grows meanwhile; workers in other processes are not counted.
    """

    def __init__(self) -> None:
        self.steps = 0
        self._grown: defaultdict[str, float] = defaultdict(float)

    @contextmanager
    def inside(self, stage: str) -> Iterator[None]:
        before = resident_mb()
        try:
            yield
        finally:
            after = resident_mb()
            if before is not None and after is not None:
                self._grown[stage] += after - before

    def step_done(self, metrics: Metrics) -> None:
        """Adds `memory/host_mb`, `memory/<stage>_mb` (grown inside it so far), `memory/steps` (made by this process), and
        on a GPU `memory/gpu_mb` (held by tensors between steps).
        """
        self.steps += 1
        held = resident_mb()
        if held is not None:
            metrics.add("memory/host_mb", held)
            metrics.add("memory/steps", float(self.steps))
            for stage, grown in self._grown.items():
                metrics.add(f"memory/{stage}_mb", grown)
        if torch.cuda.is_available() and torch.cuda.is_initialized():
            metrics.add("memory/gpu_mb", torch.cuda.memory_allocated() / 1e6)
