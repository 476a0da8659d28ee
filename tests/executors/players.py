"""Workers that the executors' suite plays with: each method shows one way of calling."""

from __future__ import annotations

import os
import time

import torch
from torch import distributed

from podium.controller.dispatch import PROTOCOLS, Plan, dispatch
from podium.core.batch import Batch
from podium.core.metrics import Metrics
from podium.core.shares import costs_of, cut, take


@PROTOCOLS.register("every_second_row")
def every_second_row(args, kwargs, ranks):
    """A user's own protocol: data rank r gets the rows r, r + n, r + 2n..."""
    (batch,) = args
    shares = [torch.arange(r, len(batch), ranks.data_size) for r in range(ranks.data_size)]
    calls = [((batch.index(shares[ranks.data_rank(r)]),), kwargs) for r in range(ranks.workers)]
    leaders = tuple(r for r in range(ranks.workers) if ranks.leads(r))

    def collect(results):
        back = torch.argsort(torch.cat(shares))
        return Batch.concatenate([r for r in results if len(r)]).index(back)

    return Plan(calls, collect, leaders)


class Player:
    """A role's worker with one number for weights."""

    def __init__(self, context):
        self.context, self.weight, self.steps = context, torch.zeros(1), 0

    @dispatch("gather")
    def place(self):
        c = self.context
        return c.role, c.rank, c.world_size, c.pool, os.getpid()

    @dispatch("rows")
    def lengths(self, batch, factor=1.0):
        return Batch({"scores": batch.lengths("response").float() * factor, "response_ids": batch["response_ids"]})

    @dispatch("every_second_row")
    def second_rows(self, batch):
        return Batch({"scores": batch["scores"] + 1})

    @dispatch("prompts")
    def answer(self, batch, *, group_size=1, on_progress=None):
        if on_progress is not None:
            on_progress(0, len(batch) * group_size, 0)
        out = batch.repeat(group_size)
        return Batch({"group_id": out["group_id"], "row_index": out["occurrence"], "response_ids": out["prompt_ids"]})

    @dispatch("prompts")
    def slow_answer(self, batch, *, on_progress=None):
        for done in range(100):
            time.sleep(0.1)
            on_progress(done, 100, 0)
        return batch

    @dispatch("rows")
    def count(self, batch):
        return Metrics({"tokens": (float(batch.lengths("response").sum()), len(batch))})

    @dispatch("rows")
    def break_off(self, batch):
        raise RuntimeError(f"the collective of rank {self.context.rank} broke off")

    @dispatch("rows")
    def drop_a_row(self, batch):
        return batch.slice(1, len(batch))

    @dispatch("each")
    def own(self, number):
        return number * 10 + self.context.rank

    @dispatch("first")
    def where(self):
        return self.context.rank

    @dispatch("broadcast")
    def step(self, batch):
        """One step on the mean length: every rank makes it, and all have the same weight after it."""
        mine = take(batch, cut(costs_of(batch), self.context.data_size)[self.context.data_rank])
        sums = torch.tensor([float(mine.lengths("response").sum()), float(len(mine))])
        if self.context.world_size > 1:
            distributed.all_reduce(sums)
        self.weight = self.weight + sums[0] / sums[1]
        self.steps += 1
        return float(self.weight)

    @dispatch("gather")
    def weights(self):
        return float(self.weight), self.steps

    @dispatch("broadcast")
    def state_dict(self):
        return {"weight": self.weight, "steps": self.steps}

    @dispatch("broadcast")
    def load_state_dict(self, state):
        self.weight, self.steps = state["weight"].clone(), state["steps"]

    @dispatch("gather")
    def speak(self):
        print("a line of output")

    @dispatch("broadcast")
    def fail_on(self, rank, then_wait=False):
        if self.context.rank == rank:
            raise ValueError(f"no good on rank {rank}")
        if then_wait:
            distributed.all_reduce(torch.zeros(1))

    @dispatch("broadcast")
    def hang(self, rank):
        """The ranks make different collective calls: all but one wait."""
        if self.context.rank != rank:
            distributed.all_reduce(torch.zeros(1))

    @dispatch("broadcast")
    def die_on(self, rank):
        if self.context.rank == rank:
            os._exit(3)
        distributed.all_reduce(torch.zeros(1))

    @dispatch("broadcast")
    def sleep(self, seconds):
        started = time.time()
        time.sleep(seconds)
        return started, time.time()


class Unbuildable(Player):
    def __init__(self, context):
        if context.rank == context.world_size - 1:
            raise RuntimeError("the weights are not there")
        super().__init__(context)


class DiesInInit(Player):
    def __init__(self, context):
        if context.rank == 0:
            os._exit(4)
        super().__init__(context)


def batch(rows=7):
    """Rows of 0, 3, 1, 4... tokens, so that shares of equal tokens are not the rows in order."""
    lengths = [(i * 3) % 5 + (20 if i == 2 else 0) for i in range(rows)]
    return Batch(
        {
            "prompt_ids": [[i] * (i % 3 + 1) for i in range(rows)],
            "response_ids": [list(range(n)) for n in lengths],
            "scores": [float(i) for i in range(rows)],
        }
    )
