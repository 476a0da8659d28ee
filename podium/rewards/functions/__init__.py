"""The built-in rewards, by name. Each is made with its options and then called like a function of TRL's signature."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

from podium.core.registry import Registry

BUILT_IN: Registry[Callable[..., Callable[..., list[Any]]]] = Registry("reward")


def text_of(completion: Any) -> str:
    """The text of a completion as TRL passes it: a string, or one or more assistant messages."""
    if isinstance(completion, str):
        return completion
    return "".join(message["content"] for message in completion)


def extracted(text: str, how: str) -> str | None:
    """The answer inside a response: `whole` (the text, stripped) or `tags` (inside the last <answer>...</answer>)."""
    if how == "whole":
        return text.strip()
    found = re.findall(r"<answer>(.*?)</answer>", text, re.DOTALL)  # as reasoning_gym.utils.extract_answer
    return found[-1].strip() if found else None


EXTRACT = ("whole", "tags")


def check_extract(how: str) -> str:
    """`how`, or ConfigError."""
    from podium.core.errors import ConfigError

    if how not in EXTRACT:
        raise ConfigError(f"extract is {how!r}", where="reward options", remedy="one of: " + ", ".join(EXTRACT))
    return how


# Registered by importing: each module is small and imports its package when it is used.
from podium.rewards.functions import code_tests, exact_match, math_verify, overlong, reasoning_gym  # noqa: E402, F401
