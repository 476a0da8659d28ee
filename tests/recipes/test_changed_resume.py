"""A resume under other settings shows what is other, and goes on only where that is accepted."""

from __future__ import annotations

import json

import pytest

from podium import RewardStage, RolloutStage, Trainer
from podium.core.errors import CheckpointError
from podium.recipes import build, load
from podium.stages.advantage import AdvantageStage
from podium.trainer.changes import ChangedSettings, changes, described, described_stage, differences, table
from tests.tiny import tiny_model, tiny_tokenizer

ROWS = [{"prompt": f"What is {a} plus {b}?", "answer": str(a + b)} for a in range(4) for b in range(4)]


@pytest.fixture(scope="module")
def model_folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("model")
    tiny_model().save_pretrained(folder)
    tiny_tokenizer().save_pretrained(folder)
    return str(folder)


@pytest.fixture
def made(model_folder, tmp_path):
    def make(*overrides, rows=ROWS, steps=1, algorithm="grpo"):
        values = {
            "algorithm": algorithm,
            "model": {"path": model_folder, "dtype": "float32"},
            "batch": {"prompts_per_step": 2, "group_size": 2},
            "rollout": {"max_new_tokens": 4},
            "checkpoint": {"export": False},
            "rewards": [{"function": lambda completions, answer, **columns: [float(len(c)) for c in completions]}],
            "run": {"folder": str(tmp_path), "name": "run", "steps": steps, "trackers": [], "progress": False},
        }
        return build(load(None, overrides, values), data=rows)

    return make


def test_the_difference_is_a_table_and_is_refused(made):
    made().train()
    with pytest.raises(ChangedSettings) as raised:
        made("optimizer.lr=0.01", "kl.coef=0.5", steps=2).train(resume=True)
    text = str(raised.value)
    assert "setting" in text and "--accept-changes" in text
    lines = {line.split()[0]: line.split()[1:] for line in text.splitlines() if line.startswith("  ") and "->" not in line}
    assert lines["optimizer.lr"] == ["1e-06", "0.01"] and lines["kl.coef"] == ["0.0", "0.5"]
    assert [name for name, _, _ in raised.value.changes] == ["kl.coef", "optimizer.lr"]


def test_an_accepted_change_takes_effect_and_is_kept(made, tmp_path, capsys):
    made().train()
    assert made("optimizer.lr=0.01", steps=2).train(resume=True, accept_changes=True).steps == 2
    rows = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    assert [row["actor/lr"] for row in rows] == [1e-6, 0.01]
    assert "accepted what has changed" in capsys.readouterr().err
    assert "lr: 0.01" in (tmp_path / "run" / "settings.yaml").read_text()
    assert "lr: 0.01" not in (tmp_path / "run" / "settings.until_000001.yaml").read_text()


def test_a_new_reference_is_an_accepted_change_too(made):
    made().train()
    assert made("kl.coef=0.5", steps=2).train(resume=True, accept_changes=True).steps == 2


@pytest.mark.parametrize("schedule", ["constant", "linear", "cosine"])
def test_more_steps_under_a_decay_are_a_change(schedule, made):
    made(f"optimizer.schedule={schedule}", steps=2).train()
    longer = made(f"optimizer.schedule={schedule}", steps=3)
    if schedule == "constant":
        assert longer.train(resume=True).steps == 3
        return
    with pytest.raises(ChangedSettings, match=rf"run.steps \(optimizer.schedule={schedule} decays over them\) +2 +3"):
        longer.train(resume=True)


def test_other_answers_to_the_same_prompts(made):
    made().train()
    others = [{**row, "answer": "7"} for row in ROWS]
    with pytest.raises(ChangedSettings, match=r"data rows\.answer +sha256"):
        made(steps=2, rows=others).train(resume=True)
    assert made(steps=2, rows=others).train(resume=True, accept_changes=True).steps == 2


def test_rows_that_are_others_cannot_be_accepted(made):
    """The position in them would mean nothing."""
    made().train()
    with pytest.raises(CheckpointError, match="rows are others"):
        made(steps=2, rows=[{**r, "prompt": f"So {r['prompt']}"} for r in ROWS]).train(resume=True, accept_changes=True)


def score(completions, **columns):
    return [float(len(c)) for c in completions]


def trainer_of(stages, tmp_path, model_folder, steps):
    from podium import PPOStage

    config = {
        "model": {"path": model_folder, "dtype": "float32"},
        "batch": {"prompts_per_step": 2, "group_size": 2},
        "checkpoint": {"export": False},
        "run": {"folder": str(tmp_path), "name": "run", "steps": steps, "trackers": [], "progress": False},
    }
    given = [RolloutStage(max_length=4), RewardStage(functions=[score]), PPOStage(**stages)]
    return Trainer(stages=given, config=config, data=ROWS)


def test_arguments_of_stages_are_compared(tmp_path, model_folder):
    trainer_of({"clip_low": 0.2}, tmp_path, model_folder, 1).train()
    with pytest.raises(ChangedSettings, match=r"stages\..*clip_low +0\.2 +0\.3"):
        trainer_of({"clip_low": 0.3}, tmp_path, model_folder, 2).train(resume=True)
    assert trainer_of({"clip_low": 0.2}, tmp_path, model_folder, 2).train(resume=True).steps == 2


def test_what_a_stage_was_given_in_plain_values():
    assert described({"a": (1, 2.0), "f": score}) == {"a": {"0": 1, "1": 2.0}, "f": f"{__name__}:score"}
    assert described(object()) == "object" and described({3, 1}) == {"0": 1, "1": 3}
    one, other = described_stage(AdvantageStage("gae", gamma=0.9)), described_stage(AdvantageStage("gae", gamma=0.8))
    assert one["class"] == "AdvantageStage" and one != other
    assert json.loads(json.dumps(one)) == one


def test_a_long_value_does_not_break_the_table():
    text = table([("a.b", "x" * 500, None)])
    assert all(len(line) < 160 for line in text.splitlines()) and text.splitlines()[1].endswith("-")


def test_a_list_is_compared_item_by_item():
    old = {"rewards": [{"function": "score:length", "weight": 1.0}, {"function": "score:right", "weight": 0.5}]}
    new = {
        "rewards": [
            {"function": "score:length", "weight": 1.0},
            {"function": "score:right", "weight": 0.7},
            {"function": "b:c"},
        ]
    }
    assert differences(old, new) == [("rewards.1.weight", 0.5, 0.7), ("rewards.2", None, {"function": "b:c"})]


def test_long_values_are_shown_where_they_begin_to_differ():
    line = table([("model.path", "/data/" * 30 + "first", "/data/" * 30 + "second")]).splitlines()[1]
    assert "first" in line and "second" in line and len(line) < 160


def test_what_may_change():
    def settings(**over):
        return {"settings": {"run": {"steps": 2, "seed": 0, "folder": "a", **over}}}

    assert changes(settings(), settings(folder="b", steps=9)) == []
    assert changes(settings(), settings(seed=1)) == [("run.seed", 0, 1)]


@pytest.mark.parametrize("answer", [True, False])
def test_a_terminal_is_asked(answer, made, monkeypatch, capsys):
    import sys

    from podium.cli import train

    made().train()
    for stream in (sys.stdin, sys.stderr):
        monkeypatch.setattr(stream, "isatty", lambda: True)
    monkeypatch.setattr(train.typer, "confirm", lambda text, **given: answer)
    trainer = made("optimizer.lr=0.01", steps=2)
    if answer:
        assert train._train(trainer, True, False).steps == 2
    else:
        with pytest.raises(ChangedSettings):
            train._train(trainer, True, False)
    assert "optimizer.lr" in capsys.readouterr().err
