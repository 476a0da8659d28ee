"""All roles in this process, one worker each: a laptop, or one GPU."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from podium.controller.dispatch import Plan
from podium.controller.future import Future
from podium.controller.memory import explained
from podium.controller.worker_group import Maker, RoleHandle, WorkerGroup, check_makers
from podium.core.activity import doing
from podium.core.ranks import Ranks, WorkerContext


class LocalExecutor:
    """Runs every call at once, in the caller's thread; an exception carries the role and method as a note.

    A call whose result nobody reads still raises where it was made: nothing fails in silence.

    Args:
        device: torch device of all roles.
    """

    concurrent = False
    writes = True

    def __init__(self, device: str = "cpu") -> None:
        self.device = device

    def launch(self, makers: Mapping[str, Maker]) -> dict[str, RoleHandle]:
        check_makers(makers, dict.fromkeys(makers, Ranks()))
        workers = {role: self._build(make, WorkerContext(role, device=self.device)) for role, make in makers.items()}
        return {role: RoleHandle(WorkerGroup(role, [w], type(w)), self) for role, w in workers.items()}

    def _build(self, make: Maker, context: WorkerContext) -> Any:
        try:
            return make(context)
        except Exception as error:
            said = explained(error, context, "build")
            if said is error:
                raise
            raise said from error

    def call(self, group: WorkerGroup, method: str, plan: Plan) -> Future:
        results = [self._run(group, rank, method, *plan.calls[rank]) for rank in range(len(plan.calls))]
        return Future.of(plan.collect([results[rank] for rank in plan.read]))

    def any(self, flag: bool) -> bool:
        return flag

    def same(self, value: Any) -> Any:
        return value

    def shutdown(self) -> None:
        pass

    def _run(self, group: WorkerGroup, rank: int, method: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        try:
            with doing(f"role '{group.role}', rank {rank}, method '{method}'"):
                return getattr(group.workers[rank], method)(*args, **kwargs)
        except Exception as error:
            said = explained(error, WorkerContext(group.role, rank, device=self.device, pool=group.pool), method)
            said.add_note(f"in role '{group.role}', rank {rank}, method '{method}'")
            if said is error:
                raise
            raise said from error
