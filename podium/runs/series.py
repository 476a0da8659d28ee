"""Which metrics belong together: the panels of the plot and the numbers beside the progress bar."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass


@dataclass(frozen=True)
class Panel:
    """One panel of the plot: the metrics whose whole names match `pattern`."""

    title: str
    pattern: str
    unit: str = ""

    def pick(self, names: Iterable[str]) -> list[str]:
        """The panel's names, in the order given."""
        return [name for name in names if re.fullmatch(self.pattern, name)]


# A role called "reward" has metrics of its training under the same prefix as the reward sources.
_OF_TRAINING = r"(?!(loss|lr|grad_norm|tokens|skipped|skipped_updates)$)"

PANELS = (
    Panel("Reward and accuracy", rf"(eval/)?reward/{_OF_TRAINING}.+|(\w+/)?accuracy"),
    Panel("KL", r"kl/per_token|\w+/(ref_kl|approx_kl)", "nats per token"),
    Panel("Entropy", r"\w+/entropy", "nats per token"),
    Panel("Response length", r"(eval/)?rollout/response_tokens", "tokens"),
    Panel("Loss", r"(\w+/)?(loss|nll)"),
    Panel("Time per stage", r"time/(?!step$).+", "seconds"),
)

_HEADLINES = (
    ("reward", r"reward/mean"),
    ("acc", r"(?!eval)\w+/accuracy"),
    ("eval", r"eval/accuracy|eval/reward/mean|eval/nll"),
    ("kl", r"kl/per_token|actor/ref_kl"),
    ("len", r"rollout/response_tokens"),
    ("loss", r"\w+/loss"),
    ("tok/s", r"speed/tokens_per_second"),
)


def headline(metrics: Mapping[str, float]) -> list[tuple[str, float]]:
    """(short label, value) of the metrics that say whether a run goes well; those that a run does not have are left out.

    A policy loss says nothing of the kind, so `loss` is there only where nothing is rewarded.
    """
    found: list[tuple[str, float]] = []
    for label, pattern in _HEADLINES:
        name = next((name for name in metrics if re.fullmatch(pattern, name)), None)
        if name is not None and not (label == "loss" and "reward/mean" in metrics):
            found.append((label, metrics[name]))
    return found
