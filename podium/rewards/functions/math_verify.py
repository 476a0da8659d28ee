"""Mathematical equality of the response's last expression and the data's answer, by the math-verify package."""

from __future__ import annotations

import importlib.util
import os
from typing import Any

from podium.core.errors import ConfigError
from podium.rewards.base import SampleFailure
from podium.rewards.functions import BUILT_IN, text_of
from podium.rewards.processes import CallFailure, DeadlinePool


@BUILT_IN.register("math_verify")
class MathVerify:
    """1 where the response's final answer equals the data's, else 0; a response without an answer gets 0.

    Runs in processes of its own: symbolic comparison can take for ever. A comparison past its deadline is killed and
    its sample counts as failed, and so does one whose comparison raises or whose `answer` cannot be parsed.

    Args:
        column: the data column with the answer (LaTeX or a plain expression).
        deadline: seconds for one sample.
        workers: processes; by default the number of CPUs, at most 8.
    """

    def __init__(self, column: str = "answer", deadline: float = 5.0, workers: int | None = None) -> None:
        if importlib.util.find_spec("math_verify") is None:
            raise ConfigError(
                "the package math-verify is missing",
                where="reward 'math_verify'",
                remedy="install it with: pip install 'podium[rewards]'",
            )
        if deadline <= 0 or (workers is not None and workers < 1):
            raise ConfigError(f"deadline={deadline}, workers={workers}: both must be positive", where="reward 'math_verify'")
        self.column, self.columns = column, (column,)
        self.pool = DeadlinePool("podium.rewards.math_worker:score", workers or min(os.cpu_count() or 1, 8), deadline)

    def __call__(self, completions: list[Any], **columns: Any) -> list[Any]:
        answers = columns[self.column]
        calls = [{"response": text_of(c), "answer": str(a)} for c, a in zip(completions, answers, strict=True)]
        # Equal responses to one prompt are common in a group; each is compared once.
        distinct = list({(call["response"], call["answer"]): call for call in calls}.values())
        found = dict(zip(((c["response"], c["answer"]) for c in distinct), self.pool.map(distinct), strict=True))
        results = [found[call["response"], call["answer"]] for call in calls]
        return [_score(r, a, self.column) for r, a in zip(results, answers, strict=True)]


def _score(result: Any, answer: Any, column: str) -> Any:
    if answer is None:
        return SampleFailure(f"the data column '{column}' is null")
    return SampleFailure(str(result)) if isinstance(result, CallFailure) else result
