"""Slots, groups and the cache's memory, without a model."""

from __future__ import annotations

import random

import pytest
import torch

from podium.engines.base import Request, SamplingParams
from podium.engines.rollout.native.kv_cache import KVCache
from podium.engines.rollout.native.scheduler import Scheduler, Sequence, row_parts
from podium.engines.rollout.stopping import StopRule


def _sequence(number: int, prompt: tuple[int, ...], most: int = 10) -> Sequence:
    sampling = SamplingParams(max_new_tokens=most)
    return Sequence(number, Request(prompt, sampling), StopRule(None, sampling, frozenset(), prompt))


def test_groups_share_a_prefix_and_keep_the_order_of_arrival() -> None:
    scheduler = Scheduler(max_concurrent=4)
    for number, prompt in enumerate([(1, 2), (3,), (1, 2), (1, 2), (3,), (9,)]):
        scheduler.add(_sequence(number, prompt))
    groups = scheduler.take(1000)
    assert [([s.id for s in g.sequences], g.more) for g in groups] == [([0, 2, 3], False), ([1], True)]
    assert scheduler.waits_for((3,))
    assert scheduler.take(1000) == []
    assert scheduler.retire([1]) == [(3, 1)]
    assert [s.id for s in scheduler.running] == [0, 1, 3]
    assert [[s.id for s in g.sequences] for g in scheduler.take(1000)] == [[4]]
    assert not scheduler.waits_for((3,))


def test_a_failed_start_is_undone() -> None:
    scheduler = Scheduler(max_concurrent=2)
    for number in range(4):
        scheduler.add(_sequence(number, (number % 2,)))
    before = list(scheduler.waiting)
    groups = scheduler.take(1)
    scheduler.put_back(groups)
    assert scheduler.running == []
    assert sorted(scheduler.waiting) == sorted(before)
    assert [s.id for s in scheduler.take(1)[0].sequences] == [0, 2]


def test_prefill_budget_takes_at_least_one_group() -> None:
    scheduler = Scheduler(max_concurrent=8)
    for number in range(4):
        scheduler.add(_sequence(number, (number,) * 10))
    assert [len(scheduler.take(15)) for _ in range(3)] == [2, 2, 0]


def test_cache_bound_limits_what_runs_at_once() -> None:
    scheduler = Scheduler(max_concurrent=8, max_cache_tokens=64)
    for number in range(5):
        scheduler.add(_sequence(number, (1,) * 10, most=10))
    assert sum(len(g.sequences) for g in scheduler.take(1000)) == 3
    big = Scheduler(max_concurrent=8, max_cache_tokens=4)
    big.add(_sequence(0, (1,) * 10))
    big.add(_sequence(1, (1,) * 10))
    assert sum(len(g.sequences) for g in big.take(1000)) == 1


@pytest.mark.parametrize("seed", range(20))
def test_retiring_keeps_slots_without_gaps(seed: int) -> None:
    rng = random.Random(seed)
    scheduler = Scheduler(max_concurrent=16)
    cells: list[int] = list(range(16))
    for number in range(16):
        scheduler.add(_sequence(number, (number,)))
    scheduler.take(1000)
    while scheduler.running:
        slots = rng.sample(range(len(scheduler.running)), rng.randint(1, len(scheduler.running)))
        kept = {s.id for i, s in enumerate(scheduler.running) if i not in slots}
        for source, target in scheduler.retire(slots):
            cells[target] = cells[source]
        assert {s.id for s in scheduler.running} == kept
        assert [s.id for s in scheduler.running] == cells[: len(kept)]


@pytest.mark.parametrize("seed", range(10))
def test_row_parts_cover_all_rows_and_never_cost_more(seed: int) -> None:
    rng = random.Random(seed)
    lengths = sorted((rng.randint(1, 2000) for _ in range(rng.randint(1, 40))), reverse=True)
    parts = row_parts(lengths)
    assert [row for start, end in parts for row in range(start, end)] == list(range(len(lengths)))
    assert len(parts) <= 4
    cost = sum((end - start) * max(lengths[start:end]) for start, end in parts)
    assert cost + 1024 * (len(parts) - 1) <= len(lengths) * max(lengths)


def test_one_long_row_does_not_make_all_rows_long() -> None:
    assert row_parts([5000] + [100] * 31) == [(0, 1), (1, 32)]
    assert row_parts([128] * 32) == [(0, 32)]


def test_cache_keeps_what_it_holds_when_it_grows_and_moves() -> None:
    cache = KVCache()
    cache.reserve(2, 3, most_rows=8, most_length=300)
    assert (cache.slots, cache.capacity) == (2, 64)
    keys, values = torch.arange(12.0).view(6, 1, 2), -torch.arange(6.0).view(6, 1, 1)
    places = torch.tensor([0, 1, 2, 64, 65, 66])
    cache.write(0, places, keys, values)
    cache.reserve(3, 200, most_rows=8, most_length=300, used=2)
    assert (cache.slots, cache.capacity) == (4, 256)
    cache.reserve(3, 280, most_rows=8, most_length=300, used=2)
    assert cache.capacity == 300
    cache.move([(1, 2)], 3)
    cache.permute([2, 0, 1], 3)
    k, v = cache.write(0, torch.tensor([3]), keys[:1], values[:1])
    assert k[0, :3].tolist() == keys[3:].tolist()
    assert k[1, :3].tolist() == keys[:3].tolist()
    assert v[2, :3].tolist() == values[3:].tolist()
    prefix = cache.read_prefix(1, 3, torch.zeros(4))
    cache.release()
    assert cache.bytes == 0
    cache.reserve(2, 3, most_rows=8, most_length=300)
    cache.write_prefix([0, 1], prefix)
    assert cache.read_prefix(1, 3, torch.zeros(4)).layers[0][0].tolist() == keys[:3].tolist()
