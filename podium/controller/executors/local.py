"""All roles in this process, one worker each: a laptop, or one GPU."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

from podium.controller.future import Future
from podium.controller.worker_group import RoleHandle


class LocalExecutor:
    """Runs every call at once, in the caller's thread; an exception carries the role and method as a note.

    A call whose result nobody reads still raises where it was made: nothing fails in silence.
    """

    def launch(self, role: str, make_worker: Callable[[], Any]) -> RoleHandle:
        worker = make_worker()
        return RoleHandle(role, [worker], type(worker), self)

    def call(self, workers: list[Any], method: str, calls: list[Any], role: str) -> list[Future]:
        futures = []
        for rank, (worker, (args, kwargs)) in enumerate(zip(workers, calls, strict=True)):
            try:
                result = getattr(worker, method)(*args, **kwargs)
            except Exception as error:
                error.add_note(f"in role '{role}', rank {rank}, method '{method}'")
                raise
            futures.append(Future(partial(_same, result)))
        return futures


def _same(value: Any) -> Any:
    return value
