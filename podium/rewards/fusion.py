"""Several rewards become one: the weighted sum, rows that could not be scored left out and counted."""

from __future__ import annotations

import logging
from collections.abc import Iterable, Sequence

import torch
from torch import Tensor

from podium.core.activity import doing
from podium.core.batch import Batch
from podium.core.errors import ConfigError, RewardError
from podium.core.metrics import Metrics
from podium.core.settings import ShapingSettings
from podium.rewards.adapters import FunctionReward
from podium.rewards.base import REMEDY, Reward, Scored, TrainerState, sample
from podium.rewards.shaping import Shaper

_log = logging.getLogger(__name__)


def check_columns(rewards: Iterable[Reward], columns: Iterable[str]) -> None:
    """Before anything is loaded: does the data set have the columns (without `data.`) that the rewards need?

    A reward that can check more (`check()`: is a scorer's address answered?) does so.
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
        if hasattr(reward, "check"):
            reward.check()


def fuse(
    batch: Batch,
    rewards: Sequence[Reward],
    state: TrainerState | None = None,
    *,
    shaper: Shaper | None = None,
    learn: bool = True,
    raw: bool = False,
    family: str = "reward",
) -> tuple[Batch, Metrics]:
    """Scores a batch of B rows by every reward.

    Returns the rows that were scored, with `reward.<name>` (as it was given, before shaping and weight; NaN where it does
    not apply) and `rewards`, the weighted sum of those that apply (float32), and the metrics: `reward/mean`,
    `reward/<name>`, what a function reported or a source's shaping as `reward/<name>/...`, and `reward/skipped` (rows left
    out of this batch).
    A row is left out where a reward failed on it (`on_error: skip`) or where none applies.

    Args:
        shaper: normalises, clips, conditions and gates; by default made from the rewards' own settings.
        learn, raw: as for `Shaper`.
        family: "cost" names columns and metrics so, instead of "reward".

    Raises RewardError where no row is left.
    """
    if not rewards:
        raise RewardError(f"there is no {family} to score with", where="rewards", remedy="add one to `rewards`")
    metrics = Metrics()
    answers = _answers(batch, rewards, state, family, metrics)
    failed, applied = torch.zeros(len(batch), dtype=torch.bool), torch.zeros(len(batch), dtype=torch.bool)
    for scored in answers:
        failed[[row for row, _ in scored.failed]] = True
        applied |= scored.values.isfinite().cpu()
    kept = applied & ~failed
    skipped = int((~kept).sum())
    if skipped:
        _report_skipped(batch, rewards, answers, skipped)
    columns = {f"{family}.{reward.name}": scored.values for reward, scored in zip(rewards, answers, strict=True)}
    out = batch.with_columns({**columns, **_extras(batch, answers)}).index(kept)
    total, shaping = (shaper or shaper_of(rewards))(
        {reward.name: out[f"{family}.{reward.name}"] for reward in rewards},
        {reward.name: reward.weight for reward in rewards},
        groups=_groups(out),
        learn=learn,
        raw=raw,
    )
    _check_total(out, total)
    out = out.with_columns({f"{family}s": total})
    _count(metrics.merge(shaping, f"{family}/"), out, rewards, skipped, family)
    return out, metrics


def _groups(batch: Batch) -> Tensor | None:
    return batch["group_id"] if "group_id" in batch else None  # noqa: SIM401 (a Batch has no get)


def shaper_of(rewards: Iterable[Reward]) -> Shaper:
    """A shaper from what each reward says itself (`shaping`). Raises ConfigError as `Shaper`."""
    return Shaper({reward.name: getattr(reward, "shaping", None) or ShapingSettings() for reward in rewards})


def _answers(
    batch: Batch, rewards: Sequence[Reward], state: TrainerState | None, family: str, metrics: Metrics
) -> list[Scored]:
    answers = []
    for reward in rewards:
        with doing(f"{family} '{reward.name}' over {len(batch)} samples"):
            scored = reward(batch, state) if state and isinstance(reward, FunctionReward) else reward(batch)
        _check_finite(batch, reward, scored)
        metrics.merge(scored.metrics, f"{family}/{reward.name}/")
        answers.append(scored)
    return answers


def _extras(batch: Batch, answers: Iterable[Scored]) -> dict[str, object]:
    columns = {f"data.{name}": values for scored in answers for name, values in scored.columns.items()}
    return {name: values for name, values in columns.items() if len(values) == len(batch) and name not in batch}


def _report_skipped(batch: Batch, rewards: Sequence[Reward], answers: Sequence[Scored], skipped: int) -> None:
    reasons = (_failure(batch, reward, scored) for reward, scored in zip(rewards, answers, strict=True))
    first = next((reason for reason in reasons if reason), "no reward applies (each returned None)")
    if skipped == len(batch):
        raise RewardError(
            f"none of the {len(batch)} samples could be scored; the first: {first}", where="rewards", remedy=REMEDY
        )
    _log.warning("rewards: %d of %d samples left out; the first: %s", skipped, len(batch), first)


def _check_total(out: Batch, total: Tensor) -> None:
    if not total.isfinite().all():
        row = int((~total.isfinite()).nonzero()[0])
        raise RewardError(f"the weighted sum is {float(total[row])}, not a finite number", where=f"rewards, {sample(out, row)}")


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
