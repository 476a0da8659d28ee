"""`podium plan` against a GPU's own count: planned and measured peak memory of an update and of a rollout, in three settings.

Random weights at the shapes of Qwen2.5. Settings: full training in bf16 with micro-batches of 8,192 tokens; the same with
16,384 (7B: 4,096); LoRA of rank 16. Measured is `torch.cuda.max_memory_allocated`: what tensors had, without the driver's own.

    python benchmarks/plan_memory.py [--sizes 0.5b,1.5b,7b]

The last line is one JSON object.
"""

from __future__ import annotations

import argparse
import gc
import json
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
    """Planned and measured bytes of an update and of a rollout."""
    from transformers import AutoModelForCausalLM

    gc.collect()
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats()
    with torch.device("cuda"):
        model = AutoModelForCausalLM.from_config(config_of(size), dtype=torch.bfloat16)
    if lora:
        add_lora(model, LoraSettings(rank=lora))
    engine = SingleDeviceEngine(ActorModel(model), optimizer=OptimizerSettings(lr=1e-6), microbatch_tokens=microbatch)
    batch, loss = rows(), policy_loss(one_update=True)
    engine.update(batch, loss)  # moments are there from now on
    gc.collect()
    torch.cuda.empty_cache()
    spec = RoleSpec("actor", shape_of(model.config, size), 2, True, lora=lora)
    torch.cuda.reset_peak_memory_stats()
    free = torch.cuda.mem_get_info()[0]
    engine.update(batch, loss)
    found = {"update_measured": float(torch.cuda.max_memory_allocated())}
    passes = -(-ROW * ROWS // microbatch)
    found["update_planned"] = spec.stays + spec.update_bytes(
        microbatch, microbatch * (ROW - PROMPT) // ROW, passes, room=float(free)
    )
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats()
    rollout = PagedEngine(model, _NoTokenizer(), max_concurrent=RESPONSES, max_cache_tokens=RESPONSES * ROW)  # type: ignore[arg-type]
    for row in range(RESPONSES):
        prompt = tuple(batch["prompt_ids"][row].tolist())
        rollout.submit(Request(prompt, SamplingParams(max_new_tokens=ROW - PROMPT, temperature=1.0), row))
    while rollout.pending:
        rollout.step()
    found["rollout_measured"] = float(torch.cuda.max_memory_allocated())
    found["rollout_planned"] = spec.stays + decode_bytes(spec, RESPONSES, PROMPT) + cache_bytes(spec, RESPONSES, ROW)
    return found


class _NoTokenizer:
    eos_token_id = None
    additional_special_tokens_ids: tuple[int, ...] = ()

    def __len__(self) -> int:
        return VOCABULARY


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--sizes", default="0.5b,1.5b,7b")
    results: dict[str, Any] = {}
    for size in parser.parse_args().sizes.split(","):
        for name, microbatch, lora in settings_of(size):
            found = measure(size, microbatch, lora)
            results[f"{size} {name}"] = found
            for phase in ("update", "rollout"):
                planned, measured = found[f"{phase}_planned"], found[f"{phase}_measured"]
                print(
                    f"{size:>5} {name:<14} {phase:<8} planned {planned / 1e9:7.2f} GB   measured {measured / 1e9:7.2f} GB   "
                    f"{planned / measured - 1:+.1%}",
                    flush=True,
                )
    print(json.dumps(results))


if __name__ == "__main__":
    main()
