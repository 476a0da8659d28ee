"""A function in processes of its own, with a deadline per call: for verifiers that may hang or crash.

The worker is this module run as a script; calls and answers are JSON lines on its pipes. Fresh interpreters, not
forks: the parent holds threads and perhaps a GPU, and its `__main__` must not be imported again. Nothing here imports
torch, so that a worker starts fast.
"""

from __future__ import annotations

import atexit
import contextlib
import importlib
import json
import os
import queue
import subprocess
import sys
import threading
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import IO, Any

START_SECONDS = 120.0


class CallFailure(Exception):
    """A call that gave no answer: it raised in the worker, passed its deadline, or ended the worker."""


class DeadlinePool:
    """Calls `module:function` with JSON keywords in `workers` processes; a call past `deadline` seconds is killed.

    Workers start at the first call. A killed one is replaced when it is needed next. `close()` ends them all; so does
    the end of the program.
    """

    def __init__(self, target: str, workers: int, deadline: float) -> None:
        self.target, self.workers, self.deadline = target, workers, deadline
        self._idle: queue.SimpleQueue[_Worker] = queue.SimpleQueue()
        self._all = [_Worker(target) for _ in range(workers)]
        for worker in self._all:
            self._idle.put(worker)
        atexit.register(self.close)

    def map(self, calls: Sequence[Mapping[str, Any]]) -> list[Any]:
        """The answer to each call, or a CallFailure in its place, in order."""
        if not calls:
            return []
        with ThreadPoolExecutor(min(self.workers, len(calls))) as threads:
            return list(threads.map(self._call, calls))

    def _call(self, keywords: Mapping[str, Any]) -> Any:
        worker = self._idle.get()
        try:
            return worker.call(keywords, self.deadline)
        except CallFailure as failure:
            return failure
        finally:
            self._idle.put(worker)

    def close(self) -> None:
        """Ends the workers."""
        for worker in self._all:
            worker.kill()
        atexit.unregister(self.close)


class _Worker:
    def __init__(self, target: str) -> None:
        self.target = target
        self.process: subprocess.Popen[bytes] | None = None

    def call(self, keywords: Mapping[str, Any], deadline: float) -> Any:
        if self.process is None or self.process.poll() is not None:
            self._start()
        answer = self._exchange(json.dumps(keywords).encode(), deadline)
        if "error" in answer:
            raise CallFailure(answer["error"])
        return answer["value"]

    def _start(self) -> None:
        self.kill()
        # The worker finds what this process finds, however it came to be importable.
        path = os.pathsep.join(entry or os.getcwd() for entry in sys.path)
        environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": path}
        command = [sys.executable, "-m", __name__, self.target]
        self.process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, env=environment)
        self._exchange(None, START_SECONDS)  # its first line says that the function is imported

    def _exchange(self, line: bytes | None, deadline: float) -> dict[str, Any]:
        process = self.process
        assert process is not None
        assert process.stdin is not None
        assert process.stdout is not None
        late = threading.Event()

        def kill() -> None:
            late.set()
            process.kill()

        timer = threading.Timer(deadline, kill)
        timer.start()
        try:
            if line is not None:
                process.stdin.write(line + b"\n")
                process.stdin.flush()
            answer = process.stdout.readline()
        except BrokenPipeError:
            answer = b""
        finally:
            timer.cancel()
        if answer.endswith(b"\n"):
            return json.loads(answer)
        self.kill()
        raise CallFailure(
            f"no answer within {deadline:g} seconds; its process was killed"
            if late.is_set()
            else f"its process ended with exit code {process.returncode}"
        )

    def kill(self) -> None:
        process, self.process = self.process, None
        if process is not None:
            process.kill()
            process.wait()
            for pipe in (process.stdin, process.stdout):
                if pipe is not None:
                    _close(pipe)


def _close(pipe: IO[bytes]) -> None:
    with contextlib.suppress(BrokenPipeError):  # bytes that the dead worker never read
        pipe.close()


def serve(target: str) -> None:
    """The worker's loop: a JSON line of keywords in, `{"value": ...}` or `{"error": ...}` out."""
    answers = os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)  # what the function prints must not mix with the answers
    module, _, name = target.partition(":")
    function = getattr(importlib.import_module(module), name)
    _answer(answers, {"value": "ready"})
    for line in sys.stdin.buffer:
        try:
            answer = {"value": function(**json.loads(line))}
        except BaseException as error:
            answer = {"error": f"raised {type(error).__name__}: {error}"}
        _answer(answers, answer)


def _answer(pipe: IO[bytes], answer: dict[str, Any]) -> None:
    pipe.write(json.dumps(answer).encode() + b"\n")
    pipe.flush()


if __name__ == "__main__":
    # Ctrl-C goes to the whole group; the parent decides when a worker ends (its pipe closes, or it is killed).
    import signal

    signal.signal(signal.SIGINT, signal.SIG_IGN)
    serve(sys.argv[1])
