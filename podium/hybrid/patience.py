"""The deadline of a hand-over: every wait in it has an end, and names whom it waits for."""

from __future__ import annotations

import time
from collections.abc import Iterable
from datetime import timedelta
from typing import Any

import torch

from podium.core.activity import doing
from podium.core.errors import DeadlineError
from podium.core.ranks import names_of

_POLL_SECONDS = 5e-5
_TICK_SECONDS = 2e-3  # process groups cut timeouts to milliseconds: a wait must not end just before its time


class Patience:
    """How long one hand-over may take, from now.

    Args:
        seconds: 0: without end.
        rank: who waits.
        queued: to wait for the process group's work is to put it into the device's queue (NCCL); `device` waits for that.
    """

    def __init__(self, seconds: float = 0.0, rank: int = 0, *, queued: bool = False) -> None:
        self.seconds, self.rank, self.queued = seconds, rank, queued
        self._end = time.monotonic() + seconds if seconds else None

    def work(self, work: Any, what: str, ranks: Iterable[int]) -> None:
        """Waits for a collective or message of the process group.

        Args:
            what: it is that the wait is for.
            ranks: who must do their part.

        Raises DeadlineError when it has passed.
        """
        with doing(f"hand-over, waiting for {what}"):
            if self._end is None or self.queued:
                work.wait()
                return
            try:
                work.wait(timedelta(seconds=max(0.001, self._end - time.monotonic()) + _TICK_SECONDS))
            except RuntimeError as error:
                if time.monotonic() < self._end:
                    raise  # the other side is gone: not a matter of time
                raise self._passed(what, ranks) from error

    def device(self, device: torch.device, what: str, ranks: Iterable[int]) -> None:
        """Waits until the device has done what was asked of it. Raises DeadlineError."""
        if device.type != "cuda" or self._end is None:
            return
        event = torch.cuda.Event()
        event.record(torch.cuda.current_stream(device))
        with doing(f"hand-over, waiting for {what}"):
            while not event.query():
                if time.monotonic() > self._end:
                    raise self._passed(what, ranks)
                time.sleep(_POLL_SECONDS)

    def _passed(self, what: str, ranks: Iterable[int]) -> DeadlineError:
        others = sorted(set(ranks) - {self.rank})
        return DeadlineError(
            f"rank {self.rank} waited {self.seconds:g} s in a hand-over for {what} of {names_of(others)}",
            where="deadlines.hand_over",
            remedy="see where those ranks stand (their logs, py-spy); if it may take longer, raise deadlines.hand_over",
        )
