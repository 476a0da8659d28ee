"""How a step's rows are cut into minibatches, and what a reward worker hands its model."""

import pytest
import torch

from podium.core.batch import Batch
from podium.workers.base import minibatches, parts_of


def rows(count):
    return Batch({"row_index": list(range(count)), "pair_id": [i // 2 for i in range(count)]})


@pytest.mark.parametrize(("count", "size", "sizes"), [(8, 0, [8]), (8, 8, [8]), (8, 4, [4, 4]), (7, 4, [4, 3]), (9, 4, [5, 4])])
def test_minibatches_are_even_and_cover_every_row_once(count, size, sizes):
    parts = list(minibatches(rows(count), size, seed=3))
    assert [len(p) for p in parts] == sizes
    assert sorted(i for p in parts for i in p["row_index"].tolist()) == list(range(count))


def test_units_stay_together_and_no_minibatch_is_empty():
    parts = list(minibatches(rows(8), 1, seed=3, unit="pair_id"))
    assert [len(p) for p in parts] == [2, 2, 2, 2]
    assert all(len(set(p["pair_id"].tolist())) == 1 for p in parts)
    assert parts_of(8, 1, 4) == 4


def test_the_seed_orders_them():
    orders = [[p["row_index"].tolist() for p in minibatches(rows(8), 2, seed=s)] for s in (1, 1, 2)]
    assert orders[0] == orders[1] != orders[2]
    assert list(minibatches(rows(0), 4, seed=0)) == []


def test_a_cut_response_is_closed_before_it_is_scored():
    from podium.models.heads import RewardModel
    from podium.workers.reward import RewardWorker
    from tests.tiny import EOS_ID, tiny_model, tiny_tokenizer

    seen = []

    class Engine:
        model = RewardModel.from_causal_lm(tiny_model())

        def compute(self, batch, outputs):
            seen.append(batch["response_ids"].to_list())
            return Batch({"scores": torch.zeros(len(batch))})

    worker = RewardWorker(Engine(), tokenizer=tiny_tokenizer(), policy_tokenizer=tiny_tokenizer())
    worker.score(Batch({"prompt_ids": [[1, 5], [1, 6], [1, 7]], "response_ids": [[8], [9, EOS_ID], []]}))
    assert seen == [[[8, EOS_ID], [9, EOS_ID], [EOS_ID]]]


@pytest.fixture
def three_heads():
    from podium.engines.train.single import SingleDeviceEngine
    from podium.models.heads import RewardModel
    from podium.workers.reward import RewardWorker
    from tests.tiny import tiny_model, tiny_tokenizer

    model = RewardModel.from_causal_lm(tiny_model(), heads=["helpful", "honest", "harmless"])
    return RewardWorker(SingleDeviceEngine(model, microbatch_tokens=8), tokenizer=tiny_tokenizer())


def test_a_worker_gives_every_head_its_column_or_the_one_asked_for(three_heads):
    batch = Batch({"prompt_ids": [[1, 5], [1, 6, 9], [1, 7]], "response_ids": [[8], [9, 4], []]})
    scores = three_heads.score(batch, name="scores")
    assert scores.names == ["scores.harmless", "scores.helpful", "scores.honest"]
    for row in range(3):
        alone = three_heads.score(batch.index([row]), name="scores")
        assert float(alone["scores.honest"][0]) == pytest.approx(float(scores["scores.honest"][row]), abs=1e-5)
    assert torch.equal(three_heads.score(batch, head="honest")["rewards"], scores["scores.honest"])


def test_one_score_of_several_heads_has_to_be_named(three_heads):
    from podium.core.errors import RewardError

    batch = Batch({"prompt_ids": [[1, 5]], "response_ids": [[8]]})
    with pytest.raises(RewardError, match="several heads"):
        three_heads.get_reward(batch)
    with pytest.raises(RewardError, match="did you mean 'honest'"):
        three_heads.score(batch, head="honst")
