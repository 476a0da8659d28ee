"""Several rewards become one: the weighted sum, rows that could not be scored left out and counted."""

from __future__ import annotations

import logging
from collections.abc import Iterable, Sequence

import torch
from torch import Tensor

from podium.core.batch import Batch
from podium.core.errors import ConfigError, RewardError
from podium.core.metrics import Metrics
from podium.rewards.adapters import FunctionReward
from podium.rewards.base import REMEDY, Reward, Scored, TrainerState, sample

_log = logging.getLogger(__name__)


def check_columns(rewards: Iterable[Reward], columns: Iterable[str]) -> None:
    """Before anything is loaded: does the data set have the columns (without `data.`) that the rewards need?

    Raises ConfigError naming the reward, the column, and those that are there.
    """
    present = sorted(columns)
    for reward in rewards:
        missing = [column for column in getattr(reward, "columns", ()) if column not in present]
        if missing:
            raise ConfigError(
                f"it needs the data column {', '.join(missing)}; the data set has: {', '.join(present) or 'none'}",
                where=f"reward '{reward.name}'",
                remedy="add the column to the data, or choose another reward",
            )


def fuse(
    batch: Batch, rewards: Sequence[Reward], state: TrainerState | None = None, *, family: str = "reward"
) -> tuple[Batch, Metrics]:
    """Scores a batch of B rows by every reward. `family` "cost" names columns and metrics so, instead of "reward".

    Returns the rows that were scored, with `reward.<name>` (before its weight; NaN where it does not apply) and
    `rewards`, the weighted sum of those that apply (float32), and the metrics: `reward/mean`, `reward/<name>`, what a
    function reported as `reward/<name>/...`, and `reward/skipped` (rows left out of this batch).
    A row is left out where a reward failed on it (`on_error: skip`) or where none applies.
    Raises RewardError where no row is left.
    """
    if not rewards:
        raise RewardError("there is no reward to score with", where="rewards", remedy="add one to `rewards`")
    metrics, total = Metrics(), torch.zeros(len(batch))
    applied = torch.zeros(len(batch), dtype=torch.bool)
    failed = torch.zeros(len(batch), dtype=torch.bool)
    columns: dict[str, object] = {}
    first: str | None = None
    for reward in rewards:
        scored = reward(batch, state) if state and isinstance(reward, FunctionReward) else reward(batch)
        _check_finite(batch, reward, scored)
        here = scored.values.isfinite()
        total += torch.where(here, scored.values * reward.weight, 0.0)
        applied |= here
        failed[[row for row, _ in scored.failed]] = True
        columns[f"{family}.{reward.name}"] = scored.values
        columns |= {
            f"data.{name}": v for name, v in scored.columns.items() if len(v) == len(batch) and f"data.{name}" not in batch
        }
        metrics.merge(scored.metrics, f"{family}/{reward.name}/")
        first = first or _failure(batch, reward, scored)
    kept = applied & ~failed
    skipped = int((~kept).sum())
    if skipped:
        first = first or "no reward applies (each returned None)"
        if skipped == len(batch):
            raise RewardError(
                f"none of the {len(batch)} samples could be scored; the first: {first}", where="rewards", remedy=REMEDY
            )
        _log.warning("rewards: %d of %d samples left out; the first: %s", skipped, len(batch), first)
    if not total[kept].isfinite().all():
        row = int((~total.isfinite() & kept).nonzero()[0])
        raise RewardError(
            f"the weighted sum is {float(total[row])}, not a finite number", where=f"rewards, {sample(batch, row)}"
        )
    out = batch.with_columns({**columns, f"{family}s": total}).index(kept)
    _count(metrics, out, rewards, skipped, family)
    return out, metrics


def _check_finite(batch: Batch, reward: Reward, scored: Scored) -> None:
    odd = ~scored.values.isfinite()
    odd[[row for row, _ in scored.failed] + scored.absent] = False
    if odd.any():
        row = int(odd.nonzero()[0])
        raise RewardError(
            f"gave {float(scored.values[row])}, not a finite number", where=f"reward '{reward.name}', {sample(batch, row)}"
        )


def _failure(batch: Batch, reward: Reward, scored: Scored) -> str | None:
    if not scored.failed:
        return None
    row, reason = scored.failed[0]
    return f"reward '{reward.name}', {sample(batch, row)}: {reason}"


def _count(metrics: Metrics, out: Batch, rewards: Sequence[Reward], skipped: int, family: str) -> None:
    metrics.add(f"{family}/mean", float(out[f"{family}s"].sum()), len(out))
    for reward in rewards:
        values: Tensor = out[f"{family}.{reward.name}"]
        there = values[~values.isnan()]
        metrics.add(f"{family}/{reward.name}", float(there.sum()), len(there))
    metrics.add(f"{family}/skipped", skipped)
