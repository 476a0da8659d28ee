"""Ctrl-C as a request: the run stops at a border where its state is whole."""

from __future__ import annotations

import signal
import threading
from types import FrameType, TracebackType
from typing import Any


class StopRequested(Exception):
    """Raised inside a step, before any weight changed, when a stop was asked for."""


class InterruptGuard:
    """While active, the first SIGINT or SIGTERM sets `requested`; the second interrupts at once.

    Only the main thread can take signals; elsewhere the guard does nothing.
    """

    def __init__(self) -> None:
        self.requested = False
        self._before: dict[int, Any] = {}

    def __enter__(self) -> InterruptGuard:
        if threading.current_thread() is threading.main_thread():
            for number in (signal.SIGINT, signal.SIGTERM):
                self._before[number] = signal.signal(number, self._on_signal)
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)

    def _on_signal(self, number: int, frame: FrameType | None) -> None:
        if self.requested:
            raise KeyboardInterrupt
        self.requested = True

    def check(self) -> None:
        """Raises StopRequested where a stop was asked for."""
        if self.requested:
            raise StopRequested
