"""Which metrics belong together: the panels of the plot and the numbers beside the progress bar."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass


@dataclass(frozen=True)
class Panel:
    """One panel of the plot: the metrics whose whole names match `pattern`; spread (`/std`, `/min`, `/max`) is left out."""

    title: str
    pattern: str
    unit: str = ""

    def pick(self, names: Iterable[str]) -> list[str]:
        """The panel's names, in the order given."""
        return [name for name in names if re.fullmatch(self.pattern, name) and not _SPREAD.search(name)]


_SPREAD = re.compile(r"[/_](std|min|max)$")
_NOT_TIME = r"(?!time/)"

PANELS = (
    Panel("Reward and accuracy", _NOT_TIME + r"(\w+/)?(rewards?|scores?|accuracy|margin)(/.+)?"),
    Panel("KL to the reference", _NOT_TIME + r"(\w+/)?(ref_)?kl(_ref)?(/mean)?", "nats"),
    Panel("Entropy", r"(\w+/)?entropy(/mean)?", "nats per token"),
    Panel("Response length", r"(\w+/)?response_(length|tokens)(/mean)?", "tokens"),
    Panel("Loss", _NOT_TIME + r"(\w+/)?((\w+_)?loss(/\w+)?|nll)"),
    Panel("Time per stage", r"time/.+", "seconds"),
)

_HEADLINES = (
    ("reward", r"(train/)?(rewards?|scores?)(/mean)?"),
    ("acc", r"((?!eval)\w+/)?accuracy"),
    ("eval", r"eval/(accuracy|rewards?(/mean)?|nll)"),
    ("kl", r"(\w+/)?(ref_)?kl(_ref)?(/mean)?"),
    ("loss", r"(\w+/)?loss(/mean)?"),
    ("tok/s", r"(\w+/)?tokens_per_second"),
)


def headline(metrics: Mapping[str, float]) -> list[tuple[str, float]]:
    """(short label, value) of the metrics that say whether a run goes well; those that a run does not have are left out."""
    found: list[tuple[str, float]] = []
    for label, pattern in _HEADLINES:
        name = next((name for name in metrics if re.fullmatch(pattern, name)), None)
        if name is not None:
            found.append((label, metrics[name]))
    return found
