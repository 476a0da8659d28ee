"""A role: the workers that play it, behind one handle."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, Protocol

from podium.controller.dispatch import PROTOCOLS, Plan, protocol_of, resolve_arguments
from podium.controller.future import Future
from podium.core.errors import did_you_mean
from podium.core.ranks import Ranks, WorkerContext

Maker = Callable[[WorkerContext], Any]
"""Builds a role's worker inside the worker's process; it must be picklable where that is another one.

Where it has a method `check(ranks)`, that is called first, before a process is started or a model loaded, and may refuse.
"""


def check_makers(makers: Mapping[str, Maker], ranks: Mapping[str, Ranks]) -> None:
    """Asks each maker that can say so whether its role can be divided among these ranks. Raises what it raises."""
    for role, make in makers.items():
        check = getattr(make, "check", None)
        if check is not None:
            check(ranks[role])


@dataclass(frozen=True)
class WorkerGroup:
    """The workers of one role, in rank order: what they are depends on the executor."""

    role: str
    workers: list[Any]
    worker_class: type
    ranks: Ranks = field(default_factory=Ranks)
    pool: str = "local"


class Executor(Protocol):
    """Where workers live.

    `concurrent`: calls of different pools run at the same time. `writes`: this process writes the run's files.
    """

    concurrent: bool
    writes: bool

    def launch(self, makers: Mapping[str, Maker]) -> dict[str, RoleHandle]:
        """Starts the workers of these roles. Called once; what `shutdown` ended can be launched again."""
        ...

    def call(self, group: WorkerGroup, method: str, plan: Plan) -> Future:
        """Runs one method on the group's workers. The future gives what the plan collects."""
        ...

    def any(self, flag: bool) -> bool:
        """True on every controller where it is on one of them."""
        ...

    def same(self, value: Any) -> Any:
        """The value of the controller that writes, on every controller."""
        ...

    def shutdown(self) -> None:
        """Ends the workers, where they are not this process."""
        ...


class RoleHandle:
    """Calls a role's methods on all its workers: `actor.generate_sequences(prompts)`.

    Only methods that the worker class marks with `@dispatch` can be called; each returns a `Future`.
    """

    def __init__(self, group: WorkerGroup, executor: Executor) -> None:
        self.group, self.role, self._executor = group, group.role, executor

    @property
    def workers(self) -> list[Any]:
        """In rank order: the workers themselves in this process, else what the executor reaches them by."""
        return self.group.workers

    def ask_for_work(self) -> None:
        """From now on rows are dealt to the workers by what they cost the role's model, where there are several shares.

        The worker knows its model: its `row_work` says it. A worker without that method gets equal numbers of tokens.
        """
        if self.group.ranks.data_size > 1 and protocol_of(getattr(self.group.worker_class, "row_work", None)):
            ranks = replace(self.group.ranks, work=self.row_work().result())
            self.group = replace(self.group, ranks=ranks)

    def __getattr__(self, name: str) -> Callable[..., Future]:
        if name.startswith("__"):  # what copying and pickling look for
            raise AttributeError(name)
        kind = self.group.worker_class
        protocol_name = protocol_of(getattr(kind, name, None))
        if protocol_name is None:
            known = [n for n in dir(kind) if protocol_of(getattr(kind, n))]
            raise AttributeError(f"the role '{self.role}' has no method '{name}'; {did_you_mean(name, known)}")
        protocol = PROTOCOLS.get(protocol_name)

        def call(*args: Any, **kwargs: Any) -> Future:
            args, kwargs = resolve_arguments(args, kwargs)
            return self._executor.call(self.group, name, protocol(args, kwargs, self.group.ranks))

        return call

    def __repr__(self) -> str:
        return f"RoleHandle({self.role}, {self.group.ranks.workers} x {self.group.worker_class.__name__})"
