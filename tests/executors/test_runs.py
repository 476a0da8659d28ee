"""Whole runs: the numbers of one process on every executor and placement; a run that lost a worker goes on by itself."""

from __future__ import annotations

import json
import threading
from pathlib import Path

import pytest

from podium import Trainer
from podium.core.errors import WorkerLost
from podium.trainer.loop import TrainResult
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
    return [{k: v for k, v in line.items() if "/" in k and not k.startswith(("time/", "speed/", "memory/"))} for line in lines]


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


def samples(result):
    """Every rollout that was kept."""
    lines = [json.loads(line) for path in sorted(result.run_folder.glob("samples/*.jsonl")) for line in path.open()]
    return [{name: line[name] for name in ("prompt", "response_ids", "group_id", "policy_version")} for line in lines]


TOGETHER = {
    "fsdp": {"actor": {"cpus": 2, "backend": "fsdp"}, "rollout": {"shares": "actor", "parallel": {"tensor": 2}}},
    "tensor": {"actor": {"cpus": 2, "parallel": {"tensor": 2}}, "rollout": {"parallel": {"tensor": 2}}},
}


@pytest.mark.parametrize("name", ["fsdp", pytest.param("tensor", marks=pytest.mark.slow)])
def test_grpo_whose_workers_generate_with_one_model_between_them(name, ray_cluster, tmp_path):
    """The samples of every step and the metrics are those of one process."""
    want = trained(tmp_path / "alone", algorithm="grpo", kl={"coef": 0.0})[1]
    trainer, got = trained(
        tmp_path / "together", algorithm="grpo", kl={"coef": 0.0}, executor={"kind": "ray"}, resource_pool=TOGETHER[name]
    )
    trainer.close()
    assert samples(got) == samples(want) and len(samples(want)) == 16
    for mine, theirs in zip(rows(got), rows(want), strict=True):
        assert mine == pytest.approx(theirs, rel=1e-4, abs=1e-5)


@pytest.mark.slow
@pytest.mark.parametrize("generates", [1, 2])
def test_models_that_workers_read_in_parts(generates, ray_cluster, tmp_path):
    """PPO from a folder, actor and critic in FSDP: each worker reads its part; the numbers of one process that read it all."""
    tiny_model().save_pretrained(tmp_path / "model")
    tiny_tokenizer().save_pretrained(tmp_path / "model")
    pools = {**POOLS["fsdp"], "rollout": {"parallel": {"tensor": generates}}}
    results = []
    for name, sections in (("alone", {}), ("parts", {"executor": {"kind": "ray"}, "resource_pool": pools})):
        values = settings(tmp_path / name, model={"path": str(tmp_path / "model"), "dtype": "float32"}, **sections)
        trainer = Trainer(config=values, data=PROMPTS)
        results.append(trainer.train())
        trainer.close()
    assert samples(results[0]) == samples(results[1])
    for mine, theirs in zip(rows(results[1]), rows(results[0]), strict=True):
        assert mine == pytest.approx(theirs, rel=1e-4, abs=1e-5)


@pytest.mark.slow
def test_ppo_under_torchrun_has_them_too_and_rank_0_alone_writes(alone, tmp_path):
    from tests.executors.test_suite import start_ranks

    start_ranks(["tests.executors.spmd_train", str(tmp_path)], seconds=300)
    run = Path((tmp_path / "path").read_text())
    assert [p.name for p in tmp_path.iterdir() if p.is_dir()] == [run.name]
    assert (run / "model" / "config.json").is_file() and (run / "checkpoints" / "step_000002").is_dir()
    for mine, theirs in zip(rows(TrainResult(run, 2, 0.0, None, None, {})), alone, strict=True):
        assert mine == pytest.approx(theirs, rel=1e-4, abs=1e-5)


@pytest.mark.slow
def test_pools_on_two_nodes(alone, tmp_path):
    """A cluster of two nodes, simulated on this machine: each has room for two: the actor's three workers are on both."""
    ray = pytest.importorskip("ray")
    cluster_utils = pytest.importorskip("ray.cluster_utils")
    if ray.is_initialized():
        pytest.skip("another cluster runs in this process: start this test alone (-k two_nodes)")
    cluster = cluster_utils.Cluster(initialize_head=True, head_node_args={"num_cpus": 2})
    try:
        cluster.add_node(num_cpus=2)
        cluster.wait_for_nodes()
        trainer, result = trained(
            tmp_path,
            executor={"kind": "ray", "address": cluster.address},
            resource_pool={"critic": {"cpus": 1}, "actor": {"cpus": 3}, "reference": "actor"},
        )
        places = trainer.executor.placed["actor"].places
        trainer.close()
        assert len({place.node for place in places}) == 2
        for mine, theirs in zip(rows(result), alone, strict=True):
            assert mine == pytest.approx(theirs, rel=1e-4, abs=1e-5)
    finally:
        ray.shutdown()
        cluster.shutdown()


@pytest.mark.slow
@pytest.mark.timeout(1200)
@pytest.mark.parametrize("delay", [0.0, 0.03])
def test_a_worker_killed_at_any_stage(delay, ray_cluster, tmp_path):
    """Each step another stage loses a worker, before it calls it or while it does; the numbers are those of a quiet run."""
    values = {"run": {**settings(tmp_path)["run"], "steps": 6}}
    calm, quiet = trained(tmp_path / "calm", executor={"kind": "ray", "workers": 2}, **values)
    calm.close()
    more = {"executor": {"kind": "ray", "workers": 2, "restarts": 6}, "checkpoint": {"every_steps": 1, "export": False}}
    trainer = made(tmp_path / "killed", **more, **values)
    stages = {s.label: s for s in trainer.graph.stages}
    victims = ("rollout", "old_log_probs", "ref_log_probs", "values", "update_critic", "update_actor")
    done = set()
    for step, label in enumerate(victims):
        stages[label].run = deadly(trainer, stages[label].run, step, delay, done, ray_cluster)
    result = trainer.train()
    trainer.close()
    assert done == set(range(6)) and result.steps == 6
    for mine, theirs in zip(rows(result), rows(quiet), strict=True):
        assert mine == pytest.approx(theirs, rel=1e-4, abs=1e-5)


def deadly(trainer, run, at, delay, done, ray):
    """A stage's `run` that has a worker killed, once, at step `at`."""

    def run_and_kill(batch, context):
        if context.step == at and at not in done:
            done.add(at)
            victim = trainer.roles["actor"].workers[at % 2]
            threading.Timer(delay, lambda: ray.kill(victim)).start() if delay else ray.kill(victim)
        return run(batch, context)

    return run_and_kill


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
def test_a_run_goes_on_with_another_number_of_workers(alone, ray_cluster, tmp_path):
    """A checkpoint of two workers, resumed in one process."""
    first = {**settings(tmp_path)["run"], "steps": 1}
    trainer, result = trained(tmp_path, executor={"kind": "ray", "workers": 2}, run=first)
    trainer.close()
    rest = made(tmp_path).train(resume=result.run_folder)
    for mine, theirs in zip(rows(rest), alone, strict=True):
        assert mine == pytest.approx(theirs, rel=1e-4, abs=1e-5)


@pytest.mark.slow
def test_a_run_that_keeps_losing_workers_gives_up_and_says_how_to_go_on(ray_cluster, tmp_path):
    def deadly(prompts, completions, **columns):
        ray_cluster.kill(trainer.roles["actor"].workers[0])
        return reward(prompts, completions)

    trainer = made(tmp_path, deadly, executor={"kind": "ray", "workers": 2, "restarts": 0})
    with pytest.raises(WorkerLost, match="rank 0 is gone"):
        trainer.train()
