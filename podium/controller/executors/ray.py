"""Worker groups as Ray actors: each pool's processes are actors of one placement group, on any nodes of a cluster."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor

from podium.controller.arrays import from_arrays, to_arrays
from podium.controller.dispatch import Plan
from podium.controller.executors.ray_cluster import cluster_nodes, connect, import_ray
from podium.controller.executors.waiting import Answers, Waiter
from podium.controller.future import Future
from podium.controller.placement import Placed, place
from podium.controller.process import Failure, WorkerProcess
from podium.controller.resource_pool import ResourcePool
from podium.controller.worker_group import Maker, RoleHandle, WorkerGroup, check_makers
from podium.core.batch import Batch
from podium.core.deferred import DeferredRagged
from podium.core.errors import ResourceError, WorkerLost
from podium.core.ragged import Ragged, as_array, as_tensor

STAYS_BYTES = 64 * 1024
"""A token column of a result that is larger stays with its worker until someone reads it."""


class RayExecutor:
    """Roles as groups of Ray actors.

    Calls return futures. What a worker returns stays in its node's object store, except small columns: reading a column
    fetches it, passing it on to another role sends the reference. An exception in a worker arrives with its role, rank, pool
    and traceback. A worker that is gone, or does not answer within the deadline, is a `WorkerLost`; its pool is stopped.

    Args:
        pool: devices of each role.
        workers: processes of the pool where none is described.
        address: of a running cluster ("auto", "host:port"); None: RAY_ADDRESS, else a local one is started.
        deadline_seconds: the longest that one call may take.
        grace_seconds: how long the other ranks may go on after one has failed.
        device: "cpu" keeps pools that are not described off the GPUs.
    """

    concurrent = True
    writes = True

    def __init__(
        self,
        pool: ResourcePool | Mapping[str, Any] | None = None,
        *,
        workers: int = 1,
        address: str | None = None,
        deadline_seconds: float = 3600.0,
        grace_seconds: float = 10.0,
        device: str | None = None,
    ) -> None:
        self.pool, self.workers, self.address, self.device = ResourcePool.of(pool), workers, address, device
        self.deadline_seconds, self.grace_seconds = deadline_seconds, grace_seconds
        self._pools: dict[str, _Pool] = {}

    # ------------------------------------------------------------------ start and end

    def launch(self, makers: Mapping[str, Maker]) -> dict[str, RoleHandle]:
        """Places the pools, starts their actors, and builds all workers. Raises ResourceError before anything is started."""
        self.shutdown()
        ray = self._connect()
        nodes = cluster_nodes(ray, self._asks_memory())
        placed = place(self.pool, list(makers), nodes, workers=self.workers, on_cpus=self.device == "cpu")
        check_makers(makers, {role: ranks for p in placed for role, ranks in p.ranks.items()})
        try:
            # Where no pool names GPU ids, which ones it gets is Ray's to say: others may use the cluster too.
            named = any(pool.gpus for pool in self.pool.pools.values())
            for p in placed:
                self._pools[p.name] = _Pool(ray, p, self.deadline_seconds, named)
            groups: dict[str, WorkerGroup] = {}
            started = {p.name: self._pools[p.name].build({r: makers[r] for r in p.roles}) for p in placed}
            for p in placed:
                actors = self._pools[p.name].actors
                refs = started[p.name]
                results = self._waiter(p.name, f"pool '{p.name}'", "the building of its workers").wait(refs, range(len(refs)))
                for role, kind in results[0].items():
                    groups[role] = WorkerGroup(role, actors, kind, p.ranks[role], p.name)
        except BaseException:
            self.shutdown()
            raise
        return {role: RoleHandle(groups[role], self) for role in makers}

    @property
    def placed(self) -> dict[str, Placed]:
        """Where each pool's processes are."""
        return {name: pool.placed for name, pool in self._pools.items()}

    def shutdown(self) -> None:
        """Ends all workers; the cluster stays."""
        for pool in self._pools.values():
            pool.stop()
        self._pools = {}

    def any(self, flag: bool) -> bool:
        return flag

    def same(self, value: Any) -> Any:
        return value

    def _connect(self) -> Any:
        processes = sum(pool.cpus for pool in self.pool.pools.values()) or self.workers
        return connect(self.address or os.environ.get("RAY_ADDRESS"), processes)

    def _asks_memory(self) -> bool:
        return any(pool.gpu_memory_gb for pool in self.pool.pools.values())

    # ------------------------------------------------------------------ calls

    def call(self, group: WorkerGroup, method: str, plan: Plan) -> Future:
        if group.pool not in self._pools or self._pools[group.pool].stopped:
            raise WorkerLost(f"the pool '{group.pool}' of the role '{group.role}' was stopped", remedy="launch the roles again")
        pool = self._pools[group.pool]
        on_progress = plan.calls[0][1].get("on_progress") if plan.calls else None
        pool.raise_unread()
        refs = pool.submit(group.role, method, plan)
        waiter = self._waiter(group.pool, f"role '{group.role}'", f"method '{method}'", on_progress)
        return pool.remember(refs, lambda: plan.collect([from_arrays(result) for result in waiter.wait(refs, plan.read)]))

    def _waiter(self, pool: str, who: str, what: str, on_progress: Any = None) -> Waiter:
        running = self._pools[pool]
        errors = running.ray.exceptions
        return Waiter(
            Answers(running.ray.wait, running.ray.get, errors.RayError, errors.RayTaskError),
            running,
            f"{who}, pool '{pool}', {what}",
            deadline=self.deadline_seconds,
            grace=self.grace_seconds,
            on_progress=on_progress,
        )


class _Pool:
    """The actors of one pool, in rank order. All calls go through one lock, so every rank gets them in the same order."""

    def __init__(self, ray: Any, placed: Placed, deadline: float, gpus_are_named: bool = False) -> None:
        self.ray, self.placed, self.stopped, self._named = ray, placed, False, gpus_are_named
        self._lock = threading.Lock()
        self._unread: list[_Once] = []
        self._group = _reserve(ray, placed)
        self.actors = [self._start(rank) for rank in range(len(placed.places))]
        try:
            if len(self.actors) > 1:
                host, port = ray.get(self.actors[0].open_store.remote())
                ray.get([actor.join.remote(host, port, len(self.actors), deadline) for actor in self.actors])
        except ray.exceptions.RayError as error:
            self.stop()
            what = f"its processes do not find each other: {str(error).strip().splitlines()[-1]}"
            raise WorkerLost(what, where=f"pool '{placed.name}'", remedy="the nodes must reach each other's ports") from error

    def _start(self, rank: int) -> Any:
        from_group = self.ray.util.scheduling_strategies.PlacementGroupSchedulingStrategy(self._group, rank)
        gpu = self.placed.places[rank].gpu
        actor = _actor_class(self.ray).options(
            num_cpus=1, num_gpus=0 if gpu is None else 1, scheduling_strategy=from_group, max_restarts=0
        )
        return actor.remote(self.placed.name, rank, self.placed.device, gpu if self._named else None)

    def build(self, makers: Mapping[str, Maker]) -> list[Any]:
        shared = self.ray.put((dict(makers), dict(self.placed.ranks)))
        return [actor.build_from.remote(shared) for actor in self.actors]

    def submit(self, role: str, method: str, plan: Plan) -> list[Any]:
        """One reference a worker that is called."""
        put: dict[int, Any] = {}  # what several workers get is put once
        with self._lock:
            refs = []
            for rank, call in enumerate(plan.calls):
                if id(call) not in put:
                    args, kwargs = call
                    reports = kwargs.get("on_progress") is not None
                    given = to_arrays((args, {k: v for k, v in kwargs.items() if k != "on_progress"}))
                    put[id(call)] = self.ray.put((given, reports))
                refs.append(self.actors[rank].run.remote(role, method, put[id(call)], rank in plan.read))
            return refs

    def remember(self, refs: list[Any], collect: Callable[[], Any]) -> Future:
        """The call's future."""
        once = _Once(refs, collect)
        with self._lock:
            self._unread.append(once)
        return Future(once)

    def raise_unread(self) -> None:
        """A call whose result nobody read, and which has failed, raises at the pool's next call: nothing fails in silence."""
        with self._lock:
            self._unread = [once for once in self._unread if not once.read]
            ended = [once for once in self._unread if once.has_ended(self.ray)]
        for once in ended:
            once()

    # What `Waiter` asks of a pool.

    def progress(self) -> tuple[int, int, int]:
        """Summed over the ranks; those that do not answer at once are left out."""
        refs = [actor.progress.remote() for actor in self.actors]
        done, _ = self.ray.wait(refs, num_returns=len(refs), timeout=1.0)
        numbers = self.ray.get(done) if done else [(0, 0, 0)]
        return tuple(sum(column) for column in zip(*numbers, strict=True))  # type: ignore[return-value]

    def cancel(self) -> None:
        for actor in self.actors:
            actor.cancel.remote()

    def stack(self, rank: int) -> str:
        try:
            return self.ray.get(self.actors[rank].stack.remote(), timeout=5.0)
        except Exception as error:  # the process is gone, or stuck for good
            return f"(no answer: {type(error).__name__})"

    def stop(self) -> None:
        """Kills the actors: none is left in a collective that will not end."""
        if self.stopped:
            return
        self.stopped = True
        for actor in self.actors:
            self.ray.kill(actor)
        self.ray.util.remove_placement_group(self._group)


class _Once:
    """Collects a call's result when it is first asked for, and gives it (or its error) again after that."""

    def __init__(self, refs: list[Any], collect: Callable[[], Any]) -> None:
        self.read = False
        self._refs, self._collect, self._lock = refs, collect, threading.Lock()
        self._result: Any = None
        self._error: BaseException | None = None

    def __call__(self) -> Any:
        with self._lock:
            if not self.read:
                try:
                    self._result = self._collect()
                except BaseException as error:
                    self._error = error
                self.read = True
            if self._error is not None:
                raise self._error
            return self._result

    def has_ended(self, ray: Any) -> bool:
        return len(ray.wait(self._refs, num_returns=len(self._refs), timeout=0)[0]) == len(self._refs)


def _reserve(ray: Any, placed: Placed) -> Any:
    bundles = [{"CPU": 1.0, **({} if spot.gpu is None else {"GPU": 1.0})} for spot in placed.places]
    nodes = [{"ray.io/node-id": spot.node} for spot in placed.places]
    group = ray.util.placement_group(bundles, bundle_label_selector=nodes)
    if not group.wait(60):
        ray.util.remove_placement_group(group)
        raise ResourceError(
            f"the cluster did not free {len(bundles)} places for the pool '{placed.name}' within 60 s",
            where=f"resource_pool.{placed.name}",
            remedy="end what else runs there (ray status), or ask for less",
        )
    return group


def _actor_class(ray: Any) -> Any:
    class Process(WorkerProcess):
        def open_store(self, host: str = "") -> tuple[str, int]:
            return super().open_store(host or ray.util.get_node_ip_address())

        def build_from(self, given: tuple[Any, Any]) -> Any:
            return self.build(*given)

        def run(self, role: str, method: str, given: Any, wanted: bool) -> Any:
            (args, kwargs), reports = given
            args, kwargs = from_arrays((args, kwargs))
            result = self.call(role, method, args, kwargs, reports=reports)
            return result if isinstance(result, Failure) else to_arrays(_staying(ray, result)) if wanted else None

        @ray.method(concurrency_group="control")
        def progress(self) -> tuple[int, int, int]:
            return super().progress()

        @ray.method(concurrency_group="control")
        def cancel(self) -> None:
            super().cancel()

        @ray.method(concurrency_group="control")
        def stack(self) -> str:
            return super().stack()

    return ray.remote(concurrency_groups={"control": 2})(Process)


# ---------------------------------------------------------------------- results that stay where they are


class RaySource:
    """A token column in an object store."""

    def __init__(self, ref: Any, lengths: Tensor, dtype: torch.dtype) -> None:
        self.ref, self.lengths, self.dtype = ref, lengths, dtype

    def fetch(self) -> Tensor:
        ray = import_ray()
        try:
            return as_tensor(ray.get(self.ref))
        except ray.exceptions.RayError as error:
            raise WorkerLost(f"a column is gone with the worker that made it: {type(error).__name__}") from error

    def __eq__(self, other: object) -> bool:
        return isinstance(other, RaySource) and self.ref == other.ref

    def __hash__(self) -> int:
        return hash(self.ref)

    def __reduce__(self) -> Any:
        return _source, (self.ref, as_array(self.lengths), self.dtype)


def _source(ref: Any, lengths: Any, dtype: torch.dtype) -> RaySource:
    return RaySource(ref, as_tensor(lengths), dtype)


def _staying(ray: Any, result: Any) -> Any:
    """A batch with its large token columns replaced by references to this node's object store."""
    if not isinstance(result, Batch):
        return result
    columns: dict[str, Any] = {}
    for name in result.names:
        value = result[name]
        if isinstance(value, Ragged) and not isinstance(value, DeferredRagged):
            flat = as_array(value.values)
            if value.values.numel() * value.values.element_size() >= STAYS_BYTES and not isinstance(flat, Tensor):
                value = DeferredRagged([RaySource(ray.put(flat), value.lengths, value.dtype)])
        columns[name] = value
    return Batch(columns)
