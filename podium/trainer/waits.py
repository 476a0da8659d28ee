"""A run's deadlines: which hold for which stage, and what a report says of the step."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from pathlib import Path
from typing import Any

from podium.controller.deadlines import Deadlines
from podium.core.batch import Batch
from podium.core.settings import DeadlineSettings
from podium.stages.base import Stage
from podium.trainer.memory import MemoryWatch

Watch = Callable[[Stage, Batch], AbstractContextManager[None]]

_SCORED = {"rewards", "costs", "step_rewards"}
_SHOWN = 3


def run_deadlines(
    settings: DeadlineSettings, folder: Path, note: Callable[[str], None], facts: Callable[[], dict[str, Any]], *, local: bool
) -> Deadlines:
    """The deadlines of a run whose reports go to `folder`.

    Args:
        local: workers are this process. Where they are others, the executor watches its own calls.
    """
    limits = {"reward": settings.reward, "data": settings.data, "save": settings.save}
    if local:
        limits |= {"rollout": settings.rollout, "call": settings.call}
    return Deadlines(limits, folder, note, facts=facts)


def kind_of(stage: Stage) -> str:
    """Which deadline is a stage's, by what it writes. One that samples and scores has none: its two parts have theirs."""
    scores, samples = bool(_SCORED & set(stage.writes)), "rollout_log_probs" in stage.writes
    if scores and samples:
        return "parts"
    return "reward" if scores else "rollout" if samples else "call"


class StageWatch:
    """Puts each stage's run under its deadline, and knows which one ended last and how far the present one is."""

    def __init__(self, deadlines: Deadlines, memory: MemoryWatch) -> None:
        self.deadlines, self.memory = deadlines, memory
        self.last_stage, self.progress = "", ""

    @contextmanager
    def __call__(self, stage: Stage, batch: Batch) -> Iterator[None]:
        self.progress = ""
        waiting = self.deadlines.waiting(kind_of(stage), f"stage '{stage.label}'", lambda: _samples(batch))
        with waiting, self.memory.inside(stage.label) if kind_of(stage) != "parts" else nullcontext():
            yield
        self.last_stage = stage.label

    def reported(self, stage: str, done: int, total: int) -> None:
        """How far a stage says it is."""
        self.progress = f"{stage}: {done} of {total}"


def _samples(batch: Batch) -> str:
    """The rows that a stage works on: how many, and the first by data row and prompt."""
    if "prompt" not in batch:
        return f"{len(batch)} rows"
    shown = []
    for i in range(min(_SHOWN, len(batch))):
        row = f"data row {int(batch['row_index'][i])}: " if "row_index" in batch else ""
        shown.append(f"{row}{str(batch['prompt'][i])[:80]!r}")
    return f"{len(batch)} samples, the first: " + "; ".join(shown)
