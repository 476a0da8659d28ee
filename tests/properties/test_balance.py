"""Rows dealt to ranks and packed into micro-batches by their work: nothing is lost, budgets hold, and the work is even."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st
from torch import Tensor

from podium.controller.dispatch import PROTOCOLS
from podium.core.batch import Batch
from podium.core.deferred import DeferredRagged
from podium.core.prompts import Prompts, distinct_prompts
from podium.core.ranks import Ranks
from podium.core.shares import UNEVEN, costs_of, cut, deal
from podium.core.work import Work
from podium.engines.train import SingleDeviceEngine
from podium.engines.train.microbatch import plan
from podium.models.heads import ActorModel, CriticModel
from podium.models.work import work_of
from tests.properties.test_train_invariance import CASES, Captured, assert_same_gradients, rows, shared_rows
from tests.tiny import tiny_model

QWEN_05B = Work(token=400_000, predicted=152_000, pair=24)
WORKS = [Work(), QWEN_05B, Work(token=5, pair=1), Work(token=100, pair=1, near=3, window=64)]
ROWS = st.lists(st.tuples(st.integers(1, 300), st.integers(0, 3_000)), min_size=1, max_size=60)


def _prompts(of_row: list[int], lengths: list[int]) -> Prompts:
    distinct = list(dict.fromkeys(of_row))
    numbers = torch.tensor([distinct.index(prompt) for prompt in of_row])
    first = torch.tensor([of_row.index(prompt) for prompt in distinct])
    return Prompts(numbers, first, torch.tensor([lengths[prompt] for prompt in distinct]))


def _tokens(part: Tensor, lengths: Tensor, prompts: Prompts) -> int:
    """Each prompt once."""
    own = lengths[part] - prompts.lengths[prompts.of_row[part]]
    return int(own.sum() + prompts.lengths[prompts.of_row[part].unique()].sum())


def _cost(part: Tensor, lengths: Tensor, responses: Tensor, prompts: Prompts, work: Work) -> int:
    of_prompts = work.of(prompts.lengths)
    own = work.of(lengths, responses)[part] - of_prompts[prompts.of_row[part]]
    return int(own.sum() + of_prompts[prompts.of_row[part].unique()].sum())


@settings(max_examples=60, deadline=None)
@given(ROWS, st.lists(st.integers(0, 5), min_size=60, max_size=60), st.integers(200, 8_000), st.sampled_from(WORKS))
@example(
    [(1, 16), (1, 145), (1, 89)], [0] * 60, 200, Work()
)  # parts of a group meet in one micro-batch: its prompt counts once
def test_micro_batches(drawn: list[tuple[int, int]], groups: list[int], budget: int, work: Work) -> None:
    """No row lost, no budget exceeded (but by a row alone), no more of them and none costlier than by tokens."""
    of_row = groups[: len(drawn)]
    responses = torch.tensor([response for _, response in drawn])
    prompts = _prompts(of_row, [40, 7, 300, 150, 1, 90])
    lengths = prompts.lengths[prompts.of_row] + responses
    by_tokens = plan(lengths, budget, prompts=prompts)
    parts = plan(lengths, budget, prompts=prompts, responses=responses, work=work)
    assert torch.equal(torch.cat(parts).sort().values, torch.arange(len(lengths)))
    assert all(len(part) == 1 or _tokens(part, lengths, prompts) <= budget for part in parts)
    costs, before = ([_cost(p, lengths, responses, prompts, work) for p in made] for made in (parts, by_tokens))
    assert len(parts) <= len(by_tokens) and max(costs) <= max(before)
    assert costs == sorted(costs, reverse=True)
    again = plan(lengths, budget, prompts=prompts, responses=responses, work=work)
    assert all(torch.equal(a, b) for a, b in zip(parts, again, strict=True))


@settings(max_examples=60, deadline=None)
@given(ROWS, st.integers(1, 8), st.sampled_from(WORKS))
def test_shares_of_ranks(drawn: list[tuple[int, int]], ranks: int, work: Work) -> None:
    """No row lost; the largest share is even enough, or no more than LPT's bound above the mean or the costliest row."""
    batch = Batch({"prompt_ids": [[1] * p for p, _ in drawn], "response_ids": [[1] * r for _, r in drawn]})
    costs = costs_of(batch, work)
    shares = cut(costs, ranks)
    index = torch.arange(len(batch))
    assert sorted(row for share in shares for row in index[share].tolist()) == index.tolist()
    largest, mean = max(int(costs[share].sum()) for share in shares), float(costs.sum()) / ranks
    assert largest <= max(UNEVEN * mean, mean + int(costs.max()) * (1 - 1 / ranks) + 1)


@settings(max_examples=60, deadline=None)
@given(
    st.lists(st.integers(0, 900), min_size=1, max_size=64),
    st.sampled_from([1, 4, 8]),
    st.integers(1, 8),
    st.sampled_from(WORKS),
)
@example([217, 253, 271, 369, 621, 110, 2, 0, 125, 611, 516, 547, 509], 4, 3, WORKS[3])  # in a row by their own cost is best
def test_shares_of_groups(responses: list[int], group: int, ranks: int, work: Work) -> None:
    """No row lost; with prompts counted once in each share, no costlier than single rows dealt by their own cost."""
    prompts = [[3 + i // group] * (40 + 97 * (i // group) % 500) for i in range(len(responses))]
    batch = Batch({"prompt_ids": prompts, "response_ids": [[1] * r for r in responses]})
    index = torch.arange(len(batch))
    shares, by_rows = deal(batch, ranks, work), cut(costs_of(batch, work), ranks)
    assert sorted(row for share in shares for row in index[share].tolist()) == index.tolist()
    lengths = batch.lengths("prompt") + batch.lengths("response")
    known = distinct_prompts(batch["prompt_ids"])
    dealt, cutted = (
        [_cost(index[share], lengths, batch.lengths("response"), known, work) for share in made] for made in (shares, by_rows)
    )
    mean = _cost(index, lengths, batch.lengths("response"), known, work) / ranks
    assert max(dealt) <= max(max(cutted), UNEVEN * mean)


def test_groups_stay_whole_where_parting_them_costs_more() -> None:
    """8 prompts of 512 tokens, 8 answers around 512 each, on 4 ranks: a prompt is computed once or twice, not four times."""
    draw = torch.Generator().manual_seed(3)
    prompts = [torch.randint(3, 99, (512,), generator=draw) for _ in range(8)]
    lengths = torch.exp(6.2 + 0.6 * torch.randn(64, generator=draw)).long().clamp(8, 2048).tolist()
    batch = Batch({"prompt_ids": [prompts[i // 8] for i in range(64)], "response_ids": [[1] * n for n in lengths]})
    groups = torch.arange(64) // 8
    computed = [sum(len(groups[s].unique()) for s in made) for made in (deal(batch, 4, QWEN_05B), _by_rows(batch, 4))]
    assert computed[0] <= 12 and computed[1] >= 28


def _by_rows(batch: Batch, ranks: int) -> list[Tensor]:
    """Costliest first, each to the rank with the least."""
    costs = QWEN_05B.of(batch.lengths("prompt") + batch.lengths("response"), batch.lengths("response")).tolist()
    rows: list[list[int]] = [[] for _ in range(ranks)]
    for row in sorted(range(len(costs)), key=lambda row: -costs[row]):
        min(rows, key=lambda mine: sum(costs[i] for i in mine)).append(row)
    return [torch.tensor(mine) for mine in rows]


def test_prompts_that_lie_elsewhere_are_not_fetched_to_deal_rows() -> None:
    class Elsewhere:
        lengths, dtype = torch.full((16,), 5), torch.int64

        def fetch(self) -> Tensor:
            raise AssertionError("fetched")

    batch = Batch({"prompt_ids": DeferredRagged([Elsewhere()]), "response_ids": [[1] * (7 * n % 40) for n in range(16)]})
    shares = deal(batch, 4, QWEN_05B, fetch=False)
    assert sorted(row for share in shares for row in torch.arange(16)[share].tolist()) == list(range(16))


def test_long_rows_make_ranks_wait_less_than_shares_of_tokens_do() -> None:
    """Log-normal lengths up to 32,768 on 8 ranks, a 0.5B shape: the slowest rank against the mean, over 20 draws."""
    draw, ratios = torch.Generator().manual_seed(0), []
    for _ in range(20):
        lengths = torch.exp(8 + 1.2 * torch.randn(128, generator=draw)).long().clamp(16, 32_768)
        costs = QWEN_05B.of(lengths, lengths - 16)
        by_tokens, by_cost = (max(float(costs[s].sum()) for s in cut(by, 8)) for by in (lengths, costs))
        ratios.append((by_tokens * 8 / float(costs.sum()), by_cost * 8 / float(costs.sum())))
    tokens, cost = (sum(column) / len(ratios) for column in zip(*ratios, strict=True))
    assert cost < 1.01 and tokens > 1.08
    assert all(by_cost <= by_tokens + 0.01 for by_tokens, by_cost in ratios)


@pytest.mark.parametrize("seed", range(3))
def test_micro_batches_do_not_depend_on_the_order_of_rows(seed: int) -> None:
    draw = torch.Generator().manual_seed(seed)
    lengths = torch.randperm(900, generator=draw)[:40] + 1  # distinct, so no tie is broken by the order
    order = torch.randperm(40, generator=draw)
    sets = [{frozenset(ids[p].tolist()) for p in plan(lengths[ids], 2_000, work=QWEN_05B)} for ids in (torch.arange(40), order)]
    assert sets[0] == sets[1]


@pytest.mark.parametrize("case", ["policy", "value", "pairwise reward"])
def test_the_gradient_is_the_same_however_rows_are_balanced(case: str) -> None:
    make, loss = CASES[case]
    for batch in (rows(), shared_rows()):
        gradients = []
        for work in (Work(), Work(token=3, pair=1), Work(token=1, predicted=90)):
            engine = Captured(make(), 45)
            engine.work = work
            engine.update(batch.index(torch.randperm(len(batch), generator=torch.Generator().manual_seed(work.token))), loss)
            gradients.append(engine.gradients)
        for other in gradients[1:]:
            assert_same_gradients(other, gradients[0])


# ------------------------------------------------------------------ what a model's rows cost


def test_the_work_of_a_model_is_that_of_its_shape() -> None:
    """Two layers of 64: q, o of 64 x 64, k, v of 32 x 64, three of 128 x 64; 512 tokens; all heads together 64 wide."""
    products = 2 * (2 * 64 * 64 + 2 * 32 * 64 + 3 * 128 * 64) // 64
    model = tiny_model("llama")
    assert work_of(ActorModel(model)) == Work(token=products, predicted=512, pair=2)
    assert work_of(CriticModel.from_causal_lm(model)) == Work(token=products, pair=2)
    assert work_of(ActorModel(tiny_model("mistral"))) == Work(token=products, predicted=512, near=2, window=8)
    mixed = work_of(ActorModel(tiny_model("gemma3")))
    assert (mixed.pair, mixed.near, mixed.window) == (1, 1, 8)
    assert work_of(torch.nn.Linear(2, 2)) == Work()


def test_a_window_ends_the_square() -> None:
    work = Work(token=0, near=1, window=10)
    assert work.of(torch.tensor([4, 10, 30])).tolist() == [16, 100, 10 * 50]


def test_the_controller_deals_by_the_work_that_ranks_say() -> None:
    """One row of 100 tokens costs as much as 19 of 10 where attention is all: by tokens it would get 9 others."""
    batch = Batch({"prompt_ids": [[1]] * 21, "response_ids": [[1] * 99] + [[1] * 9] * 20})
    by_tokens, by_work = (
        PROTOCOLS.get("rows")((batch,), {}, replace(Ranks(data=2), work=work)) for work in (Work(), Work(token=0, pair=1))
    )
    sizes = [[len(args[0]) for args, _ in made.calls] for made in (by_tokens, by_work)]
    assert sizes == [[6, 15], [1, 20]]


def test_an_engine_knows_its_models_work() -> None:
    model = ActorModel(tiny_model("llama"))
    assert SingleDeviceEngine(model).work == work_of(model)
