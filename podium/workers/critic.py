"""The critic: a value before every token."""

from __future__ import annotations

from typing import Any

from podium.controller.dispatch import dispatch
from podium.core.batch import Batch
from podium.core.metrics import Metrics
from podium.workers.base import TrainedRole


class CriticWorker(TrainedRole):
    """A value model with its optimizer."""

    @dispatch("rows")
    def compute_values(self, batch: Batch) -> Batch:
        """`values`: what the critic expects from the state before each response token."""
        return Batch({"values": self.engine.compute(batch, ("values",))["values"]})

    @dispatch("rows")
    def update_critic(self, batch: Batch, loss: Any = None) -> Metrics:
        """Fits the values to `returns`."""
        return self.update(batch, loss)
