"""What each thread is at, in words: reports of hangs and the answer to Ctrl-C say it."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager

_at: dict[int, list[str]] = {}


@contextmanager
def doing(what: str) -> Iterator[None]:
    """While inside, this thread is at `what` (a stage, a role's method, a reward, a sample)."""
    stack = _at.setdefault(threading.get_ident(), [])
    stack.append(what)
    try:
        yield
    finally:
        stack.pop()
        if not stack:
            _at.pop(threading.get_ident(), None)


def activity(thread: int) -> list[str]:
    """What a thread is at, the widest first; empty where it says nothing."""
    return list(_at.get(thread, ()))
