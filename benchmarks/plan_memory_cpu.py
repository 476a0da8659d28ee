"""`podium plan` against the memory that a process takes: the peak of one optimizer update on a CPU, fp32, one thread.

Each setting runs in a process of its own; what the process had before the model is taken off.

    python benchmarks/plan_memory_cpu.py
"""

from __future__ import annotations

import gc
import os
import subprocess
import sys
import threading
import time
from pathlib import Path

SETTINGS = ((1024, 0), (4096, 0), (2048, 16))
"""Micro-batch tokens, LoRA rank."""
ROWS, ROW, PROMPT = 16, 256, 16
WIDTHS = {
    "hidden_size": 512,
    "intermediate_size": 1536,
    "num_hidden_layers": 8,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
}


def resident() -> int:
    """Bytes of this process in memory."""
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def measure(microbatch: int, lora: int) -> None:
    """Prints planned and measured bytes of one setting."""
    import torch
    from transformers import AutoModelForCausalLM, LlamaConfig

    from podium.algorithms.losses import policy_loss
    from podium.core.batch import Batch
    from podium.core.settings import LoraSettings, OptimizerSettings
    from podium.engines.train import SingleDeviceEngine
    from podium.models.adapters import add_lora
    from podium.models.heads import ActorModel
    from podium.planner.memory import RoleSpec
    from podium.planner.shapes import shape_of

    torch.set_num_threads(1)
    loss = policy_loss(one_update=True)

    def engine(vocabulary: int, widths: dict[str, int]) -> SingleDeviceEngine:
        model = AutoModelForCausalLM.from_config(LlamaConfig(vocab_size=vocabulary, tie_word_embeddings=True, **widths))
        if lora:
            add_lora(model, LoraSettings(rank=lora))
        return SingleDeviceEngine(ActorModel(model), optimizer=OptimizerSettings(), microbatch_tokens=microbatch)

    def rows(count: int) -> Batch:
        response = ROW - PROMPT
        return Batch(
            {
                "prompt_ids": [torch.randint(10, 500, (PROMPT,)) for _ in range(count)],
                "response_ids": [torch.randint(10, 500, (response,)) for _ in range(count)],
                "loss_mask": [torch.ones(response, dtype=torch.bool) for _ in range(count)],
                "advantages": [torch.randn(response) for _ in range(count)],
            }
        )

    engine(512, {**WIDTHS, "hidden_size": 64, "intermediate_size": 64}).update(rows(1), loss)  # what torch itself takes
    gc.collect()
    before = resident()
    made = engine(16_384, WIDTHS)
    batch = rows(ROWS)
    made.update(batch, loss)  # moments are there from now on
    gc.collect()
    peak, done = [0], threading.Event()

    def watch() -> None:
        while not done.is_set():
            peak[0] = max(peak[0], resident())
            time.sleep(0.001)

    thread = threading.Thread(target=watch)
    thread.start()
    made.update(batch, loss)
    done.set()
    thread.join()
    role = RoleSpec("actor", shape_of(made.model.model.config), 4, True, cuda=False, lora=lora)
    planned = role.stays + role.update_bytes(microbatch, microbatch * (ROW - PROMPT) // ROW, ROWS * ROW // microbatch)
    measured = peak[0] - before
    name = f"micro-batches of {microbatch}" + (f", LoRA {lora}" if lora else "")
    print(f"{name:<32} planned {planned / 1e6:6.0f} MB   measured {measured / 1e6:6.0f} MB   {planned / measured - 1:+.1%}")


def main() -> None:
    # Freed memory goes back at once, so that what is resident is what is used.
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "MALLOC_TRIM_THRESHOLD_": "0", "MALLOC_MMAP_THRESHOLD_": "65536"}
    for microbatch, lora in SETTINGS:
        subprocess.run([sys.executable, __file__, str(microbatch), str(lora)], env=environment, check=True)


if __name__ == "__main__":
    if len(sys.argv) == 3:
        measure(int(sys.argv[1]), int(sys.argv[2]))
    else:
        main()
