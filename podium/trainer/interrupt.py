"""Ctrl-C as a request: the run stops at a border where its state is whole."""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType, TracebackType
from typing import Any

STOPPING = "stopping at the next border; Ctrl-C again stops at once"
SAVING = "saving all state; this ends by itself"


class StopRequested(Exception):
    """Raised inside a step, before any weight changed, when a stop was asked for."""


class InterruptGuard:
    """While active, the first SIGINT or SIGTERM sets `requested` and says so; the second interrupts at once.

    Only the main thread can take signals; elsewhere the guard does nothing.

    Args:
        say: shows a line to the user.
        waits_for: says what the run is at; added to the first answer, so that a long reward or update is seen to be it.
        alone: no other controller runs the same loop; where some do, they stop together at a step's border.
    """

    def __init__(
        self,
        say: Callable[[str], None] = lambda text: None,
        *,
        alone: bool = True,
        waits_for: Callable[[], str] = lambda: "",
    ) -> None:
        self.requested, self._alone, self._waits_for = False, alone, waits_for
        self._say, self._saving = say, False
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
        again, self.requested = self.requested, True
        if again and not self._saving:
            raise KeyboardInterrupt
        at = self._waits_for()
        self._acknowledge(SAVING if self._saving else f"{STOPPING}\nnow at: {at}" if at else STOPPING)

    def _acknowledge(self, text: str) -> None:
        try:
            self._say(text)
        except RuntimeError:  # the signal came in the middle of a write to the same stream
            os.write(2, f"{text}\n".encode())

    def check(self) -> None:
        """Raises StopRequested where a stop was asked for and can be made here."""
        if self.requested and self._alone:
            raise StopRequested

    @contextmanager
    def saving(self) -> Iterator[None]:
        """Inside, no signal interrupts: a save that is given up half-way would lose what it was to keep."""
        before, self._saving = self._saving, True
        try:
            yield
        finally:
            self._saving = before
