"""Reaching a Ray cluster, and what it has: its nodes, their CPUs and GPUs. The one module that imports Ray."""

from __future__ import annotations

import os
import socket
from collections.abc import Sequence
from typing import Any

from podium.controller.placement import Node
from podium.core.errors import ResourceError

OLDEST = (2, 50)


def connect(address: str | None, processes: int) -> Any:
    """The `ray` module, connected to the cluster at `address`, or to one that is started on this machine for `processes`.

    Raises ResourceError: Ray is not installed, too old, of another version than the cluster, or does not answer.
    """
    ray = import_ray()
    if ray.is_initialized():
        return ray
    os.environ.setdefault("RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO", "0")
    local = {} if address else {"num_cpus": max(os.cpu_count() or 1, processes), "include_dashboard": False}
    try:
        _check_answers(address)
        ray.init(address=address or "local", logging_level="warning", configure_logging=False, **local)
    except (OSError, RuntimeError, ValueError) as error:  # (ConnectionError and TimeoutError are OSErrors)
        text = str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
        remedy = "start one: ray start --head; or leave the address out for one on this machine"
        if "ersion" in str(error):
            remedy = f"install the cluster's versions of Ray and Python here (Ray {ray.__version__} is installed)"
        what = f"no Ray cluster answers at '{address}': {text}" if address else f"Ray does not start: {text}"
        raise ResourceError(what, where="executor.address", remedy=remedy) from error
    return ray


def cluster_nodes(ray: Any, with_memory: bool) -> list[Node]:
    """The living nodes, by id."""
    found = []
    for node in ray.nodes():
        if not node["Alive"]:
            continue
        has = node["Resources"]
        types = [name.removeprefix("accelerator_type:") for name in has if name.startswith("accelerator_type:")]
        gpus = tuple(range(int(has.get("GPU", 0))))
        memory = _gpu_memory(ray, node["NodeID"]) if with_memory and gpus else None
        found.append(Node(node["NodeID"], int(has.get("CPU", 0)), gpus, types[0] if types else None, memory))
    return found


def _gpu_memory(ray: Any, node_id: str) -> float | None:
    """The smallest memory of a node's GPUs, in GB; None where its driver does not say."""

    def ask() -> float | None:
        import subprocess

        command = ["nvidia-smi", "--query-gpu=memory.total", "--format=csv,noheader,nounits"]
        try:
            lines: Sequence[str] = subprocess.run(command, capture_output=True, text=True, timeout=20).stdout.split()
        except OSError:
            return None
        return min((float(line) * 1.048576e-3 for line in lines), default=None)

    there = ray.util.scheduling_strategies.NodeAffinitySchedulingStrategy(node_id, soft=False)
    return ray.get(ray.remote(num_cpus=0)(ask).options(scheduling_strategy=there).remote())


def import_ray() -> Any:
    os.environ.setdefault("RAY_DEDUP_LOGS", "0")  # read when Ray is imported; every rank's lines are its own
    try:
        import ray
        import ray.util.scheduling_strategies
    except ImportError as error:
        raise ResourceError("Ray is not installed", where="executor", remedy="pip install 'podium[ray]'") from error
    numbers = tuple(int(part) for part in ray.__version__.split(".")[:2])
    if numbers < OLDEST:
        raise ResourceError(
            f"Ray {ray.__version__} is installed, and this version of Podium needs {'.'.join(map(str, OLDEST))} or later",
            where="executor",
            remedy="pip install --upgrade 'podium[ray]'",
        )
    return ray


def _check_answers(address: str | None) -> None:
    """Raises OSError where nothing listens at `host:port`: Ray itself would try for minutes."""
    host, _, port = (address or "").partition(":")
    if port.isdecimal():
        socket.create_connection((host, int(port)), timeout=10).close()
