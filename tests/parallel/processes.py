"""Runs a function on several processes with gloo, on this machine."""

from __future__ import annotations

import os
import pickle
import tempfile
import time
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from filelock import FileLock

from podium.core.ranks import Ranks, WorkerContext


def on_ranks(function: Callable[..., Any], ranks: int, *args: Any, timeout: float = 120.0, backend: str = "gloo") -> list[Any]:
    """`function(rank, *args)` on every rank of a process group; what each returned. With NCCL each has a GPU of its own.

    The functions and arguments must be picklable (module level). Raises RuntimeError with a rank's traceback.
    """
    with tempfile.TemporaryDirectory() as folder:
        spawned = mp.get_context("spawn")
        workers = [
            spawned.Process(target=_main, args=(function, rank, ranks, folder, args, backend), daemon=True)
            for rank in range(ranks)
        ]
        for worker in workers:
            worker.start()
        _wait(workers, Path(folder), timeout)
        results = [_read(Path(folder) / str(rank)) for rank in range(ranks)]
        failed = [f"rank {rank}:\n{error}" for rank, (error, _) in enumerate(results) if error]
        if failed:
            raise RuntimeError("\n".join(failed))
        return [value for _, value in results]


def once(factory: pytest.TempPathFactory, name: str, make: Callable[[Path], Any]) -> tuple[Path, Any]:
    """`make(folder)`, run once for all of pytest's processes (xdist deals a module's tests to several): folder and result."""
    shared = factory.getbasetemp()
    if "PYTEST_XDIST_WORKER" in os.environ:
        shared = shared.parent
    folder = shared / name
    with FileLock(f"{folder}.lock"):
        kept = folder / "result.pickle"
        if not kept.exists():
            folder.mkdir(exist_ok=True)
            try:
                outcome = (None, make(folder))
            except RuntimeError as error:  # the others shall not wait for it to fail again
                outcome = (str(error), None)
            kept.write_bytes(pickle.dumps(outcome))
    error, value = pickle.loads(kept.read_bytes())
    if error:
        raise RuntimeError(error)
    return folder, value


def _wait(workers: list[Any], folder: Path, timeout: float) -> None:
    """Until all have ended, one has failed (the others may wait for it in a collective), or the time is up."""
    end = time.monotonic() + timeout
    while any(worker.is_alive() for worker in workers) and time.monotonic() < end:
        workers[0].join(0.2)
        written = [folder / str(rank) for rank in range(len(workers)) if (folder / str(rank)).exists()]
        if any(_read(path)[0] for path in written):
            end = min(end, time.monotonic() + 5)
    for worker in workers:
        if worker.is_alive():
            worker.terminate()


def _read(path: Path) -> tuple[str | None, Any]:
    return pickle.loads(path.read_bytes()) if path.exists() else ("ended without a result (or hung)", None)


def _main(function: Callable[..., Any], rank: int, ranks: int, folder: str, args: tuple[Any, ...], backend: str) -> None:
    os.environ["OMP_NUM_THREADS"] = "1"
    torch.set_num_threads(1)
    error, value = None, None
    try:
        store = dist.FileStore(f"{folder}/store", ranks)
        if backend == "nccl":
            torch.cuda.set_device(rank)
        dist.init_process_group(backend, store=store, rank=rank, world_size=ranks)
        value = function(rank, *args)
        dist.barrier()
    except BaseException:
        error = traceback.format_exc()
    part = Path(folder) / f"{rank}.part"
    part.write_bytes(pickle.dumps((error, value)))
    part.rename(Path(folder) / str(rank))
    if error is None:
        dist.destroy_process_group()
    os._exit(0)


def context_of(rank: int, **sizes: int) -> WorkerContext:
    return WorkerContext("actor", rank, Ranks(**sizes))
