"""Out of memory, said so that one can do something: whose, where, while doing what, and which settings to change."""

from __future__ import annotations

import torch

from podium.core.errors import WorkerError
from podium.core.ranks import WorkerContext

# In order of effect; the first is the one to try.
_UPDATE = (
    "batch.microbatch_tokens: half of it (changes memory and speed, never the gradient)",
    "model.dtype: bfloat16",
    "resource_pool.{role}: {{backend: fsdp}} on more GPUs (weights and optimizer are divided among them)",
    "model.lora: {{rank: 16}} (only adapters have gradients and optimizer state)",
)
_FORWARD = (
    "batch.microbatch_tokens: half of it",
    "model.dtype: bfloat16",
    "resource_pool.{role}: a pool of its own, or {{backend: fsdp}} on more GPUs",
)
_GENERATE = (
    "rollout.max_concurrent: half of it (fewer responses at a time)",
    "rollout.max_new_tokens: lower",
    "resource_pool: roles that share this pool elsewhere (reference: {{cpus: 1}})",
)
_BUILD = (
    "resource_pool.{role}: {{backend: fsdp}} on more GPUs, or a pool of its own",
    "model.dtype: bfloat16",
    "model.lora with model.quantization: 4bit",
)


class OutOfMemory(WorkerError):
    """A worker's device (or the machine) has no memory left for what was asked of it."""


def explained(error: BaseException, context: WorkerContext, phase: str) -> BaseException:
    """The error, or an `OutOfMemory` that says more where it is one.

    Args:
        phase: the method that ran; "build" while the worker was made.
    """
    if not is_out_of_memory(error):
        return error
    advice = [line.format(role=context.role) for line in _advice(phase)]
    wanted = str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
    said = OutOfMemory(
        f"out of memory in '{phase}': {wanted} ({_held(context.device)})",
        where=str(context),
        remedy="in order of effect:\n     " + "\n     ".join(advice),
    )
    said.__cause__ = error
    return said


def is_out_of_memory(error: BaseException) -> bool:
    """Of a GPU, or of the CPU (torch has no class of its own for that one)."""
    if isinstance(error, torch.OutOfMemoryError | MemoryError):
        return True
    return isinstance(error, RuntimeError) and "can't allocate memory" in str(error)


def _advice(phase: str) -> tuple[str, ...]:
    if phase == "build":
        return _BUILD
    if phase.startswith("generate"):
        return _GENERATE
    return _UPDATE if phase.startswith("update") else _FORWARD


def _held(device: str) -> str:
    """What is allocated there, in GB."""
    if device.startswith("cuda"):
        free, total = torch.cuda.mem_get_info(device)
        ours, cached = torch.cuda.memory_allocated(device), torch.cuda.memory_reserved(device)
        return (
            f"this process holds {ours / 1e9:.1f} GB in tensors and {(cached - ours) / 1e9:.1f} GB of cache; "
            f"{free / 1e9:.1f} of {total / 1e9:.1f} GB are free"
        )
    try:
        with open("/proc/meminfo") as file:
            numbers = {line.split(":")[0]: int(line.split()[1]) * 1024 for line in file}
        with open("/proc/self/statm") as file:
            pages = int(file.read().split()[1])
    except OSError:
        return "no figures on this system"
    resident = pages * 4096
    return (
        f"this process holds {resident / 1e9:.1f} GB; "
        f"{numbers['MemAvailable'] / 1e9:.1f} of {numbers['MemTotal'] / 1e9:.1f} GB are available"
    )
