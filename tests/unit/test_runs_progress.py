from __future__ import annotations

import io
import re

from podium.runs.progress import Progress
from podium.runs.series import headline


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


class Clock:
    now = 0.0

    def __call__(self) -> float:
        return self.now


METRICS = {"reward/mean": 0.4321, "actor/ref_kl": 0.00123, "speed/tokens_per_second": 1234.5, "actor/loss": 1.0}


def test_plain_lines_say_what_matters() -> None:
    out, clock = io.StringIO(), Clock()
    with Progress(100, "grpo", stream=out, clock=clock) as progress:
        clock.now = 2.0
        progress.step(METRICS, {"rollout": 1.25, "reward": 0.04, "kl": 0.001})
    assert out.getvalue() == (
        "grpo step   1/100  reward 0.432 kl 0.00123 tok/s 1,234  rollout 1.2s reward 40ms  1.3s/step, 2:08 left\n"
    )


def test_plain_lines_are_not_too_many() -> None:
    out, clock = io.StringIO(), Clock()
    with Progress(50, stream=out, clock=clock) as progress:
        for _ in range(50):
            clock.now += 0.1
            progress.step(METRICS)
    shown = re.findall(r"step +(\d+)/50", out.getvalue())
    assert shown[0] == "1" and shown[-1] == "50" and len(shown) == 4


def test_resumed_run_counts_on() -> None:
    out, clock = io.StringIO(), Clock()
    with Progress(10, stream=out, clock=clock, completed=7) as progress:
        clock.now = 4.0
        progress.step({})
    with Progress(10, stream=out, clock=clock) as progress:
        progress.completed = 8
        clock.now = 5.0
        progress.step({}, {"rollout": 0.5})
    assert out.getvalue().splitlines() == [
        "step  8/10  4.0s/step, 0:08 left",
        "step  9/10  rollout 0.5s  0.5s/step, 0:00 left",
    ]


def test_disabled_shows_notes_only() -> None:
    out = io.StringIO()
    with Progress(3, enabled=False, stream=out) as progress:
        progress.stage("rollout", 1, 2)
        progress.step(METRICS, {"rollout": 1.0})
        progress.note("3 prompts were dropped [too long]")
    assert out.getvalue() == "3 prompts were dropped [too long]\n"


def test_bars_in_a_terminal() -> None:
    out = Terminal()
    with Progress(4, "grpo", stream=out) as progress:
        progress.stage("rollout", 30, 64)
        progress.step(METRICS, {"rollout": 1.25})
        progress.note("kept as written: [bold]")
        progress.step(METRICS)
    text = out.getvalue()
    assert "grpo" in text and "2/4" in text and "kept as written: [bold]" in text


def test_an_error_ends_the_bars() -> None:
    out = Terminal()
    try:
        with Progress(4, stream=out) as progress:
            raise KeyboardInterrupt
    except KeyboardInterrupt:
        progress.note("stopped")
    assert out.getvalue().endswith("stopped\n")
    assert "\x1b[?25h" in out.getvalue()  # the cursor is shown again


def test_headline_leaves_out_what_is_not_there() -> None:
    assert headline({"actor/loss": 2.0, "actor/lr": 1e-5}) == [("loss", 2.0)]
    assert headline({}) == []
