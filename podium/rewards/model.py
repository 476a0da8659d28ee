"""A reward model as a reward: the model runs in its worker, this only takes its scores."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from podium.core.batch import Batch, resolve
from podium.core.errors import RewardError, did_you_mean
from podium.rewards.base import REMEDY, OnError, Scored, sample


class ModelReward:
    """Scores by `score(batch) -> Batch` (a role handle's `score`; its future is waited for).

    Args:
        score: gives the column `scores` for a model with one head, `scores.<head>` for each head of one with several.
        head: which of several heads; None: the model has one.
    """

    def __init__(
        self,
        name: str,
        score: Callable[[Batch], Any],
        *,
        head: str | None = None,
        weight: float = 1.0,
        on_error: OnError = "raise",
    ) -> None:
        self.name, self.score, self.head, self.weight, self.on_error = name, score, head, weight, on_error

    def __call__(self, batch: Batch) -> Scored:
        """Raises RewardError for a score that is not finite (unless skipped), or a head that the model has not."""
        values = head_column(resolve(self.score(batch)), self.head, self.name).float()
        failed = []
        for row in (~values.isfinite()).nonzero()[:, 0].tolist():
            reason = f"the model gave {float(values[row])}, not a finite number"
            if self.on_error == "raise":
                raise RewardError(reason, where=f"reward '{self.name}', {sample(batch, row)}", remedy=REMEDY)
            failed.append((row, reason))
        return Scored(torch.where(values.isfinite(), values, torch.nan), failed)


def head_column(scores: Batch, head: str | None, reward: str) -> Tensor:
    """One score `[B]` of what a reward role gave: `scores.<head>`, or `scores` of a model with one head.

    Raises RewardError where the model has several heads and none of them is meant.
    """
    heads = [name.removeprefix("scores.") for name in scores.names if name.startswith("scores.")]
    if head in heads:
        return scores[f"scores.{head}"]
    if "scores" in scores:  # one head: its name need not be known to the worker
        return scores["scores"]
    if head is None:
        what = f"the model has {len(heads)} heads: {', '.join(heads)}"
        remedy = f"name those that count: model.reward_heads.{heads[0]}=1.0 ..., or in Python models=[model.head(...), ...]"
    else:
        what, remedy = f"the model has no head '{head}'", did_you_mean(head, heads)
    raise RewardError(what, where=f"reward '{reward}'", remedy=remedy)
