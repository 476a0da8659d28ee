"""Whole runs: the numbers of one process on every executor and placement; a run that lost a worker goes on by itself."""

from __future__ import annotations

import json

import pytest

from podium import Trainer
from podium.core.errors import WorkerLost
from tests.tiny import tiny_model, tiny_tokenizer

PROMPTS = [{"prompt": f"What is {a} plus {b}?", "answer": str(a + b)} for a in range(4) for b in range(4)]


def reward(prompts, completions, **columns):
    return [float(len(c) % 5) / 4 for c in completions]


def settings(folder, algorithm="ppo", **sections):
    values = {
        "algorithm": algorithm,
        "batch": {"prompts_per_step": 4, "group_size": 2, "minibatch_sequences": 4},
        "rollout": {"max_new_tokens": 5},
        "optimizer": {"lr": 1e-3, "eps": 1e-5},
        "rewards": [{"function": reward}],
        "kl": {"coef": 0.05, "place": "reward"},
        "model": {"dtype": "float32"},
        "run": {"folder": str(folder), "steps": 2, "trackers": [], "progress": False, "threads": 1},
        "checkpoint": {"export": False},
    }
    return {**values, **sections}


def made(folder, rewards=reward, **sections):
    values = {**settings(folder, **sections), "rewards": [{"function": rewards, "name": "reward"}]}
    return Trainer(config=values, models={"actor": tiny_model()}, tokenizer=tiny_tokenizer(), data=PROMPTS)


def trained(folder, **sections):
    trainer = made(folder, **sections)
    return trainer, trainer.train()


def rows(result):
    lines = [json.loads(line) for line in (result.run_folder / "metrics.jsonl").read_text().splitlines()]
    return [{k: v for k, v in line.items() if "/" in k and not k.startswith(("time/", "speed/"))} for line in lines]


@pytest.fixture(scope="module")
def alone(tmp_path_factory):
    return rows(trained(tmp_path_factory.mktemp("alone"))[1])


POOLS = {
    "two copies": {"actor": {"cpus": 2}},
    "fsdp": {"actor": {"cpus": 2, "backend": "fsdp"}, "critic": {"shares": "actor", "backend": "fsdp"}},
    "split": {"actor": {"cpus": 2}, "critic": {"cpus": 1}, "reference": "critic"},
}


@pytest.mark.parametrize("name", ["two copies", *(pytest.param(name, marks=pytest.mark.slow) for name in ("fsdp", "split"))])
def test_ppo_on_ray_has_the_numbers_of_one_process(name, alone, ray_cluster, tmp_path):
    trainer, result = trained(tmp_path, executor={"kind": "ray"}, resource_pool=POOLS[name])
    trainer.close()
    for mine, theirs in zip(rows(result), alone, strict=True):
        assert mine == pytest.approx(theirs, rel=1e-4, abs=1e-5)


@pytest.mark.parametrize("saved", [True, pytest.param(False, marks=pytest.mark.slow)])
def test_a_run_that_loses_a_worker_goes_on_by_itself(saved, alone, ray_cluster, tmp_path):
    """A worker is killed while the controller scores the second step's answers: from a checkpoint, and from the start."""
    calls = []

    def deadly(prompts, completions, **columns):
        calls.append(len(completions))
        if len(calls) == 2:
            ray_cluster.kill(trainer.roles["actor"].workers[1])
        return reward(prompts, completions)

    trainer = made(
        tmp_path,
        deadly,
        executor={"kind": "ray", "workers": 2, "restarts": 1},
        checkpoint={"every_steps": int(saved), "export": False},
    )
    result = trainer.train()
    trainer.close()
    assert result.steps == 2 and len(calls) == (3 if saved else 4)
    for mine, theirs in zip(rows(result), alone, strict=True):
        assert mine == pytest.approx(theirs, rel=1e-4, abs=1e-5)


@pytest.mark.slow
def test_a_run_that_keeps_losing_workers_gives_up_and_says_how_to_go_on(ray_cluster, tmp_path):
    def deadly(prompts, completions, **columns):
        ray_cluster.kill(trainer.roles["actor"].workers[0])
        return reward(prompts, completions)

    trainer = made(tmp_path, deadly, executor={"kind": "ray", "workers": 2, "restarts": 0})
    with pytest.raises(WorkerLost, match="rank 0 is gone"):
        trainer.train()
