"""The quick start's task: sort a few numbers, repeats included, and a checker that knows the answer.

The demonstrations come from a sloppy writer who often drops repeats (`5 6 9 6` becomes `5 6 9`). A model that imitates them
learns the form, the order, and the sloppiness. The checker accepts only the right answer, so reinforcement learning can
teach what the demonstrations do not.
"""

from __future__ import annotations

import random
import zlib
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

NUMBERS = range(1, 10)
LENGTH = 4
REPEATS = 0.72
"""Share of problems with a number that occurs twice or more."""
SLOPPY = 0.62
"""Share of such problems in which the writer of the demonstrations drops the repeats."""


@dataclass(frozen=True)
class Problem:
    """A prompt and its only right answer."""

    prompt: str
    answer: str

    @property
    def held_out(self) -> bool:
        """A quarter of all answers is never shown in training, in any order of its numbers."""
        return zlib.crc32(self.answer.encode()) % 4 == 0


def problems(draw: random.Random, *, held_out: bool) -> Iterator[Problem]:
    """Problems without end: of the held-out answers, or of the others."""
    while True:
        numbers = _numbers(draw)
        problem = Problem(f"Sort these numbers: {_text(numbers)} =", f" {_text(sorted(numbers))}")
        if problem.held_out == held_out:
            yield problem


def distinct(source: Iterator[Problem], count: int) -> list[Problem]:
    """The first `count` problems with different prompts."""
    found: dict[str, Problem] = {}
    while len(found) < count:
        problem = next(source)
        found.setdefault(problem.prompt, problem)
    return list(found.values())


def demonstration(problem: Problem, draw: random.Random) -> str:
    """What the sloppy writer answers: right, or with the repeats dropped."""
    numbers = problem.answer.split()
    kept = sorted(set(numbers)) if draw.random() < SLOPPY else numbers
    return f" {' '.join(kept)}"


def correct(prompts: list[str], completions: list[str], answer: list[str], **columns: Any) -> list[float]:
    """The reward: 1 for exactly the right answer, else 0."""
    return [float(given == right) for given, right in zip(completions, answer, strict=True)]


def _numbers(draw: random.Random) -> list[int]:
    wants_repeat = draw.random() < REPEATS
    while True:
        numbers = draw.choices(NUMBERS, k=LENGTH)
        if (len(set(numbers)) < LENGTH) == wants_repeat:
            return numbers


def _text(numbers: list[int]) -> str:
    return " ".join(map(str, numbers))
