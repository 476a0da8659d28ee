from __future__ import annotations

from pathlib import Path

from podium.runs.plot import plot_metrics
from podium.runs.series import PANELS


def panel_of(name: str) -> list[str]:
    return [panel.title for panel in PANELS if panel.pick([name])]


def test_each_metric_has_its_panel() -> None:
    expected = {
        "reward/mean": "Reward and accuracy",
        "reward/exact_match": "Reward and accuracy",
        "eval/reward/mean": "Reward and accuracy",
        "eval/accuracy": "Reward and accuracy",
        "kl/per_token": "KL",
        "actor/ref_kl": "KL",
        "actor/entropy": "Entropy",
        "rollout/response_tokens": "Response length",
        "actor/loss": "Loss",
        "reward/loss": "Loss",
        "eval/nll": "Loss",
        "time/reward": "Time per stage",
        "time/update_actor": "Time per stage",
    }
    assert {name: panel_of(name) for name in expected} == {name: [title] for name, title in expected.items()}


def test_other_metrics_have_none() -> None:
    others = ("actor/lr", "reward/lr", "reward/skipped", "step", "time", "time/step", "kl/coef", "rollout/tokens")
    assert [panel_of(name) for name in others] == [[]] * len(others)


def test_png_is_written(tmp_path: Path) -> None:
    rows = [
        {"step": i, "time": 1.0, "reward/mean": i / 9, "actor/ref_kl": None, "actor/entropy": float("nan")} for i in range(10)
    ]
    path = plot_metrics(rows, tmp_path / "plot.png", title="a run")
    assert path is not None and path.read_bytes().startswith(b"\x89PNG")


def test_nothing_to_draw(tmp_path: Path) -> None:
    assert plot_metrics([], tmp_path / "plot.png") is None
    assert plot_metrics([{"step": 1, "time": 1.0, "reward/mean": None}], tmp_path / "plot.png") is None
    assert not list(tmp_path.iterdir())
