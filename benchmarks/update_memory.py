"""An update that takes less memory: LoRA, the optimizer's state in the CPU's memory, layers computed again; time and memory.

The rows, shapes and rates are those of `update.py`: random weights in bf16, log-normal lengths around 768 tokens, 32,768 tokens
an update. Each way is an engine of its own; what does not fit is said to be out of memory.

    python benchmarks/update_memory.py [--sizes 0.5b,1.5b,7b] [--ways full,lora,lora_own_layers,...] [--steps 3]

`lora` has rank 16 on all linear layers; `lora_own_layers` is the same through peft's own layers, as before they were fused.
A peak below `--card-gb` is marked: the way fits a card of that size.
"""

from __future__ import annotations

import argparse
import json
import math
import sys
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch

from podium.core.jsonable import jsonable
from podium.core.settings import LoraSettings, OptimizerSettings
from podium.engines.train import SingleDeviceEngine
from podium.models.adapters import add_lora
from podium.models.heads import ActorModel
from podium.profiling.machine import matrix_rate

sys.path.insert(0, str(Path(__file__).parent))
from models import lognormal_lengths, make_model
from update import MICROBATCH, Run, free_memory


@dataclass(frozen=True)
class Way:
    """How a model is trained; `microbatch`: tokens in a pass (0: as `update.py`)."""

    states: str = "fp32"
    offload: bool = False
    lora: int = 0
    own_layers: bool = False
    recompute: str = "none"
    microbatch: int = 0


WAYS = {
    "full": Way(),
    "8bit": Way(states="8bit"),
    "offload": Way(offload=True),
    "offload_recompute": Way(offload=True, recompute="full"),
    "offload_all": Way(offload=True, recompute="offload"),
    "offload_small": Way(offload=True, recompute="full", microbatch=4_096),
    "lora": Way(lora=16),
    "lora_own_layers": Way(lora=16, own_layers=True),
    "lora_recompute": Way(lora=16, recompute="full"),
}


@contextmanager
def engine_of(run: Run, way: Way) -> Iterator[SingleDeviceEngine]:
    free_memory()
    model = make_model(run.shape, run.device)
    if way.lora:
        add_lora(model, LoraSettings(rank=way.lora, alpha=2 * way.lora))
    actor = ActorModel(model)
    actor.recompute = way.recompute  # type: ignore[assignment]
    settings = OptimizerSettings(lr=1e-6, states=way.states)  # type: ignore[arg-type]
    tokens = way.microbatch or run.microbatch
    engine = SingleDeviceEngine(actor, optimizer=settings, microbatch_tokens=tokens, offload_optimizer=way.offload)
    reason = "peft's own layers" if way.own_layers else None
    with patch("podium.models.lm_head.why_not_fused", lambda _: reason) if reason else nullcontext():
        yield engine
    engine.model = engine._optimizer = None


def measure(run: Run, way: Way) -> dict[str, float]:
    try:
        with engine_of(run, way) as engine:
            out = run.measure(engine, run.rows())
    except torch.cuda.OutOfMemoryError:
        out = {"seconds": math.nan, "peak_gb": math.inf}
    free_memory()
    return {**out, "tokens_per_second": sum(lognormal_lengths(run.tokens)) / out["seconds"]}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--sizes", default="0.5b,1.5b,7b")
    parser.add_argument("--ways", default=",".join(WAYS), help="of " + ",".join(WAYS))
    parser.add_argument("--steps", type=int, default=3)
    parser.add_argument("--card-gb", type=float, default=24.0)
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    args = parser.parse_args()
    ways = args.ways.split(",")
    if unknown := set(ways) - set(WAYS):
        parser.error(f"no way is called {', '.join(unknown)}; they are {', '.join(WAYS)}")
    rate = matrix_rate(args.device, torch.bfloat16 if args.device == "cuda" else torch.float32)
    report: dict[str, Any] = {"torch": torch.__version__, "matrix_tflops": rate / 1e12}
    for size in args.sizes.split(","):
        run = Run(size, args.device, rate, args.steps, MICROBATCH.get(size))
        print(f"{size}\n{'way':>18} {'ms':>8} {'tokens/s':>10} {'peak GB':>8}")
        for name in ways:
            out = report[f"{size} {name}"] = measure(run, WAYS[name])
            peak = out.get("peak_gb", math.nan)
            note = f"  fits {args.card_gb:g} GB" if peak < args.card_gb else ""
            print(f"{name:>18} {1e3 * out['seconds']:8.0f} {out['tokens_per_second']:10.0f} {peak:8.1f}{note}", flush=True)
    print(json.dumps(jsonable(report)))


if __name__ == "__main__":
    main()
