"""Numerics, watched from the first step: whether training and rollout agree, how old samples are, what is no number.

Two parts. `WatchStage` compares the log-probs that tokens were sampled with to those of the weights that are about to be
trained, before the update. `alarms` holds a step's metrics against the bounds of the section `watch`.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from podium.core import schema
from podium.core.batch import Batch, Ragged
from podium.core.metrics import Metrics
from podium.core.settings import BoundSettings, WatchSettings
from podium.stages.base import Stage, StepContext

SPOT_SHARE, SPOT_EVERY = 64, 8
"""Where no pass of training's own is there to compare with, one row in 64 is computed once more: under 1% of a step. That is
done in the first two steps and then in one of eight, over eight times the rows: a pass over few rows takes a GPU no less time.
"""

schema.column(
    "train_log_probs",
    "token",
    torch.float32,
    axis="response",
    unit="nats",
    meaning="training's log-probs before the update; NaN where they were not measured",
)


class WatchStage(Stage):
    """Compares training's log-probs with the rollout's before the actor's update, and writes `watch/` metrics.

    `log_prob_gap` (mean of |difference|, nats a token) and `log_prob_gap_max`; `ratio` (mean of training's probability over
    the rollout's: 1 where both agree); `effective_sample_size` (Kong 1992: (sum w)^2 / (n sum w^2) of those ratios, 1 is best);
    `rollout_kl` (of the rollout's distribution from training's, k1); `staleness` (updates between the weights that sampled and
    those that train) and `staleness_max`; `entropy` (mean of -log p of the sampled tokens: an unbiased estimate where nothing
    was truncated).

    Args:
        old_log_probs: a pass of training's own is in the graph, and all rows are compared. Else some rows are computed for
            this (`spot_rows`), and kept as the column `train_log_probs`.
    """

    name = "watch"
    roles = ("actor",)

    def __init__(self, *, old_log_probs: bool) -> None:
        self.old_log_probs = old_log_probs
        self.reads = ("prompt_ids", "response_ids", "rollout_log_probs", "response_mask", "policy_version")
        if old_log_probs:
            self.reads += ("old_log_probs",)
        else:
            self.writes = ("train_log_probs",)

    def run(self, batch: Batch, context: StepContext) -> Batch:
        sampled = batch["response_mask"].values
        rollout = batch["rollout_log_probs"].values
        context.metrics.add("watch/entropy", float(-rollout[sampled].sum()), float(sampled.sum()))
        version = context.roles["actor"].training_version().result()
        behind = version - batch["policy_version"]
        context.metrics.add("watch/staleness", float(behind.sum()), len(batch))
        context.metrics.add("watch/staleness_max", float(behind.max()) if len(batch) else 0.0)
        if self.old_log_probs:
            compare(batch["old_log_probs"].values[sampled], rollout[sampled], context.metrics)
            return Batch()
        trained = self._spot(batch, context)
        measured = sampled & ~trained.isnan()
        compare(trained[measured], rollout[measured], context.metrics)
        return Batch({"train_log_probs": Ragged(trained, batch["response_ids"].offsets)})

    def _spot(self, batch: Batch, context: StepContext) -> Tensor:
        """Training's log-probs of the first rows; NaN elsewhere."""
        out = torch.full((len(batch["response_ids"].values),), math.nan)
        rows = spot_rows(len(batch), context.step)
        if rows:
            part = batch.select("prompt_ids", "response_ids").index(range(rows))
            found = context.roles["actor"].compute_log_probs(part, name="old_log_probs").result()["old_log_probs"].values
            out[: len(found)] = found
        return out


def spot_rows(rows: int, step: int) -> int:
    """How many rows of a step are computed once more: one in `SPOT_SHARE`, on average."""
    taken = max(1, rows * SPOT_EVERY // SPOT_SHARE)
    every = max(1, taken * SPOT_SHARE // max(rows, 1))
    return min(rows, taken) if step < 2 or step % every == 0 else 0


def compare(trained: Tensor, rollout: Tensor, metrics: Metrics) -> None:
    """Adds the `watch/` metrics of one set of tokens: log-probs `[M]` of training and of the rollout."""
    if not len(trained):
        return
    gap = (trained - rollout).double()
    ratio = gap.clamp(-20, 20).exp()
    count = float(len(gap))
    metrics.add("watch/log_prob_gap", float(gap.abs().sum()), count)
    metrics.add("watch/log_prob_gap_max", float(gap.abs().max()))
    metrics.add("watch/ratio", float(ratio.sum()), count)
    metrics.add("watch/effective_sample_size", float(ratio.sum().square() / ratio.square().sum()), count)
    metrics.add("watch/rollout_kl", float(-gap.sum()), count)


def watch_stages(stages: Iterable[Stage], settings: WatchSettings) -> list[Stage]:
    """What watches a graph of these stages: nothing where no policy is trained on its own samples, or it is switched off."""
    parts = [part for stage in stages for part in stage.expand()]
    written = {name for part in parts for name in part.writes}
    trains = any(part.updates == "actor" for part in parts)
    if not settings.enabled or not trains or "rollout_log_probs" not in written:
        return []
    return [WatchStage(old_log_probs="old_log_probs" in written)]


# ------------------------------------------------------------------ bounds


@dataclass(frozen=True)
class Alarm:
    """A metric beyond its bound. `stop`: the run is to end."""

    metric: str
    value: float
    bound: float
    stop: bool
    meaning: str

    def __str__(self) -> str:
        side = "is" if not math.isfinite(self.value) else "above" if self.value > self.bound else "below"
        shown = "is no finite number" if side == "is" else f"= {self.value:.4g}, {side} {self.bound:g}"
        return f"{self.metric} {shown}: {self.meaning}"


# Metric, its setting, whether its bound is an upper one, and what it means beyond it.
_BOUNDS = (
    ("watch/log_prob_gap", "log_prob_gap", True, "training and rollout give the sampled tokens other probabilities"),
    (
        "watch/effective_sample_size",
        "effective_sample_size",
        False,
        "few samples carry the update; the rollout's policy is another",
    ),
    ("watch/staleness_max", "staleness", True, "samples are from older weights than allowed"),
    ("watch/entropy", "entropy", False, "the policy has nearly no choice left (entropy collapse)"),
)


def alarms(metrics: Mapping[str, float], settings: WatchSettings) -> list[Alarm]:
    """The bounds that a step's metrics break, and what is not finite in them (an update that was skipped for it, too)."""
    found = []
    for metric, setting, upper, meaning in _BOUNDS if settings.enabled else ():
        value, bound = metrics.get(metric), getattr(settings, setting)
        if value is not None and (broken := _broken(value, bound, upper)) is not None:
            found.append(Alarm(metric, value, *broken, meaning))
    stop = settings.nonfinite == "stop"
    for name, value in metrics.items():
        if name.endswith("/skipped_updates") and value > 0:
            found.append(Alarm(name, value, 0.0, stop, "the gradient was not finite, so the update was left out"))
        elif name.endswith("/loss") and not math.isfinite(value):
            found.append(Alarm(name, value, math.inf, stop, "the loss was not finite"))
    return found


def _broken(value: float, bound: BoundSettings, upper: bool) -> tuple[float, bool] | None:
    """(the bound, stop) where the value breaks one."""
    for limit, stop in ((bound.stop, True), (bound.warn, False)):
        if limit is not None and not (value <= limit if upper else value >= limit):
            return limit, stop
    return None
