"""What runs inside a worker's process: it joins its pool, builds the workers of the pool's roles, and runs their methods."""

from __future__ import annotations

import io
import os
import sys
import threading
import traceback
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass, replace
from datetime import timedelta
from typing import Any, TextIO

from podium.controller.memory import explained
from podium.controller.worker_group import Maker
from podium.core.errors import WorkerError
from podium.core.ranks import AXES, Ranks, WorkerContext


@dataclass(frozen=True)
class Failure:
    """An exception on its way to the controller."""

    error: BaseException
    where: str
    trace: str

    @classmethod
    def of(cls, error: BaseException, where: str) -> Failure:
        """The exception with what is known of its place; one that cannot travel becomes a WorkerError of the same text."""
        import pickle

        trace = "".join(traceback.format_exception(error))
        try:
            pickle.loads(pickle.dumps(error))
        except Exception:  # whatever a user's exception does
            error = WorkerError(f"{type(error).__name__}: {error}")
        return cls(error.with_traceback(None), where, trace)

    def raised(self) -> BaseException:
        """The exception, with its place and the worker's traceback as notes."""
        if not any(self.where in note for note in getattr(self.error, "__notes__", ())):
            self.error.add_note(f"in {self.where}")
            self.error.add_note(f"the worker's own traceback:\n{self.trace}")
        return self.error


class Cancelled(Exception):
    """The controller has given up a call; raised where the worker reports progress."""


class WorkerProcess:
    """One process of a pool: rank `rank`, with a worker of each of the pool's roles.

    Args:
        pool, rank: which process this is.
        gpu: the id of its GPU among those of its node, where the pool names ids; None: what the process was given.
        device: "cuda" or "cpu".
    """

    def __init__(self, pool: str, rank: int, device: str, gpu: int | None = None) -> None:
        if gpu is not None:  # before CUDA is initialised
            os.environ["CUDA_VISIBLE_DEVICES"] = str(gpu)
        self.pool, self.rank, self.device = pool, rank, device
        self.workers: dict[str, Any] = {}
        self._contexts: dict[str, WorkerContext] = {}
        self._cancelled = threading.Event()
        self._progress = (0, 0, 0)
        self._main = threading.get_ident()
        self._store: Any = None
        self.label = f"{pool} {rank}"
        sys.stdout, sys.stderr = Labelled(sys.stdout, self), Labelled(sys.stderr, self)  # type: ignore[assignment]

    # ------------------------------------------------------------------ start

    def open_store(self, host: str) -> tuple[str, int]:
        """Rank 0: where the others of the pool find it."""
        from torch.distributed import TCPStore

        self._store = TCPStore(host, 0, is_master=True, wait_for_workers=False)
        return host, self._store.port

    def join(self, host: str, port: int, world: int, deadline_seconds: float) -> None:
        """Makes the pool's process group. All ranks call it.

        The controller stops a pool whose ranks do not answer by the deadline, and says where they stand; the group's own
        timeout, which would end them one by one, comes later. It is also what they have to find each other.
        """
        import torch
        from torch import distributed

        timeout = timedelta(seconds=max(300.0, 2 * deadline_seconds))
        if self._store is None:
            self._store = distributed.TCPStore(host, port, is_master=False, timeout=timeout)
        if self.device == "cuda":
            torch.cuda.set_device(0)
        distributed.init_process_group(
            "nccl" if self.device == "cuda" else "gloo",
            store=distributed.PrefixStore("podium", self._store),
            rank=self.rank,
            world_size=world,
            timeout=timeout,
        )

    def build(self, makers: Mapping[str, Maker], ranks: Mapping[str, Ranks]) -> dict[str, type] | Failure:
        """Builds the roles' workers; their classes, or what went wrong."""
        for role, make in makers.items():
            context = self._context(role, ranks[role])
            try:
                self.label = f"{role} {self.rank}"
                self.workers[role] = make(replace(context, mesh=self._mesh(context)))
            except BaseException as error:
                return Failure.of(explained(error, context, "build"), f"{context}, while its worker was built")
            self._contexts[role] = context
        return {role: type(worker) for role, worker in self.workers.items()}

    def _context(self, role: str, ranks: Ranks) -> WorkerContext:
        backend = "nccl" if self.device == "cuda" else "gloo"
        return WorkerContext(role, self.rank, ranks, self.device, backend, self.pool)

    def _mesh(self, context: WorkerContext) -> Any:
        return role_mesh(context)

    # ------------------------------------------------------------------ calls

    def call(self, role: str, method: str, args: tuple[Any, ...], kwargs: dict[str, Any], *, reports: bool = False) -> Any:
        """Runs a method of a role's worker; its result, or a `Failure`."""
        self.label = f"{role} {self.rank}"
        self._cancelled.clear()
        self._progress, self._main = (0, 0, 0), threading.get_ident()
        if reports:
            kwargs = {**kwargs, "on_progress": self._report}
        try:
            return getattr(self.workers[role], method)(*args, **kwargs)
        except BaseException as error:
            context = self._contexts[role]
            return Failure.of(explained(error, context, method), f"{context}, method '{method}'")
        finally:
            with suppress(Exception):
                sys.stdout.flush()

    def _report(self, done: int, total: int, tokens: int) -> None:
        self._progress = (done, total, tokens)
        if self._cancelled.is_set():
            raise Cancelled

    def progress(self) -> tuple[int, int, int]:
        """How far the running call is."""
        return self._progress

    def cancel(self) -> None:
        """The running call ends where it next reports its progress."""
        self._cancelled.set()

    def stack(self) -> str:
        """Where the running call stands."""
        frame = sys._current_frames().get(self._main)
        if frame is None:
            return "(nothing runs)"
        frames = [f for f in traceback.extract_stack(frame) if f.filename != __file__]
        return "".join(traceback.format_list(frames[-8:]))


def role_mesh(context: WorkerContext) -> Any:
    """The role's device mesh over its pool's processes; None for a single worker."""
    if context.world_size == 1:
        return None
    from torch.distributed.device_mesh import init_device_mesh

    shape = tuple(context.ranks.sizes.values())
    return init_device_mesh(context.device.partition(":")[0], shape, mesh_dim_names=AXES)


class Labelled(io.TextIOBase):
    """A stream whose lines begin with role and rank: "[actor 1] ..."."""

    def __init__(self, stream: TextIO, process: WorkerProcess) -> None:
        self._stream, self._process, self._at_start = stream, process, True

    def write(self, text: str) -> int:
        for line in text.splitlines(keepends=True):
            self._stream.write(f"[{self._process.label}] {line}" if self._at_start else line)
            self._at_start = line.endswith("\n")
        return len(text)

    def flush(self) -> None:
        self._stream.flush()

    def fileno(self) -> int:
        return self._stream.fileno()

    def isatty(self) -> bool:
        return False
