"""Deadlines: a wait that lasts too long ends, with a report of who waited for whom; others are left alone."""

from __future__ import annotations

import json
import math
import signal
import subprocess
import sys
import textwrap
import threading
import time
from contextlib import suppress

import pytest

from podium.controller.deadlines import SIGNAL, Deadlines, as_text, memory, report_of
from podium.core.activity import activity, doing
from podium.core.errors import DeadlineError

GRACE = 30.0


@pytest.fixture
def deadlines(tmp_path):
    said = []
    with Deadlines({"reward": 0.2, "call": 30.0}, tmp_path / "reports", said.append, GRACE, lambda: {"step": 7}) as given:
        given.said = said
        yield given


def reports(tmp_path):
    return [json.loads(p.read_text()) for p in sorted((tmp_path / "reports").glob("*.json"))]


def test_a_wait_that_sleeps_is_broken_off_and_reported(deadlines, tmp_path):
    started = time.monotonic()
    said = pytest.raises(DeadlineError, match=r"deadlines.reward: scorer did not end within 0.2 s")
    with said, deadlines.waiting("reward", "scorer", lambda: "sample 3"), doing("reward 'slow' over 8 samples"):
        time.sleep(60)
    assert time.monotonic() - started < 20
    (report,) = reports(tmp_path)
    assert report["owner"] == "scorer" and report["waiter"] == "MainThread" and report["about"] == "sample 3"
    assert report["step"] == 7 and report["doing"] == ["scorer", "reward 'slow' over 8 samples"]
    main = next(stack for name, stack in report["threads"].items() if name.startswith("MainThread"))
    assert any("time.sleep(60)" in line for line in main) and report["memory"]["host_mib"] > 1
    text = next((tmp_path / "reports").glob("*.txt")).read_text()
    assert text.startswith("MainThread waits for scorer") and "time.sleep(60)" in text
    assert "did not end within 0.2 s" in deadlines.said[0]


def test_a_wait_that_was_broken_off_leaves_no_last_resort_behind(deadlines):
    """Else the process would be ended `grace` seconds later, whatever goes on then."""
    with deadlines.waiting("call", "stage"):
        with pytest.raises(DeadlineError), deadlines.waiting("reward", "scorer"):
            time.sleep(60)
        left = deadlines.waits[0].end + GRACE
        _until(lambda: deadlines._armed >= left - GRACE / 10)
    with pytest.raises(DeadlineError), deadlines.waiting("reward", "scorer"):
        time.sleep(60)
    _until(lambda: deadlines._armed == math.inf)


def test_a_thread_that_is_broken_off_where_it_takes_the_lock_does_not_keep_it(tmp_path):
    class Slow(Deadlines):
        def _write(self, wait):
            time.sleep(0.3)  # with the lock: the thread comes to it meanwhile
            return super()._write(wait)

    def stage():
        with suppress(DeadlineError), deadlines.waiting("reward", "outer"):
            end = time.monotonic() + 5
            while time.monotonic() < end:
                with deadlines.waiting("call", "inner"):
                    pass

    with Slow({"reward": 0.1, "call": 30.0}, tmp_path / "reports") as deadlines:
        for _ in range(3):
            thread = threading.Thread(target=stage, daemon=True)
            thread.start()
            thread.join(10)
            assert not thread.is_alive()
            assert deadlines._changed.acquire(timeout=2)
            deadlines._changed.release()


def _until(holds):
    end = time.monotonic() + 10
    while not holds():
        assert time.monotonic() < end
        time.sleep(0.01)


def test_a_wait_in_a_lock_and_in_a_process(deadlines):
    lock = threading.Lock()
    lock.acquire()
    for wait in (lock.acquire, lambda: subprocess.run(["sleep", "60"])):
        with pytest.raises(DeadlineError), deadlines.waiting("reward", "scorer"):
            wait()


def test_a_function_that_catches_everything_cannot_hide_it(deadlines):
    def careless():
        try:
            time.sleep(60)
        except BaseException:
            return 0.0

    with pytest.raises(DeadlineError), deadlines.waiting("reward", "scorer"):
        careless()
    with pytest.raises(DeadlineError), deadlines.waiting("reward", "scorer"):
        try:
            time.sleep(60)
        except BaseException:
            raise ValueError("made of it") from None


def test_what_ends_in_time_and_errors_of_its_own_are_left_alone(deadlines, tmp_path):
    for _ in range(50):
        with deadlines.waiting("reward", "scorer"):
            pass
    with pytest.raises(ValueError, match="mine"), deadlines.waiting("reward", "scorer"):
        raise ValueError("mine")
    with deadlines.waiting("none", "whoever"):
        time.sleep(0.3)
    time.sleep(0.3)
    assert reports(tmp_path) == [] and deadlines.waits == []


def test_the_innermost_wait_is_the_one_that_ends(deadlines, tmp_path):
    with deadlines.waiting("call", "stage"), pytest.raises(DeadlineError), deadlines.waiting("reward", "scorer"):
        time.sleep(60)
    assert [r["owner"] for r in reports(tmp_path)] == ["scorer"]


def test_another_thread_is_broken_off_at_its_next_line(deadlines):
    caught = []

    def work():
        try:
            with deadlines.waiting("reward", "scorer"):
                while True:
                    time.sleep(0.01)
        except DeadlineError as error:
            caught.append(error)

    thread = threading.Thread(target=work)
    thread.start()
    thread.join(30)
    assert len(caught) == 1


def test_ctrl_c_during_a_wait_is_a_ctrl_c(deadlines):
    before = signal.signal(signal.SIGINT, signal.default_int_handler)  # a process in the background is born deaf to it
    try:
        with pytest.raises(KeyboardInterrupt), deadlines.waiting("call", "stage"):
            signal.raise_signal(signal.SIGINT)
    finally:
        signal.signal(signal.SIGINT, before)


def test_a_clock_that_jumps_does_not_matter(deadlines, tmp_path, monkeypatch):
    monkeypatch.setattr(time, "time", lambda: 4e9)
    with deadlines.waiting("call", "stage"):
        pass
    assert reports(tmp_path) == []


def test_what_the_run_waits_for_now(deadlines):
    assert deadlines.current() == ""
    with deadlines.waiting("call", "stage 'update_actor'"), doing("role 'actor', rank 0, method 'update'"):
        assert deadlines.current() == "stage 'update_actor', role 'actor', rank 0, method 'update', 0 s so far"
    assert activity(threading.get_ident()) == []


def test_nothing_is_left_behind(tmp_path):
    before = signal.getsignal(SIGNAL)
    with Deadlines({"reward": 5.0}, tmp_path / "reports") as deadlines, deadlines.waiting("reward", "scorer"):
        pass
    assert not (tmp_path / "reports").exists() and signal.getsignal(SIGNAL) == before


def test_native_code_that_never_returns_ends_the_process_with_its_stacks(tmp_path):
    """A regular expression holds the interpreter's lock: no python of ours can run, and no signal handler."""
    program = f"""
        import re
        from pathlib import Path
        from podium.controller.deadlines import Deadlines

        def stuck():
            re.match(r"(a+)+$", "a" * 64 + "b")

        with Deadlines({{"reward": 0.2}}, Path({str(tmp_path)!r}), grace=0.5) as deadlines:
            with deadlines.waiting("reward", "scorer"):
                stuck()
    """
    done = subprocess.run([sys.executable, "-c", textwrap.dedent(program)], timeout=60)
    assert done.returncode == 1 and "in stuck" in (tmp_path / "stacks.txt").read_text()
    said = []
    with Deadlines({"reward": 5.0}, tmp_path, said.append) as deadlines, deadlines.waiting("reward", "scorer"):
        pass
    assert "in stuck" in (tmp_path / "stacks_001.txt").read_text() and "stacks_001.txt" in said[0]


@pytest.fixture
def last_resort(monkeypatch):
    """Seconds that the last resort was set to, and None where it was taken back."""
    calls = []
    monkeypatch.setattr("faulthandler.dump_traceback_later", lambda left, **given: calls.append(left))
    monkeypatch.setattr("faulthandler.cancel_dump_traceback_later", lambda: calls.append(None))
    return calls


def test_short_waits_cost_no_thread_each(tmp_path, last_resort):
    """The last resort is set anew only where it would come too late or too early."""
    with Deadlines({"call": 100.0, "reward": 10.0, "data": 50.0}, tmp_path, grace=40.0) as deadlines:
        for kind in ("call", "reward", "data"):
            for _ in range(20):
                with deadlines.waiting(kind, "a stage"):
                    pass
    assert last_resort == [pytest.approx(140, abs=1), pytest.approx(50, abs=1), pytest.approx(90, abs=1), None]


def test_the_last_resort_is_taken_back_where_nothing_waits(tmp_path, last_resort):
    with Deadlines({"call": 0.3}, tmp_path, grace=0.4) as deadlines:
        with deadlines.waiting("call", "a stage"):
            pass
        time.sleep(0.6)
        assert last_resort == [pytest.approx(0.7, abs=0.1), None]


def test_a_wait_that_ends_sooner_than_the_last_is_not_overslept(tmp_path):
    with Deadlines({"call": 100.0, "reward": 0.2}, tmp_path) as deadlines:
        with deadlines.waiting("call", "the first"):
            pass
        started = time.monotonic()
        with pytest.raises(DeadlineError), deadlines.waiting("reward", "the second"):
            time.sleep(5)
        assert time.monotonic() - started < 3


def test_a_report_without_its_samples(deadlines):
    def unknown():
        raise KeyError("prompt")

    from podium.controller.deadlines import Wait

    report = report_of(Wait("reward", "scorer", threading.get_ident(), 1.0, time.monotonic(), unknown), {"step": 1})
    assert report["about"].startswith("(not known") and "step: 1" in as_text(report)
    assert memory()["host_peak_mib"] > 1
