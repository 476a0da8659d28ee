"""The critic: a value before every token."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from podium.controller.dispatch import dispatch
from podium.core.batch import Batch
from podium.core.metrics import Metrics
from podium.workers.advantages import estimate_advantages
from podium.workers.base import TrainedRole


class CriticWorker(TrainedRole):
    """A value model with its optimizer."""

    @dispatch("rows")
    def compute_values(self, batch: Batch, name: str = "values") -> Batch:
        """What the critic expects from the state before each response token, as the column `name`."""
        return Batch({name: self.engine.compute(batch, ("values",))["values"]})

    @dispatch("broadcast")
    def compute_advantages(self, sequences: Batch, rewards: Tensor, *, gamma: float = 1.0, gae_lambda: float = 0.95) -> Batch:
        """Values, token rewards, and GAE's `advantages` and `returns`, added to the sequences.

        Advantages are whitened over all rows.

        Args:
            sequences: with `prompt_ids`, `response_ids`, `response_mask`.
            rewards: one per response, `[B]`.
        """
        batch = sequences.with_columns({"rewards": rewards}).union(self.over_all_rows(sequences, self.compute_values))
        return estimate_advantages(batch, gamma=gamma, gae_lambda=gae_lambda)

    @dispatch("broadcast")
    def update_critic(self, batch: Batch, loss: Any = None) -> Metrics:
        """Fits the values to `returns`."""
        return self.update(batch, loss)
