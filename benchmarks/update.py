"""How fast one optimizer update is: forward, backward and AdamW on one GPU, at the shapes of Qwen2.5.

Random weights in bf16, log-normal lengths around 768 tokens, one AdamW step for every 32,768 tokens. MFU is 6 x parameters
(every one once) x tokens, plus attention (forward and twice that backward, causal), over this machine's own rate of a bf16
matrix product (8192 cubed), measured in the same run. Only real tokens count; nothing is padded.

    python benchmarks/update.py [--sizes 0.5b,1.5b,7b] [--parts speed,shared,techniques,log_probs,profile,trl,long] [--steps 3]

`techniques` times each technique switched off. `shared` trains groups of 8 answers that share a prompt against the same
rows with prompts of their own. `log_probs` times the head alone. `profile` lists where the time goes by kind of kernel.
`trl` lets TRL make the same update, in several settings, and takes the fastest (`trl_peer.py`); it needs `speed`.
`long` is one row of 32,768 tokens, with each kind of recomputation. `--device cpu --sizes tiny` runs the script itself
anywhere; the last line is one JSON object.
"""

from __future__ import annotations

import argparse
import gc
import json
import math
import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import torch

from podium.algorithms.log_probs import log_probs_from_hidden
from podium.algorithms.losses import policy_loss
from podium.core.batch import Batch
from podium.core.jsonable import jsonable
from podium.core.settings import OptimizerSettings
from podium.engines.train import SingleDeviceEngine
from podium.models.heads import ActorModel
from podium.profiling.kernels import by_kind, kernel_times
from podium.profiling.machine import matrix_rate, synchronize, timed

sys.path.insert(0, str(Path(__file__).parent))
import techniques
import trl_peer
from models import PROMPT_TOKENS, SHAPES, lognormal_lengths, make_model, make_rows

PARTS = ("speed", "shared", "techniques", "log_probs", "profile", "trl", "long")
TOKENS_PER_UPDATE = {"tiny": 256}
DEFAULT_TOKENS = 32_768
MICROBATCH = {"7b": 8_192}
OPTIMIZER: dict[str, dict[str, Any]] = {"7b": {"states": "8bit"}}


class Run:
    """What every part needs: the device, its matrix rate, the size at hand, how many steps are timed."""

    def __init__(self, size: str, device: str, rate: float, steps: int, microbatch: int | None) -> None:
        self.size, self.device, self.rate, self.steps = size, device, rate, steps
        self.shape = SHAPES[size]
        self.tokens = TOKENS_PER_UPDATE.get(size, DEFAULT_TOKENS)
        self.microbatch = microbatch or min(self.tokens, MICROBATCH.get(size, DEFAULT_TOKENS))

    def rows(self) -> Batch:
        """Log-normal lengths, in all as many tokens as an update has."""
        return make_rows(lognormal_lengths(self.tokens), PROMPT_TOKENS, vocabulary=self.shape.vocabulary)

    @contextmanager
    def engine(self) -> Iterator[SingleDeviceEngine]:
        free_memory()
        settings = OptimizerSettings(lr=1e-6, **OPTIMIZER.get(self.size, {}))
        model = ActorModel(make_model(self.shape, self.device))
        engine = SingleDeviceEngine(model, optimizer=settings, microbatch_tokens=self.microbatch)
        yield engine
        engine.model = engine._optimizer = None  # a name at the caller's must not hold the memory
        free_memory()

    def measure(self, engine: SingleDeviceEngine, rows: Batch, warmup: int = 2, steps: int | None = None) -> dict[str, float]:
        """Seconds an update, the most memory in use (GB, on a GPU), the first update's gradient norm. NaN: out of memory."""
        loss = policy_loss(one_update=True)
        on_gpu = self.device == "cuda"
        if on_gpu:
            torch.cuda.reset_peak_memory_stats()
        try:
            norm = engine.update(rows, loss).means().get("grad_norm", math.nan)
            seconds = timed(lambda: engine.update(rows, loss), steps or self.steps, warmup - 1, self.device)
        except torch.cuda.OutOfMemoryError:
            engine._optimizer.zero_grad()  # type: ignore[union-attr]
            free_memory()
            return {"seconds": math.nan, "peak_gb": math.inf}
        peak = {"peak_gb": torch.cuda.max_memory_allocated() / 1e9} if on_gpu else {}
        return {"seconds": seconds, **peak, "grad_norm": norm}

    def speed(self, engine: SingleDeviceEngine, seconds: float, lengths: list[int]) -> dict[str, float]:
        """Tokens/s and MFU of an update of rows of these lengths."""
        dense = 6 * sum(p.numel() for p in engine.model.parameters()) * sum(lengths)
        return {
            "tokens_per_second": sum(lengths) / seconds,
            "mfu_6n": dense / seconds / self.rate,
            "mfu": (dense + attention_flops(self.shape, lengths)) / seconds / self.rate,
        }


def free_memory() -> None:
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()


def attention_flops(shape: Any, lengths: list[int]) -> float:
    """Forward and backward of causal attention: 3 x 4 x heads x width x n^2 / 2 for each layer."""
    return 3 * sum(n * shape.attention(n / 2) for n in lengths)


# ---------------------------------------------------------------------- parts


def speed(run: Run, engine: SingleDeviceEngine) -> dict[str, float]:
    lengths = lognormal_lengths(run.tokens)
    out = run.measure(engine, run.rows())
    return {**out, **run.speed(engine, out["seconds"], lengths)}


def shared_prompts(run: Run, engine: SingleDeviceEngine, prompts: int = 8) -> dict[str, float]:
    """8 answers a prompt, 512 + 512 tokens: tokens/s (a prompt counted for each of its answers) with it shared, and not."""
    half = 16 if run.size == "tiny" else 512
    lengths = [2 * half] * (8 * prompts)
    seconds = {
        shared: run.measure(engine, make_rows(lengths, half, group=8, shared=shared, vocabulary=run.shape.vocabulary))[
            "seconds"
        ]
        for shared in (True, False)
    }
    return {
        "tokens_per_second": sum(lengths) / seconds[True],
        "without": sum(lengths) / seconds[False],
        "ratio": seconds[False] / seconds[True],
    }


def long_row(run: Run, engine: SingleDeviceEngine) -> dict[str, dict[str, float]]:
    """One row of as many tokens as an update has, in one pass, with each kind of recomputation."""
    lengths, before = [run.tokens], engine.microbatch_tokens
    rows = make_rows(lengths, PROMPT_TOKENS, vocabulary=run.shape.vocabulary)
    engine.microbatch_tokens, table = run.tokens, {}
    for recompute in ("none", "selective", "full"):
        engine.model.recompute = recompute
        out = run.measure(engine, rows, warmup=1, steps=2)
        table[f"recompute {recompute}"] = {**out, **run.speed(engine, out["seconds"], lengths)}
    engine.model.recompute, engine.microbatch_tokens = "none", before
    return table


def profile(run: Run, engine: SingleDeviceEngine) -> dict[str, float]:
    """Milliseconds of the device by kind of kernel in one update, and how long it stood still."""
    from torch.profiler import ProfilerActivity
    from torch.profiler import profile as record

    rows, loss = run.rows(), policy_loss(one_update=True)
    engine.update(rows, loss)
    synchronize(run.device)
    activities = [ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if run.device == "cuda" else [])]
    with record(activities=activities) as recorded:
        wall = timed(lambda: engine.update(rows, loss), 1, 0, run.device)
    kernels = kernel_times(recorded, run.device)
    for kernel in kernels[:28]:
        print(f"    {kernel.ms:9.2f} ms  {kernel.name[:110]}", flush=True)
    kinds = by_kind(kernels)
    kinds["idle"] = 1e3 * wall - sum(kinds.values())
    return {kind: round(ms, 2) for kind, ms in kinds.items()}


HEADS: tuple[tuple[str, dict[str, Any], int], ...] = (
    ("tiled", {"keep_logits": 0}, 4),
    ("tiled, kept", {}, 3),
    ("chunked", {"chunk_tokens": 2048}, 4),
)


def head_alone(device: str, rate: float, steps: int) -> dict[str, dict[str, float]]:
    """Log-probs with entropy, forward and backward, of 8,192 tokens: share of the matrix bound, and extra memory."""
    out = {}
    vocabulary = SHAPES["1.5b"].vocabulary
    for width in (1536, 3584):
        hidden, weight = (
            torch.randn(n, width, device=device, dtype=torch.bfloat16).mul_(0.05).requires_grad_() for n in (8192, vocabulary)
        )
        targets = torch.randint(0, vocabulary, (8192,), device=device)
        product = 2 * 8192 * width * vocabulary / rate
        for name, options, products in HEADS:
            seconds, extra = _one_head(hidden, weight, targets, options, steps)
            out[f"{width} {name}"] = {
                "ms": 1e3 * seconds,
                "of_bound": products * product / seconds,
                "extra_gib": extra / 2**30,
            }
    return out


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
    return timed(run, steps, 3, hidden.device), extra


def against_trl(run: Run, ours: float) -> dict[str, Any]:
    """TRL's update of the same rows in several settings; how many times ours is its fastest, and its default."""
    with ExitStack() as stack:
        free_memory()
        table = trl_peer.updates(run.shape, run.device, run.rows(), stack)
    free_memory()
    fastest = min(table, key=lambda name: table[name]["seconds"] if table[name]["seconds"] > 0 else math.inf)
    default = min(
        (row["seconds"] for name, row in table.items() if name.startswith(trl_peer.DEFAULT) and row["seconds"] > 0),
        default=math.nan,
    )
    return {
        "fastest": fastest,
        "ratio_to_trl": table[fastest]["seconds"] / ours,
        "ratio_to_trl_default": default / ours,
        "settings": table,
    }


ENGINE_PARTS: dict[str, Callable[[Run, SingleDeviceEngine], Any]] = {
    "speed": speed,
    "shared": shared_prompts,
    "long": long_row,
    "profile": profile,
    "techniques": techniques.table,
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--sizes", default="0.5b,1.5b,7b")
    parser.add_argument("--parts", default="speed,shared,techniques,log_probs,profile", help="of " + ",".join(PARTS))
    parser.add_argument("--steps", type=int, default=3)
    parser.add_argument("--microbatch-tokens", type=int, default=None)
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    args = parser.parse_args()
    parts = args.parts.split(",")
    if unknown := set(parts) - set(PARTS):
        parser.error(f"no part is called {', '.join(unknown)}; they are {', '.join(PARTS)}")
    if "trl" in parts and "speed" not in parts:
        parser.error("the part trl needs speed: it is compared with it")
    rate = matrix_rate(args.device, torch.bfloat16 if args.device == "cuda" else torch.float32)
    gpu = torch.cuda.get_device_name() if args.device == "cuda" else None
    report: dict[str, Any] = {"gpu": gpu, "torch": torch.__version__, "matrix_tflops": rate / 1e12}
    print(f"matrix rate {rate / 1e12:.3g} TFLOP/s", flush=True)
    if "log_probs" in parts:
        report["log_probs"] = show("log_probs", head_alone(args.device, rate, args.steps))
    for size in args.sizes.split(","):
        run = Run(size, args.device, rate, args.steps, args.microbatch_tokens)
        report[size] = of_size = {}
        with run.engine() as engine:
            for name, part in ENGINE_PARTS.items():
                if name in parts:
                    of_size[name] = show(f"{size} {name}", part(run, engine))
        if "trl" in parts:
            of_size["trl"] = show(f"{size} trl", against_trl(run, of_size["speed"]["seconds"]))
            report[f"ratio_to_trl_{size}"] = of_size["trl"]["ratio_to_trl"]
            report[f"ratio_to_trl_default_{size}"] = of_size["trl"]["ratio_to_trl_default"]
    print(json.dumps(jsonable(report)))


def show(title: str, result: Any) -> Any:
    print(title, json.dumps(jsonable(result), indent=1), flush=True)
    return result


if __name__ == "__main__":
    main()
