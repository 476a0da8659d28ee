"""How scores of several sources become one number: normalise, clip, condition, weigh, sum, gate. All on tensors `[B]`."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

import torch
from torch import Tensor

from podium.core.errors import CheckpointError, ConfigError, RewardError, did_you_mean
from podium.core.metrics import Metrics
from podium.core.settings import ShapingSettings

LEAST_DEVIATION = 1e-6
"""A smaller deviation is taken as this: scores that are all equal become 0."""


@dataclass
class Moments:
    """Mean and deviation of all values so far, merged batch by batch (Chan, Golub and LeVeque 1979, equation 1.5)."""

    count: float = 0.0
    mean: float = 0.0
    m2: float = 0.0
    """Sum of squared distances from the mean."""

    def update(self, values: Tensor) -> None:
        """Merges the values `[K]` in; K may be 0."""
        if not (n := values.numel()):
            return
        mean = float(values.double().mean())
        m2 = float((values.double() - mean).square().sum())
        delta, total = mean - self.mean, self.count + n
        self.mean += delta * n / total
        self.m2 += m2 + delta * delta * self.count * n / total
        self.count = total

    @property
    def deviation(self) -> float:
        """Of the population (divided by the count); 1 before anything was seen."""
        return (self.m2 / self.count) ** 0.5 if self.count else 1.0

    def scaled(self, values: Tensor) -> Tensor:
        return (values - self.mean) / max(self.deviation, LEAST_DEVIATION)


class Shaper:
    """The fusion of named sources. Holds the running statistics of those that are scaled by them.

    For source s with score r_s, weight w_s: total = sum of w_s * clip(normalise(r_s)) over the sources that count; where a
    gate fails, total = its floor. Running statistics take in a step's scores before they scale them.

    Args:
        settings: by source name, every source of the sum.

    Raises ConfigError for an `only_if` that names no source, or sources that wait for each other in a circle.
    """

    def __init__(self, settings: Mapping[str, ShapingSettings]) -> None:
        self.settings = dict(settings)
        self.order = _order(self.settings)
        self.moments = {name: Moments() for name, s in self.settings.items() if s.normalize == "running"}

    @property
    def by_group(self) -> bool:
        return any(s.normalize == "group" for s in self.settings.values())

    def __call__(
        self,
        scores: Mapping[str, Tensor],
        weights: Mapping[str, float],
        *,
        groups: Tensor | None = None,
        learn: bool = True,
        raw: bool = False,
    ) -> tuple[Tensor, Metrics]:
        """The fused score, float32 `[B]`, and metrics by source (`<source>/shaped` and others).

        Args:
            scores: float32 `[B]` a source; NaN where it does not apply: there it adds nothing.
            groups: int64 `[B]`, for sources that are normalised by group.
            learn: running statistics take these scores in.
            raw: neither normalise nor clip (evaluation).
        """
        metrics = Metrics()
        counts = self._counting(scores, metrics)
        total = torch.zeros_like(next(iter(scores.values())))
        for name, values in scores.items():
            here, settings = counts[name], self.settings[name]
            shaped = values
            if not raw:
                shaped = self._normalised(name, values, here, groups, learn)
                if settings.clip is not None:
                    shaped = shaped.clamp(-settings.clip, settings.clip)
            if shaped is not values:
                metrics.add(f"{name}/shaped", float(shaped[here].sum()), int(here.sum()))
            total += torch.where(here, shaped * weights[name], 0.0)
        return self._gated(total, scores, metrics), metrics

    def _counting(self, scores: Mapping[str, Tensor], metrics: Metrics) -> dict[str, Tensor]:
        """Where each source counts, bool `[B]`. A condition is met only by a source that counts itself."""
        counts: dict[str, Tensor] = {}
        for name in self.order:
            there = ~scores[name].isnan()
            condition = self.settings[name].only_if
            counts[name] = there
            if condition is not None:
                counts[name] = there & counts[condition.source] & (scores[condition.source] >= condition.at_least)
                metrics.add(f"{name}/counts", float(counts[name].sum()), float(there.sum()))
        return counts

    def _normalised(self, name: str, values: Tensor, here: Tensor, groups: Tensor | None, learn: bool) -> Tensor:
        how = self.settings[name].normalize
        if how == "running":
            moments = self.moments[name]
            if learn:
                moments.update(values[here])
            return moments.scaled(values)
        if how == "batch":
            moments = Moments()
            moments.update(values[here])
            return moments.scaled(values)
        if how == "group":
            return _by_group(name, values, here, groups)
        return values

    def _gated(self, total: Tensor, scores: Mapping[str, Tensor], metrics: Metrics) -> Tensor:
        floors = torch.full_like(total, torch.inf)
        gates = {name: s.gate for name, s in self.settings.items() if s.gate is not None}
        for name, gate in gates.items():
            fails = scores[name] < gate.at_least  # NaN: the source does not apply, nor does its gate
            floors = torch.where(fails, floors.clamp(max=gate.floor), floors)
            metrics.add(f"{name}/gate_failed", float(fails.sum()), len(total))
        return torch.where(floors.isfinite(), floors, total) if gates else total

    def state_dict(self) -> dict[str, Any]:
        return {name: asdict(moments) for name, moments in self.moments.items()}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Puts back what `state_dict` gave. Raises CheckpointError where other sources were scaled then."""
        if set(state) != set(self.moments):
            raise CheckpointError(
                f"scaled by running statistics were {sorted(state) or 'none'}, now are {sorted(self.moments) or 'none'}",
                where="rewards",
                remedy="resume with the same sources and scaling",
            )
        for name in self.moments:
            self.moments[name] = Moments(**state[name])


def _by_group(name: str, values: Tensor, here: Tensor, groups: Tensor | None) -> Tensor:
    if groups is None:
        what, remedy = "normalize: group needs the column 'group_id'", "generate in groups, or set normalize: batch"
        raise RewardError(what, where=f"reward '{name}'", remedy=remedy)
    _, group = torch.unique(groups, return_inverse=True)
    zeros = torch.zeros(int(group.max()) + 1 if len(group) else 0, dtype=torch.float64)
    x = torch.where(here, values, 0.0).double()
    n = zeros.index_add(0, group, here.double()).clamp(min=1)
    mean = (zeros.index_add(0, group, x) / n)[group]
    centred = torch.where(here, x - mean, 0.0)
    deviation = (zeros.index_add(0, group, centred.square()) / n).sqrt()[group]
    return (centred / deviation.clamp(min=LEAST_DEVIATION)).float()


def _order(settings: Mapping[str, ShapingSettings]) -> list[str]:
    """Names in an order in which every condition is known when it is asked."""
    waits = {name: s.only_if.source for name, s in settings.items() if s.only_if is not None}
    for name, source in waits.items():
        if source not in settings:
            raise ConfigError(
                f"only_if names '{source}', which is no reward source here",
                where=f"reward '{name}'",
                remedy=did_you_mean(source, [n for n in settings if n != name]),
            )
    order: list[str] = []
    while len(order) < len(settings):
        ready = [name for name in settings if name not in order and (name not in waits or waits[name] in order)]
        if not ready:
            circle = [name for name in settings if name not in order]
            raise ConfigError(
                f"only_if goes in a circle: {', '.join(f'{n} if {waits[n]}' for n in circle)}",
                where="rewards",
                remedy="drop one of the conditions",
            )
        order += ready
    return order
