"""What the controller does with rows: shares, columns that lie elsewhere, stages at the same time, ranks."""

import pickle
import threading
import time

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from podium.controller.dispatch import PROTOCOLS
from podium.core.batch import Batch
from podium.core.deferred import DeferredRagged
from podium.core.errors import ResourceError
from podium.core.ragged import Ragged
from podium.core.ranks import Ranks, axes_of
from podium.core.shares import cut, restore, size_of, take
from podium.stages.base import Stage, StepContext
from podium.stages.graph import StageGraph


@given(st.lists(st.integers(1, 60), max_size=40), st.integers(1, 5), st.integers(1, 3))
def test_shares_hold_every_row_once_are_even_and_come_back(costs, parts, copies):
    rows = Batch({"row_index": list(range(len(costs)))})
    shares = cut(torch.tensor(costs, dtype=torch.int64), parts)
    taken = [take(rows, share) for share in shares]
    assert len(shares) == parts and sorted(i for t in taken for i in t["row_index"].tolist()) == list(range(len(costs)))
    loads = [sum(costs[i] for i in t["row_index"].tolist()) for t in taken]
    assert max(loads) - sum(costs) / parts <= max(costs, default=0)  # no share is more than a row above the mean
    if costs:
        back = restore([t.repeat(copies) for t in taken], shares, copies)
        assert back["row_index"].tolist() == [i for i in range(len(costs)) for _ in range(copies)]


def test_units_are_not_cut():
    units = torch.tensor([0, 1, 0, 2, 1, 3])
    shares = cut(torch.tensor([5, 1, 5, 2, 1, 2]), 2, units)
    assert [sorted(set(units[s].tolist())) for s in shares] == [[0], [1, 2, 3]]
    assert sum(size_of(s) for s in shares) == 6


def test_long_rows_are_balanced_better_than_in_a_row():
    costs = torch.tensor([90, 1, 1, 1, 1, 80, 1, 1])
    loads = [int(costs[s].sum()) for s in cut(costs, 2)]
    assert max(loads) - min(loads) <= 10


def test_ranks_of_one_data_rank_get_the_same_rows_and_the_first_answers():
    ranks = Ranks(data=2, tensor=2)
    plan = PROTOCOLS.get("rows")((Batch({"scores": [1.0, 2.0, 3.0, 4.0]}),), {}, ranks)
    assert [args[0]["scores"].tolist() for args, _ in plan.calls] == [[1.0, 2.0], [1.0, 2.0], [3.0, 4.0], [3.0, 4.0]]
    assert plan.read == (0, 2)


def test_axes_follow_the_backend():
    assert axes_of("fsdp", {}, 8) == Ranks(shard=8) and axes_of("ddp", {}, 4) == Ranks(data=4)
    assert axes_of("fsdp", {"tensor": 2}, 8) == Ranks(shard=4, tensor=2)
    assert axes_of("fsdp", {"data": 2}, 8) == Ranks(data=2, shard=4)
    with pytest.raises(ResourceError, match="data 2 x shard 4 makes 8 workers, and the pool has 6"):
        Ranks.fit({"data": 2, "shard": 4}, 6)


class Elsewhere:
    """A source that counts how often it is fetched."""

    fetched = 0

    def __init__(self, rows):
        held = Ragged.from_rows(rows, torch.int64)
        self.lengths, self.dtype, self.held = held.lengths, held.dtype, held.values

    def fetch(self):
        Elsewhere.fetched += 1
        return self.held


@pytest.fixture
def column():
    Elsewhere.fetched = 0
    return DeferredRagged([Elsewhere([[1, 2], [], [3]]), Elsewhere([[4], [5, 6, 7]])])


def test_a_deferred_column_passes_for_a_ragged_one(column):
    batch = Batch({"prompt_ids": column})
    assert len(batch) == 5 and batch.lengths("prompt").tolist() == [2, 0, 1, 1, 3]
    parts = [batch.slice(0, 2), batch.index([4, 3, 2])]
    again = Batch.concatenate([*parts, batch.repeat(2)])
    assert Elsewhere.fetched == 0  # nothing was needed yet
    assert again["prompt_ids"].to_list()[:5] == [[1, 2], [], [5, 6, 7], [4], [3]]
    assert batch["prompt_ids"].to_list() == [[1, 2], [], [3], [4], [5, 6, 7]]
    assert batch.union(Batch({"prompt_ids": batch["prompt_ids"]})).names == ["prompt_ids"]


def test_only_sources_of_rows_that_are_left_are_fetched_or_sent(column):
    few = column.index(torch.tensor([4, 3]))
    assert few.to_list() == [[5, 6, 7], [4]] and Elsewhere.fetched == 1
    sent = pickle.loads(pickle.dumps(column.index(torch.tensor([4, 3]))))
    assert len(sent.sources) == 1 and sent.to_list() == [[5, 6, 7], [4]]
    assert pickle.loads(pickle.dumps(column.index(torch.tensor([], dtype=torch.int64)))).to_list() == []


def test_a_pickled_share_holds_its_own_rows_only():
    whole = Batch({"response_ids": [[7] * 1000] * 100})
    assert len(pickle.dumps(whole.slice(0, 1))) < 20_000
    assert pickle.loads(pickle.dumps(whole.slice(3, 5)))["response_ids"].to_list() == [[7] * 1000] * 2


# ---------------------------------------------------------------------- stages at the same time


class Slow(Stage):
    """Writes a column, and waits until all of its kind are running."""

    reads = ("prompt_ids",)

    def __init__(self, name, column, barrier):
        self.name, self.writes, self.barrier = name, (column,), barrier

    def run(self, batch, context):
        self.barrier.wait(5)
        context.metrics.add("seen", 1.0)
        context.metrics.add(self.name, 2.0)
        return Batch({self.writes[0]: [float(len(batch))] * len(batch)})


class Last(Stage):
    name, reads, writes = "last", ("scores", "rewards"), ("costs",)

    def run(self, batch, context):
        assert context.metrics.mean("seen") == 1.0  # what ran before is in the metrics
        return Batch({"costs": batch["scores"] + batch["rewards"]})


class Fails(Stage):
    reads = ("prompt_ids",)

    def __init__(self, name, column, seconds):
        self.name, self.writes, self.seconds = name, (column,), seconds

    def run(self, batch, context):
        time.sleep(self.seconds)
        raise ValueError(self.name)


def test_ready_stages_run_at_the_same_time_and_metrics_add_up():
    barrier = threading.Barrier(2)
    graph = StageGraph([Slow("a", "scores", barrier), Slow("b", "rewards", barrier), Last()], ["prompt_ids"])
    context = StepContext(0, {}, concurrent=True)
    out = graph.run(Batch({"prompt_ids": [[1], [2]]}), context)
    assert out["costs"].tolist() == [4.0, 4.0]
    assert dict(context.metrics.items())["seen"] == (2.0, 2.0) and context.metrics.mean("b") == 2.0
    assert {"time/a", "time/b", "time/last"} <= {name for name, _ in context.metrics.items()}


def test_of_two_stages_that_fail_the_first_in_order_is_raised():
    graph = StageGraph([Fails("a", "scores", 0.1), Fails("b", "rewards", 0.0)], ["prompt_ids"])
    with pytest.raises(ValueError, match=r"^a$"):
        graph.run(Batch({"prompt_ids": [[1]]}), StepContext(0, {}, concurrent=True))
