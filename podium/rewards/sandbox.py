"""Runs python that nobody has read, in a process that may do little, until a deadline. Not a virtual machine.

What gives what is in docs/rewards.md, "Running code". `python -m podium.rewards.sandbox` prints the layers of this machine.
"""

from __future__ import annotations

import contextlib
import json
import os
import secrets
import signal
import subprocess
import sys
import tempfile
import threading
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import IO, Any, Literal

Status = Literal["done", "exited", "error", "timeout", "memory", "output", "refused", "crashed"]
_CHILD = Path(__file__).with_name("sandbox_child.py")


@dataclass(frozen=True)
class Limits:
    """What a program may use."""

    seconds: float = 5.0
    """Wall time, from its start; its processor time is limited to a little more."""
    memory_bytes: int = 512 * 2**20
    """Address space."""
    output_bytes: int = 2**20
    """The longest output, and the longest file."""
    most_files: int = 16
    """Times that it may open a file for writing."""


@dataclass(frozen=True)
class Outcome:
    """How a program ended.

    `done`: it ran to its end. `exited`: it left by sys.exit or os._exit. `error`: it raised. `timeout`, `memory`, `output`: it
    used more than it may. `refused`: it tried what it may not; `detail` says what. `crashed`: a signal ended it.
    """

    status: Status
    exit_code: int
    stdout: str = ""
    detail: str = ""
    passed: list[bool] = field(default_factory=list)
    """For each test, whether it ran through."""
    layers: tuple[str, ...] = ()
    """What held it, where it came to its end."""


def run_python(code: str, tests: Sequence[str] | None = None, *, stdin: str = "", limits: Limits | None = None) -> Outcome:
    """Runs a program in a fresh process, in a folder of its own that is removed afterwards; nothing of it is left running.

    Args:
        code: python source, with the standard library at hand.
        tests: statements (asserts) run after it in its namespace, whose `__name__` is then not "__main__". None: the program
            itself is what is asked for.
        stdin: what it can read.

    A program cannot claim success by leaving early or by what it prints. It shares its interpreter with the tests, though:
    one that searches the interpreter's memory can. Comparing output for given input has no such hole.
    """
    limits = limits or Limits()
    nonce = secrets.token_hex(16)
    payload = {
        "nonce": nonce,
        "code": code,
        "tests": None if tests is None else list(tests),
        "seconds": limits.seconds,
        "memory_bytes": limits.memory_bytes,
        "file_bytes": limits.output_bytes,
        "most_files": limits.most_files,
    }
    with contextlib.ExitStack() as stack:
        folder = stack.enter_context(tempfile.TemporaryDirectory(prefix="podium-sandbox-", ignore_cleanup_errors=True))
        files = [stack.enter_context(tempfile.TemporaryFile()) for _ in range(5)]
        given, told, source, out, errors = files
        _fill(given, json.dumps(payload).encode())
        _fill(source, stdin.encode("utf-8", "surrogatepass"))
        command = [sys.executable, "-I", "-S", "-B", "-X", "utf8", str(_CHILD), str(given.fileno()), str(told.fileno())]
        process = subprocess.Popen(
            command,
            stdin=source,
            stdout=out,
            stderr=errors,
            cwd=folder,
            env={"HOME": folder, "TMPDIR": folder, "LANG": "C.UTF-8"},
            pass_fds=(given.fileno(), told.fileno()),
            start_new_session=True,
        )
        late = _wait(process, limits.seconds)
        report = _report(told, nonce)
        return _outcome(process.returncode, late, report, _text(out, limits.output_bytes), _text(errors, 4096))


@cache
def layers() -> tuple[str, ...]:
    """What holds a program on this machine: of limits, network namespace, landlock, seccomp, audit hook."""
    return run_python("", limits=Limits(seconds=30.0)).layers


def _wait(process: subprocess.Popen[bytes], seconds: float) -> bool:
    """Waits until the deadline; then, and in any case, ends the whole process group. Returns whether it was late."""
    late = threading.Event()

    def end() -> None:
        late.set()
        _kill(process)

    timer = threading.Timer(seconds, end)
    timer.start()
    try:
        os.waitid(os.P_PID, process.pid, os.WEXITED | os.WNOWAIT)
    finally:
        timer.cancel()
        timer.join()
        _kill(process)  # before it is reaped: until then no other group can have its number
        process.wait()
    return late.is_set()


def _kill(process: subprocess.Popen[bytes]) -> None:
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(process.pid, signal.SIGKILL)


def _fill(file: IO[bytes], content: bytes) -> None:
    file.write(content)
    file.flush()
    file.seek(0)


def _text(file: IO[bytes], most: int) -> str:
    file.seek(0)
    return file.read(most).decode("utf-8", "replace")


def _report(file: IO[bytes], nonce: str) -> dict[str, Any]:
    """What the process says of itself; nothing, where the program wrote that instead."""
    file.seek(0)
    try:
        report = json.loads(file.read(2**20))
    except ValueError:
        return {}
    return report if isinstance(report, dict) and report.get("nonce") == nonce else {}


def _outcome(code: int, late: bool, report: dict[str, Any], stdout: str, stderr: str) -> Outcome:
    by_signal: dict[int, Status] = {
        -signal.SIGXCPU: "timeout",
        -signal.SIGXFSZ: "output",
        -signal.SIGSYS: "refused",
        -signal.SIGKILL: "memory",  # nobody else kills it: the system had none left
    }
    if late:
        return Outcome("timeout", code, stdout, "it ran past its deadline")
    if code < 0:
        return Outcome(by_signal.get(code, "crashed"), code, stdout, f"ended by signal {-code}")
    if not report:
        no_memory = "MemoryError" in stderr
        return Outcome("memory" if no_memory else "exited", code, stdout, stderr[-300:])
    status, passed = report["status"], report.get("passed", [])
    if status == "done":
        return Outcome("done", code, stdout, "", passed, tuple(report["layers"]))
    detail = report.get("what") or (passed[0] if status == "error" else "")
    return Outcome(status, code, stdout, detail, [], tuple(report.get("layers", ())))


if __name__ == "__main__":
    print(", ".join(layers()))
