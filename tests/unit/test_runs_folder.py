from __future__ import annotations

import json
import resource
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import pytest

from podium.core.errors import CheckpointError, ConfigError
from podium.runs.folder import RunFolder, latest_run, read_jsonl


def test_create_never_overwrites(tmp_path: Path) -> None:
    first = RunFolder.create(tmp_path / "runs", "grpo")
    first.write_settings("algorithm: grpo\n")
    second, third = RunFolder.create(tmp_path / "runs", "grpo"), RunFolder.create(tmp_path / "runs", "grpo")
    assert [run.name for run in (first, second, third)] == ["grpo", "grpo-2", "grpo-3"]
    assert first.settings.read_text() == "algorithm: grpo\n"
    assert not any(second.path.iterdir())  # a folder for what is not there yet would only confuse


@pytest.mark.parametrize("name", ["", "a/b", "..", "."])
def test_create_refuses_a_path_as_name(tmp_path: Path, name: str) -> None:
    with pytest.raises(ConfigError, match="not a name for a run"):
        RunFolder.create(tmp_path, name)
    assert not list(tmp_path.iterdir())


def test_create_where_nothing_can_be_written(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(ConfigError, match="cannot make a run folder"):
        RunFolder.create(tmp_path / "file", "grpo")


def test_open_needs_settings(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="no run at"):
        RunFolder.open(tmp_path)
    (tmp_path / "settings.yaml").write_text("")
    assert RunFolder.open(tmp_path).name == tmp_path.name


def test_each_step_is_on_disk_at_once(tmp_path: Path) -> None:
    run = RunFolder.create(tmp_path, "a")
    run.log(0, {"reward": 0.5, "kl": float("nan")})
    row = json.loads(run.metrics.read_text())
    assert row["step"] == 0 and row["reward"] == 0.5 and row["kl"] is None and row["time"] > 1e9
    run.log(1, {"reward": np.float32(0.25)})  # type: ignore[dict-item]
    assert [r["reward"] for r in run.read_metrics()] == [0.5, 0.25]


def test_a_step_is_logged_once(tmp_path: Path) -> None:
    run = RunFolder.create(tmp_path, "a")
    run.log(2, {"reward": 0.1})
    run.log(3, {"reward": 0.2})
    run.write_samples(3, [])
    run.log(3, {"reward": 0.3})
    assert [(r["step"], r["reward"]) for r in run.read_metrics()] == [(2, 0.1), (3, 0.3)]
    assert (run.samples / "step_000003.jsonl").exists()
    run.close()
    with pytest.raises(ValueError, match="step 2 is logged after step 3"):
        RunFolder(run.path).log(2, {})


def test_rewind_then_log_again(tmp_path: Path) -> None:
    run = RunFolder.create(tmp_path, "a")
    for step in range(1, 6):
        run.log(step, {"reward": step / 10})
        run.write_samples(step, [{"prompt": "p", "response": "é", "rewards": {"f": 1.0}, "group_id": step}])
    before = run.metrics.read_text().splitlines()
    resumed = RunFolder(run.path)
    resumed.rewind(3)
    assert resumed.metrics.read_text().splitlines() == before[:3]
    assert sorted(p.name for p in resumed.samples.iterdir()) == [f"step_00000{i}.jsonl" for i in (1, 2, 3)]
    resumed.log(4, {"reward": 9.0})
    assert [r["step"] for r in resumed.read_metrics()] == [1, 2, 3, 4]


def test_rewind_without_metrics(tmp_path: Path) -> None:
    RunFolder.create(tmp_path, "a").rewind(0)


def test_half_a_line_of_a_killed_run_is_cut_off(tmp_path: Path) -> None:
    run = RunFolder.create(tmp_path, "a")
    run.log(1, {"reward": 1.0})
    run.close()
    with run.metrics.open("a") as file:
        file.write('{"step": 2, "rew')
    assert [r["step"] for r in run.read_metrics()] == [1]
    run.log(2, {"reward": 2.0})
    assert [r["reward"] for r in run.read_metrics()] == [1.0, 2.0]
    assert len(run.metrics.read_text().splitlines()) == 2


def test_samples_and_summary(tmp_path: Path) -> None:
    run = RunFolder.create(tmp_path, "a")
    rows = [{"prompt": "2+2", "response": "vier €", "rewards": {"exact": 1.0}, "finish_reason": "stop", "group_id": 0}]
    path = run.write_samples(12, rows)
    assert path.name == "step_000012.jsonl" and list(read_jsonl(path)) == rows
    run.write_summary({"accuracy": float("inf"), "model": run.model, "seconds": 1.5})
    assert json.loads(run.summary.read_text()) == {"accuracy": None, "model": str(run.model), "seconds": 1.5}


def test_latest_run(tmp_path: Path) -> None:
    import os

    assert latest_run(tmp_path / "none") is None
    dated = ["grpo-20261130-120000", "grpo-20261130-120000-2", "grpo-mine-20261130-120000"]
    for i, name in enumerate(["exp", "exp-2", *dated, "exp-large", "exp-3"]):
        run = RunFolder.create(tmp_path, name)
        run.write_settings("")
        if name != "exp-3":  # it has nothing to go on from
            (run.checkpoints / "step_000001").mkdir(parents=True)
            (run.checkpoints / "step_000001" / "manifest.json").write_text("{}")
        os.utime(run.settings, (1000 + i, 1000 + i))

    def found(*args: str, **kwargs: str) -> str | None:
        run = latest_run(tmp_path, *args, **kwargs)
        return run.name if run else None

    assert found() == "exp-large" and found("exp") == "exp-2" and found("exp-l") is None
    assert found(algorithm="grpo") == "grpo-20261130-120000-2" and found(algorithm="ppo") is None


def test_sample_files_are_bounded(tmp_path, monkeypatch):
    """The newest stay; of the older ones fewer and fewer, over the whole run."""
    from podium.runs import folder as module

    monkeypatch.setattr(module, "MOST_SAMPLES", 40)
    monkeypatch.setattr(module, "NEWEST_SAMPLES", 10)
    run = RunFolder.create(tmp_path, "run")
    most = 0
    for step in range(1, 1001):
        run.write_samples(step, [{"prompt": "a"}])
        if step % 50 == 0:
            most = max(most, len(list(run.samples.iterdir())))
    steps = sorted(int(p.stem.removeprefix("step_")) for p in run.samples.iterdir())
    assert most <= 40 and steps[-10:] == list(range(991, 1001)) and steps[0] < 200
    run.rewind(500)
    run.write_samples(501, [{"prompt": "a"}])
    assert max(int(p.stem.removeprefix("step_")) for p in run.samples.iterdir()) == 501


def test_other_settings_keep_the_ones_before(tmp_path):
    run = RunFolder.create(tmp_path, "run")
    run.write_settings("a: 1\n")
    run.change_settings("a: 2\n", 7)
    assert run.settings.read_text() == "a: 2\n" and (run.path / "settings.until_000007.yaml").read_text() == "a: 1\n"


def test_two_processes_cannot_write_one_run(tmp_path):
    run = RunFolder.create(tmp_path, "run")
    with run.locked():
        again = RunFolder(run.path)
        with pytest.raises(ConfigError, match=r"going on in another process \(process \d+ on "), again.locked():
            pass
    with RunFolder(run.path).locked():
        pass


@contextmanager
def full_disk() -> Iterator[None]:
    """Nothing more can be written to any file (Python leaves SIGXFSZ aside, so it is an OSError)."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (0, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)


def test_a_full_disk_is_one_error_and_leaves_no_half_of_a_file(tmp_path: Path) -> None:
    run = RunFolder.create(tmp_path, "a")
    with full_disk():
        with pytest.raises(CheckpointError, match="could not write into the run's folder: File too large"), run.locked():
            pass
        with pytest.raises(CheckpointError, match=r"could not write settings\.yaml: File too large"):
            run.write_settings("algorithm: grpo")
        run.write_error(1, ValueError("said elsewhere"))
    assert [p.name for p in run.path.iterdir()] == [".lock"]
    with run.locked():
        pass
