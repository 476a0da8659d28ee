"""Dispatch, futures, handles, pools."""

import pytest

from podium.controller.dispatch import PROTOCOLS, dispatch
from podium.controller.executors.local import LocalExecutor
from podium.controller.resource_pool import ResourcePool
from podium.core.batch import Batch
from podium.core.errors import ConfigError, ResourceError
from podium.core.metrics import Metrics
from podium.core.ranks import Ranks


class Worker:
    @dispatch("rows")
    def double(self, batch, factor=2.0):
        return Batch({"rewards": batch["scores"] * factor})

    @dispatch("first")
    def fail(self):
        raise ValueError("no")

    def hidden(self):
        return 1


def test_a_future_passes_for_its_result():
    role = LocalExecutor().launch({"reward": lambda context: Worker()})["reward"]
    batch = Batch({"scores": [1.0, 2.0]})
    future = role.double(batch)
    assert future["rewards"].tolist() == [2.0, 4.0] and len(future) == 2 and "rewards" in future
    assert batch.union(future).names == ["rewards", "scores"]
    assert role.double(Batch({"scores": [3.0]}), factor=1.0).result()["rewards"].tolist() == [3.0]


def test_arguments_may_be_futures():
    role = LocalExecutor().launch({"reward": lambda context: Worker()})["reward"]
    first = role.double(Batch({"scores": [1.0]}))
    renamed = role.double(Batch({"scores": first["rewards"]}))
    assert renamed["rewards"].tolist() == [4.0]


def test_an_error_carries_role_rank_and_method_and_is_never_swallowed():
    role = LocalExecutor().launch({"critic": lambda context: Worker()})["critic"]
    with pytest.raises(ValueError) as caught:
        role.fail()
    assert "role 'critic', rank 0, method 'fail'" in caught.value.__notes__[0]


def test_only_dispatched_methods_can_be_called():
    role = LocalExecutor().launch({"critic": lambda context: Worker()})["critic"]
    with pytest.raises(AttributeError, match="did you mean 'double'"):
        role.duoble  # noqa: B018
    with pytest.raises(AttributeError, match="no method 'hidden'"):
        role.hidden  # noqa: B018


def test_rows_are_split_evenly_and_collected_in_order():
    batch = Batch({"scores": [0.0, 1.0, 2.0, 3.0, 4.0], "response_ids": [[1], [2, 3], [], [4], [5]]})
    plan = PROTOCOLS.get("rows")((batch,), {"factor": 3}, Ranks(data=2))
    assert [len(args[0]) for args, _ in plan.calls] == [3, 2] and plan.calls[0][1] == {"factor": 3}
    back = plan.collect([args[0] for args, _ in plan.calls])
    assert back["response_ids"].to_list() == batch["response_ids"].to_list()


def test_metrics_of_ranks_add_up_by_count():
    parts = [Metrics({"loss": (2.0, 1.0)}), Metrics({"loss": (1.0, 3.0)})]
    plan = PROTOCOLS.get("rows")((Batch({"scores": [1.0, 2.0]}),), {}, Ranks(data=2))
    assert plan.collect(parts).mean("loss") == 0.75


def test_pool_with_unknown_role_key_or_repeated_gpu():
    with pytest.raises(ResourceError, match="unknown role 'actr'"):
        ResourcePool({"actr": {}})
    with pytest.raises(ConfigError, match="did you mean 'gpus'"):
        ResourcePool({"actor": {"gpu": [0]}})
    with pytest.raises(ConfigError, match="distinct"):
        ResourcePool({"actor": {"gpus": [0, 0]}})


def test_a_backend_that_is_not_there_is_named():
    pool = ResourcePool({"actor": {"gpus": [0, 1], "backend": "fsdp"}})
    with pytest.raises(ResourceError, match=r"backend 'fsdp' is not in this version .* role 'actor'[\s\S]*single"):
        pool.check({"actor": {"single"}})


def test_the_command_line_s_executor_and_workers():
    from podium.cli.train import executor_values

    assert executor_values(None, None) == {}
    assert executor_values(None, 2) == {"executor": {"kind": "ray", "workers": 2}}
    assert executor_values("spmd", None) == {"executor": {"kind": "spmd"}}
    with pytest.raises(ConfigError, match=r"2 workers do not go into one process\n.*--executor ray"):
        executor_values("local", 2)
    from podium.controller.executors import create_executor
    from podium.core.settings import ExecutorSettings

    with pytest.raises(ConfigError, match=r"executor\.kind=ray"):
        create_executor(ExecutorSettings(workers=2))
    assert ResourcePool({"actor": {"cpus": 2}}).notes("cpu", 0) == [
        "the pools ask for 2 processes; this run has one (executor.kind=ray has several)"
    ]
