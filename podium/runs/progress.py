"""Progress while a run goes on: bars in a terminal, plain lines elsewhere (a log file, CI). All of it on stderr."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Mapping
from types import TracebackType
from typing import IO, TYPE_CHECKING, Any

from podium.runs.series import headline

if TYPE_CHECKING:
    from rich.live import Live
    from rich.progress import Progress as Bars

LINE_EVERY_SECONDS = 2.0
"""Without a terminal: at most one line in this time, besides the first and the last step."""


class Progress:
    """Shows how far a run is and the numbers that matter: reward, KL, tokens/s, time per stage.

    `with Progress(total_steps, title) as progress:` then `progress.stage("rollout", done, total)` while a stage works
    and `progress.step(metrics, stage_seconds)` when a step is done. With `enabled=False` only notes are shown.
    """

    def __init__(
        self,
        total_steps: int,
        title: str = "",
        enabled: bool = True,
        *,
        completed: int = 0,
        stream: IO[str] | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.total_steps, self.title, self.enabled = total_steps, title, enabled
        self.completed = completed
        """Steps done, earlier ones of a resumed run included; may be set before the first step."""
        self._here = 0
        self._spent = 0.0
        self._stream = stream or sys.stderr
        self._clock = clock
        self._last_step_at = clock()
        self._last_line = -LINE_EVERY_SECONDS
        self._live: Live | None = None
        self._bars: Bars
        self._steps: Any = None
        self._stage: Any = None
        self._below = ""

    def __enter__(self) -> Progress:
        self._last_step_at = self._clock()
        if self.enabled and self._stream.isatty():
            self._open_bars()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        if self._live is not None:
            self._bars.update(self._stage, visible=False)
            self._live.stop()
            self._live = None

    def step(self, metrics: Mapping[str, float], stage_seconds: Mapping[str, float] | None = None) -> None:
        """A step is done: its metrics, and the seconds that each of its stages took."""
        now = self._clock()
        self.completed += 1
        self._here += 1
        # Without the stages' own times, what lies between two steps; the first would then count loading too.
        self._spent += sum(stage_seconds.values()) if stage_seconds else now - self._last_step_at
        self._last_step_at = now
        if not self.enabled:
            return
        numbers = _numbers(metrics)
        times = _times(stage_seconds or {})
        if self._live is not None:
            self._below = "  ".join(part for part in (numbers, times) if part)
            self._bars.update(self._steps, completed=self.completed)
            self._bars.update(self._stage, visible=False)
            return
        ends = self._here == 1 or self.completed >= self.total_steps
        if ends or now - self._last_line >= LINE_EVERY_SECONDS:
            self._last_line = now
            self._print(self._line(numbers, times))

    def stage(self, name: str, done: int, total: int) -> None:
        """How far the running stage is (rollout: tokens). Shown below the steps in a terminal only."""
        if self._live is not None:
            self._bars.update(self._stage, description=f"  {name}", completed=done, total=total or None, visible=True)

    def note(self, text: str) -> None:
        """Something that the user should read once."""
        if self._live is not None:
            self._live.console.print(text, markup=False, highlight=False)
        else:
            self._print(text)

    def _print(self, text: str) -> None:
        print(text, file=self._stream, flush=True)

    def _line(self, numbers: str, times: str) -> str:
        each = self._spent / self._here
        left = each * max(self.total_steps - self.completed, 0)
        head = f"{self.title} " if self.title else ""
        count = f"{self.completed:>{len(str(self.total_steps))}}/{self.total_steps}"
        parts = [f"{head}step {count}", numbers, times, f"{_seconds(each)}/step, {_clock_text(left)} left"]
        return "  ".join(part for part in parts if part)

    def _open_bars(self) -> None:
        from rich.console import Console, Group
        from rich.live import Live
        from rich.progress import BarColumn, MofNCompleteColumn, TextColumn, TimeElapsedColumn, TimeRemainingColumn
        from rich.progress import Progress as Bars
        from rich.text import Text

        self._bars = Bars(
            TextColumn("{task.description}", markup=False),
            BarColumn(bar_width=24),
            MofNCompleteColumn(),
            TimeElapsedColumn(),
            TimeRemainingColumn(),
        )
        self._steps = self._bars.add_task(self.title or "steps", total=self.total_steps, completed=self.completed)
        self._stage = self._bars.add_task("", total=None, visible=False)
        # The numbers stand below the bars: beside them they would squeeze the bars out of a narrow terminal.
        self._live = Live(
            get_renderable=lambda: Group(self._bars, Text(self._below, style="bold")),
            console=Console(file=self._stream),
            refresh_per_second=8,
        )
        self._live.start()


def _numbers(metrics: Mapping[str, float]) -> str:
    return " ".join(f"{label} {_short(value)}" for label, value in headline(metrics))


def _times(stage_seconds: Mapping[str, float]) -> str:
    """The stages that take at least a fiftieth of the time, in their order."""
    least = sum(stage_seconds.values()) / 50
    return " ".join(f"{name} {_seconds(seconds)}" for name, seconds in stage_seconds.items() if seconds >= least)


def _short(value: float) -> str:
    """Three significant figures, thousands in full."""
    return f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.3g}"


def _seconds(value: float) -> str:
    return f"{value * 1000:.0f}ms" if value < 0.1 else f"{value:.1f}s"


def _clock_text(seconds: float) -> str:
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{rest:02}" if hours else f"{minutes}:{rest:02}"
