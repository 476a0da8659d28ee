"""Time by kind of kernel, from what `torch.profiler` recorded."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import torch

KINDS: tuple[tuple[str, tuple[str, ...]], ...] = (
    ("autograd", ("autograd::", "backward0", "backward1", "accumulategrad")),
    ("attention", ("flash", "fmha", "attention", "sdpa", "_merge", "_own_kernel", "_shared_kernel", "_combine_kernel")),
    ("matrix products", ("gemm", "nvjet", "cutlass", "cublas", "sm90_xmma", "addmm", "aten::mm", "aten::bmm", "aten::linear")),
    ("communication", ("nccl", "c10d", "gloo")),
    ("log-probs", ("_statistics", "_gradient", "log_softmax", "logsumexp", "logprobs")),
    ("optimizer", ("adam", "multi_tensor", "foreach", "_update")),
    ("norms", ("_norm", "layernorm")),
    ("rotation", ("_rotate",)),
    ("activation", ("_swiglu", "silu", "gelu")),
    ("sampling", ("topk", "sort", "multinomial", "argmax", "exponential", "_scan_kernel", "_draw_kernel")),
    ("KV cache", ("_store_kernel", "_places_kernel")),
    ("copies and fills", ("memcpy", "memset", "copy", "fill", "zero_", "aten::cat", "catarray", "index", "gather", "scatter")),
    ("elementwise, sums", ("elementwise", "reduce")),
)
"""(kind, parts of a kernel's name), the first that fits wins; what fits none is "other". Kernels of Podium's own begin with
an underscore; names of the CPU are those of torch's operators, whose simplest are in `OPERATORS`."""
OPERATORS = {
    "elementwise, sums": "mul add sub div neg exp pow rsqrt mean sum where sin cos amax clamp log square lt gt ge le eq min "
    "max",
    "views, allocation": "empty empty_like empty_strided zeros view slice as_strided transpose reshape expand select resize "
    "detach t to unsqueeze squeeze split narrow unbind item _local_scalar_dense",
}
_BY_OPERATOR = {name: kind for kind, names in OPERATORS.items() for name in names.split()}


@dataclass(frozen=True)
class KernelTime:
    """One kernel (on a CPU: one operator of torch, without those that it calls): milliseconds and calls."""

    name: str
    kind: str
    ms: float
    calls: int


def kind_of(name: str) -> str:
    """The kind of a kernel by its name."""
    low = name.lower()
    operator = low.removeprefix("aten::").removesuffix("_") if low.startswith("aten::") else None
    if operator in _BY_OPERATOR:
        return _BY_OPERATOR[operator]
    return next((kind for kind, parts in KINDS if any(part in low for part in parts)), "other")


def kernel_times(recorded: Any, device: str | torch.device) -> list[KernelTime]:
    """What ran on the device, the longest first.

    Args:
        recorded: a `torch.profiler.profile` that has ended.
        device: cuda: its kernels are counted. Otherwise the operators of the CPU, each without what it called.
    """
    on_gpu = torch.device(device).type == "cuda"
    found = []
    for event in recorded.key_averages():
        is_kernel = event.device_type == torch.autograd.DeviceType.CUDA
        us = event.self_device_time_total if on_gpu else event.self_cpu_time_total
        # "#" and the profiler's own marks are no kernels; nor is what the user named.
        if is_kernel != on_gpu or not us or "#" in event.key or event.is_user_annotation:
            continue
        found.append(KernelTime(event.key, kind_of(event.key), us / 1e3, event.count))
    return sorted(found, key=lambda kernel: -kernel.ms)


def by_kind(kernels: Iterable[KernelTime]) -> dict[str, float]:
    """Milliseconds of each kind, the longest first."""
    kinds: dict[str, float] = {}
    for kernel in kernels:
        kinds[kernel.kind] = kinds.get(kernel.kind, 0.0) + kernel.ms
    return dict(sorted(kinds.items(), key=lambda item: -item[1]))
