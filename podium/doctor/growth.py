"""Memory that grows from step to step: how fast, whether that is more than noise, and where."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from podium.doctor.facts import Facts, Finding

BLOCKS = 10
"""Steps are averaged in so many blocks: within one, what is held swings (a step's garbage); between them it must not grow."""
LEAST_STEPS, LEAST_MB, LEAST_T = 40, 8.0, 5.0
_HELD = (("memory/host_mb", "host"), ("memory/gpu_mb", "GPU"))
_BETWEEN = "between the stages"

Series = Sequence[tuple[int, float]]


@dataclass(frozen=True)
class Growth:
    """A line through the blocks' means: MB a step, its t statistic (slope over its standard error), MB over the whole."""

    slope: float
    t: float
    total: float


def growth(series: Series) -> Growth | None:
    """The growth of a series of (step, MB), its first tenth left out; None where it is too short."""
    settled = series[max(10, len(series) // 10) :]
    if len(settled) < LEAST_STEPS - 10:
        return None
    size = len(settled) // BLOCKS
    blocks = [settled[len(settled) - (i + 1) * size : len(settled) - i * size] for i in reversed(range(BLOCKS))]
    xs, ys = ([sum(point[k] for point in block) / size for block in blocks] for k in (0, 1))
    slope, error = _line(xs, ys)
    return Growth(slope, slope / error if error else math.inf * (slope > 0), slope * (settled[-1][0] - settled[0][0]))


def _line(xs: Sequence[float], ys: Sequence[float]) -> tuple[float, float]:
    """Least squares: the slope and its standard error."""
    n = len(xs)
    x0, y0 = sum(xs) / n, sum(ys) / n
    spread = sum((x - x0) ** 2 for x in xs)
    slope = sum((x - x0) * (y - y0) for x, y in zip(xs, ys, strict=True)) / spread
    left = sum((y - y0 - slope * (x - x0)) ** 2 for x, y in zip(xs, ys, strict=True))
    return slope, math.sqrt(left / (n - 2) / spread)


def is_leak(series: Series) -> Growth | None:
    """The growth, where it is one: above noise, of some size, and in both halves (a cache that filled once is none)."""
    found = growth(series)
    if found is None or found.t < LEAST_T or found.total < LEAST_MB:
        return None
    settled = series[max(10, len(series) // 10) :]
    quarter = len(settled) // 4
    means = [sum(v for _, v in settled[i * quarter : (i + 1) * quarter]) / quarter for i in range(4)]
    halves = means[1] - means[0], means[3] - means[2]
    return found if min(halves) > 0.2 * sum(halves) else None


def leaks(facts: Facts) -> Iterator[Finding]:
    """Host and GPU memory that grow."""
    rows = _of_this_process(facts)
    for name, kind in _HELD:
        found = is_leak(_series(rows, name))
        if found is None:
            continue
        where, remedy = _owner(facts, rows, found) if kind == "host" else ("", _REMEDIES["update"])
        yield Finding(
            "warning",
            f"{kind} memory grows{where and f': {where}'}",
            f"{1000 * found.slope:.0f} MB per 1,000 steps, {found.total:.0f} MB over the last {len(rows)} steps; "
            f"{rows[-1][name]:.0f} MB are held now",
            f"{name}; the slope is {min(found.t, 999):.0f} times its standard error"
            + (f"; {_SHARES}" if kind == "host" else ""),
            remedy,
        )


_SHARES = "memory/<stage>_mb say in which stage"


def _of_this_process(facts: Facts) -> list[dict[str, float]]:
    """The steps that the last process made: another begins with other memory."""
    rows = [row for row in facts.steps if row.get("memory/steps") is not None]
    start = max((i for i, row in enumerate(rows) if not i or row["memory/steps"] <= rows[i - 1]["memory/steps"]), default=0)
    return rows[start:]


def _series(rows: Sequence[dict[str, float]], name: str) -> list[tuple[int, float]]:
    return [(int(row["step"]), float(row[name])) for row in rows if row.get(name) is not None]


def _owner(facts: Facts, rows: Sequence[dict[str, float]], whole: Growth) -> tuple[str, str]:
    """(the stage in which most of it grows, or nothing; what to do)."""
    held = [name for name, _ in _HELD] + ["memory/steps"]
    stages = {n.removeprefix("memory/").removesuffix("_mb"): n for n in rows[-1] if n.startswith("memory/") and n not in held}
    slopes = {stage: found.slope for stage, n in stages.items() if (found := growth(_series(rows, n))) is not None}
    slopes[_BETWEEN] = whole.slope - sum(slopes.values())
    stage = max(slopes, key=lambda s: slopes[s])
    if slopes[stage] < 0.5 * whole.slope:
        return "", "no single stage holds most of it; look at what each of them keeps from step to step"
    share = f"{min(1.0, slopes[stage] / whole.slope):.0%} of it"
    if stage == _BETWEEN:
        return f"{share} {_BETWEEN}", _REMEDIES[_BETWEEN]
    functions = [str(source.get("function")) for source in facts.settings.get("rewards") or () if isinstance(source, dict)]
    named = f" ({', '.join(functions)})" if stage == "reward" and functions else ""
    kind = next((k for k in _REMEDIES if stage.startswith(k)), "")
    return f"{share} in stage '{stage}'{named}", _REMEDIES[kind]


_KEEPS = "a function keeps something of every call: a list or dict that only grows, a cache without a bound, log lines"
_REMEDIES = {
    "reward": _KEEPS,
    "cost": _KEEPS,
    "step_rewards": _KEEPS,
    "rollout": "the rollout engine keeps something of every request; try rollout.engine=hf to tell it from the rest",
    "update": "something keeps tensors of each update alive: a hook, a model class of your own, metrics that hold a graph",
    _BETWEEN: "trackers, callbacks, logging: try run.trackers=[] and run.log_samples=0",
    "": "the stage keeps something from step to step",
}
