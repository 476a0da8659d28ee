"""What ends a run early loses nothing that was learnt, and what goes on with it is what would have been."""

from __future__ import annotations

import json
import resource
import signal
import sys
from contextlib import contextmanager

import pytest
import torch

from podium.checkpoints.store import CheckpointStore, verify
from podium.core.errors import CheckpointError, ConfigError, ResourceError, RewardError
from podium.recipes import build, load
from podium.trainer.interrupt import STOPPING, InterruptGuard
from podium.trainer.state import Border
from podium.trainer.trainer import Trainer
from tests.tiny import tiny_model, tiny_tokenizer

ROWS = [{"prompt": f"What is {a} plus {b}?", "answer": str(a + b)} for a in range(4) for b in range(4)]
EVALUATED = ("data.eval_samples=4", "evaluation.every_steps=2")


@pytest.fixture(scope="module")
def model_folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("model")
    tiny_model().save_pretrained(folder)
    tiny_tokenizer().save_pretrained(folder)
    return str(folder)


class Reward:
    """Scores by length; at its `at`-th call it does something else first."""

    def __init__(self):
        self.calls, self.at, self.act = 0, 0, lambda: None

    def __call__(self, prompts, completions, **columns):
        self.calls += 1
        if self.calls == self.at:
            self.act()
        return [float(len(c) % 5) / 4 for c in completions]


def boom():
    raise ValueError("boom")


def ctrl_c():
    signal.raise_signal(signal.SIGINT)


def ctrl_c_twice():
    ctrl_c()
    ctrl_c()


@pytest.fixture
def made(model_folder, tmp_path):
    """Makes a trainer of the run `name`; the reward acts at its `at`-th call."""

    def make(name, *overrides, at=0, act=boom, algorithm="grpo", rows=ROWS, steps=4, reward=None):
        given, reward = reward, Reward()
        reward.at, reward.act = at, act
        values = {
            "algorithm": algorithm,
            "model": {"path": model_folder, "dtype": "float32"},
            "batch": {"prompts_per_step": 4, "group_size": 2},
            "optimizer": {"lr": 1e-3},
            "rollout": {"max_new_tokens": 6},
            "checkpoint": {"export": False},
            "rewards": [{"function": given or (lambda prompts, completions, **columns: reward(prompts, completions))}],
            "run": {"folder": str(tmp_path), "name": name, "steps": steps, "trackers": [], "progress": False},
        }
        return build(load(None, overrides, values), data=rows)

    return make


def rows_of(folder):
    """The metrics that depend on what was computed, not on how long it took."""
    rows = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    return [{k: v for k, v in row.items() if not k.startswith(("time", "speed", "memory"))} for row in rows]


def saved(folder):
    return CheckpointStore(folder / "checkpoints").steps()


@contextmanager
def largest_file(size):
    """A disk that takes files of up to `size` bytes."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)


# ---------------------------------------------------------------------- errors


@pytest.mark.parametrize("algorithm", ["grpo", "ppo"])
def test_an_error_in_a_step_keeps_the_steps_before_it(algorithm, made, tmp_path, capsys):
    overrides = ("batch.minibatch_sequences=4", "kl.coef=0.1", "kl.controller=adaptive")
    with pytest.raises(RewardError, match="boom") as raised:
        made("part", *overrides, at=3, algorithm=algorithm).train()
    line = f"saved after step 2; continue with --resume {tmp_path / 'part'}"
    assert line in raised.value.__notes__ and line in capsys.readouterr().err
    assert saved(tmp_path / "part") == [2]
    result = made("part", *overrides, algorithm=algorithm).train(resume=True)
    whole = made("whole", *overrides, algorithm=algorithm).train()
    assert rows_of(result.run_folder) == rows_of(whole.run_folder)


def test_an_error_after_the_weights_changed_saves_nothing_new(made, tmp_path):
    for name, every, expected in (
        ("none", 0, "no checkpoint was saved: step 2 broke off"),
        ("older", 1, "saved after step 1;"),
    ):
        trainer = made(name, "batch.minibatch_sequences=4", f"checkpoint.every_steps={every}").prepare()
        engine = trainer.roles["actor"].workers[0].engine
        update, calls = engine.update, []

        def fails(*given, update=update, calls=calls):
            calls.append(1)
            return boom() if len(calls) == 4 else update(*given)

        engine.update = fails
        with pytest.raises(ValueError, match="boom") as raised:
            trainer.train()
        assert any(expected in note for note in raised.value.__notes__)
        assert saved(tmp_path / name) == ([1] if every else [])


def test_an_update_that_broke_off_in_the_optimizer_is_noticed(made, tmp_path):
    """The version says nothing yet, but some weights have changed."""
    trainer = made("run").prepare()
    optimizer = trainer.roles["actor"].workers[0].engine._optimizer
    write, calls = optimizer._write_parameters, []
    optimizer._write_parameters = lambda: (calls.append(1), boom() if len(calls) == 2 else write())
    with pytest.raises(ValueError, match="boom"):
        trainer.train()
    assert saved(tmp_path / "run") == []


def test_an_error_in_the_first_step_leaves_no_checkpoint(made, tmp_path):
    with pytest.raises(RewardError, match="boom"):
        made("run", at=1).train()
    assert saved(tmp_path / "run") == []


def test_an_error_in_an_evaluation_keeps_the_step(made, tmp_path):
    with pytest.raises(RewardError, match="boom"):
        made("part", *EVALUATED, at=4).train()  # start, step 1, step 2, evaluation
    assert saved(tmp_path / "part") == [2]
    result = made("part", *EVALUATED).train(resume=True)
    assert rows_of(result.run_folder) == rows_of(made("whole", *EVALUATED).train().run_folder)


# ---------------------------------------------------------------------- state of the user's own


class Novelty:
    """A reward with a memory: what was answered before counts less, and a moving mean is taken off."""

    def __init__(self):
        self.seen, self.mean, self.calls, self.dies_at = {}, torch.zeros(1), 0, 0

    def __call__(self, prompts, completions, **columns):
        self.calls += 1
        if self.calls == self.dies_at:
            boom()
        out = []
        for text in completions:
            self.seen[text[:1]] = self.seen.get(text[:1], 0) + 1
            score = 1.0 / self.seen[text[:1]]
            self.mean = 0.9 * self.mean + 0.1 * score
            out.append(score - float(self.mean))
        return out

    def state_dict(self):
        return {"seen": self.seen, "mean": self.mean, "calls": self.calls}

    def load_state_dict(self, state):
        self.seen, self.mean, self.calls = state["seen"], state["mean"], state["calls"]


class Forgetful(Novelty):
    """The same without a word of its state."""

    state_dict = load_state_dict = None


@pytest.mark.parametrize("sampling", [(), ("sampling_rounds=2",)], ids=["plain", "dynamic sampling"])
def test_a_reward_with_state_goes_on_where_it_was(sampling, made):
    def run(name, kind, dies_at=0, **given):
        reward = kind()
        reward.dies_at = dies_at
        trainer = made(name, *EVALUATED, *sampling, reward=reward)
        return trainer.train(**given).run_folder

    whole = rows_of(run("whole", Novelty))
    with pytest.raises(RewardError, match="boom"):
        run("part", Novelty, dies_at=6)
    assert rows_of(run("part", Novelty, resume=True)) == whole
    # What the state is for: an object that does not keep it gives other numbers, and the test would see them.
    with pytest.raises(RewardError, match="boom"):
        run("forgetful", Forgetful, dies_at=6)
    assert rows_of(run("forgetful", Forgetful, resume=True)) != whole


def test_a_step_that_is_made_again_finds_the_reward_s_state_as_it_was(made):
    reward = Novelty()
    trainer = made("run", reward=reward).prepare()
    border = Border.of(trainer)
    trainer.train()
    assert reward.seen
    border.return_to(trainer)
    assert reward.seen == {} and float(reward.mean) == 0.0


# ---------------------------------------------------------------------- Ctrl-C


def test_the_first_ctrl_c_is_acknowledged_at_once(made, capsys):
    seen = []
    made("run", at=2, act=lambda: (ctrl_c(), seen.append(capsys.readouterr().err))).train()
    assert STOPPING in seen[0]


def test_the_second_ctrl_c_keeps_the_last_border(made, tmp_path, capsys):
    with pytest.raises(KeyboardInterrupt):
        made("part", at=3, act=ctrl_c_twice).train()
    assert saved(tmp_path / "part") == [2] and "saved after step 2; continue with --resume" in capsys.readouterr().err
    result = made("part").train(resume=True)
    assert rows_of(result.run_folder) == rows_of(made("whole").train().run_folder)


def test_a_second_ctrl_c_while_the_first_one_s_state_is_saved(made, tmp_path, monkeypatch):
    write = CheckpointStore._write
    monkeypatch.setattr(CheckpointStore, "_write", lambda *given: (ctrl_c(), write(*given))[1])
    stopped = made("run", at=2, act=ctrl_c).train()
    assert stopped.interrupted and saved(tmp_path / "run") == [2]


def test_a_signal_in_the_middle_of_a_write_is_acknowledged_all_the_same(capfd):
    def busy(text):
        raise RuntimeError("reentrant call")

    with InterruptGuard(busy) as guard:
        ctrl_c()
        assert guard.requested
    assert STOPPING in capfd.readouterr().err


@pytest.mark.parametrize("step", [2, 4], ids=["periodic", "final"])
def test_an_interrupted_evaluation_is_made_after_the_resume(step, made):
    trainer = made("part", *EVALUATED).prepare()
    engine = trainer.roles["actor"].workers[0].rollout
    measure, step_of, count = trainer.measure, engine.step, []

    def measured(*given):
        count.append(1)
        if len(count) == step // 2 + 1:
            engine.step = lambda: (ctrl_c(), setattr(engine, "step", step_of), step_of())[2]
        return measure(*given)

    trainer.measure = measured
    stopped = trainer.train()
    assert stopped.interrupted and stopped.steps == step
    result = made("part", *EVALUATED).train(resume=True)
    whole = made("whole", *EVALUATED).train()
    assert rows_of(result.run_folder) == rows_of(whole.run_folder)
    for name in ("evaluation_before", "evaluation_after"):
        a, b = getattr(result, name), getattr(whole, name)
        assert a.pop("time/evaluate") and b.pop("time/evaluate") and a == b


# ---------------------------------------------------------------------- disks


def test_a_full_disk_is_an_error_of_one_line_and_leaves_nothing_half_written(made, tmp_path):
    with largest_file(40_000), pytest.raises(CheckpointError, match="could not write the checkpoint of step 1"):
        made("run", "checkpoint.every_steps=1").train()
    assert not list((tmp_path / "run" / "checkpoints").iterdir())


def test_a_full_disk_at_the_export(made, tmp_path, monkeypatch):
    trainer = made("run", "checkpoint.export=true", steps=1).prepare()
    save = CheckpointStore.save

    def then_full(self, *given):
        path = save(self, *given)
        resource.setrlimit(resource.RLIMIT_FSIZE, (40_000, resource.getrlimit(resource.RLIMIT_FSIZE)[1]))
        return path

    monkeypatch.setattr(CheckpointStore, "save", then_full)
    with largest_file(10**9), pytest.raises(CheckpointError, match="could not write the model"):
        trainer.train()
    assert saved(tmp_path / "run") == [1]


def test_a_damaged_newest_checkpoint_is_made_again(made, tmp_path):
    made("run", "checkpoint.every_steps=2").train()
    newest = tmp_path / "run" / "checkpoints" / "step_000004"
    tensors = newest / "role_actor.safetensors"
    data = bytearray(tensors.read_bytes())
    data[-1] ^= 1
    tensors.write_bytes(bytes(data))
    result = made("run").train(resume=True)
    assert result.steps == 4 and verify(newest) is None and saved(result.run_folder) == [2, 4]
    assert rows_of(result.run_folder) == rows_of(made("whole").train().run_folder)


# ---------------------------------------------------------------------- what a resume takes


def test_a_finished_run_keeps_its_results(made, capsys):
    first = made("run", *EVALUATED).train()
    summary = (first.run_folder / "summary.json").read_text()
    again = made("run", *EVALUATED).train(resume=True)
    assert again == first and (first.run_folder / "summary.json").read_text() == summary
    assert "nothing was left to do: all 4 steps were made before" in capsys.readouterr().err
    longer = made("run", *EVALUATED, steps=5).train(resume=True)
    assert longer.steps == 5 and longer.evaluation_before == first.evaluation_before


def test_a_name_is_not_a_prefix(made, tmp_path):
    made("exp-large", steps=1).train()
    with pytest.raises(CheckpointError, match="no run called 'exp' has a checkpoint"):
        made("exp", steps=2).train(resume=True)
    for _ in range(2):
        made("exp", steps=1).train()
    assert made("exp", steps=2).train(resume=True).run_folder.name == "exp-2"


def test_a_run_without_a_checkpoint_is_skipped(made):
    kept = made("run", steps=1).train()
    with pytest.raises(RewardError):
        made("run", at=1).train()
    assert made("run", steps=2).train(resume=True).run_folder == kept.run_folder


def test_a_run_without_a_name(made):
    first = made(None, steps=1).train()
    made("grpo-mine", steps=1).train()
    assert made(None, steps=2).train(resume=True).run_folder == first.run_folder


def test_other_rows_of_the_same_number(made):
    made("run", steps=1).train()
    others = [{**row, "prompt": f"And {row['prompt']}"} for row in ROWS]
    with pytest.raises(CheckpointError, match="rows are others"):
        made("run", steps=2, rows=others).train(resume=True)


# ---------------------------------------------------------------------- before the run


def test_wrong_trackers_leave_no_folder(made, tmp_path, monkeypatch):
    with pytest.raises(ConfigError, match="did you mean 'tensorboard'"):
        made("run", "run.trackers=[tensorbord]")
    monkeypatch.setitem(sys.modules, "wandb", None)
    with pytest.raises(ResourceError, match="'wandb' is not installed"):
        made("run", "run.trackers=[wandb]").train()
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("device", ["cqu", "cpu:x", "cuda:99"])
def test_a_device_that_is_not_there(device, made, tmp_path):
    with pytest.raises(ConfigError, match=r"run\.device"):
        made("run", f"run.device={device}").train()
    assert not list(tmp_path.iterdir())


def test_settings_given_twice(made):
    settings = made("run").settings
    for given in ({"config": settings, "config_path": "other.yaml"}, {"stages": settings, "config": {"algorithm": "ppo"}}):
        with pytest.raises(ConfigError, match="settings are given twice"):
            Trainer(**given)


def test_a_switched_kl_controller_is_in_the_border_that_is_saved(made, tmp_path):
    trainer = made("run", "kl.coef=0.1", at=2, act=lambda: (trainer.set_kl_controller("adaptive", target=0.5), boom()))
    with pytest.raises(RewardError):
        trainer.train()
    step, saved_state = CheckpointStore(tmp_path / "run" / "checkpoints").load()
    assert step == 1 and saved_state["stages"]["kl"]["kind"] == "adaptive"


def test_a_reference_that_is_another_model_is_refused(tmp_path):
    """A model in memory was trained by the run's first part: as the reference of the second it would hide the KL."""
    from podium.core.errors import CheckpointError
    from podium.recipes import train
    from tests.tiny import tiny_model, tiny_tokenizer

    rows = [{"prompt": f"What is {n}?"} for n in range(8)]
    model, given = tiny_model(), {"tokenizer": tiny_tokenizer(), "kl": {"coef": 0.1}, "rollout": {"max_new_tokens": 4}}
    given |= {"batch": {"prompts_per_step": 2, "group_size": 2}, "optimizer": {"lr": 1e-2}}
    run = {"folder": str(tmp_path), "name": "run", "trackers": [], "progress": False}

    def reward(completions, **columns):
        return [float(len(c)) for c in completions]

    train(model, rows, reward, run={**run, "steps": 1}, **given)
    with pytest.raises(CheckpointError, match="the reference has other weights"):
        train(model, rows, reward, run={**run, "steps": 2}, resume=True, **given)
    assert train(tiny_model(), rows, reward, run={**run, "steps": 2}, resume=True, **given).steps == 2
