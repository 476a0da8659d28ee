"""The run's curves as one picture: a grid of panels, each there only when the run has its metrics."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from podium.runs.series import PANELS, Panel

MAX_LINES = 8
"""Lines in one panel; more cannot be told apart."""


def plot_metrics(rows: Sequence[Mapping[str, Any]], path: str | Path, title: str = "") -> Path | None:
    """Draws the rows of metrics.jsonl into a PNG; returns its path, or None when no panel has a number to show."""
    names = list(dict.fromkeys(name for row in rows for name in row))
    chosen = [(panel, _lines(rows, panel.pick(names))) for panel in PANELS]
    panels = [(panel, lines) for panel, lines in chosen if lines]
    if not panels:
        return None
    # The object interface, not pyplot: no global state, no display, safe beside the user's own figures.
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    columns = min(2, len(panels))
    grid = math.ceil(len(panels) / columns)
    figure = Figure(figsize=(5.2 * columns, 3.1 * grid + 0.4), layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.subplots(grid, columns, squeeze=False).flatten()
    for axis, (panel, lines) in zip(axes, panels, strict=False):
        _draw(axis, panel, lines)
    for axis in axes[len(panels) :]:
        axis.set_visible(False)
    if title:
        figure.suptitle(title)
    figure.savefig(path, dpi=110)
    return Path(path)


Line = tuple[str, list[float], list[float]]


def _lines(rows: Sequence[Mapping[str, Any]], names: Sequence[str]) -> list[Line]:
    """(name, steps, values) of each metric that has a finite number at all."""
    lines: list[Line] = []
    for name in names:
        points = [(row["step"], row[name]) for row in rows if _finite(row.get(name))]
        line = (name, [p[0] for p in points], [p[1] for p in points])
        # With one reward, its mean and the sum are the same curve: one of them is enough.
        if points and line[1:] not in [other[1:] for other in lines]:
            lines.append(line)
    return lines[:MAX_LINES]


def _finite(value: Any) -> bool:
    return isinstance(value, int | float) and math.isfinite(value)


def _draw(axis: Any, panel: Panel, lines: Sequence[Line]) -> None:
    axis.set_title(panel.title, fontsize=11, loc="left")
    for name, steps, values in lines:
        # Few points (an evaluation every so often) are marked: a line alone would hide where they are.
        axis.plot(steps, values, linewidth=1.5, label=name, marker="o" if len(steps) <= 12 else None, markersize=4)
    axis.set_xlabel("step", fontsize=9)
    axis.set_ylabel(panel.unit, fontsize=9)
    axis.grid(alpha=0.3)
    axis.spines[["top", "right"]].set_visible(False)
    axis.tick_params(labelsize=8)
    axis.xaxis.get_major_locator().set_params(integer=True)
    axis.legend(fontsize=7, framealpha=0.7, edgecolor="none")
