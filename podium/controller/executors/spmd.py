"""The same program on every rank, under torchrun: the controller's loop is replicated, every role plays on all ranks."""

from __future__ import annotations

import os
import pickle
import time
import zlib
from collections.abc import Mapping
from dataclasses import dataclass, replace
from datetime import timedelta
from typing import Any

import torch
from torch import Tensor, distributed

from podium.controller.dispatch import Plan
from podium.controller.future import Future
from podium.controller.memory import explained
from podium.controller.process import Failure, role_mesh
from podium.controller.resource_pool import PoolSettings, ResourcePool
from podium.controller.worker_group import Maker, RoleHandle, WorkerGroup, check_makers
from podium.core.batch import Batch
from podium.core.errors import ResourceError, WorkerError, WorkerLost
from podium.core.ragged import Ragged, as_array
from podium.core.ranks import Ranks, WorkerContext, names_of


class SpmdExecutor:
    """Roles in the processes that torchrun started, in this very program: no Ray, and a way into a user's own program.

    Every rank runs the same controller with the same values, calls its own worker, and exchanges results with the others.
    Before the results go round, the ranks compare what they called: one that strays (a reward that differs from rank to
    rank) is an error that names the column. Only rank 0 writes files and shows progress (`writes`).

    Args:
        pool: `parallel` sizes of each role; devices are those of torchrun's processes.
        deadline_seconds: the longest that ranks wait for each other.
        grace_seconds: how long a rank that failed waits for the others before it ends.
        device: "cuda", "cpu"; None: a GPU for each process where there are enough.
    """

    concurrent = False

    def __init__(
        self,
        pool: ResourcePool | Mapping[str, Any] | None = None,
        *,
        deadline_seconds: float = 3600.0,
        grace_seconds: float = 10.0,
        device: str | None = None,
    ) -> None:
        self.pool = ResourcePool.of(pool)
        self.deadline_seconds, self.grace_seconds = deadline_seconds, grace_seconds
        if not distributed.is_initialized() and "RANK" not in os.environ:
            raise ResourceError(
                "this process was not started by torchrun",
                where="executor",
                remedy="torchrun --nproc-per-node 2 -m podium train ... --executor spmd; or --executor ray",
            )
        self.local_rank = int(os.environ.get("LOCAL_RANK", 0))
        self.device = device or _device(int(os.environ.get("LOCAL_WORLD_SIZE", 1)))
        if self.device.startswith("cuda"):
            self.device = f"cuda:{self.local_rank}"
            torch.cuda.set_device(self.local_rank)
        self._own_group = not distributed.is_initialized()
        timeout = timedelta(seconds=deadline_seconds)
        if self._own_group:
            distributed.init_process_group("nccl" if self.device.startswith("cuda") else "gloo", timeout=timeout)
        self.rank, self.world = distributed.get_rank(), distributed.get_world_size()
        self._control = distributed.new_group(backend="gloo", timeout=timeout)
        self._store = distributed.PrefixStore("podium-calls", distributed.distributed_c10d._get_default_store())
        self._calls = 0
        self.writes = self.rank == 0

    # ------------------------------------------------------------------ start and end

    def launch(self, makers: Mapping[str, Maker]) -> dict[str, RoleHandle]:
        ranks = self._ranks(list(makers))
        check_makers(makers, ranks)
        handles, failure = {}, None
        for role, make in makers.items():
            context = WorkerContext(role, self.rank, ranks[role], self.device, self._backend, "torchrun")
            try:
                worker = make(replace(context, mesh=role_mesh(context)))
            except BaseException as error:
                failure = Failure.of(explained(error, context, "build"), f"{context}, while its worker was built")
                break
            workers = [worker if rank == self.rank else None for rank in range(self.world)]
            handles[role] = RoleHandle(WorkerGroup(role, workers, type(worker), ranks[role], "torchrun"), self)
        self._agree(_Call("all roles", "building", 0, {}), failure)
        return handles

    def _ranks(self, roles: list[str]) -> dict[str, Ranks]:
        groups = self.pool.groups(roles, PoolSettings(cpus=self.world))
        if len(groups) > 1:
            raise ResourceError(
                f"under torchrun every role plays on every rank; the pools of {groups[0].name} and {groups[1].name} are two",
                where="resource_pool",
                remedy="leave the pools out, or use --executor ray",
            )
        return {role: self.pool.ranks(role, self.world) for role in roles}

    @property
    def _backend(self) -> str:
        return "nccl" if self.device.startswith("cuda") else "gloo"

    def shutdown(self) -> None:
        """Ends the process group, where this executor made it."""
        if self._own_group and distributed.is_initialized():
            distributed.destroy_process_group()

    def any(self, flag: bool) -> bool:
        number = torch.tensor([float(flag)])
        distributed.all_reduce(number, distributed.ReduceOp.MAX, group=self._control)
        return bool(number)

    def same(self, value: Any) -> Any:
        values = [value]
        distributed.broadcast_object_list(values, group=self._control)
        return values[0]

    # ------------------------------------------------------------------ calls

    def call(self, group: WorkerGroup, method: str, plan: Plan) -> Future:
        result, failure = None, None
        if self.rank < len(plan.calls):
            args, kwargs = plan.calls[self.rank]
            try:
                result = getattr(group.workers[self.rank], method)(*args, **kwargs)
            except Exception as error:
                context = WorkerContext(group.role, self.rank, group.ranks, self.device, self._backend, group.pool)
                failure = Failure.of(explained(error, context, method), f"{context}, method '{method}'")
        self._agree(_Call(group.role, method, *_digests(plan)), failure)
        if plan.for_files:
            return Future.of(plan.collect([result]) if self.rank in plan.read else None)
        results: list[Any] = [None] * self.world
        distributed.all_gather_object(results, result if self.rank in plan.read else None, group=self._control)
        return Future.of(plan.collect([results[rank] for rank in plan.read]))

    def _agree(self, call: _Call, failure: Failure | None) -> None:
        """All ranks have made the same call, and none has failed; else every rank raises the same error."""
        number, self._calls = self._calls, self._calls + 1
        self._store.set(f"{number}/{self.rank}", pickle.dumps((call, failure, time.time())))  # type: ignore[arg-type]
        if number > 1:
            self._store.delete_key(f"{number - 2}/{self.rank}")
        said, silent = {}, []
        until = time.monotonic() + (self.deadline_seconds if failure is None else self.grace_seconds)
        for rank in range(self.world):
            left = max(0.1, until - time.monotonic())
            try:
                self._store.wait([f"{number}/{rank}"], timedelta(seconds=left))
                said[rank] = pickle.loads(self._store.get(f"{number}/{rank}"))
            except distributed.DistError as error:
                silent.append(rank)
                if "imeout" not in str(error) and "timed out" not in str(error):
                    raise WorkerLost(f"{names_of([rank])} is gone", where=str(call)) from error
        failures = sorted((at, rank) for rank, (_, failed, at) in said.items() if failed is not None)
        if failures:  # the first one is the cause: the others' collectives break off after it
            cause = said[failures[0][1]][1].raised()
            if silent:
                cause.add_note(f"{names_of(silent)} did not end within {self.grace_seconds:g} s after that")
            try:  # other rows on one rank, say, are why a collective broke off
                self._compare({rank: call for rank, (call, _, _) in said.items()})
            except WorkerError as different:
                raise different from cause
            raise cause
        if silent:
            raise WorkerLost(f"{names_of(silent)} did not get there within {self.deadline_seconds:g} s", where=str(call))
        self._compare({rank: call for rank, (call, _, _) in said.items()})

    def _compare(self, calls: dict[int, _Call]) -> None:
        one = min(calls)
        first = calls[one]
        for rank, other in calls.items():
            if other == first:
                continue
            if (other.role, other.method) != (first.role, first.method):
                what = f"rank {one} calls {first}, rank {rank} calls {other}"
            elif other.rows != first.rows:
                what = f"ranks {one} and {rank} call {first} with {first.rows} and {other.rows} rows"
            else:
                odd = sorted(n for n in {*first.columns, *other.columns} if first.columns.get(n) != other.columns.get(n))
                what = f"ranks {one} and {rank} call {first} with other values of {', '.join(odd)}"
            raise WorkerError(
                f"the ranks do not do the same: {what}",
                where="executor spmd",
                remedy="every rank must compute the same: rewards and stages may not draw on time, chance or the rank",
            )


@dataclass(frozen=True)
class _Call:
    """What a rank called, how many rows it gave, and a checksum of each column."""

    role: str
    method: str
    rows: int
    columns: dict[str, int]

    def __str__(self) -> str:
        return f"{self.role}.{self.method}"


def _digests(plan: Plan) -> tuple[int, dict[str, int]]:
    calls = {id(call): call for call in plan.calls}.values()
    batches = [given for args, kwargs in calls for given in (*args, *kwargs.values()) if isinstance(given, Batch)]
    sums: dict[str, int] = {}
    for batch in batches:
        for name in batch.names:
            sums[name] = _checksum(batch[name], sums.get(name, 0))
    return sum(len(batch) for batch in batches), sums


def _checksum(value: Any, start: int) -> int:
    if isinstance(value, Ragged):
        return zlib.crc32(_bytes(value.values), zlib.crc32(_bytes(value.offsets), start))
    if isinstance(value, Tensor):
        return zlib.crc32(_bytes(value), start)
    return zlib.crc32(repr(value).encode(), start)


def _bytes(tensor: Tensor) -> Any:
    return as_array(tensor.contiguous().view(torch.uint8)) if tensor.numel() else b""


def _device(local_world: int) -> str:
    there = torch.cuda.device_count() if torch.cuda.is_available() else 0
    if 0 < there < local_world:
        raise ResourceError(
            f"torchrun started {local_world} processes on a machine with {there} GPUs",
            where="executor",
            remedy=f"torchrun --nproc-per-node {there}, or run.device=cpu",
        )
    return "cuda" if there else "cpu"
