"""How fast one optimizer update is: forward, backward and AdamW on one GPU, at the shapes of Qwen2.5.

Random weights in bf16, log-normal lengths around 768 tokens, one AdamW step for every 32,768 tokens. MFU is 6 x parameters
(every one once) x tokens, plus attention (forward and twice that backward, causal), over this machine's own rate of a bf16
matrix product (8192 cubed), measured in the same run. Only real tokens count; nothing is padded.

    python benchmarks/update.py [--sizes 0.5b,1.5b,7b] [--parts speed,shared,techniques,log_probs,profile] [--steps 3]

`techniques` times each technique switched off. `shared` trains groups of 8 answers that share a prompt against the same
rows with prompts of their own. `log_probs` times the head alone. `profile` lists where the time goes by kind of kernel.
The last line is one JSON object.
"""

from __future__ import annotations

import argparse
import gc
import json
import math
import random
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any
from unittest.mock import patch

import torch

from podium.algorithms.log_probs import log_probs_from_hidden
from podium.algorithms.losses import policy_loss
from podium.core.batch import Batch
from podium.core.settings import OptimizerSettings
from podium.engines.train import SingleDeviceEngine
from podium.models.heads import ActorModel

NAMES = ("hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads", "num_key_value_heads")
SHAPES = {
    "0.5b": dict(zip(NAMES, (896, 4864, 24, 14, 2), strict=True)),
    "1.5b": dict(zip(NAMES, (1536, 8960, 28, 12, 2), strict=True)),
    "7b": dict(zip(NAMES, (3584, 18944, 28, 28, 4), strict=True)),
}
TIED = ("0.5b", "1.5b")
VOCABULARY = 151_936
TOKENS_PER_UPDATE = 32_768
MICROBATCH = {"0.5b": 32_768, "1.5b": 32_768, "7b": 8_192}
OPTIMIZER: dict[str, dict[str, Any]] = {"7b": {"states": "8bit"}}
PROMPT_TOKENS = 8


def make_model(size: str) -> Any:
    from transformers import AutoModelForCausalLM, Qwen2Config

    torch.manual_seed(0)
    config = Qwen2Config(
        vocab_size=VOCABULARY, max_position_embeddings=32_768, tie_word_embeddings=size in TIED, **SHAPES[size]
    )
    with torch.device("cuda"):
        return AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)


def make_rows(lengths: list[int], prompt_tokens: int, group: int = 1, shared: bool = True) -> Batch:
    """Rows of the given whole lengths; `shared`: each `group` of neighbours has one prompt."""
    draw = torch.Generator().manual_seed(1)

    def ids(count: int) -> torch.Tensor:
        return torch.randint(10, 150_000, (count,), generator=draw)

    prompts = [ids(prompt_tokens) for _ in lengths]
    prompts = [prompts[i // group * group] for i in range(len(lengths))] if shared else prompts
    responses = [ids(n - prompt_tokens) for n in lengths]
    return Batch(
        {
            "prompt_ids": prompts,
            "response_ids": responses,
            "loss_mask": [torch.ones(len(r), dtype=torch.bool) for r in responses],
            "advantages": [torch.randn(len(r), generator=draw) for r in responses],
        }
    )


def lognormal_lengths(total: int) -> list[int]:
    draw, lengths = random.Random(0), []
    while (left := total - sum(lengths)) > 0:
        n = max(2 * PROMPT_TOKENS, int(draw.lognormvariate(math.log(768), 0.5)))
        lengths.append(n if left - n >= 2 * PROMPT_TOKENS else left)
    return lengths


def matrix_rate() -> float:
    """FLOP/s of a bf16 product on random data."""
    a, b = (torch.randn(8192, 8192, device="cuda", dtype=torch.bfloat16) for _ in range(2))
    seconds = timed(lambda: a @ b, 20)
    return 2 * 8192**3 / seconds


def timed(call: Callable[[], Any], steps: int, warmup: int = 3) -> float:
    """Mean seconds of a call, the device's queue drained before and after."""
    for _ in range(warmup):
        call()
    torch.cuda.synchronize()
    started = time.perf_counter()
    for _ in range(steps):
        call()
    torch.cuda.synchronize()
    return (time.perf_counter() - started) / steps


def attention_flops(size: str, lengths: list[int]) -> float:
    """Forward and backward of causal attention: 3 x 4 x hidden x n^2 / 2 for each layer."""
    shape = SHAPES[size]
    return 3 * sum(2 * n * n for n in lengths) * shape["hidden_size"] * shape["num_hidden_layers"]


@contextmanager
def engine_of(size: str, microbatch: int | None = None, **optimizer: Any) -> Iterator[SingleDeviceEngine]:
    gc.collect()
    torch.cuda.empty_cache()
    settings = OptimizerSettings(lr=1e-6, **{**OPTIMIZER.get(size, {}), **optimizer})
    engine = SingleDeviceEngine(
        ActorModel(make_model(size)), optimizer=settings, microbatch_tokens=microbatch or MICROBATCH[size]
    )
    yield engine
    engine.model = engine._optimizer = None  # a name at the caller's must not hold the memory


def measure(engine: SingleDeviceEngine, rows: Batch, steps: int) -> dict[str, float]:
    """Seconds an update, and the most memory in use (GB)."""
    loss = policy_loss(one_update=True)
    torch.cuda.reset_peak_memory_stats()
    seconds = timed(lambda: engine.update(rows, loss), steps, warmup=2)
    return {"seconds": seconds, "peak_gb": torch.cuda.max_memory_allocated() / 1e9}


def speed(size: str, rate: float, steps: int, engine: SingleDeviceEngine) -> dict[str, float]:
    lengths = lognormal_lengths(TOKENS_PER_UPDATE)
    out = measure(engine, make_rows(lengths, PROMPT_TOKENS), steps)
    parameters = sum(p.numel() for p in engine.model.parameters())
    dense = 6 * parameters * TOKENS_PER_UPDATE
    out["tokens_per_second"] = TOKENS_PER_UPDATE / out["seconds"]
    out["mfu_6n"] = dense / out["seconds"] / rate
    out["mfu"] = (dense + attention_flops(size, lengths)) / out["seconds"] / rate
    return out


def shared_prompts(size: str, steps: int, engine: SingleDeviceEngine, prompts: int = 8) -> dict[str, float]:
    """8 answers a prompt, 512 + 512 tokens: tokens/s (a prompt counted for each of its answers) with it shared, and not."""
    lengths = [1024] * (8 * prompts)
    seconds = {
        shared: measure(engine, make_rows(lengths, 512, group=8, shared=shared), steps)["seconds"] for shared in (True, False)
    }
    return {
        "tokens_per_second": sum(lengths) / seconds[True],
        "without": sum(lengths) / seconds[False],
        "ratio": seconds[False] / seconds[True],
    }


TECHNIQUES: dict[str, tuple[str, Any]] = {
    "fused layers": ("podium.models.lm_head.why_not_fused", lambda base: "switched off"),
    "tiled log-probs": ("podium.algorithms.log_probs._tiled", lambda hidden: False),
    "cuDNN attention": ("podium.models.cudnn_attention._installed", lambda: False),
    "kept logits": ("podium.algorithms._tiled_log_probs._free_bytes", lambda device: 0),
}


def techniques(size: str, steps: int, engine: SingleDeviceEngine) -> dict[str, dict[str, float]]:
    rows = make_rows(lognormal_lengths(TOKENS_PER_UPDATE), PROMPT_TOKENS)
    table: dict[str, dict[str, float]] = {"all on": measure(engine, rows, steps)}
    for name, (place, value) in TECHNIQUES.items():
        with ExitStack() as stack:
            stack.enter_context(patch(place, value))
            try:
                table[f"without {name}"] = measure(engine, rows, steps)
            except torch.cuda.OutOfMemoryError:
                table[f"without {name}"] = {"seconds": math.nan, "peak_gb": math.inf}
                engine._optimizer.zero_grad()  # type: ignore[union-attr]
                torch.cuda.empty_cache()
    for recompute in ("selective", "full"):
        engine.model.recompute = recompute
        table[f"recompute {recompute}"] = measure(engine, rows, steps)
        engine.model.recompute = "none"
    return table


def head_alone(rate: float, steps: int) -> dict[str, dict[str, float]]:
    """Log-probs with entropy, forward and backward, of 8,192 tokens: share of the matrix bound, and extra memory."""
    out = {}
    for width in (1536, 3584):
        hidden, weight = (
            torch.randn(n, width, device="cuda", dtype=torch.bfloat16).mul_(0.05).requires_grad_() for n in (8192, VOCABULARY)
        )
        targets = torch.randint(0, VOCABULARY, (8192,), device="cuda")
        product = 2 * 8192 * width * VOCABULARY / rate
        for name, options, products in HEADS:
            seconds, extra = _one_head(hidden, weight, targets, options, steps)
            out[f"{width} {name}"] = {
                "ms": 1e3 * seconds,
                "of_bound": products * product / seconds,
                "extra_gib": extra / 2**30,
            }
    return out


HEADS: tuple[tuple[str, dict[str, Any], int], ...] = (
    ("tiled", {"keep_logits": 0}, 4),
    ("tiled, kept", {}, 3),
    ("chunked", {"chunk_tokens": 2048}, 4),
)


def _one_head(
    hidden: torch.Tensor, weight: torch.Tensor, targets: torch.Tensor, options: dict[str, Any], steps: int
) -> tuple[float, float]:
    """Seconds, and the bytes beyond the operands and their gradients."""

    def run() -> None:
        hidden.grad = weight.grad = None
        log_probs, entropy = log_probs_from_hidden(hidden, weight, targets, with_entropy=True, **options)
        (log_probs.sum() + 0.1 * entropy.sum()).backward()

    run()
    hidden.grad = weight.grad = None
    before = torch.cuda.memory_allocated() + hidden.nbytes + weight.nbytes
    torch.cuda.reset_peak_memory_stats()
    run()
    extra = torch.cuda.max_memory_allocated() - before
    return timed(run, steps), extra


KINDS = (
    ("attention", ("flash", "fmha", "attention", "sdpa", "_merge")),
    ("matrix products", ("gemm", "nvjet", "cutlass", "cublas", "sm90_xmma")),
    ("log-prob passes", ("_statistics", "_gradient")),
    ("norms", ("_norm",)),
    ("rotation", ("_rotate",)),
    ("activation", ("_swiglu",)),
    ("optimizer", ("adam", "multi_tensor", "foreach", "_update")),
)


def profile(engine: SingleDeviceEngine, rows: Batch) -> dict[str, float]:
    """Milliseconds of the device by kind of kernel in one update, and how long it stood still."""
    from torch.profiler import ProfilerActivity
    from torch.profiler import profile as record

    loss = policy_loss(one_update=True)
    engine.update(rows, loss)
    torch.cuda.synchronize()
    with record(activities=[ProfilerActivity.CUDA, ProfilerActivity.CPU]) as recorded:
        started = time.perf_counter()
        engine.update(rows, loss)
        torch.cuda.synchronize()
        wall = time.perf_counter() - started
    kinds: dict[str, float] = {}
    others: dict[str, float] = {}
    for event in recorded.key_averages():
        on_device = event.device_type == torch.autograd.DeviceType.CUDA
        if not on_device or not event.self_device_time_total or "#" in event.key:  # "#": a mark of the profiler, no kernel
            continue
        name = event.key.lower()
        kind = next((kind for kind, parts in KINDS if any(part in name for part in parts)), "other")
        kinds[kind] = kinds.get(kind, 0.0) + event.self_device_time_total / 1e3
        others[event.key[:110]] = event.self_device_time_total / 1e3
    for name, ms in sorted(others.items(), key=lambda item: -item[1])[:28]:
        print(f"    {ms:9.2f} ms  {name}", flush=True)
    kinds["idle"] = 1e3 * wall - sum(kinds.values())
    return {kind: round(ms, 2) for kind, ms in sorted(kinds.items(), key=lambda item: -item[1])}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--sizes", default="0.5b,1.5b,7b")
    parser.add_argument("--parts", default="speed,shared,techniques,log_probs,profile")
    parser.add_argument("--steps", type=int, default=3)
    parser.add_argument("--microbatch-tokens", type=int, default=None)
    args = parser.parse_args()
    parts = args.parts.split(",")
    rate = matrix_rate()
    report: dict[str, Any] = {"gpu": torch.cuda.get_device_name(), "torch": torch.__version__, "matrix_tflops": rate / 1e12}
    print(f"matrix rate {rate / 1e12:.0f} TFLOP/s", flush=True)
    if "log_probs" in parts:
        report["log_probs"] = show("log_probs", head_alone(rate, args.steps))
    for size in args.sizes.split(","):
        jobs: dict[str, Callable[[SingleDeviceEngine], Any]] = {
            "speed": lambda engine, size=size: speed(size, rate, args.steps, engine),
            "shared": lambda engine, size=size: shared_prompts(size, args.steps, engine),
            "techniques": lambda engine, size=size: techniques(size, args.steps, engine),
            "profile": lambda engine: profile(engine, make_rows(lognormal_lengths(TOKENS_PER_UPDATE), PROMPT_TOKENS)),
        }
        with engine_of(size, args.microbatch_tokens) as engine:
            report[size] = {name: show(f"{size} {name}", job(engine)) for name, job in jobs.items() if name in parts}
    print(json.dumps(report))


def show(title: str, result: Any) -> Any:
    print(title, json.dumps(result, indent=1), flush=True)
    return result


if __name__ == "__main__":
    main()
