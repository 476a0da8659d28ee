"""The budget of a pass, measured; and activation checkpointing as a setting."""

from __future__ import annotations

from pathlib import Path
from unittest.mock import patch

import pytest
import torch
from torch.utils.checkpoint import checkpoint

from podium.core.settings import BatchSettings, OptimizerSettings
from podium.engines.train import SingleDeviceEngine, budget
from podium.models.heads import ActorModel
from podium.recipes import build, load
from tests.properties.test_train_invariance import CASES, rows
from tests.tiny import tiny_model, tiny_tokenizer


def test_the_setting() -> None:
    assert BatchSettings(microbatch_tokens="auto").planned_microbatch_tokens == 8192
    assert BatchSettings(microbatch_tokens=77).planned_microbatch_tokens == 77
    with pytest.raises(ValueError, match="at least 1, or auto"):
        BatchSettings(microbatch_tokens=0)


def test_from_what_a_trial_took() -> None:
    """1 MB a token and 100 GB free (of it 20 GB taken later): 64,000 tokens, in whole thousands."""
    taken: list[str] = []
    with (
        patch.object(torch.cuda, "synchronize"),
        patch.object(torch.cuda, "reset_peak_memory_stats"),
        patch.object(torch.cuda, "memory_allocated", return_value=5 * 10**9),
        patch.object(torch.cuda, "memory_reserved", return_value=15 * 10**9),
        patch.object(torch.cuda, "max_memory_allocated", return_value=5 * 10**9 + 4_000 * 10**6),
        patch.object(torch.cuda, "mem_get_info", return_value=(90 * 10**9, 141 * 10**9)),
    ):
        found = budget.measured_budget(lambda: taken.append("run"), 4_000, torch.device("cuda"), later_bytes=20 * 10**9)
    assert found == 64_000 // 1024 * 1024
    assert len(taken) == 2


def test_auto_leaves_no_trace_of_its_trial() -> None:
    """The same weights after an update as with a number; and the number is kept."""
    _, loss = CASES["policy"]
    results = []
    for tokens in ("auto", 8192):
        engine = SingleDeviceEngine(
            ActorModel(tiny_model("qwen2")), optimizer=OptimizerSettings(lr=1e-3), microbatch_tokens=tokens
        )
        with patch.object(budget, "measured_budget", lambda run, *_: (run(), 8192)[1]):
            engine.compute(rows(), ("log_probs",))
            metrics = engine.update(rows(), loss)
        assert engine.microbatch_tokens == 8192
        results.append((metrics.means(), [p.detach().clone() for p in engine.model.parameters()]))
    assert results[0][0] == results[1][0]
    assert all(torch.equal(a, b) for a, b in zip(results[0][1], results[1][1], strict=True))


def test_a_recipe_trains_with_both(tmp_path: Path) -> None:
    """Two steps with whole layers computed again and the budget measured."""
    settings = load(
        values={
            "algorithm": "grpo",
            "batch": {
                "prompts_per_step": 2,
                "group_size": 2,
                "microbatch_tokens": "auto",
                "activation_checkpointing": "full",
            },
            "rollout": {"max_new_tokens": 4},
            "rewards": [{"function": lambda completions, **_: [float(len(text)) for text in completions]}],
            "run": {"folder": str(tmp_path), "steps": 2, "trackers": [], "progress": False, "device": "cpu"},
        }
    )
    actor, data = tiny_model("llama"), [{"prompt": f"{n} + 1 ="} for n in range(4)]
    with patch("podium.models.recompute.checkpoint", side_effect=checkpoint) as called:
        build(settings, models={"actor": actor}, tokenizer=tiny_tokenizer(), data=data).train()
    assert called.call_count >= 2 * 2  # layers x updates
