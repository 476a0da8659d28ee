"""Runs the response's python against the data's tests, in a sandboxed process."""

from __future__ import annotations

import json
import os
import re
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

from podium.core.errors import ConfigError, did_you_mean
from podium.rewards.base import SampleFailure
from podium.rewards.functions import BUILT_IN, text_of
from podium.rewards.sandbox import Limits, layers, run_python

REASONS = ("passed", "failed", "no_code", "error", "exited", "timeout", "memory", "output", "refused", "crashed")
SCORES = ("all", "share")


@BUILT_IN.register("code_tests")
class CodeTests:
    """1 where the program in the response's last ```python block passes its tests, else 0; why not is a metric.

    Tests are a list, one row's own: asserts as text (run after the program, in its namespace), or pairs
    `{"input": ..., "output": ...}` (the program reads the one and must print the other; white space at line ends left out).
    The forms `{"inputs": [...], "outputs": [...]}` and JSON text of any of these are read too.

    Args:
        column: the data column with the tests.
        deadline: seconds for one process: all asserts of a row, or one pair.
        memory_mb: address space of the process.
        score: "all" gives 1 for all tests and else 0, "share" the share of tests passed.
        workers: processes at a time; by default the number of CPUs, at most 8.
        weak_isolation: run also where the kernel cannot hold calls (seccomp) and files (Landlock), so on other systems than
            Linux. Then a hook inside python must hold the program, which one that is written to break out can pass.
    """

    def __init__(
        self,
        column: str = "tests",
        deadline: float = 5.0,
        memory_mb: int = 512,
        score: str = "all",
        workers: int | None = None,
        weak_isolation: bool = False,
    ) -> None:
        where = "reward 'code_tests'"
        if deadline <= 0 or memory_mb < 64 or (workers is not None and workers < 1):
            what = f"deadline={deadline}, memory_mb={memory_mb}, workers={workers}"
            raise ConfigError(what, where=where, remedy="deadline above 0, memory_mb at least 64, workers at least 1")
        if score not in SCORES:
            raise ConfigError(f"score is {score!r}", where=where, remedy=did_you_mean(score, SCORES))
        if os.name != "posix":
            raise ConfigError("programs cannot be held on this system", where=where, remedy="run on Linux")
        if not weak_isolation and not {"seccomp", "landlock"} <= set(found := layers()):
            raise ConfigError(
                f"this system can hold programs only by: {', '.join(found) or 'nothing'}",
                where=where,
                remedy="seccomp and Landlock are needed (Linux 5.13, x86_64 or aarch64); "
                "where nothing is at risk, set options.weak_isolation: true",
            )
        self.column, self.columns = column, (column,)
        self.share = score == "share"
        self.limits = Limits(seconds=deadline, memory_bytes=memory_mb * 2**20)
        self.workers = workers or min(os.cpu_count() or 1, 8)

    def __call__(
        self, completions: list[Any], log_metric: Callable[[str, float], None] | None = None, **columns: Any
    ) -> list[Any]:
        rows = [(text_of(c), json.dumps(t, default=str)) for c, t in zip(completions, columns[self.column], strict=True)]
        distinct = list(dict.fromkeys(rows))  # equal responses to one prompt are common in a group
        with ThreadPoolExecutor(self.workers) as threads:
            found = dict(zip(distinct, threads.map(self._judge, distinct), strict=True))
        verdicts = [found[row] for row in rows]
        if log_metric is not None:
            for reason in REASONS:
                for _, why in (v for v in verdicts if v[1]):
                    log_metric(reason, float(why == reason))
        return [score for score, _ in verdicts]

    def _judge(self, row: tuple[str, str]) -> tuple[float | SampleFailure, str]:
        """Score and reason for one response; a failure, and no reason, where its tests cannot be read."""
        text, tests = row
        try:
            asserts, pairs = read_tests(json.loads(tests))
        except ValueError as error:
            return SampleFailure(f"the data column '{self.column}': {error}"), ""
        code = last_block(text)
        if code is None:
            return 0.0, "no_code"
        return self._by_asserts(code, asserts) if asserts else self._by_pairs(code, pairs)

    def _by_asserts(self, code: str, asserts: list[str]) -> tuple[float, str]:
        outcome = run_python(code, asserts, limits=self.limits)
        if outcome.status != "done":
            return 0.0, outcome.status
        return self._counted(outcome.passed)

    def _by_pairs(self, code: str, pairs: list[Pair]) -> tuple[float, str]:
        passed, reason = [], ""
        for pair in pairs:
            outcome = run_python(code, stdin=pair.input, limits=self.limits)
            ended = outcome.status == "done" or (outcome.status == "exited" and outcome.exit_code == 0)
            passed.append(ended and _lines(outcome.stdout) == _lines(pair.output))
            if not passed[-1]:
                reason = reason or ("failed" if ended else outcome.status)
                if not self.share:
                    break
        score, plain = self._counted(passed)
        return score, reason or plain

    def _counted(self, passed: list[bool]) -> tuple[float, str]:
        score = sum(passed) / len(passed) if self.share else float(all(passed))
        return score, "passed" if all(passed) else "failed"


@dataclass(frozen=True)
class Pair:
    """What a program is given, and what it must print."""

    input: str
    output: str


def last_block(text: str) -> str | None:
    """The code in the last ```python (or ```py) block of a response."""
    found = re.findall(r"^```(?:python3?|py)[ \t]*\n(.*?)^```", text, re.DOTALL | re.MULTILINE)
    return found[-1] if found else None


def read_tests(tests: Any) -> tuple[list[str], list[Pair]]:
    """Asserts, or pairs of input and output. Raises ValueError for what is neither, or none."""
    if isinstance(tests, str):
        try:
            tests = json.loads(tests)
        except ValueError:
            tests = [tests]  # one assert, or several lines of them
    if isinstance(tests, Mapping):
        if odd := sorted(set(tests) - {"inputs", "outputs"}):
            raise ValueError(f"tests with the keys {', '.join(map(str, odd))} are of a form that is not known")
        inputs, outputs = tests.get("inputs"), tests.get("outputs")
        if not isinstance(inputs, list) or not isinstance(outputs, list) or len(inputs) != len(outputs):
            raise ValueError('a mapping of tests needs "inputs" and "outputs", lists of one length')
        tests = [{"input": i, "output": o} for i, o in zip(inputs, outputs, strict=True)]
    if not isinstance(tests, list) or not tests:
        raise ValueError(f"it has no tests: {str(tests)[:80]!r}")
    if all(isinstance(test, str) for test in tests):
        return tests, []
    if all(isinstance(test, Mapping) and {"input", "output"} <= set(test) for test in tests):
        return [], [Pair(_text(test["input"]), _text(test["output"])) for test in tests]
    raise ValueError('tests are asserts (texts), or pairs {"input": ..., "output": ...}, all of one kind')


def _text(value: Any) -> str:
    return "\n".join(map(str, value)) if isinstance(value, list) else str(value)


def _lines(text: str) -> list[str]:
    return [line.rstrip() for line in text.rstrip().split("\n")]
