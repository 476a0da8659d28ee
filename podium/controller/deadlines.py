"""Deadlines: every wait has an end and an owner; when it passes there is a report, then an error where the wait was made.

How a wait is broken off. The watching thread cannot raise in another thread that sits in a system call, so:

1. a wait of the main thread gets a signal (SIGUSR2), whose handler raises: that breaks off sleeping, reading from a socket,
   waiting for a lock or a process. SIGALRM is left to programs that use it for timeouts of their own.
2. a wait of another thread gets an asynchronous exception (`PyThreadState_SetAsyncExc`): it comes with the next line of
   python that the thread runs.
3. what reacts to neither within `grace` seconds (native code that never returns, with or without the interpreter's lock) is
   ended with its process, by `faulthandler`'s own thread, which needs no lock: stacks are written first. The last checkpoint
   stands.

What is raised in between is no `Exception`, so that a reward's own `except Exception` does not take it for a failed sample.
Times are monotonic: a clock that is set does not matter.
"""

from __future__ import annotations

import ctypes
import faulthandler
import json
import math
import os
import resource
import signal
import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from types import FrameType, TracebackType
from typing import Any, TextIO

from podium.core.activity import activity, doing
from podium.core.errors import DeadlineError
from podium.core.jsonable import jsonable

SIGNAL = signal.SIGUSR2
STACKS = "stacks.txt"


class DeadlinePassed(BaseException):
    """Raised inside a wait whose deadline has passed; where the wait ends it becomes a `DeadlineError`."""


@dataclass
class Wait:
    """One wait that goes on: of `thread`, for `owner`, to end at `end` (monotonic seconds)."""

    kind: str
    owner: str
    thread: int
    limit: float
    started: float
    about: Callable[[], str]
    report: Path | None = None
    """Where the report is, once the deadline has passed."""
    ended: bool = False

    @property
    def end(self) -> float:
        return self.started + self.limit

    def __str__(self) -> str:
        return f"{self.owner} ({time.monotonic() - self.started:.0f} s so far)"


@dataclass
class Deadlines:
    """Watches waits. Used as a context around a run; waits outside of it are not watched.

    Args:
        limits: seconds by kind of wait; 0 or a kind that is not named: no deadline.
        folder: where reports go.
        note: shows a line to the user.
        grace: seconds after which a wait that does not react ends the process; 0: it is left alone.
        facts: more for the report (the step, the last stage that finished).
    """

    limits: Mapping[str, float]
    folder: Path
    note: Callable[[str], None] = lambda text: None
    grace: float = 60.0
    facts: Callable[[], dict[str, Any]] = dict
    waits: list[Wait] = field(default_factory=list)

    def __post_init__(self) -> None:
        # Taken as itself where a wait begins and ends: `Condition.__enter__` is python, and what breaks off a wait could come
        # between its two lines, when the lock is held and nobody will release it.
        self._lock = threading.RLock()
        self._changed = threading.Condition(self._lock)
        self._watcher: threading.Thread | None = None
        self._before: Any = None
        self._stacks: TextIO | None = None
        self._open = False
        self._asleep_until = self._armed = math.inf

    # ------------------------------------------------------------------ around a run

    def __enter__(self) -> Deadlines:
        self._open = True
        if threading.current_thread() is threading.main_thread():
            self._before = signal.signal(SIGNAL, self._on_signal)
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        with self._changed:
            self._open = False
            self._changed.notify_all()
        if self._before is not None:
            signal.signal(SIGNAL, self._before)
            self._before = None
        if self._stacks is not None:
            faulthandler.cancel_dump_traceback_later()
            self._armed = math.inf
            self._stacks.close()
            with suppress(OSError):
                path = self.folder / STACKS
                if not path.stat().st_size:
                    path.unlink()
                    self.folder.rmdir()  # where there is no report either

    # ------------------------------------------------------------------ one wait

    @contextmanager
    def waiting(self, kind: str, owner: str, about: Callable[[], str] = lambda: "") -> Iterator[None]:
        """A wait of this thread for `owner`.

        Args:
            kind: which of the limits holds ("rollout", "reward", "call", "data", "save").
            about: the samples or the request concerned; asked for when the deadline passes.

        Raises DeadlineError when it has passed.
        """
        limit = self.limits.get(kind, 0.0)
        with doing(owner):
            if not limit or not self._open:
                yield
                return
            wait = Wait(kind, owner, threading.get_ident(), limit, time.monotonic(), about)
            self._begin(wait)
            try:
                try:
                    yield
                finally:
                    wait.ended = True
            except DeadlinePassed:
                pass
            except Exception:
                if wait.report is None:
                    raise  # an error of its own; what was made of the exception on its way is replaced below
            finally:
                self._finish(wait)
            if wait.report is not None:
                raise DeadlineError(
                    f"{owner} did not end within {limit:g} s",
                    where=f"deadlines.{kind}",
                    remedy=f"see {wait.report}; if it may take longer, raise deadlines.{kind} (0: no deadline)",
                )

    def current(self) -> str:
        """What the run waits for now, for a user who asks; empty where it waits for nothing."""
        main = threading.main_thread().ident or 0
        said = activity(main)
        running = [wait for wait in self.waits if wait.thread == main]
        seconds = f", {time.monotonic() - running[-1].started:.0f} s so far" if running else ""
        return f"{', '.join(said)}{seconds}" if said else ""

    def _begin(self, wait: Wait) -> None:
        with self._lock:
            self.waits.append(wait)
            if self._watcher is None:
                self._watcher = threading.Thread(target=self._watch, name="deadlines", daemon=True)
                self._watcher.start()
            if wait.end < self._asleep_until:
                self._changed.notify_all()
            self._arm()  # with the lock: from waits of a moment ago it would be set too early, and nobody would set it right

    def _finish(self, wait: Wait) -> None:
        wait.ended = True
        with self._lock:
            self.waits = [other for other in self.waits if other is not wait]
            if wait.report is not None:  # the watcher sleeps past its last resort, which must not end those that go on
                self._changed.notify_all()
            if wait.report is not None and not self._by_signal(wait):  # one that has not arrived yet
                ctypes.pythonapi.PyThreadState_SetAsyncExc(ctypes.c_ulong(wait.thread), None)

    def _by_signal(self, wait: Wait) -> bool:
        return wait.thread == threading.main_thread().ident and self._before is not None

    def _arm(self) -> None:
        """The last resort, for the wait that would need it first."""
        if not self.grace:
            return
        if self._stacks is None:
            try:
                self._stacks = self._open_stacks()
            except OSError:  # a full disk: the run goes on without its last resort
                self.grace = 0.0
                return
        ends = [wait.end for wait in self.waits if not wait.ended]
        needed = min(ends) + self.grace if ends else math.inf
        if 0 <= needed - self._armed <= self.grace / 10:
            return  # to set it anew makes a thread; a little early will do
        self._armed = needed
        if ends:
            faulthandler.dump_traceback_later(max(0.1, needed - time.monotonic()), exit=True, file=self._stacks)
        else:
            faulthandler.cancel_dump_traceback_later()

    def _open_stacks(self) -> TextIO:
        """An empty file for the last resort; one that a process before left behind is kept under another name, and said."""
        self.folder.mkdir(parents=True, exist_ok=True)
        path = self.folder / STACKS
        if path.exists() and path.stat().st_size:
            kept = path.with_name(f"stacks_{1 + len(list(self.folder.glob('stacks_*.txt'))):03d}.txt")
            path.rename(kept)
            self.note(f"the process before was ended by a deadline, in code that could not be broken off; see {kept}")
        return path.open("w")

    # ------------------------------------------------------------------ the watching thread

    def _watch(self) -> None:
        """Sleeps until the earliest end that it knows. Waits that end before it do not wake it: most end at once. Where nothing
        waits any more, it takes back the last resort that they have left, in good time.
        """
        with self._changed:
            while self._open:
                self.waits = [wait for wait in self.waits if not wait.ended]  # also one that was broken off as it ended
                ends = [wait.end for wait in self.waits if wait.report is None]
                if not self.waits and self._armed < math.inf:
                    ends = [self._armed - 0.5 * self.grace]
                self._asleep_until = min(ends, default=math.inf)
                self._changed.wait(max(0.0, self._asleep_until - time.monotonic()) if ends else None)
                if not self._open:  # the last resort is taken back already, its file closed
                    break
                self._arm()
                late = [w for w in self.waits if w.report is None and not w.ended and time.monotonic() >= w.end]
                if late:
                    self._passed(late[-1])  # the innermost: what it is in will end with it
            self._watcher = None

    def _passed(self, wait: Wait) -> None:
        try:
            wait.report = self._write(wait)
            self.note(f"{wait.owner} did not end within {wait.limit:g} s; see {wait.report}")
        except OSError as error:  # a full disk must not keep the wait alive
            wait.report = self.folder / "(no report could be written)"
            with suppress(Exception):
                self.note(f"{wait.owner} did not end within {wait.limit:g} s; no report: {error.strerror}")
        if wait.ended:
            return
        if self._by_signal(wait):
            signal.pthread_kill(wait.thread, SIGNAL)
        else:
            ctypes.pythonapi.PyThreadState_SetAsyncExc(ctypes.c_ulong(wait.thread), ctypes.py_object(DeadlinePassed))

    def _on_signal(self, number: int, frame: FrameType | None) -> None:
        main = threading.get_ident()
        if any(wait.report is not None and wait.thread == main and not wait.ended for wait in self.waits):
            raise DeadlinePassed
        if callable(self._before):
            self._before(number, frame)

    # ------------------------------------------------------------------ the report

    def _write(self, wait: Wait) -> Path:
        """A report as JSON (for `podium doctor`), and the same as text beside it."""
        self.folder.mkdir(parents=True, exist_ok=True)
        number = 1 + len(list(self.folder.glob("deadline_*.json")))
        path = self.folder / f"deadline_{number:03d}_{wait.kind}.json"
        content = report_of(wait, self.facts())
        path.write_text(json.dumps(jsonable(content), indent=1, ensure_ascii=False, default=str) + "\n")
        path.with_suffix(".txt").write_text(as_text(content))
        return path.with_suffix(".txt")


def report_of(wait: Wait, facts: Mapping[str, Any]) -> dict[str, Any]:
    """Who waits on whom, since when, over what, and where every thread is."""
    names = {thread.ident: thread.name for thread in threading.enumerate()}
    try:
        about = wait.about()
    except Exception as error:  # what it reads may be half made
        about = f"(not known: {error})"
    return {
        "kind": wait.kind,
        "waiter": names.get(wait.thread, str(wait.thread)),
        "owner": wait.owner,
        "limit_seconds": wait.limit,
        "waited_seconds": round(time.monotonic() - wait.started, 3),
        "doing": activity(wait.thread),
        "about": about,
        **facts,
        "time": time.strftime("%Y-%m-%d %H:%M:%S"),
        "process": os.getpid(),
        "memory": memory(),
        "threads": {
            f"{names.get(ident, '?')} ({ident})": traceback.format_stack(frame)
            for ident, frame in sys._current_frames().items()
        },
    }


def as_text(report: Mapping[str, Any]) -> str:
    """A report to read: facts first, the waiting thread's stack, then the others'."""
    lines = [
        f"{report['waiter']} waits for {report['owner']}: {report['waited_seconds']:g} s, "
        f"the deadline is {report['limit_seconds']:g} s (deadlines.{report['kind']})",
        "it is at: " + " > ".join(report["doing"]),
    ]
    skip = ("kind", "waiter", "owner", "limit_seconds", "waited_seconds", "doing", "threads")
    lines += [f"{name}: {value}" for name, value in report.items() if name not in skip and value not in ("", None)]
    threads = sorted(report["threads"].items(), key=lambda item: not item[0].startswith(report["waiter"]))
    for name, stack in threads:
        lines += ["", f"thread {name}", "".join(stack).rstrip()]
    return "\n".join(lines) + "\n"


def memory() -> dict[str, float]:
    """This process's memory in MiB: at its largest, now, and the GPU's where there is one."""
    found = {
        "host_peak_mib": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / (2**20 if sys.platform == "darwin" else 2**10)
    }
    with suppress(OSError, ValueError, IndexError):
        pages = int(Path("/proc/self/statm").read_text().split()[1])
        found["host_mib"] = pages * os.sysconf("SC_PAGE_SIZE") / 2**20
    torch = sys.modules.get("torch")
    if torch is not None and torch.cuda.is_available() and torch.cuda.is_initialized():
        found["gpu_mib"] = torch.cuda.memory_allocated() / 2**20
        found["gpu_peak_mib"] = torch.cuda.max_memory_allocated() / 2**20
    return {name: round(value, 1) for name, value in found.items()}
