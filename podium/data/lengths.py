"""Lengths of prompts and answers: their figures, a histogram, a picture."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any


@dataclass(frozen=True)
class Lengths:
    """Figures of some lengths. `p95`: 95 of 100 are at most this long (nearest rank)."""

    count: int
    min: int
    median: int
    mean: float
    p95: int
    max: int
    total: int
    bins: tuple[tuple[int, int, int], ...]
    """(shortest, longest, how many) of each bar of the histogram, both ends included."""

    @classmethod
    def of(cls, values: Sequence[int], bins: int = 10) -> Lengths:
        """From at least one length."""
        ordered = sorted(values)
        n, total = len(ordered), sum(ordered)

        def rank(share: float) -> int:
            return ordered[max(0, math.ceil(share * n) - 1)]

        return cls(n, ordered[0], rank(0.5), total / n, rank(0.95), ordered[-1], total, _histogram(ordered, bins))

    def as_dict(self) -> dict[str, Any]:
        """Plain values."""
        return asdict(self)


def _histogram(ordered: Sequence[int], bins: int) -> tuple[tuple[int, int, int], ...]:
    low, high = ordered[0], ordered[-1]
    width = max(1, math.ceil((high - low + 1) / bins))
    counts = [0] * math.ceil((high - low + 1) / width)
    for value in ordered:
        counts[(value - low) // width] += 1
    return tuple((low + i * width, low + (i + 1) * width - 1, count) for i, count in enumerate(counts))


def plot_lengths(
    lengths: Mapping[str, Sequence[int]], unit: str, path: str | Path, title: str, limit: int | None = None
) -> None:
    """A PNG with a histogram of each part. `limit`: a line in the prompt's panel.

    Raises OSError where the file cannot be written.
    """
    # The object interface, not pyplot: no global state, no display.
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure
    from matplotlib.ticker import MaxNLocator

    figure = Figure(figsize=(4.6 * len(lengths), 3.4), layout="constrained")
    FigureCanvasAgg(figure)
    panels = figure.subplots(1, len(lengths), squeeze=False).flatten()
    for panel, (name, values) in zip(panels, lengths.items(), strict=True):
        panel.hist(values, bins=min(40, max(1, len(set(values)))), color="#3b6ea5")
        for axis in (panel.xaxis, panel.yaxis):
            axis.set_major_locator(MaxNLocator(integer=True, nbins=6))
        panel.set_title(name)
        panel.set_xlabel(unit)
        panel.set_ylabel("rows")
        if name == "prompt" and limit is not None and max(values) > limit:
            panel.axvline(limit, color="#b03a2e", linestyle="--", label=f"data.max_prompt_tokens={limit}")
            panel.legend()
    figure.suptitle(title)
    figure.savefig(path, format="png", dpi=110)
