"""The doctor's checks, each on a run folder that has that trouble and on one that has not."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from podium.cli.main import main
from podium.core.errors import ConfigError
from podium.core.settings import WatchSettings
from podium.doctor.run import examine, read_run
from podium.stages.watch import alarms, spot_rows

HEALTHY = {
    "time/step": 2.0,
    "advantages/abs": 0.8,
    "reward/mean": 0.5,
    "reward/skipped": 0.0,
    "actor/grad_norm": 1.0,
    "actor/skipped_updates": 0.0,
    "actor/loss": 0.01,
    "kl/per_token": 0.01,
    "watch/entropy": 1.5,
    "watch/log_prob_gap": 0.001,
    "watch/effective_sample_size": 0.99,
    "watch/staleness": 0.0,
    "rollout/cut_share": 0.05,
    "rollout/response_tokens": 200.0,
}


def run_with(folder: Path, last: dict[str, Any] | None = None, *, steps: int = 8, finished: bool = True) -> Path:
    """A run whose second half has other metrics."""
    (folder / "samples").mkdir(parents=True)
    (folder / "settings.yaml").write_text("{batch: {prompts_per_step: 4, group_size: 8}, rollout: {max_new_tokens: 256}}")
    rows = [{"step": s, **HEALTHY, **((last or {}) if s > steps // 2 else {})} for s in range(1, steps + 1)]
    (folder / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (folder / "samples/step_000008.jsonl").write_text(json.dumps({"prompt": "p", "response": "the same"}) + "\n")
    if finished:
        (folder / "summary.json").write_text("{}")
    return folder


def causes(folder: Path) -> list[str]:
    return [finding.cause for finding in examine(read_run(folder))]


def test_nothing_is_wrong(tmp_path: Path) -> None:
    assert causes(run_with(tmp_path / "run")) == []


@pytest.mark.parametrize(
    ("metrics", "cause"),
    [
        ({"kl/per_token": 3.0}, "KL explosion"),
        ({"watch/entropy": 0.01}, "entropy collapse"),
        ({"actor/skipped_updates": 1.0, "actor/loss": None}, "gradient not finite"),
        ({"watch/log_prob_gap": 0.4}, "training and rollout disagree"),
        ({"watch/log_prob_gap": None}, "training and rollout disagree"),
        ({"rollout/cut_share": 0.9}, "truncated responses"),
        ({"rollout/response_tokens": 0.5}, "empty responses"),
        ({"reward/skipped": 30.0}, "reward fails"),
        ({"watch/staleness": 40.0}, "old samples"),
    ],
)
def test_each_trouble_is_named(tmp_path: Path, metrics: dict[str, Any], cause: str) -> None:
    assert cause in causes(run_with(tmp_path / "run", metrics))


def test_equal_rewards_and_a_spike(tmp_path: Path) -> None:
    found = causes(run_with(tmp_path / "equal", {"advantages/abs": 0.0, "reward/mean": 0.0}, steps=24))
    assert found == ["no signal: all rewards are equal"]
    folder = run_with(tmp_path / "spike")
    with (folder / "metrics.jsonl").open("a") as file:
        file.write(json.dumps({"step": 9, **HEALTHY, "actor/grad_norm": 900.0}) + "\n")
    assert causes(folder) == ["gradient spikes"]


def test_a_hang_is_read_from_its_report(tmp_path: Path) -> None:
    folder = run_with(tmp_path / "run", finished=False)
    (folder / "reports").mkdir()
    report = {
        "kind": "reward",
        "waiter": "MainThread",
        "owner": "stage 'reward'",
        "limit_seconds": 60,
        "waited_seconds": 60.1,
        "doing": ["stage 'reward'", "reward 'judge'"],
        "about": "32 samples, the first: data row 4",
        "memory": {"host_mib": 900.0},
        "threads": {"MainThread (1)": ["  File a.py, line 1\n", "  File judge.py, line 9, in ask\n    socket.recv()\n"]},
    }
    (folder / "reports/deadline_001_reward.json").write_text(json.dumps(report))
    (folder / "reports/broken.json").write_text("{")
    first = next(f for f in examine(read_run(folder)) if "stage 'reward'" in f.cause)
    assert first.severity == "error" and "60 s" in first.what
    assert "reward 'judge'" in first.evidence and "judge.py, line 9" in first.evidence and "data row 4" in first.evidence
    assert "scorer does not answer" in first.remedy


def test_a_run_that_stopped_without_a_word(tmp_path: Path) -> None:
    import os
    import time

    folder = run_with(tmp_path / "run", finished=False)
    assert causes(folder) == []
    for name in ("metrics.jsonl", "settings.yaml"):
        os.utime(folder / name, (time.time() - 50_000,) * 2)
    assert causes(folder) == ["stopped without a word"]


def test_what_ended_the_run(tmp_path: Path) -> None:
    from podium.core.errors import WorkerError
    from podium.runs.folder import RunFolder

    folder = run_with(tmp_path / "run", finished=False)
    error = WorkerError("rank 1 got 12 rows, the others 16", where="update_actor")
    RunFolder.open(folder).write_error(8, error)
    (found,) = examine(read_run(folder))
    assert found.severity == "error" and "workers do not agree" in found.cause and "rank 1 got 12 rows" in found.what
    with (folder / "metrics.jsonl").open("a") as file:  # it went on
        file.write(json.dumps({"step": 9, "time": 9e9, **HEALTHY}) + "\n")
    assert causes(folder) == []
    (folder / "reports").mkdir()
    (folder / "reports/stacks.txt").write_text("Thread 0x1 (most recent call first):\n  File x.py, line 3 in all_reduce\n")
    (found,) = examine(read_run(folder))
    assert "ended itself" in found.cause and "all_reduce" in found.evidence


def test_the_command(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    def run(*arguments: str) -> tuple[int, str]:
        with pytest.raises(SystemExit) as ended:
            main(("doctor", *arguments))
        return int(ended.value.code or 0), capsys.readouterr().out

    good, bad = run_with(tmp_path / "good"), run_with(tmp_path / "bad", {"watch/log_prob_gap": 0.4})
    assert run(str(good)) == (0, f"{good}: 8 steps, finished\n\nNothing is wrong that the run's folder could tell.\n")
    code, out = run(str(bad))
    assert code == 1 and f"podium doctor numerics {bad}" in out
    assert json.loads(run(str(bad), "--json")[1])["findings"][0]["cause"] == "training and rollout disagree"
    assert run(str(tmp_path))[0] == 2 and run("numbers", str(good))[0] == 2
    with pytest.raises(ConfigError, match="no samples with their tokens"):
        from podium.doctor.numerics import examine_numerics

        (good / "settings.yaml").write_text("{algorithm: grpo, model: {path: nowhere}}")
        examine_numerics(good)


# ------------------------------------------------------------------ bounds


def test_bounds_warn_and_stop() -> None:
    settings = WatchSettings.model_validate(
        {"log_prob_gap": {"warn": 0.1, "stop": 1.0}, "entropy": {"warn": 0.5}, "nonfinite": "stop"}
    )
    assert alarms({"watch/log_prob_gap": 0.05, "watch/entropy": 1.0, "actor/skipped_updates": 0.0}, settings) == []
    (warned,) = alarms({"watch/log_prob_gap": 0.2}, settings)
    assert not warned.stop and "above 0.1" in str(warned)
    assert alarms({"watch/log_prob_gap": 2.0}, settings)[0].stop
    assert alarms({"watch/log_prob_gap": float("nan")}, settings)[0].stop  # what is no number is within no bound
    (low,) = alarms({"watch/entropy": 0.1}, settings)
    assert "below 0.5" in str(low)
    assert alarms({"actor/skipped_updates": 1.0}, settings)[0].stop
    assert not alarms({"critic/loss": float("nan")}, WatchSettings())[0].stop


@pytest.mark.parametrize("rows", [1, 3, 16, 40, 64, 256, 1000])
def test_the_spot_check_costs_one_row_in_64(rows: int) -> None:
    many = 6400
    taken = [spot_rows(rows, step) for step in range(many)]
    assert sum(taken[2:]) == pytest.approx(many * rows / 64, rel=0.1)
    assert taken[0] == taken[1] > 0 and max(taken) <= rows
    assert sum(n > 0 for n in taken) <= many / 8 + 2


def test_no_rows_are_spot_checked_where_there_are_none() -> None:
    assert spot_rows(0, 0) == 0


@pytest.mark.parametrize("saved", [True, False])
def test_the_way_on_is_one_that_works(tmp_path: Path, saved: bool) -> None:
    """Without a checkpoint `--resume` would be refused."""
    run = run_with(tmp_path / "run", finished=False)
    (run / "error.json").write_text(json.dumps({"type": "ValueError", "message": "no", "step": 3}))
    if saved:
        (run / "checkpoints" / "step_000002").mkdir(parents=True)
    (found,) = (f for f in examine(read_run(run)) if "ended after step 3" in f.what)
    assert ("train --resume" in found.remedy) is saved and str(run) in found.remedy
