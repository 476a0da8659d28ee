"""A role: the workers that play it, behind one handle."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Protocol

from podium.controller.dispatch import PROTOCOLS, protocol_of, resolve_arguments
from podium.controller.future import Future
from podium.core.errors import did_you_mean


class Executor(Protocol):
    """Where workers live. `call` runs one method on several workers and returns their futures, in rank order."""

    def launch(self, role: str, make_worker: Callable[[], Any]) -> RoleHandle:
        """Starts the workers of a role."""
        ...

    def call(self, workers: list[Any], method: str, calls: list[Any], role: str) -> list[Future]: ...


class RoleHandle:
    """Calls a role's methods on all its workers: `actor.generate_sequences(prompts)`.

    Only methods that the worker class marks with `@dispatch` can be called; each returns a `Future`.
    """

    def __init__(self, role: str, workers: list[Any], worker_class: type, executor: Executor) -> None:
        self.role, self.workers = role, workers
        self._class, self._executor = worker_class, executor

    def __getattr__(self, name: str) -> Callable[..., Future]:
        protocol_name = protocol_of(getattr(self._class, name, None))
        if protocol_name is None:
            known = [n for n in dir(self._class) if protocol_of(getattr(self._class, n))]
            raise AttributeError(f"the role '{self.role}' has no method '{name}'; {did_you_mean(name, known)}")
        protocol = PROTOCOLS.get(protocol_name)

        def call(*args: Any, **kwargs: Any) -> Future:
            args, kwargs = resolve_arguments(args, kwargs)
            calls = protocol.split(args, kwargs, len(self.workers))
            futures = self._executor.call(self.workers[: len(calls)], name, calls, self.role)
            return Future(lambda: protocol.collect([f.result() for f in futures]))

        return call

    def __repr__(self) -> str:
        return f"RoleHandle({self.role}, {len(self.workers)} x {self._class.__name__})"
