"""The graph: order from reads and writes, and every way in which stages may not fit."""

import pytest

from podium.core.batch import Batch
from podium.core.errors import GraphError
from podium.stages.base import Stage, StepContext
from podium.stages.graph import StageGraph


def stage(name, reads=(), writes=(), **attributes):
    made = Stage()
    made.name, made.reads, made.writes = name, tuple(reads), tuple(writes)
    for key, value in attributes.items():
        setattr(made, key, value)
    return made


def labels(graph):
    return [s.label for s in graph.order]


def test_order_follows_the_columns_not_the_list():
    graph = StageGraph(
        [stage("advantages", ["rewards"], ["advantages"]), stage("reward", ["prompt_ids"], ["rewards"])], ["prompt_ids"]
    )
    assert labels(graph) == ["reward", "advantages"]


def test_independent_stages_share_a_level():
    graph = StageGraph(
        [
            stage("rollout", ["prompt_ids"], ["response_ids"], changes_rows=True),
            stage("values", ["response_ids"], ["values"]),
            stage("ref", ["response_ids"], ["ref_log_probs"]),
            stage("advantages", ["values", "ref_log_probs"], ["advantages"]),
        ],
        ["prompt_ids"],
    )
    assert graph.levels == [[0], [1, 2], [3]]


def test_a_role_is_updated_after_everyone_who_needs_its_old_weights():
    graph = StageGraph(
        [
            stage("update_actor", ["prompt_ids"], roles=("actor",), updates="actor"),
            stage("old_log_probs", ["prompt_ids"], ["old_log_probs"], roles=("actor",)),
        ],
        ["prompt_ids"],
    )
    assert labels(graph) == ["old_log_probs", "update_actor"]


def test_a_column_that_nothing_writes_names_stage_column_and_nearest():
    with pytest.raises(GraphError, match=r"'advantages' reads 'reward', which nothing writes[\s\S]*did you mean 'rewards'"):
        StageGraph([stage("r", [], ["rewards"]), stage("advantages", ["reward"], ["advantages"])], [])


def test_two_writers_of_one_column():
    with pytest.raises(GraphError, match="'rewards' is written by both 'a' and 'b'"):
        StageGraph([stage("a", [], ["rewards"]), stage("b", [], ["rewards"])], [])


def test_two_stages_of_one_name():
    with pytest.raises(GraphError, match="two stages are called 'a'"):
        StageGraph([stage("a"), stage("a")], [])


def test_a_cycle_names_its_stages():
    with pytest.raises(GraphError, match="wait for each other: a, b"):
        StageGraph([stage("a", ["values"], ["returns"]), stage("b", ["returns"], ["values"])], [])


def test_after_a_stage_that_is_not_there():
    with pytest.raises(GraphError, match="did you mean 'reward'"):
        StageGraph([stage("reward"), stage("b", after=("rewrad",))], [])


def test_optional_columns_that_nothing_writes_are_listed():
    graph = StageGraph([stage("t", optional_reads=("step_rewards",))], [])
    assert graph.missing_optional() == [("t", "step_rewards")]


def test_run_hands_columns_on_and_times_stages():
    class Add(Stage):
        name, reads, writes = "add", ("scores",), ("rewards",)

        def run(self, batch, context):
            return Batch({"rewards": batch["scores"] + 1})

    context = StepContext(0, {})
    out = StageGraph([Add()], ["scores"]).run(Batch({"scores": [1.0, 2.0]}), context)
    assert out["rewards"].tolist() == [2.0, 3.0] and "time/add" in context.metrics
