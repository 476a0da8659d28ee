"""What a run's folder holds, read once; and what a finding is."""

from __future__ import annotations

import json
import math
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from podium.core.config import load_yaml
from podium.runs.folder import RunFolder, read_jsonl

Severity = Literal["error", "warning", "note"]
LAST = 10
"""Steps that count as the present."""


@dataclass(frozen=True)
class Finding:
    """One trouble: its likely cause, where it shows, what to do."""

    severity: Severity
    cause: str
    what: str
    evidence: str
    remedy: str


@dataclass
class Facts:
    """What a run's folder holds."""

    path: Path
    settings: dict[str, Any]
    metrics: list[dict[str, Any]]
    reports: list[dict[str, Any]]
    alarms: list[dict[str, Any]]
    samples: list[dict[str, Any]]
    """Of the last step that has any."""
    nonfinite: list[str]
    error: dict[str, Any] | None
    """What ended the run's last part."""
    stacks: str
    """Written by a process that ended itself: a wait reacted to nothing."""
    finished: bool
    silent_seconds: float
    """Since the last metrics were written."""
    steps: list[dict[str, Any]] = field(init=False)
    """Metrics of training steps alone."""

    def __post_init__(self) -> None:
        self.steps = [row for row in self.metrics if "time/step" in row]

    @property
    def going_on(self) -> str:
        """The command by which the run goes on; where it has no checkpoint, the one that begins it anew."""
        run = RunFolder(self.path)
        if any(run.checkpoints.glob("step_*")):
            return f"podium train --resume {self.path}"
        return f"podium train {run.settings} run.name=NEW (there is no checkpoint yet)"

    def series(self, name: str) -> list[tuple[int, float]]:
        """(step, value) of a metric; a value that was not finite is NaN."""
        found = ((row["step"], row[name]) for row in self.steps if name in row)
        return [(step, math.nan if value is None else float(value)) for step, value in found]

    def last(self, name: str) -> float | None:
        """Mean over the last steps: up to `LAST`, and no more than the last third."""
        series = self.series(name)
        values = [v for _, v in series[-max(1, min(LAST, len(series) // 3)) :] if not math.isnan(v)]
        return sum(values) / len(values) if values else None

    def first(self, name: str) -> float | None:
        """Mean over the first three steps."""
        values = [v for _, v in self.series(name)[:3] if not math.isnan(v)]
        return sum(values) / len(values) if values else None


def read_run(path: str | Path) -> Facts:
    """The facts of a run folder. Raises ConfigError where there is none."""
    run = RunFolder.open(path)
    files = sorted(run.samples.glob("step_*.jsonl"))
    reports = []
    for file in sorted((run.path / "reports").glob("*.json")):
        try:
            reports.append({"file": file.name, **json.loads(file.read_text(encoding="utf-8"))})
        except (json.JSONDecodeError, UnicodeDecodeError, TypeError):
            reports.append({"file": file.name})
    newest = max((f.stat().st_mtime for f in (run.metrics, run.settings) if f.exists()), default=time.time())
    return Facts(
        path=run.path,
        settings=load_yaml(run.settings),
        metrics=run.read_metrics(),
        reports=reports,
        alarms=list(read_jsonl(run.path / "alarms.jsonl")),
        samples=list(read_jsonl(files[-1])) if files else [],
        error=_error(run),
        stacks=stacks.read_text(errors="replace") if (stacks := run.path / "reports" / "stacks.txt").is_file() else "",
        nonfinite=sorted(p.name for p in run.samples.glob("nonfinite_*.jsonl")),
        finished=run.summary.exists(),
        silent_seconds=time.time() - newest,
    )


def _error(run: RunFolder) -> dict[str, Any] | None:
    """`error.json`, unless the run has gone on since."""
    path = run.path / "error.json"
    try:
        error = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, json.JSONDecodeError, UnicodeDecodeError):
        return None
    later = any((row.get("time") or 0) > (error.get("time") or 0) for row in run.read_metrics()[-1:])
    return None if later else error
