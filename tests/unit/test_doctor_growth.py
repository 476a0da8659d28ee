"""Memory that grows: told from noise, from a cache that fills once, from another process; and traced to its stage."""

from __future__ import annotations

import json
import mmap
import random
from pathlib import Path
from typing import Any

import pytest

from podium.core.resident import resident_mb
from podium.doctor.growth import growth, is_leak
from podium.doctor.run import examine, read_run
from podium.recipes import train
from tests.tiny import tiny_model, tiny_tokenizer

STEPS = 300


def noise(seed: int = 0, size: float = 3.0) -> list[float]:
    """Swings with a memory of their own, as an allocator's."""
    draw, out = random.Random(seed), [0.0]
    for _ in range(STEPS):
        out.append(0.9 * out[-1] + draw.gauss(0, size))
    return out


def series(shape: Any, seed: int = 0) -> list[tuple[int, float]]:
    return [(s, 400.0 + shape(s) + swing) for s, swing in zip(range(1, STEPS + 1), noise(seed), strict=False)]


@pytest.mark.parametrize("seed", range(20))
def test_noise_is_no_leak(seed: int) -> None:
    assert is_leak(series(lambda s: 0.0, seed)) is None


@pytest.mark.parametrize("seed", range(20))
def test_a_leak_is_found_and_measured(seed: int) -> None:
    found = is_leak(series(lambda s: 0.25 * s, seed))
    assert found is not None and found.slope == pytest.approx(0.25, rel=0.35)


@pytest.mark.parametrize("shape", [lambda s: 80.0 * (s > 150), lambda s: 60.0 * min(1.0, s / 40), lambda s: -0.25 * s])
def test_what_fills_once_or_shrinks_is_no_leak(shape: Any) -> None:
    assert is_leak(series(shape)) is None


def test_a_short_run_says_nothing() -> None:
    assert growth([(s, 10.0 * s) for s in range(1, 30)]) is None


def run_with(folder: Path, rows: list[dict[str, float]]) -> Path:
    folder.mkdir()
    (folder / "settings.yaml").write_text("rewards: [{function: 'mine.py:judge'}]")
    (folder / "summary.json").write_text("{}")
    metrics = [{"step": s, "time/step": 1.0, **row} for s, row in enumerate(rows, 1)]
    (folder / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in metrics))
    return folder


def rows_of(per_step: float, reward: float, steps: int = STEPS, first: float = 400.0) -> list[dict[str, float]]:
    return [
        {"memory/host_mb": first + per_step * s, "memory/reward_mb": reward * s, "memory/rollout_mb": 3.0, "memory/steps": s}
        for s in range(1, steps + 1)
    ]


def found_in(folder: Path) -> list[str]:
    return [finding.cause for finding in examine(read_run(folder))]


def test_the_stage_is_named_where_it_is_known(tmp_path: Path) -> None:
    folder = run_with(tmp_path / "reward", rows_of(0.5, 0.45))
    assert found_in(folder) == ["host memory grows: 90% of it in stage 'reward' (mine.py:judge)"]
    assert "500 MB per 1,000 steps" in examine(read_run(folder))[0].what
    assert found_in(run_with(tmp_path / "other", rows_of(0.5, 0.0))) == ["host memory grows: 100% of it between the stages"]


def test_a_resumed_run_is_judged_by_its_last_process(tmp_path: Path) -> None:
    resumed = [*rows_of(0.0, 0.0, first=400.0), *rows_of(0.0, 0.0, first=900.0)]
    assert found_in(run_with(tmp_path / "fine", resumed)) == []
    leaking = [*rows_of(0.5, 0.5), *rows_of(0.5, 0.5)]
    assert "in stage 'reward'" in found_in(run_with(tmp_path / "leaks", leaking))[0]


@pytest.mark.skipif(resident_mb() is None, reason="the system does not say what a process holds")
@pytest.mark.parametrize("planted", [True, False])
def test_a_leak_planted_in_a_reward_of_a_real_run(planted: bool, tmp_path: Path) -> None:
    kept: list[mmap.mmap] = []

    def judge(completions: list[str], **columns: Any) -> list[float]:
        junk = mmap.mmap(-1, 600_000)  # not from what earlier tests of this process gave back to its heap
        junk.write(b"x" * 600_000)
        if planted:
            kept.append(junk)
        return [float(len(c) % 5) for c in completions]

    small = {"hidden_size": 16, "intermediate_size": 32, "num_attention_heads": 2, "num_key_value_heads": 1}
    result = train(
        tiny_model(**small),
        [{"prompt": f"What is {n}?"} for n in range(8)],
        judge,
        tokenizer=tiny_tokenizer(),
        batch={"prompts_per_step": 2, "group_size": 2},
        rollout={"max_new_tokens": 2},
        checkpoint={"export": False},
        run={"folder": str(tmp_path), "name": "run", "steps": 60, "trackers": [], "progress": False, "log_samples": 0},
    )
    found = [cause for cause in found_in(result.run_folder) if "memory" in cause]
    assert len(found) == planted and all("in stage 'reward'" in cause for cause in found)
