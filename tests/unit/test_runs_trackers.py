from __future__ import annotations

import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from podium.core.errors import ConfigError, ResourceError
from podium.runs.folder import RunFolder
from podium.runs.trackers import open_trackers

SETTINGS = {"algorithm": "grpo", "run": {"seed": 3}}


@pytest.fixture
def run(tmp_path: Path) -> RunFolder:
    return RunFolder.create(tmp_path, "a")


def test_unknown_tracker(run: RunFolder) -> None:
    with pytest.raises(ConfigError, match="did you mean 'wandb'"):
        open_trackers(["wandbb"], run, SETTINGS)


@pytest.mark.parametrize(("name", "remedy"), [("wandb", "podium\\[tracking\\]"), ("mlflow", "podium\\[tracking\\]")])
def test_missing_package_names_the_extra(run: RunFolder, monkeypatch: pytest.MonkeyPatch, name: str, remedy: str) -> None:
    monkeypatch.setitem(sys.modules, name, None)
    with pytest.raises(ResourceError, match=remedy):
        open_trackers([name], run, SETTINGS)


def test_missing_default_is_a_note(run: RunFolder, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "tensorboardX", None)
    notes: list[str] = []
    assert open_trackers(["tensorboard"], run, SETTINGS, required=False, note=notes.append) == []
    assert len(notes) == 1 and "pip install tensorboardX" in notes[0]


def test_tensorboard_log_can_be_read(run: RunFolder) -> None:
    accumulator = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator")
    (tracker,) = open_trackers(["tensorboard"], run, SETTINGS)
    for step in range(1, 5):
        tracker.log(step, {"reward": step / 4})
    tracker.close()
    (resumed,) = open_trackers(["tensorboard"], run, SETTINGS, resume_step=2)
    resumed.log(3, {"reward": 7.0})
    resumed.close()
    events = accumulator.EventAccumulator(str(run.path / "tensorboard"))
    events.Reload()
    assert [(e.step, e.value) for e in events.Scalars("reward")] == [(1, 0.25), (2, 0.5), (3, 7.0)]


class FakeWandb:
    """The calls that the tracker makes of the real package."""

    def __init__(self) -> None:
        self.started: list[dict[str, Any]] = []
        self.logged: list[tuple[int, dict[str, float]]] = []
        self.finished = 0

    def init(self, **arguments: Any) -> Any:
        self.started.append(arguments)
        run = SimpleNamespace(id=arguments["id"] or "abc")
        run.log = lambda metrics, step: self.logged.append((step, metrics))
        run.finish = lambda: setattr(self, "finished", self.finished + 1)
        return run


def test_wandb_goes_on_in_the_same_run(run: RunFolder, monkeypatch: pytest.MonkeyPatch) -> None:
    fake = FakeWandb()
    monkeypatch.setitem(sys.modules, "wandb", fake)  # type: ignore[arg-type]
    (tracker,) = open_trackers(["wandb"], run, SETTINGS)
    tracker.log(1, {"reward": 0.5})
    tracker.close()
    open_trackers(["wandb"], run, SETTINGS, resume_step=1)
    assert fake.started[0]["name"] == "a" and fake.started[0]["config"] == SETTINGS and fake.started[0]["id"] is None
    assert fake.started[1]["id"] == "abc" and fake.started[1]["resume"] == "allow"
    assert fake.logged == [(1, {"reward": 0.5})] and fake.finished == 1


class FakeMlflow:
    def __init__(self) -> None:
        self.calls: list[tuple[str, Any]] = []

    def set_experiment(self, name: str) -> None:
        self.calls.append(("experiment", name))

    def start_run(self, run_id: str | None, run_name: str | None) -> Any:
        self.calls.append(("start", (run_id, run_name)))
        return SimpleNamespace(info=SimpleNamespace(run_id=run_id or "m1"))

    def log_params(self, params: dict[str, str]) -> None:
        self.calls.append(("params", params))

    def log_metrics(self, metrics: dict[str, float], step: int) -> None:
        self.calls.append(("metrics", (step, metrics)))

    def end_run(self) -> None:
        self.calls.append(("end", None))


def test_mlflow(run: RunFolder, monkeypatch: pytest.MonkeyPatch) -> None:
    fake = FakeMlflow()
    monkeypatch.setitem(sys.modules, "mlflow", fake)  # type: ignore[arg-type]
    (tracker,) = open_trackers(["mlflow"], run, SETTINGS)
    tracker.log(1, {"reward": 0.5, "kl": float("nan")})
    tracker.close()
    open_trackers(["mlflow"], run, SETTINGS, resume_step=1)
    assert fake.calls == [
        ("experiment", "podium"),
        ("start", (None, "a")),
        ("params", {"algorithm": "grpo", "run.seed": "3"}),
        ("metrics", (1, {"reward": 0.5})),
        ("end", None),
        ("experiment", "podium"),
        ("start", ("m1", None)),
    ]


def test_opened_trackers_are_closed_when_a_later_one_fails(run: RunFolder, monkeypatch: pytest.MonkeyPatch) -> None:
    fake = FakeWandb()
    monkeypatch.setitem(sys.modules, "wandb", fake)  # type: ignore[arg-type]
    monkeypatch.setitem(sys.modules, "mlflow", None)
    with pytest.raises(ResourceError, match="mlflow"):
        open_trackers(["wandb", "mlflow"], run, SETTINGS)
    assert fake.finished == 1
