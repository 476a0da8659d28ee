"""`podium plan` against a GPU's own count: planned and measured peak memory of an update and of a rollout, in three settings.

Random weights at the shapes of Qwen2.5. Settings: full training in bf16 with micro-batches of 8,192 tokens; the same with
16,384 (7B: 4,096); LoRA of rank 16. 7B trains in full with moments in 8 bits: with those in fp32 it does not fit on one H200.
Measured is `torch.cuda.max_memory_allocated`: what tensors had, without the driver's own. A setting that runs out of memory is
said, and the others go on. Ends with status 1 where one did, or where planned and measured differ by more than 10%.

    python benchmarks/plan_memory.py [--sizes 0.5b,1.5b,7b]

The last line is one JSON object.
"""

from __future__ import annotations

import argparse
import gc
import json
import sys
from typing import Any

import torch

from podium.algorithms.losses import policy_loss
from podium.core.batch import Batch
from podium.core.settings import LoraSettings, OptimizerSettings
from podium.engines.base import Request, SamplingParams
from podium.engines.rollout.native.paged_engine import PagedEngine
from podium.engines.train import SingleDeviceEngine
from podium.models.adapters import add_lora
from podium.models.heads import ActorModel
from podium.planner.memory import RoleSpec, cache_bytes, decode_bytes
from podium.planner.shapes import shape_of

NAMES = ("hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads", "num_key_value_heads")
SHAPES = {
    "0.5b": dict(zip(NAMES, (896, 4864, 24, 14, 2), strict=True)),
    "1.5b": dict(zip(NAMES, (1536, 8960, 28, 12, 2), strict=True)),
    "7b": dict(zip(NAMES, (3584, 18944, 28, 28, 4), strict=True)),
}
VOCABULARY, TIED = 151_936, ("0.5b", "1.5b")
ROW, PROMPT, ROWS = 512, 64, 64
RESPONSES = 64


def config_of(size: str) -> Any:
    from transformers import Qwen2Config

    shape = SHAPES[size]
    return Qwen2Config(vocab_size=VOCABULARY, max_position_embeddings=32_768, tie_word_embeddings=size in TIED, **shape)


def settings_of(size: str) -> list[tuple[str, int, int]]:
    """(name, micro-batch tokens, LoRA rank)."""
    other = 4096 if size == "7b" else 16384
    return [("full, 8192", 8192, 0), (f"full, {other}", other, 0), ("LoRA 16, 8192", 8192, 16)]


def rows() -> Batch:
    draw = torch.Generator().manual_seed(1)
    prompts = [torch.randint(10, 150_000, (PROMPT,), generator=draw) for _ in range(ROWS)]
    responses = [torch.randint(10, 150_000, (ROW - PROMPT,), generator=draw) for _ in range(ROWS)]
    return Batch(
        {
            "prompt_ids": prompts,
            "response_ids": responses,
            "loss_mask": [torch.ones(ROW - PROMPT, dtype=torch.bool) for _ in range(ROWS)],
            "advantages": [torch.randn(ROW - PROMPT, generator=draw) for _ in range(ROWS)],
        }
    )


def measure(size: str, microbatch: int, lora: int) -> dict[str, float]:
    """Planned and measured bytes of what stays, of an update and of a rollout."""
    from transformers import AutoModelForCausalLM

    _emptied()
    with torch.device("cuda"):
        model = AutoModelForCausalLM.from_config(config_of(size), dtype=torch.bfloat16)
    if lora:
        add_lora(model, LoraSettings(rank=lora))
    eight = size == "7b" and not lora
    optimizer = OptimizerSettings(lr=1e-6, states="8bit" if eight else "fp32")
    engine = SingleDeviceEngine(ActorModel(model), optimizer=optimizer, microbatch_tokens=microbatch)
    batch, loss = rows(), policy_loss(one_update=True)
    engine.update(batch, loss)  # moments are there from now on
    _emptied()
    moments = 2 + 8 / 256 if eight else 8.0
    spec = RoleSpec("actor", shape_of(model.config, size), 2, True, lora=lora, moment_bytes=moments)
    found = {"stays_planned": spec.stays + spec.workspace, "stays_measured": float(torch.cuda.memory_allocated())}
    free = torch.cuda.mem_get_info()[0]
    engine.update(batch, loss)
    found["update_measured"] = float(torch.cuda.max_memory_allocated())
    passes = -(-ROW * ROWS // microbatch)
    found["update_planned"] = spec.stays + spec.update_bytes(
        microbatch, microbatch * (ROW - PROMPT) // ROW, passes, room=float(free)
    )
    _emptied()
    rollout = PagedEngine(model, _NoTokenizer(), max_concurrent=RESPONSES, max_cache_tokens=RESPONSES * ROW)  # type: ignore[arg-type]
    for row in range(RESPONSES):
        prompt = tuple(batch["prompt_ids"][row].tolist())
        rollout.submit(Request(prompt, SamplingParams(max_new_tokens=ROW - PROMPT, temperature=1.0), row))
    while rollout.pending:
        rollout.step()
    found["rollout_measured"] = float(torch.cuda.max_memory_allocated())
    found["rollout_planned"] = spec.stays + decode_bytes(spec, RESPONSES, PROMPT) + cache_bytes(spec, RESPONSES, ROW)
    return found


def _emptied() -> None:
    gc.collect()
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats()


class _NoTokenizer:
    eos_token_id = None
    additional_special_tokens_ids: tuple[int, ...] = ()

    def __len__(self) -> int:
        return VOCABULARY


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--sizes", default="0.5b,1.5b,7b")
    results: dict[str, Any] = {}
    wrong = 0
    for size in parser.parse_args().sizes.split(","):
        for name, microbatch, lora in settings_of(size):
            try:
                found = measure(size, microbatch, lora)
            except torch.OutOfMemoryError as error:
                print(f"{size:>5} {name:<14} ran out of memory: {str(error).splitlines()[0][:90]}", flush=True)
                wrong += 1
                continue
            results[f"{size} {name}"] = found
            wrong += shown(f"{size:>5} {name:<14}", found)
    print(json.dumps(results))
    sys.exit(1 if wrong else 0)


def shown(title: str, found: dict[str, float]) -> int:
    """Prints a line for each phase; how many are wrong by more than a tenth."""
    wrong = 0
    for phase in ("stays", "update", "rollout"):
        planned, measured = found[f"{phase}_planned"], found[f"{phase}_measured"]
        off = planned / measured - 1
        print(
            f"{title} {phase:<8} planned {planned / 1e9:7.2f} GB   measured {measured / 1e9:7.2f} GB   {off:+.1%}", flush=True
        )
        wrong += abs(off) > 0.1
    return wrong


if __name__ == "__main__":
    main()
