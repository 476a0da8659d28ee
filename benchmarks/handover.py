"""The hand-over from training to generation, beside gathering every full tensor: bytes, milliseconds, and are the bits equal.

    torchrun --nproc-per-node 2 benchmarks/handover.py --shape 7b          # two GPUs, NCCL
    torchrun --nproc-per-node 2 benchmarks/handover.py --shape tiny        # a laptop, gloo

Training: FSDP2 over all ranks, in bf16 or fp32 (`--train-dtype`; fp32 is cast by the sender). Generation: TP over all ranks
(`tp`) or a whole copy on each (`dp`), in bf16. The weights are random, of the shape's sizes.

Ways are timed in the same run, each after a barrier, the slowest rank counts; median of `--repeats`:
  hand-over   Podium's plan and transfer, into generation tensors that are there already
  gather      every full tensor on every rank (FSDP2's `full_tensor()`), then the slice that generation needs is copied
  all-gather  as many bytes as one buffer, by one collective: the link's own rate
  message     as many bytes as one buffer, sent round by one message of each rank: the rate of messages
Where the hand-over's time goes: `queue_ms` is what a process takes to ask for all of it (the rest is waiting for devices), and
`alone_ms` what its steps take, one kind at a time: collectives, packing, messages, unpacking, copies within a rank. By what
their sum is longer than the hand-over, they overlap.
Nothing is checked while it is timed. Afterwards bits are compared with the gathered tensors: of the first hand-over, of a
second one after the weights have changed, and of a third after a rollout cache went to sleep and woke up elsewhere. Then
training and generation share their memory, as on one device: bytes, extra memory and time of that hand-over.

A line of JSON for each way; the last line has the comparisons. With `benchmarks/handover_engines.py` the same hand-over ends in
a rollout engine that generates.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import time
from collections.abc import Callable, Iterable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from podium.engines.layout import Layout, ModelParallel, gathered_layout, local_of
from podium.engines.rollout.native.paged_cache import PagedCache
from podium.engines.train.tensor_parallel import split_of
from podium.hybrid.engine import MovedHandOver, SharedHandOver
from podium.hybrid.gathers import all_gather
from podium.hybrid.patience import Patience
from podium.hybrid.plan import place_generation
from podium.hybrid.transfer import Transport, is_nccl

# hidden, intermediate, layers, heads, key/value heads, head width, vocabulary, tied: Qwen2.5's
SHAPES: dict[str, tuple[int, int, int, int, int, int, int, bool]] = {
    "tiny": (64, 128, 2, 4, 2, 16, 512, True),
    "0.5b": (896, 4864, 24, 14, 2, 64, 151936, True),
    "1.5b": (1536, 8960, 28, 12, 2, 128, 151936, True),
    "7b": (3584, 18944, 28, 28, 4, 128, 152064, False),
}


def shapes_of(name: str) -> dict[str, tuple[int, ...]]:
    """The model's tensors."""
    hidden, width, layers, heads, kv, head, vocabulary, tied = SHAPES[name]
    shapes: dict[str, tuple[int, ...]] = {"model.embed_tokens.weight": (vocabulary, hidden)}
    for i in range(layers):
        at = f"model.layers.{i}."
        for part, count in (("q", heads), ("k", kv), ("v", kv)):
            shapes[f"{at}self_attn.{part}_proj.weight"] = (count * head, hidden)
            shapes[f"{at}self_attn.{part}_proj.bias"] = (count * head,)
        shapes[f"{at}self_attn.o_proj.weight"] = (hidden, heads * head)
        shapes[f"{at}mlp.gate_proj.weight"] = shapes[f"{at}mlp.up_proj.weight"] = (width, hidden)
        shapes[f"{at}mlp.down_proj.weight"] = (hidden, width)
        shapes[f"{at}input_layernorm.weight"] = shapes[f"{at}post_attention_layernorm.weight"] = (hidden,)
    shapes["model.norm.weight"] = (hidden,)
    if not tied:
        shapes["lm_head.weight"] = (vocabulary, hidden)
    return shapes


def sharded(shapes: dict[str, tuple[int, ...]], dtype: torch.dtype, mesh: Any, device: torch.device) -> dict[str, Tensor]:
    """Random tensors, each cut along its first dimension: what `fully_shard` leaves on a rank."""
    from torch.distributed.tensor import Shard, zeros

    tensors = {}
    for name, shape in shapes.items():
        tensors[name] = zeros(shape, dtype=dtype, device_mesh=mesh, placements=[Shard(0)])
        tensors[name].to_local().normal_()
    return tensors


def generation(source: Layout, kind: str, dtype: torch.dtype) -> Layout:
    """Tensor parallel over all ranks, or a copy on each; the ranks chosen to keep what they have."""
    sizes = ModelParallel(tensor=source.ranks) if kind == "tp" else ModelParallel(data=source.ranks)
    shapes = {name: (tensor.shape, dtype) for name, tensor in source.tensors.items()}
    return place_generation(source, sizes.layout(shapes, split_of))[0]


class Clock:
    """Milliseconds of the slowest rank."""

    def __init__(self, device: torch.device, repeats: int) -> None:
        self.device, self.repeats = device, repeats

    def __call__(self, what: Callable[[], Any]) -> float:
        times = []
        for _ in range(self.repeats + 2):
            self.together()
            start = time.perf_counter()
            what()
            self._wait()
            mine = torch.tensor((time.perf_counter() - start) * 1e3, device=self.device)
            dist.all_reduce(mine, dist.ReduceOp.MAX)
            times.append(float(mine))
        return statistics.median(times[2:])

    def together(self) -> None:
        """Until every rank is here, and its device idle."""
        self._wait()
        dist.barrier()
        self._wait()

    def _wait(self) -> None:
        if self.device.type == "cuda":
            torch.cuda.synchronize()


def gather_all(tensors: dict[str, Tensor], target: dict[str, Tensor], layout: Layout, rank: int) -> None:
    """The plain way: each tensor whole on every rank, then the rank's part of it."""
    for name, tensor in tensors.items():
        box = layout.tensors[name].boxes[rank]
        whole = tensor.to(target[name].dtype).full_tensor()  # type: ignore[attr-defined]
        if box is not None:
            target[name].copy_(whole[tuple(slice(a, b) for a, b in zip(box.start, box.stop, strict=True))])


def arrives(
    hand_over: MovedHandOver,
    tensors: dict[str, Tensor],
    target: dict[str, Tensor],
    layout: Layout,
    rank: int,
    device: torch.device,
) -> list[bool]:
    """Whether every bit is right: as the weights are, after they changed, and after a cache slept and woke; on all ranks."""
    out = []
    cache = PagedCache(4, 2, 128, 64, torch.bfloat16, device)
    cache.allocate(256)
    for phase in ("first", "second", "slept"):
        if phase != "first":
            for tensor in tensors.values():
                local_of(tensor).mul_(-1.5)
        if phase == "slept":
            cache.release()
            blocker = torch.empty(1 << 24, device=device)  # so that the cache comes to lie elsewhere
            cache.allocate(512)
            del blocker
        for value in target.values():
            value.fill_(float("nan"))
        hand_over(1)
        hand_over.check()
        got = {name: value.clone() for name, value in target.items()}
        gather_all(tensors, target, layout, rank)
        same = all(torch.equal(target[name].view(torch.int16), value.view(torch.int16)) for name, value in got.items())
        everywhere = torch.tensor(float(same), device=device)
        dist.all_reduce(everywhere, dist.ReduceOp.MIN)
        out.append(bool(everywhere))
    return out


def on_one_device(shapes: dict[str, tuple[int, ...]], device: torch.device) -> dict[str, Any]:
    """Training and generation over the same memory: the hand-over checks that they still are."""
    trained = torch.nn.ParameterDict(
        {name.replace(".", "/"): torch.empty(shape, dtype=torch.bfloat16, device=device) for name, shape in shapes.items()}
    )
    before = torch.cuda.memory_allocated(device) if device.type == "cuda" else 0
    hand_over = SharedHandOver(trained, trained)
    times = []
    for version in range(20):
        start = time.perf_counter()
        report = hand_over(version)
        times.append((time.perf_counter() - start) * 1e3)
    extra = (torch.cuda.memory_allocated(device) if device.type == "cuda" else 0) - before
    bytes_moved = report.moved.received + report.moved.copied
    assert extra == 0 and bytes_moved == 0, (extra, bytes_moved)
    return {
        "generation": "one device",
        "hand_over_ms": round(statistics.median(times), 4),
        "bytes": bytes_moved,
        "extra_bytes": extra,
    }


def compared(results: dict[str, dict[str, Any]], args: argparse.Namespace) -> dict[str, Any]:
    """The last line: comparisons by keys that begin with `ratio`; above 1 the hand-over is the faster one."""
    out: dict[str, Any] = {"shape": args.shape, "ranks": dist.get_world_size()}
    for kind, result in results.items():
        if kind == "one":
            out["ratio_one_millisecond_to_hand_over_one_device"] = round(1.0 / result["hand_over_ms"], 2)
            continue
        ours = result["hand_over_ms"]
        out[f"ratio_gather_to_hand_over_{kind}"] = round(result["gather_ms"] / ours, 2)
        out[f"ratio_all_gather_to_hand_over_{kind}"] = round(result["all_gather_ms"] / ours, 2)
        if args.shape == "7b":
            out[f"ratio_60_ms_to_hand_over_{kind}"] = round(60.0 / ours, 2)
        out[f"hand_over_ms_{kind}"], out[f"bit_equal_{kind}"] = ours, result["bit_equal"]
    return out


class Watched(Patience):
    """Notes when everything is in the device's queue."""

    queued_at = 0.0

    def device(self, device: torch.device, what: str, ranks: Iterable[int]) -> None:
        self.queued_at = time.perf_counter()
        super().device(device, what, ranks)


def breakdown(transport: Transport, clock: Clock) -> dict[str, Any]:
    """Where the time of a hand-over goes. Leaves the generation tensors with values that mean nothing."""
    queueing = []
    for _ in range(clock.repeats):
        clock.together()
        start = time.perf_counter()
        transport.run(watched := Watched(queued=is_nccl(transport.group)))
        queueing.append((watched.queued_at - start) * 1e3)
    return {
        "queue_ms": round(statistics.median(queueing), 3),
        "alone_ms": {name: round(clock(part), 3) for name, part in transport.parts().items()},
    }


def link_times(received: int, device: torch.device, clock: Clock) -> tuple[float, float]:
    """Milliseconds in which one buffer brings each rank so many bytes: by an all-gather, by one message."""
    ranks = dist.get_world_size()

    def empty(count: int) -> Tensor:
        return torch.empty(max(count, 1), dtype=torch.bfloat16, device=device)

    piece = empty(received // max(ranks - 1, 1) // 2)
    whole = empty(len(piece) * ranks)
    link = clock(lambda: [work.wait() for work in all_gather([(whole, piece)])])
    piece = whole = empty(received // 2)
    room = empty(received // 2)
    return link, clock(lambda: one_message(piece, room))


def one_message(piece: Tensor, room: Tensor) -> None:
    """Sends `piece` to the next rank, and receives the one before's."""
    rank, ranks = dist.get_rank(), dist.get_world_size()
    operations = [dist.P2POp(dist.isend, piece, (rank + 1) % ranks), dist.P2POp(dist.irecv, room, (rank - 1) % ranks)]
    for work in dist.batch_isend_irecv(operations):
        work.wait()


def measure(kind: str, tensors: dict[str, Tensor], device: torch.device, args: argparse.Namespace) -> dict[str, Any]:
    rank = dist.get_rank()
    layout = generation(gathered_layout(tensors), kind, torch.bfloat16)
    target: dict[str, Tensor] = {}
    for name, shards in layout.tensors.items():
        box = shards.boxes[rank]
        target[name] = torch.empty(box.shape if box else (0,), dtype=shards.dtype, device=device)
    clock = Clock(device, args.repeats)
    hand_over = MovedHandOver(
        tensors, target, rank=rank, target_layout=layout, verify=False, bucket_bytes=args.bucket_mib << 20
    )
    ours = clock(lambda: hand_over(1))
    fingerprints = clock(hand_over.check)
    parts = breakdown(hand_over.transport, clock)
    gathered = clock(lambda: gather_all(tensors, target, layout, rank))
    equal = all(arrives(hand_over, tensors, target, layout, rank, device)) if args.check else None
    received = hand_over.plan.received_bytes(rank)
    link, message = link_times(received, device, clock)
    return {
        "generation": kind,
        "received_MB": round(received / 1e6, 1),
        "model_MB": round(layout.total_bytes / 1e6, 1),
        "hand_over_ms": round(ours, 3),
        "gather_ms": round(gathered, 3),
        "all_gather_ms": round(link, 3),
        "message_ms": round(message, 3),
        "times_faster_than_gather": round(gathered / ours, 2),
        "share_of_link": round(link / ours, 2),
        "GB_per_s": round(received / ours / 1e6, 1),
        "fingerprints_ms": round(fingerprints, 3),
        **parts,
        "bit_equal": equal,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shape", choices=SHAPES, default="tiny")
    parser.add_argument("--train-dtype", choices=["bfloat16", "float32"], default="bfloat16")
    parser.add_argument("--generation", choices=["tp", "dp", "both"], default="both")
    parser.add_argument("--repeats", type=int, default=7)
    parser.add_argument("--bucket-mib", type=int, default=256)
    parser.add_argument(
        "--no-check", dest="check", action="store_false", help="leave the comparison of bits out (it takes memory)"
    )
    args = parser.parse_args()
    on_gpu = torch.cuda.is_available()
    device = torch.device("cuda", int(os.environ["LOCAL_RANK"])) if on_gpu else torch.device("cpu")
    if on_gpu:
        torch.cuda.set_device(device)
    dist.init_process_group("nccl" if on_gpu else "gloo")
    mesh = dist.device_mesh.init_device_mesh(device.type, (dist.get_world_size(),))
    torch.manual_seed(dist.get_rank())
    tensors = sharded(shapes_of(args.shape), getattr(torch, args.train_dtype), mesh, device)
    results: dict[str, dict[str, Any]] = {}
    for kind in ["tp", "dp"] if args.generation == "both" else [args.generation]:
        result = {"shape": args.shape, "ranks": dist.get_world_size(), "train_dtype": args.train_dtype}
        results[kind] = result = result | measure(kind, tensors, device, args)
        if dist.get_rank() == 0:
            print(json.dumps(result), flush=True)
    del tensors
    results["one"] = on_one_device(shapes_of(args.shape), device)
    if dist.get_rank() == 0:
        print(json.dumps(results["one"]), flush=True)
        print(json.dumps(compared(results, args)), flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
