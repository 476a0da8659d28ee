"""reasoning-gym's own scorers, for rows read from `reasoning_gym:TASK`."""

from __future__ import annotations

import json
from functools import lru_cache
from typing import Any

from podium.core.errors import ConfigError
from podium.rewards.base import SampleFailure
from podium.rewards.functions import BUILT_IN, check_extract, extracted, text_of


@BUILT_IN.register("reasoning_gym")
class ReasoningGym:
    """The score (0 to 1) that the row's task gives; some tasks give parts.

    Reads the columns `metadata` and `answer`, and `task` where it is there: from it the problem is made again, exactly,
    and the scorer has the task's settings. Without `task` (rows from a file) the metadata must name its
    `source_dataset`, and the scorer has default settings.

    Args:
        extract: `tags` scores what stands in the last `<answer>...</answer>` (reasoning-gym's own convention; no tags:
            no answer), `whole` the whole response.
    """

    columns = ("answer", "metadata")

    def __init__(self, extract: str = "tags") -> None:
        self.extract = check_extract(extract)
        import importlib.util

        if importlib.util.find_spec("reasoning_gym") is None:
            raise ConfigError(
                "the package reasoning-gym is missing",
                where="reward 'reasoning_gym'",
                remedy="install it with: pip install 'podium[rewards]'",
            )

    def __call__(
        self, prompts: list[Any], completions: list[Any], answer: list[Any], metadata: list[Any], task: list[Any] | None = None
    ) -> list[Any]:
        tasks = task or [None] * len(completions)
        rows = zip(prompts, completions, answer, metadata, tasks, strict=True)
        return [self._score(*row) for row in rows]

    def _score(self, prompt: Any, completion: Any, answer: Any, metadata: Any, task: dict[str, Any] | None) -> Any:
        try:
            if task:
                data = _dataset(task["name"], json.dumps(task["options"], sort_keys=True))
                entry = data[task["index"]]
                if entry["answer"] != answer:
                    return SampleFailure(f"{task} made again has another answer than the row: its columns were changed")
            else:
                data = _dataset(metadata["source_dataset"], "{}")
                entry = {"question": prompt, "answer": answer, "metadata": metadata}
            return float(data.score_answer(extracted(text_of(completion), self.extract), entry))
        except Exception as error:
            return error


@lru_cache(maxsize=64)
def _dataset(name: str, options: str) -> Any:
    import reasoning_gym

    return reasoning_gym.create_dataset(name, **json.loads(options))
