"""What a worker process of the reward `math_verify` runs. It stands outside `functions/` so as not to load torch."""

from __future__ import annotations

import logging

from math_verify import parse, verify

# The package's own timeouts are off: they would count as unequal. The pool's deadline kills instead.
logging.getLogger("math_verify").setLevel(logging.ERROR)
_DELIMITERS = ("$", "\\boxed", "\\(", "\\[")


def score(response: str, answer: str) -> float:
    """1 where the response's final answer equals `answer`, else 0.

    Raises ValueError for an answer that has no mathematical reading, and what the comparison raises.
    """
    # A bare \frac{1}{2} would be read as its last number; inside \boxed{} it is taken whole.
    text = answer if any(d in answer for d in _DELIMITERS) else f"\\boxed{{{answer}}}"
    gold = parse(text, parsing_timeout=None, raise_on_error=True)
    if not gold or not answer.strip():
        raise ValueError(f"the data's answer {answer[:100]!r} cannot be read as mathematics")
    given = parse(response, parsing_timeout=None)
    return float(verify(gold, given, timeout_seconds=None, raise_on_error=True)) if given else 0.0
