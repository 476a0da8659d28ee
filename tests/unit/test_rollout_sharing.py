"""Which rows are read together: groups found from the pages they hold, and only where it saves enough."""

from __future__ import annotations

import pytest
import torch

from podium.engines.base import Request, SamplingParams
from podium.engines.rollout.native import sharing
from podium.engines.rollout.native.paged_engine import PagedEngine
from podium.engines.rollout.native.sharing import SharingPlan, Tiles, groups_of
from tests.tiny import tiny_model, tiny_tokenizer

CPU = torch.device("cpu")


def _engine(monkeypatch: pytest.MonkeyPatch, least: int = 16) -> PagedEngine:
    monkeypatch.setattr(sharing, "_LEAST_KEYS", least)
    return PagedEngine(tiny_model(), tiny_tokenizer(), page_size=8, steps_per_look=2)


def _start(engine: PagedEngine, *groups: tuple[int, int]) -> None:
    """Groups of so many samples of a prompt of so many tokens; after a step they run."""
    for number, (samples, tokens) in enumerate(groups):
        for seed in range(samples):
            prompt = tuple((number * 100 + i) % 400 + 10 for i in range(tokens))
            engine.submit(Request(prompt, SamplingParams(max_new_tokens=40, stop_token_ids=()), seed))
    engine.step()


def test_groups_are_those_that_hold_the_same_pages(monkeypatch: pytest.MonkeyPatch) -> None:
    engine = _engine(monkeypatch)
    _start(engine, (3, 37), (1, 50), (2, 17), (4, 9))
    rows, pool = engine._scheduler.rows, engine._scheduler.pool
    assert pool is not None
    found = sorted((keys, len(slots)) for keys, slots in groups_of(rows, pool))
    assert found == [(16, 2), (32, 3)]  # of 9 tokens one page of 8 is shared: too little
    for keys, slots in groups_of(rows, pool):
        assert all(rows[slot].pages[: keys // 8] == rows[slots[0]].pages[: keys // 8] for slot in slots)


def test_the_deepest_common_page_decides(monkeypatch: pytest.MonkeyPatch) -> None:
    """Prompts with a common start, each with samples of its own: samples share more than prompts do."""
    engine = _engine(monkeypatch)
    common = tuple(range(10, 26))
    for tail in (30, 60):
        prompt = (*common, *range(tail, tail + 17))
        for seed in range(2):
            engine.submit(Request(prompt, SamplingParams(max_new_tokens=20), seed))
    engine.submit(Request((*common, 99), SamplingParams(max_new_tokens=20), 0))
    engine.step()
    pool = engine._scheduler.pool
    assert pool is not None
    assert sorted((keys, len(slots)) for keys, slots in groups_of(engine._scheduler.rows, pool)) == [(32, 2), (32, 2)]


def test_a_plan_only_where_it_saves(monkeypatch: pytest.MonkeyPatch) -> None:
    engine = _engine(monkeypatch)
    _start(engine, (4, 64), (1, 20))
    rows, pool = engine._scheduler.rows, engine._scheduler.pool
    assert pool is not None
    plan = SharingPlan(Tiles(16, 2, torch.bfloat16, CPU))
    shared = plan.of(rows, pool, 2)
    assert shared is not None
    assert (shared.count, plan.tiles.height) == (1, 32)
    lengths = dict(zip([row.sequence.request.prompt_ids[0] for row in rows], plan.own_lengths(3), strict=True))
    assert lengths[10] == rows[0].reach + 3 - 64
    assert plan.tiles.keys[:2].tolist() == [64, 0]
    assert sorted(plan.tiles.skip.tolist()) == [0] * 12 + [64] * 4
    assert plan.of(rows, pool, 2) == shared
    monkeypatch.setattr(sharing, "_LEAST_SAVED", 0.9)
    assert SharingPlan(Tiles(16, 2, torch.bfloat16, CPU)).of(rows, pool, 2) is None
    assert SharingPlan(Tiles(16, 64, torch.bfloat16, CPU)).of(rows, pool, 2) is None


def test_without_groups_there_is_no_plan_and_rows_read_all(monkeypatch: pytest.MonkeyPatch) -> None:
    engine = _engine(monkeypatch)
    _start(engine, (1, 64), (1, 20))
    rows, pool = engine._scheduler.rows, engine._scheduler.pool
    assert pool is not None
    plan = SharingPlan(Tiles(16, 2, torch.float32, CPU))
    assert plan.of(rows, pool, 2) is None
    assert plan.own_lengths(2) == [row.reach + 2 for row in rows]
    assert plan.of([], pool, 2) is None


def test_a_group_larger_than_a_tile_makes_several(monkeypatch: pytest.MonkeyPatch) -> None:
    tiles = Tiles(24, 7, torch.bfloat16, CPU)
    assert tiles.height == 8
    assert tiles.set([(64, list(range(20))), (128, [20, 22])]) == 4
    assert tiles.keys[:5].tolist() == [64, 64, 64, 128, 0]
    assert tiles.rows[2].tolist() == [16, 17, 18, 19, -1, -1, -1, -1]
    assert tiles.rows[3, :3].tolist() == [20, 22, -1]
    assert tiles.skip[19:23].tolist() == [64, 128, 0, 128]
