"""The reward: reasoning-gym's own score of the answer's first word."""

from typing import Any

from podium.rewards.functions.reasoning_gym import ReasoningGym

SCORE = ReasoningGym(extract="whole")


def first_word(
    prompts: list[str], completions: list[str], answer: list[str], metadata: list[Any], task: list[Any], **columns: Any
) -> list[float]:
    """1 where the first word is the name that was asked for (the model may go on after it)."""
    words = [next(iter(text.split()), "").strip(".,;:!?\"()*'") for text in completions]
    return SCORE(prompts, words, answer, metadata, task)
