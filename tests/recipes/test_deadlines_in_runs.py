"""A run whose scorer never answers ends within its deadline, with a report and a checkpoint, and goes on as if nothing was."""

from __future__ import annotations

import json
import signal
import time

import pytest

from podium.core.errors import DeadlineError
from podium.recipes import build, load
from podium.stages.reward import RewardStage
from podium.stages.rollout import RolloutStage
from podium.stages.sampling import DynamicSamplingStage
from podium.trainer.waits import kind_of
from tests.tiny import tiny_model, tiny_tokenizer

ROWS = [{"prompt": f"What is {n}?", "answer": str(n)} for n in range(12)]


@pytest.fixture(scope="module")
def model_folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("model")
    tiny_model().save_pretrained(folder)
    tiny_tokenizer().save_pretrained(folder)
    return str(folder)


class Scorer:
    """Does `act` at the calls whose numbers are in `at`."""

    def __init__(self, at=(), act=lambda: time.sleep(600)):
        self.calls, self.at, self.act = 0, at, act

    def __call__(self, prompts, completions, **columns):
        self.calls += 1
        if self.calls in self.at:
            self.act()
        return [float(len(c) % 5) for c in completions]


@pytest.fixture
def made(model_folder, tmp_path):
    def make(name, scorer, *overrides):
        values = {
            "algorithm": "grpo",
            "model": {"path": model_folder, "dtype": "float32"},
            "batch": {"prompts_per_step": 2, "group_size": 2},
            "optimizer": {"lr": 1e-3},
            "rollout": {"max_new_tokens": 4},
            "checkpoint": {"export": False},
            "deadlines": {"reward": 1.0},
            "rewards": [{"function": lambda prompts, completions, **columns: scorer(prompts, completions)}],
            "run": {"folder": str(tmp_path), "name": name, "steps": 3, "trackers": [], "progress": False},
        }
        return build(load(None, overrides, values), data=ROWS)

    return make


def rows_of(folder):
    rows = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    return [{k: v for k, v in row.items() if not k.startswith(("time", "speed", "memory"))} for row in rows]


@pytest.mark.parametrize("overrides", [(), ("sampling_rounds=2",)], ids=["reward", "dynamic sampling"])
def test_a_scorer_that_never_answers(overrides, made, tmp_path, capsys):
    with pytest.raises(DeadlineError, match="stage 'reward' did not end within 1 s") as raised:
        made("part", Scorer(at=[3]), *overrides).train()
    assert any("saved after step" in note for note in raised.value.__notes__)
    (path,) = (tmp_path / "part" / "reports").glob("*.json")
    report = json.loads(path.read_text())
    assert report["owner"] == "stage 'reward'" and report["last_stage"] == "rollout" and report["action"] == "stop"
    assert report["about"].startswith("4 samples, the first: data row") and "What is" in report["about"]
    assert report["doing"][-1] == "reward '<lambda>' over 4 samples"
    result = made("part", Scorer(), *overrides).train(resume=True)
    assert rows_of(result.run_folder) == rows_of(made("whole", Scorer(), *overrides).train().run_folder)


def test_a_step_is_made_again(made, tmp_path, capsys):
    result = made("part", Scorer(at=[2, 3]), "deadlines.action=retry").train()
    assert result.steps == 3 and "making step 2 again" in capsys.readouterr().err
    assert len(list((result.run_folder / "reports").glob("*.json"))) == 2
    assert rows_of(result.run_folder) == rows_of(made("whole", Scorer()).train().run_folder)


def test_no_more_often_than_the_settings_say(made):
    with pytest.raises(DeadlineError):
        made("run", Scorer(at=range(2, 9)), "deadlines.action=retry", "deadlines.retries=1").train()


def test_ctrl_c_says_what_the_run_is_at(made, capsys):
    seen = []

    def ctrl_c():
        signal.raise_signal(signal.SIGINT)
        seen.append(capsys.readouterr().err)

    made("run", Scorer(at=[2], act=ctrl_c)).train()
    assert "now at: stage 'reward', reward '<lambda>' over 4 samples" in seen[0]


def test_a_run_that_waits_for_nothing_leaves_no_folder(made):
    assert not (made("run", Scorer()).train().run_folder / "reports").exists()


def test_which_deadline_is_a_stage_s():
    rollout, reward = RolloutStage(), RewardStage(functions=[Scorer().__call__])
    kinds = [kind_of(s) for s in (rollout, reward, DynamicSamplingStage(rollout, reward))]
    assert kinds == ["rollout", "reward", "parts"]
