"""A profile on a GPU: kernels, the device's idle time, and memory from the allocator's own counts."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from podium.profiling.machine import copy_rate, matrix_rate
from podium.profiling.run import profile_run
from podium.recipes import build, load
from tests.tiny import tiny_model, tiny_tokenizer

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU"),
]


def by_length(completions: list[str], **columns: Any) -> list[float]:
    return [float(len(c) % 5) for c in completions]


def test_a_step_on_a_gpu():
    values: dict[str, Any] = {
        "algorithm": "grpo",
        "batch": {"prompts_per_step": 4, "group_size": 4, "microbatch_tokens": 2048},
        "rollout": {"max_new_tokens": 16},
        "rewards": [{"function": by_length}],
        "run": {"steps": 9, "trackers": [], "progress": False, "device": "cuda"},
    }
    rows = [{"prompt": f"What is {a} plus 3?"} for a in range(16)]
    model = tiny_model(dtype=torch.bfloat16, hidden_size=256, num_attention_heads=4).cuda()
    trainer = build(load(values=values), models={"actor": model}, tokenizer=tiny_tokenizer(), data=rows)
    profile = profile_run(trainer, steps=2, warmup=1)
    by_name = {s.name: s for s in profile.stages}
    update, held = by_name["update_actor"], {h.owner: h.bytes or 0 for h in profile.memory}
    assert update.kernels["matrix products"] > 0 and update.kernels["optimizer"] > 0
    assert update.kernels["idle"] + sum(v for k, v in update.kernels.items() if k != "idle") >= 1e3 * update.seconds * 0.99
    assert all(s.peak_bytes for s in profile.stages)
    # What the owners hold together is what the allocator saw at most, in the update.
    owned = sum(held[name] for name in ("weights", "fp32 masters", "AdamW's moments", "gradients"))
    assert owned + held["activations and scratch, at most"] == pytest.approx(update.peak_bytes, rel=0.01)
    assert held["KV cache, at most"] > 0 and 0 < (profile.mfu or 0) < 1


def test_rates_of_the_machine():
    assert matrix_rate("cuda") > 1e13 and copy_rate("cuda") > 1e11
