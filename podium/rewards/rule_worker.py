"""What a worker process of rule rewards runs: one pattern in one text. It imports nothing slow."""

from __future__ import annotations

import re


def search(pattern: str, text: str, ignore_case: bool) -> bool:
    """Whether the pattern is found anywhere in the text. Line ends are passed by `^` and `$` (re.MULTILINE)."""
    return re.search(pattern, text, re.MULTILINE | (re.IGNORECASE if ignore_case else 0)) is not None
