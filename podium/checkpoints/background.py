"""Saving while the run goes on: the state is copied, then written in a thread."""

from __future__ import annotations

import threading
from typing import Any

import torch
from torch import Tensor

from podium.checkpoints.store import CheckpointStore


class BackgroundSaver:
    """Writes checkpoints in a thread, one at a time.

    The thread is no daemon: a process that ends by itself ends after its save. One that is killed leaves a folder that has
    no name yet, and the older checkpoints.

    Args:
        store: where they go.
        background: False writes in the caller's thread (half the host memory; the step waits).
    """

    def __init__(self, store: CheckpointStore, *, background: bool = True) -> None:
        self.store, self.background = store, background
        self._thread: threading.Thread | None = None
        self._error: BaseException | None = None

    @property
    def busy(self) -> bool:
        """A save is being written."""
        return self._thread is not None and self._thread.is_alive()

    def save(self, step: int, state: dict[str, Any]) -> None:
        """Copies the state and writes it. Waits for the save before; raises what that one met."""
        self.wait()
        if not self.background:
            self.store.save(step, state)
            return
        copied = snapshot(state)
        self._thread = threading.Thread(target=self._write, args=(step, copied), name=f"checkpoint of step {step}")
        self._thread.start()

    def check(self) -> None:
        """Raises what a save met that has ended. Called at every border, so that an error waits no longer than a step."""
        if not self.busy:
            self.wait()

    def wait(self) -> None:
        """Until the save is done. Raises CheckpointError where it could not be written."""
        thread, self._thread = self._thread, None
        if thread is not None:
            thread.join()
        error, self._error = self._error, None
        if error is not None:
            raise error

    def _write(self, step: int, state: dict[str, Any]) -> None:
        try:
            self.store.save(step, state)
        except BaseException as error:  # it is raised where the run next looks
            self._error = error


def snapshot(state: Any) -> Any:
    """A copy on the CPU that no update changes. A tensor that is there twice is copied once."""
    return _copied(state, {})


def _copied(value: Any, seen: dict[Any, Tensor]) -> Any:
    if isinstance(value, Tensor):
        key = (value.data_ptr(), tuple(value.shape), value.dtype, tuple(value.stride()), value.device)
        if value.numel() and key in seen:
            return seen[key]
        fresh = torch.empty_like(value, device="cpu", requires_grad=False).copy_(value.detach())
        seen[key] = fresh
        return fresh
    if isinstance(value, dict):
        return {name: _copied(item, seen) for name, item in value.items()}
    if isinstance(value, list | tuple):
        return [_copied(item, seen) for item in value]
    return value
