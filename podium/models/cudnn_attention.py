"""Causal attention over packed sequences by cuDNN, where its Python frontend is installed (`nvidia-cudnn-frontend`).

On an H200 it takes 0.6 to 0.65 of the time of the kernel that comes with torch (FlashAttention 2), forward and backward.
cuDNN plans a graph for each shape, which takes about a second; so the number of sequences and the longest length are
rounded up to powers of two and those times 1.5, and a graph is kept. What the rounding adds is empty and costs next to
nothing, but memory for the backward pass; rows for which that would be much take the other kernel.
"""

from __future__ import annotations

import importlib.util
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

# The padded places (sequences x longest) may be so many times the tokens.
_MOST_PADDING = 8
_KINDS = (torch.bfloat16, torch.float16)


@cache
def _installed() -> bool:
    return importlib.util.find_spec("cudnn") is not None


@dataclass(frozen=True)
class CudnnLayout:
    """`sequences` of at most `longest` tokens (both rounded up); int32, on the device: `lengths [b]`, `starts [b + 1]`."""

    sequences: int
    longest: int
    lengths: Tensor
    starts: Tensor


def make_layout(lengths: Tensor, device: torch.device) -> CudnnLayout | None:
    """The layout of sequences (`lengths [R]`, on the CPU); None where cuDNN is not there or padding would be too much."""
    total = int(lengths.sum())
    sequences, longest = rounded_up(len(lengths)), rounded_up(max(64, int(lengths.max())))
    if device.type != "cuda" or not _installed() or sequences * longest > _MOST_PADDING * max(total, 4096):
        return None
    # Its backward pass sums in any order, and has no other.
    if torch.are_deterministic_algorithms_enabled() or torch.cuda.get_device_capability(device) < (9, 0):
        return None
    padded = torch.zeros(sequences, dtype=torch.int32)
    padded[: len(lengths)] = lengths
    starts = torch.full((sequences + 1,), total, dtype=torch.int32)
    starts[0] = 0
    starts[1 : len(lengths) + 1] = torch.cumsum(lengths, 0)
    return CudnnLayout(sequences, longest, padded.to(device), starts.to(device))


def rounded_up(count: int) -> int:
    """The least of 1, 2, 3, 4, 6, 8, 12, 16, ... that is not below `count`."""
    power = 1 << max(0, count - 1).bit_length()
    return power * 3 // 4 if power >= 4 and count <= power * 3 // 4 else power


def fits(query: Tensor, key: Tensor) -> bool:
    """Whether the heads are of a kind that was measured: `[N, H, D]`."""
    return query.dtype in _KINDS and query.shape[-1] in (64, 128) and query.shape[-1] == key.shape[-1]


@cache
def _handle(device: torch.device) -> Any:
    import cudnn

    with torch.cuda.device(device):
        return cudnn.create_handle()


def _tensor(graph: Any, name: str, layout: tuple[int, int], heads: int, width: int, offsets: Any) -> Any:
    tensor = graph.tensor(name=name, dim=(layout[0], heads, layout[1], width), stride=_strides(layout[1], heads, width))
    tensor.set_ragged_offset(offsets)
    return tensor


def _strides(longest: int, heads: int, width: int) -> tuple[int, int, int, int]:
    """Of `[b, heads, longest, width]` that lies token by token."""
    return (longest * heads * width, width, heads * width, 1)


@cache
def _graph(
    device: torch.device,
    dtype: torch.dtype,
    layout: tuple[int, int],
    heads: tuple[int, int],
    width: int,
    scale: float,
    back: bool,
) -> tuple[Any, dict[str, Any]]:
    """A planned graph and its tensors by name. `layout`: sequences and longest; `heads`: of queries and of keys."""
    import cudnn

    kind = cudnn.data_type.BFLOAT16 if dtype == torch.bfloat16 else cudnn.data_type.HALF
    fp32, int32 = cudnn.data_type.FLOAT, cudnn.data_type.INT32
    graph = cudnn.pygraph(io_data_type=kind, intermediate_data_type=fp32, compute_data_type=fp32, handle=_handle(device))
    b, longest = layout

    def numbers(name: str, count: int) -> Any:
        return graph.tensor(name=name, dim=(count, 1, 1, 1), stride=(1, 1, 1, 1), data_type=int32)

    names = {name: numbers(name, b + 1) for name in ("query_starts", "key_starts")}
    names |= {name: numbers(name, b) for name in ("query_lengths", "key_lengths")}
    of = {"q": (heads[0], "query_starts"), "k": (heads[1], "key_starts"), "v": (heads[1], "key_starts")}
    of |= {"o": of["q"], "do": of["q"]} if back else {}
    names |= {name: _tensor(graph, name, layout, h, width, names[offsets]) for name, (h, offsets) in of.items()}
    options = {
        "attn_scale": scale,
        "use_causal_mask": True,
        "use_padding_mask": True,
        "seq_len_q": names["query_lengths"],
        "seq_len_kv": names["key_lengths"],
    }
    q, k, v = (names[name] for name in "qkv")
    normaliser = {"dim": (b, heads[0], longest, 1), "stride": (heads[0] * longest, longest, 1, 1)}
    if back:
        names["normaliser"] = graph.tensor(name="normaliser", data_type=fp32, **normaliser)
        grads = graph.sdpa_backward(
            q=q, k=k, v=v, o=names["o"], dO=names["do"], stats=names["normaliser"], name="backward", **options
        )
        made = dict(zip(("dq", "dk", "dv"), grads, strict=True))
    else:
        made = dict(zip(("o", "normaliser"), graph.sdpa(q=q, k=k, v=v, generate_stats=True, name="f", **options), strict=True))
        n = made["normaliser"].set_output(True).set_dim(normaliser["dim"])
        n.set_stride(normaliser["stride"]).set_data_type(fp32)
    for name, tensor in made.items():
        if name != "normaliser":
            h, offsets = of[name[-1]] if name != "o" else of["q"]
            tensor.set_output(True).set_dim((b, h, longest, width)).set_stride(_strides(longest, h, width))
            tensor.set_data_type(kind)
            tensor.set_ragged_offset(names[offsets])
    graph.build([cudnn.heur_mode.A])
    return graph, names | made


def _run(back: bool, layout: CudnnLayout, scale: float, tensors: dict[str, Tensor]) -> None:
    import cudnn

    q, k = tensors["q"], tensors["k"]
    shape = (layout.sequences, layout.longest), (q.shape[1], k.shape[1]), q.shape[2]
    graph, names = _graph(q.device, q.dtype, *shape, scale, back)
    tensors = tensors | {
        "query_starts": layout.starts * (q.shape[1] * q.shape[2]),
        "key_starts": layout.starts * (k.shape[1] * k.shape[2]),
        "query_lengths": layout.lengths,
        "key_lengths": layout.lengths,
    }
    handle = _handle(q.device)
    cudnn.set_stream(handle=handle, stream=torch.cuda.current_stream(q.device).cuda_stream)
    workspace = torch.empty(max(1, graph.get_workspace_size()), dtype=torch.uint8, device=q.device)
    graph.execute({names[name]: tensor for name, tensor in tensors.items()}, workspace, handle=handle)


class CudnnAttention(torch.autograd.Function):
    """q `[N, H, D]`, k and v `[N, K, D]` -> `[N, H, D]`, each sequence causal within itself; 16 bits, on CUDA."""

    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor, layout: CudnnLayout, scale: float) -> Tensor:
        q, k, v = q.contiguous(), k.contiguous(), v.contiguous()
        out = torch.empty_like(q)
        size = (layout.sequences, q.shape[1], layout.longest, 1)
        normaliser = torch.empty(size, dtype=torch.float32, device=q.device)
        _run(False, layout, scale, {"q": q, "k": k, "v": v, "o": out, "normaliser": normaliser})
        ctx.save_for_backward(q, k, v, out, normaliser)
        ctx.layout, ctx.scale = layout, scale
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        q, k, v, out, normaliser = ctx.saved_tensors
        grads = [torch.empty_like(x) for x in (q, k, v)]
        tensors = {"q": q, "k": k, "v": v, "o": out, "do": grad.contiguous(), "normaliser": normaliser}
        _run(True, ctx.layout, ctx.scale, tensors | dict(zip(("dq", "dk", "dv"), grads, strict=True)))
        return *grads, None, None
