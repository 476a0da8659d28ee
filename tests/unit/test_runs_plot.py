from __future__ import annotations

from pathlib import Path

from podium.runs.plot import plot_metrics
from podium.runs.series import PANELS


def panel_of(name: str) -> list[str]:
    return [panel.title for panel in PANELS if panel.pick([name])]


def test_each_metric_has_its_panel() -> None:
    expected = {
        "reward": "Reward and accuracy",
        "reward/exact_match": "Reward and accuracy",
        "eval/accuracy": "Reward and accuracy",
        "kl": "KL to the reference",
        "entropy": "Entropy",
        "rollout/response_tokens": "Response length",
        "actor/kl": "KL to the reference",
        "eval/nll": "Loss",
        "actor/loss": "Loss",
        "policy_loss": "Loss",
        "time/reward": "Time per stage",
        "time/update_actor": "Time per stage",
    }
    assert {name: panel_of(name) for name in expected} == {name: [title] for name, title in expected.items()}


def test_spread_and_settings_have_none() -> None:
    assert [panel_of(name) for name in ("reward/std", "reward_max", "lr", "step", "time", "kl_coef", "rollout/tokens")] == [[]] * 7


def test_png_is_written(tmp_path: Path) -> None:
    rows = [{"step": i, "time": 1.0, "reward": i / 9, "kl": None, "entropy": float("nan")} for i in range(10)]
    path = plot_metrics(rows, tmp_path / "plot.png", title="a run")
    assert path is not None and path.read_bytes().startswith(b"\x89PNG")


def test_nothing_to_draw(tmp_path: Path) -> None:
    assert plot_metrics([], tmp_path / "plot.png") is None
    assert plot_metrics([{"step": 1, "time": 1.0, "reward": None}], tmp_path / "plot.png") is None
    assert not list(tmp_path.iterdir())
