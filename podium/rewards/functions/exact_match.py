"""1 where the response is the data's answer, else 0."""

from __future__ import annotations

from typing import Any

from podium.rewards.base import SampleFailure
from podium.rewards.functions import BUILT_IN, check_extract, extracted, text_of


@BUILT_IN.register("exact_match")
class ExactMatch:
    """Compares text with text, white space at both ends left out.

    Args:
        column: the data column with the answer (text or a number).
        extract: `whole` takes the whole response, `tags` what stands in its last `<answer>...</answer>`.
        ignore_case: compare without regard to case.
    """

    def __init__(self, column: str = "answer", extract: str = "whole", ignore_case: bool = False) -> None:
        self.column, self.columns = column, (column,)
        self.extract, self.ignore_case = check_extract(extract), ignore_case

    def __call__(self, completions: list[Any], **columns: Any) -> list[float | SampleFailure]:
        return [self._score(text_of(c), a) for c, a in zip(completions, columns[self.column], strict=True)]

    def _score(self, text: str, answer: Any) -> float | SampleFailure:
        if answer is None:
            return SampleFailure(f"the data column '{self.column}' is null")
        given, wanted = extracted(text, self.extract), str(answer).strip()
        if given is not None and self.ignore_case:
            given, wanted = given.casefold(), wanted.casefold()
        return float(given == wanted)
