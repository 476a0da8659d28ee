"""What a Ray cluster has: its nodes, their CPUs and GPUs."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from podium.controller.placement import Node


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
