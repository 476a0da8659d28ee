"""What a user or a cluster can get wrong: refused before the start, or reported with role, rank and pool."""

from __future__ import annotations

import importlib
import os
import subprocess
import sys
import time

import pytest

from podium import Trainer
from podium.controller.executors.spmd import SpmdExecutor
from podium.controller.placement import Node, place
from podium.controller.resource_pool import ResourcePool
from podium.core.errors import ConfigError, PodiumError, ResourceError, WorkerLost
from podium.trainer.roles import check_rollout_engine
from tests.executors import trouble
from tests.executors.players import DiesInInit, Player, Unbuildable, batch
from tests.executors.test_runs import PROMPTS, settings
from tests.executors.test_suite import torchrun
from tests.tiny import tiny_model, tiny_tokenizer

ROLES = ("actor", "critic", "reference", "reward")
A, B, C = Node("a", 8, (0, 1, 2, 3), "H100", 80.0), Node("b", 8, (0, 1), "T4", 16.0), Node("c", 8)


def placed(pool, nodes=(A, B, C), roles=ROLES, **more):
    return {p.name: p for p in place(ResourcePool(pool), roles, nodes, **more)}


# ---------------------------------------------------------------------- placement, as a pure function


def test_pools_by_ids_type_memory_and_cpus():
    pools = placed(
        {
            "actor": {"gpus": [1, 3]},
            "critic": {"gpus": [1, 3], "backend": "fsdp"},
            "reference": {"cpus": 2},
            "reward": {"gpus_per_node": 1, "gpu_memory_gb": 10, "gpu_type": "t4"},
        }
    )
    assert pools["actor"].roles == ("actor", "critic")  # the same list: the same processes
    assert [(s.node, s.gpu) for s in pools["actor"].places] == [("a", 1), ("a", 3)]
    assert (pools["actor"].ranks["actor"].data, pools["actor"].ranks["critic"].shard) == (2, 2)
    assert [s.gpu for s in pools["reference"].places] == [None, None] and pools["reference"].device == "cpu"
    assert [(s.node, s.gpu) for s in pools["reward"].places] == [("b", 0)]


def test_a_pool_over_nodes_and_roles_without_a_pool():
    pools = placed({"actor": {"gpus_per_node": 2, "nodes": 2, "parallel": {"tensor": 2}}})
    assert [s.node for s in pools["actor"].places] == ["b", "b", "a", "a"] and pools["actor"].roles == ROLES
    assert (pools["actor"].ranks["actor"].data, pools["actor"].ranks["actor"].tensor) == (2, 2)
    assert [s.gpu for s in placed({}, workers=4)["actor"].places] == [0, 1, 2, 3]
    assert placed({}, nodes=(C,), workers=2)["actor"].device == "cpu"


@pytest.mark.parametrize(
    ("pool", "message"),
    [
        (
            {"actor": {"gpus_per_node": 8}},
            r"resource_pool.actor.gpus_per_node: 1 x 8 GPUs .* a: 4 H100 GPUs.*\n.*gpus_per_node: 4",
        ),
        ({"actor": {"gpus": [0, 7]}}, r"resource_pool.actor.gpus: GPUs \[7\] are not there .* on a, which has \[0, 1, 2, 3\]"),
        ({"actor": {"gpu_type": "A100", "gpus_per_node": 1}}, r"no node has a free GPU of the type 'A100'\n.*H100, T4"),
        ({"actor": {"gpu_memory_gb": 100, "gpus_per_node": 1}}, r"no node has a free GPU with 100 GB.*\n.*at most 80"),
        ({"actor": {"cpus": 60}}, r"60 processes are asked for, and 24 CPUs are free.*\n.*cpus: 24 would do"),
        ({"actor": {"cpus": 4, "parallel": {"tensor": 3}}}, r"tensor must divide 4: one of \[1, 2, 4\]"),
        ({"actor": {"gpus": [0, 1]}, "critic": {"gpus": [1, 2]}}, r"GPU 1 is in the pools of 'actor' and 'critic'"),
        ({"actor": "critic"}, r"shares 'critic', which has no pool"),
        ({"actor": "critic", "critic": "actor"}, r"in a circle"),
        ({"actor": {"gpus": [0]}, "rollout": {"gpus": [1]}}, r"rollout has devices of its own(?s:.*)\{shares: actor"),
    ],
)
def test_what_does_not_fit_is_refused_with_what_would(pool, message):
    with pytest.raises(ResourceError, match=message):
        placed(pool)


def test_a_gpu_twice_in_one_pool():
    with pytest.raises(ConfigError, match=r"distinct.*\[0, 0\]"):
        ResourcePool({"actor": {"gpus": [0, 0]}})


# ---------------------------------------------------------------------- torchrun


def test_spmd_without_torchrun(monkeypatch):
    monkeypatch.delenv("RANK", raising=False)
    with pytest.raises(ResourceError, match=r"not started by torchrun\n.*torchrun --nproc-per-node"):
        SpmdExecutor()


@pytest.mark.parametrize(
    ("name", "kind", "text"),
    [
        ("other_values", "WorkerError", "actor.lengths with other values of scores"),
        ("another_batch_size", "WorkerError", "ranks 0 and 1 call actor.lengths with 7 and 6 rows"),
        ("another_batch_size_in_a_collective", "WorkerError", "call actor.break_off with 7 and 6 rows"),
        pytest.param(
            "another_call", "WorkerError", "rank 0 calls actor.place, rank 1 calls actor.where", marks=pytest.mark.slow
        ),
        ("one_fails_while_the_other_waits", "ValueError", "no good on rank 0"),
        pytest.param("not_built", "RuntimeError", "the weights are not there", marks=pytest.mark.slow),
    ],
)
def test_under_torchrun_no_rank_hangs(name, kind, text, tmp_path):
    assert name in trouble.SPMD
    first, second = torchrun(tmp_path / "out", [name])
    for seen in (first, second) if name != "one_fails_while_the_other_waits" else (first,):
        assert seen[name]["type"] == kind and text in seen[name]["text"] and seen[name]["seconds"] < 15
    if name == "not_built":
        assert "role 'actor', rank 1 of 2" in first[name]["notes"] and "traceback" in first[name]["notes"]


# ---------------------------------------------------------------------- Ray


def executor(**settings):
    from podium.controller.executors.ray import RayExecutor

    return RayExecutor(workers=2, **{"grace_seconds": 2.0, **settings})


def test_ray_not_installed(monkeypatch):
    module = importlib.import_module("podium.controller.executors.ray")
    monkeypatch.setitem(sys.modules, "ray", None)
    with pytest.raises(ResourceError, match=r"Ray is not installed\n.*pip install 'podium\[ray\]'"):
        module.RayExecutor().launch({"actor": Player})


def test_an_old_ray(monkeypatch, ray_cluster):
    monkeypatch.setattr(ray_cluster, "__version__", "2.9.1")
    with pytest.raises(ResourceError, match=r"Ray 2.9.1 is installed.*2.50 or later"):
        executor().launch({"actor": Player})


def test_no_ray_cluster_answers():
    """In a process of its own: this one may be connected to a cluster."""
    code = (
        "from podium.controller.executors.ray import RayExecutor\n"
        "try: RayExecutor(address='127.0.0.1:1').launch({'actor': None})\n"
        "except Exception as error: print(type(error).__name__, error)\n"
    )
    pytest.importorskip("ray")
    environment = {name: value for name, value in os.environ.items() if name != "RAY_ADDRESS"}
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=100, env=environment)
    assert "ResourceError executor.address: no Ray cluster answers at '127.0.0.1:1'" in done.stdout, done.stderr
    assert "ray start --head" in done.stdout


def test_a_cluster_of_another_version(monkeypatch, ray_cluster):
    module = importlib.import_module("podium.controller.executors.ray_cluster")

    def refuse(**given):
        raise RuntimeError("Version mismatch: The cluster was started with: Ray: 2.40.0 Python: 3.12")

    monkeypatch.setattr(ray_cluster, "is_initialized", lambda: False)
    monkeypatch.setattr(ray_cluster, "init", refuse)
    monkeypatch.setattr(module, "_check_answers", lambda address: None)
    with pytest.raises(ResourceError, match=r"Version mismatch: .*\n.*install the cluster's versions of Ray and Python here"):
        module.connect("host:6379", 1)


def test_a_pool_larger_than_the_ray_cluster(ray_cluster):
    for pool, text in (({"actor": {"cpus": 99}}, "99 processes are asked for"), ({"actor": {"gpus": [0]}}, "none is free")):
        with pytest.raises(ResourceError, match=text):
            executor(pool=pool).launch({"actor": Player})


@pytest.mark.slow
@pytest.mark.parametrize("kind", [Unbuildable, DiesInInit])
def test_a_worker_that_cannot_be_built(ray_cluster, kind):
    expected, text = (RuntimeError, "weights are not there") if kind is Unbuildable else (WorkerLost, "rank 0 is gone")
    with pytest.raises(expected, match=text) as caught:
        executor().launch({"actor": kind})
    assert "pool 'actor'" in str(caught.value) + "".join(getattr(caught.value, "__notes__", ()))


@pytest.mark.slow
def test_a_rank_that_fails_while_the_other_waits_in_a_collective(ray_cluster):
    players = executor()
    role = players.launch({"actor": Player})["actor"]
    started = time.monotonic()
    with pytest.raises(ValueError, match="no good on rank 1") as caught:
        role.fail_on(1, then_wait=True).result()
    notes = "".join(caught.value.__notes__)
    assert time.monotonic() - started < 10 and "rank 0 did not end within 2 s" in notes
    assert "role 'actor', rank 1 of 2, pool 'actor', method 'fail_on'" in notes and "players.py" in notes
    with pytest.raises(WorkerLost, match="was stopped"):
        role.place()


def test_a_hang_in_a_collective_ends_at_the_deadline_and_says_where(ray_cluster):
    players = executor()
    role = players.launch({"actor": Player})["actor"]
    players.deadline_seconds = 3.0
    with pytest.raises(WorkerLost, match="rank 1 did not answer within 3 s; rank 0 had ended: the ranks do not make") as caught:
        role.hang(0).result()
    text = str(caught.value) + "".join(caught.value.__notes__)
    assert "role 'actor', pool 'actor', method 'hang'" in text and "all_reduce" in text


def test_a_worker_that_dies_is_named_and_the_other_does_not_hang(ray_cluster):
    role = executor().launch({"actor": Player})["actor"]
    with pytest.raises(WorkerLost, match=r"role 'actor', pool 'actor', method 'die_on': rank 1 is gone"):
        role.die_on(1).result()


@pytest.mark.slow
def test_pools_work_at_the_same_time_and_roles_of_one_pool_in_turn(ray_cluster):
    players = executor(pool={"actor": {"cpus": 1}, "critic": {"cpus": 1}, "reference": "critic"})
    roles = players.launch({"actor": Player, "critic": Player, "reference": Player})
    futures = [roles[name].sleep(0.6) for name in ("actor", "critic", "reference")]  # a call does not wait
    (a0, a1), (c0, c1), (r0, _) = (future.result() for future in futures)
    assert a0 < c1 and c0 < a1 and r0 >= c1
    players.shutdown()


@pytest.mark.slow
def test_large_columns_stay_with_the_worker_until_they_are_read(ray_cluster):
    from podium.core.batch import Batch

    players = executor(pool={"actor": {"cpus": 2}, "critic": {"cpus": 2}})
    roles = players.launch({"actor": Player, "critic": Player})
    long = Batch({"prompt_ids": [[1]] * 8, "response_ids": [list(range(n)) for n in (9000, 5, 7000, 8000, 10, 9000, 1, 3000)]})
    out = roles["actor"].lengths(long).result()
    column = out["response_ids"]
    assert not column.is_here and column.lengths.tolist() == long.lengths("response").tolist()
    again = roles["critic"].lengths(long.select("prompt_ids").union(out.select("response_ids"))).result()
    assert not column.is_here and not again["response_ids"].is_here  # from worker to worker
    assert again["response_ids"].to_list() == long["response_ids"].to_list()
    assert again["scores"].tolist() == long.lengths("response").tolist()
    players.shutdown()


@pytest.mark.slow
def test_a_call_can_be_given_up_from_its_progress(ray_cluster):
    role = executor().launch({"actor": Player})["actor"]

    def stop(done, total, tokens):
        raise KeyboardInterrupt

    assert len(role.answer(batch().select("prompt_ids"), on_progress=lambda *numbers: None).result()) == 7
    with pytest.raises(KeyboardInterrupt):
        role.slow_answer(batch().select("prompt_ids"), on_progress=stop).result()
    assert len(role.place().result()) == 2  # the workers go on


@pytest.mark.slow
def test_lines_of_all_ranks_come_with_role_and_rank(ray_cluster, capfd):
    role = executor().launch({"actor": Player})["actor"]
    role.speak().result()
    text, until = "", time.monotonic() + 10
    while ("[actor 1] a line" not in text or "[actor 0] a line" not in text) and time.monotonic() < until:
        time.sleep(0.2)
        out, error = capfd.readouterr()
        text += out + error
    assert "[actor 0] a line of output" in text and "[actor 1] a line of output" in text


# ---------------------------------------------------------------------- layouts, before a weight is loaded


@pytest.mark.parametrize(
    ("pool", "message"),
    [
        (
            {"actor": {"cpus": 3, "parallel": {"tensor": 3}}},
            r"actor.parallel.tensor: .*4 attention heads .*one of \[1, 2\]",
        ),
        ({"actor": {"cpus": 3, "parallel": {"sequence": 3}}}, r"resource_pool.actor.parallel.sequence: .*one of \[1, 2, 4\]"),
        (
            {"actor": {"cpus": 4}, "rollout": {"parallel": {"tensor": 4}}},
            r"resource_pool.rollout.parallel.tensor: .*2 key/value heads do not divide by tensor=4.*one of \[1, 2\]",
        ),
        ({"actor": {"cpus": 3}, "rollout": {"parallel": {"tensor": 2}}}, r"tensor must divide 3: one of \[1, 3\]"),
        ({"actor": {"cpus": 2}, "rollout": {"parallel": {"shard": 2}}}, r"generation is not divided along 'shard'"),
    ],
)
def test_heads_that_do_not_divide_are_refused_before_anything_is_started(pool, message, ray_cluster, tmp_path, monkeypatch):
    """On Ray, from the config alone: the folder has no weights."""
    from podium.controller.executors import ray as module

    tiny_model().config.save_pretrained(tmp_path / "model")
    tiny_tokenizer().save_pretrained(tmp_path / "model")
    monkeypatch.setattr(module, "_Pool", lambda *_: pytest.fail("a process was started"))
    values = {**settings(tmp_path, algorithm="grpo"), "model": {"path": str(tmp_path / "model")}}
    trainer = Trainer(config={**values, "kl": {"coef": 0.0}, "executor": {"kind": "ray"}, "resource_pool": pool}, data=PROMPTS)
    with pytest.raises(PodiumError, match=f"(?s){message}"):
        trainer.prepare()
    trainer.close()


def test_another_rollout_engine_does_not_divide_a_model(tmp_path):
    values = settings(tmp_path, algorithm="grpo", kl={"coef": 0.0}, rollout={"engine": "hf"})
    values["resource_pool"] = {"rollout": {"parallel": {"tensor": 2}}}
    trainer = Trainer(config=values, models={"actor": tiny_model()}, tokenizer=tiny_tokenizer(), data=PROMPTS)
    with pytest.raises(PodiumError, match=r"tensor 2 makes 2 workers, and the pool has 1"):
        trainer.prepare()
    with pytest.raises(ConfigError, match=r"rollout.engine: .*'hf' runs whole models"):
        check_rollout_engine("hf", 2)
