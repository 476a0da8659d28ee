"""A recipe is planned, trained with a planted fault, and the doctor names it from the run's folder."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest
import torch

from podium.cli.main import main
from podium.core.errors import NumericsError, RewardError
from podium.doctor.numerics import examine_numerics
from podium.doctor.run import examine, read_run
from podium.recipes import build, load
from podium.trainer.roles import Roles
from tests.tiny import tiny_model, tiny_tokenizer

ROWS = [{"prompt": f"What is {a} plus {b}?"} for a in range(4) for b in range(4)]
RECIPE: dict[str, Any] = {
    "algorithm": "grpo",
    "model": {"path": "model", "dtype": "float32"},
    "data": {"path": "rows.jsonl"},
    "batch": {"prompts_per_step": 2, "group_size": 4, "microbatch_tokens": 256},
    "rollout": {"max_new_tokens": 8, "temperature": 0.7},
    "optimizer": {"lr": 1e-3},
    "checkpoint": {"every_steps": 1, "keep": 3, "export": False},
    "run": {"steps": 3, "trackers": [], "name": "run", "progress": False},
}


def by_length(prompts: Any, completions: Any, **columns: Any) -> list[float]:
    return [float(len(c) % 5) / 4 for c in completions]


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    tiny_model(initializer_range=0.15).save_pretrained("model")
    tiny_tokenizer().save_pretrained("model")
    Path("rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in ROWS))
    return tmp_path


def train(*overrides: str, reward: Any = by_length) -> None:
    build(load(None, overrides, RECIPE | {"rewards": [{"function": reward}]})).train()


def podium(*arguments: str) -> int:
    with pytest.raises(SystemExit) as ended:
        main(arguments)
    return int(ended.value.code or 0)


def test_a_healthy_run(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    train()
    metrics = read_run("run" if Path("run").exists() else "runs/run").steps
    assert all(row["watch/log_prob_gap"] < 1e-4 and row["watch/staleness"] == 0 for row in metrics[:2])
    assert all(0.99 < row["watch/effective_sample_size"] <= 1 + 1e-9 for row in metrics[:2])
    assert metrics[0]["watch/entropy"] == pytest.approx(-metrics[0]["rollout/log_prob"])
    assert examine_numerics("runs/run").diagnosis.cause == "none"
    assert podium("doctor", "numerics", "runs/run") == 0 and "agree" in capsys.readouterr().out
    assert podium("doctor", "runs/run") == 0


def test_a_temperature_that_training_leaves_out(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Roles, "_temperature", lambda self: 1.0)
    train()
    found = examine(read_run("runs/run"))
    assert "training and rollout disagree" in [f.cause for f in found]
    alarms = [json.loads(line) for line in Path("runs/run/alarms.jsonl").read_text().splitlines()]
    assert alarms[0]["metric"] == "watch/log_prob_gap" and alarms[0]["step"] == 1  # from the first step
    diagnosis = examine_numerics("runs/run").diagnosis
    assert (diagnosis.cause, diagnosis.side) == ("temperature", "training")


def test_a_layer_that_is_not_handed_over(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from podium.workers.actor import ActorWorker

    generate = ActorWorker.generate_sequences

    def with_an_old_layer(self: Any, *args: Any, **kwargs: Any) -> Any:
        parameters = dict(self.rollout.model.named_parameters())
        layer = {n: p for n, p in parameters.items() if ".layers.1." in n}
        if not hasattr(self, "starting"):
            self.starting = {n: p.detach().clone() for n, p in layer.items()}
        now = {n: p.detach().clone() for n, p in layer.items()}
        with torch.no_grad():
            for n, p in layer.items():
                p.copy_(self.starting[n])
            out = generate(self, *args, **kwargs)
            for n, p in layer.items():
                p.copy_(now[n])
        return out

    with_an_old_layer.__podium_dispatch__ = generate.__podium_dispatch__  # type: ignore[attr-defined]
    monkeypatch.setattr(ActorWorker, "generate_sequences", with_an_old_layer)
    train("optimizer.lr=0.02")
    diagnosis = examine_numerics("runs/run").diagnosis
    assert (diagnosis.cause, diagnosis.side) == ("partial weights", "rollout"), diagnosis
    assert "layers.1" in diagnosis.detail and "version 0" in diagnosis.detail


def test_a_bound_stops_the_run_and_its_state_is_saved(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Roles, "_temperature", lambda self: 1.0)
    with pytest.raises(NumericsError, match="watch/log_prob_gap"):
        train("watch.log_prob_gap.stop=0.05")
    run = read_run("runs/run")
    assert [row["step"] for row in run.steps] == [1] and list(Path("runs/run/checkpoints").glob("step_000001"))


@pytest.mark.parametrize("stop", [False, True])
def test_a_gradient_that_is_not_finite(folder: Path, stop: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    from podium.stages.advantage import AdvantageStage

    run = AdvantageStage.run

    def infinite(self: Any, batch: Any, context: Any) -> Any:
        out = run(self, batch, context)
        if context.step == 1:
            out["advantages"].values[0] = math.inf
        return out

    monkeypatch.setattr(AdvantageStage, "run", infinite)
    if stop:
        with pytest.raises(NumericsError, match=r"skipped_updates|loss"):
            train("watch.nonfinite=stop")
    else:
        train()
    facts = read_run("runs/run")
    assert len(facts.steps) == (2 if stop else 3) and facts.nonfinite == ["nonfinite_step_000002.jsonl"]
    rows = [json.loads(line) for line in Path("runs/run/samples/nonfinite_step_000002.jsonl").read_text().splitlines()]
    assert len(rows) == 8 and all(row["response_ids"] for row in rows) and rows[0]["advantages"][0] is None
    assert "gradient not finite" in [f.cause for f in examine(facts)]


def test_watching_can_be_switched_off(folder: Path) -> None:
    train("watch.enabled=false", "run.steps=1")
    assert not any(name.startswith("watch/") for name in read_run("runs/run").steps[0])


def test_an_error_is_kept_for_the_doctor(folder: Path) -> None:
    calls: list[int] = []

    def breaks(prompts: Any, completions: Any, **columns: Any) -> list[float]:
        calls.append(1)
        if len(calls) == 3:
            raise ValueError("no judge today")
        return by_length(prompts, completions)

    with pytest.raises(RewardError):
        train(reward=breaks)
    (found,) = (f for f in examine(read_run("runs/run")) if f.severity == "error")
    assert found.cause == "a reward failed" and "no judge today" in found.what


def test_equal_rewards(folder: Path) -> None:
    train(reward=lambda prompts, completions, **columns: [0.0] * len(completions))
    found = examine(read_run("runs/run"))
    assert found[0].cause == "no signal: all rewards are equal" and "all are wrong" in found[0].what


def test_the_plan_of_a_recipe_and_its_short_form(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    import yaml

    Path("recipe.yaml").write_text(yaml.safe_dump(RECIPE | {"rewards": [{"function": "exact_match"}]}))
    assert podium("plan", "recipe.yaml") == 0
    shown = capsys.readouterr().out
    assert "It fits." in shown and "update actor" in shown and "rollout" in shown
    assert podium("plan", "recipe.yaml", "--json") == 0
    assert json.loads(capsys.readouterr().out)["fits"]
    assert podium("train", "recipe.yaml", "--dry-run") == 0
    assert "plan: at most" in capsys.readouterr().err
    Path("small.yaml").write_text("{nodes: 1, devices: 1, device: x, memory_gb: 2.001, flops: 1.0e+12, bandwidth: 1.0e+10}")
    assert podium("plan", "recipe.yaml", "--cluster", "small.yaml") == 1
    assert "It does not fit." in capsys.readouterr().out
