"""A reward model as a reward: the model runs in its worker, this only takes its scores."""

from __future__ import annotations

from collections.abc import Callable

from podium.core.batch import Batch, resolve
from podium.rewards.base import OnError, Scored, collect


class ModelReward:
    """Scores by `score(batch) -> Batch` with the column `scores` (a role handle's `score`; its future is waited for)."""

    def __init__(self, name: str, score: Callable[[Batch], Batch], *, weight: float = 1.0, on_error: OnError = "raise") -> None:
        self.name, self.score, self.weight, self.on_error = name, score, weight, on_error

    def __call__(self, batch: Batch) -> Scored:
        scores = resolve(self.score(batch))["scores"]
        return collect(self.name, batch, scores.tolist(), self.on_error)
