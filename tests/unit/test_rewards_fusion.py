"""Several rewards into one, by hand-computed numbers; what is skipped is counted."""

from __future__ import annotations

import logging
import math

import pytest
import torch

from podium.core.batch import Batch
from podium.core.errors import ConfigError, RewardError
from podium.rewards.adapters import adapt
from podium.rewards.base import Scored
from podium.rewards.fusion import check_columns, fuse
from podium.rewards.model import ModelReward


def batch_of(n: int) -> Batch:
    columns = {"prompt": [f"p{i}" for i in range(n)], "response": [f"r{i}" for i in range(n)], "row_index": list(range(n))}
    return Batch({**columns, "group_id": [i // 2 for i in range(n)]})


def giving(values, name="f", **options):
    return adapt(lambda completions: list(values), name, **options)


def test_weighted_sum_and_metrics():
    rewards = [giving([1.0, 0.0, 1.0], "right", weight=2.0), giving([3.0, 5.0, 7.0], "short", weight=-0.1)]
    out, metrics = fuse(batch_of(3), rewards)
    assert out["rewards"].tolist() == pytest.approx([1.7, -0.5, 1.3])
    assert out["reward.right"].tolist() == [1.0, 0.0, 1.0]
    assert out["reward.short"].tolist() == [3.0, 5.0, 7.0]
    assert out["group_id"].tolist() == [0, 0, 1]
    assert metrics.means() == pytest.approx(
        {"reward/mean": 2.5 / 3, "reward/right": 2 / 3, "reward/short": 5.0, "reward/skipped": 0.0}
    )


def test_a_failed_row_is_left_out_and_counted(caplog):
    rewards = [giving([1.0, math.nan, 3.0, 4.0], "a", on_error="skip"), giving([1.0, 1.0, math.inf, 1.0], "b", on_error="skip")]
    with caplog.at_level(logging.WARNING):
        out, metrics = fuse(batch_of(4), rewards)
    assert out["row_index"].tolist() == [0, 3]
    assert out["rewards"].tolist() == [2.0, 5.0]
    assert metrics.mean("reward/skipped") == 2.0
    assert metrics.mean("reward/a") == 2.5  # over the rows that are left
    assert "2 of 4 samples left out; the first: reward 'a', sample 1 (data row 1)" in caplog.text


def test_a_reward_that_does_not_apply_adds_nothing():
    out, metrics = fuse(batch_of(3), [giving([None, 1.0, None], "a"), giving([5.0, 5.0, None], "b")])
    assert out["row_index"].tolist() == [0, 1]  # to the last row no reward applies
    assert out["rewards"].tolist() == [5.0, 6.0]
    assert out["reward.a"].isnan().tolist() == [True, False]
    assert metrics.mean("reward/a") == 1.0
    assert metrics.mean("reward/skipped") == 1.0


def test_no_row_left_is_an_error():
    with pytest.raises(
        RewardError, match=r"none of the 2 samples could be scored; the first: reward 'a', sample 0 .*returned nan"
    ):
        fuse(batch_of(2), [giving([math.nan, math.nan], "a", on_error="skip")])
    with pytest.raises(RewardError, match=r"none of the 2 samples could be scored; the first: no reward applies"):
        fuse(batch_of(2), [giving([None, None])])
    with pytest.raises(RewardError, match="there is no reward"):
        fuse(batch_of(2), [])


def test_an_error_is_raised_unless_skipping_was_asked_for():
    with pytest.raises(RewardError, match="reward 'a', sample 1"):
        fuse(batch_of(2), [giving([1.0, math.nan], "a")])


def test_a_reward_of_ones_own_and_its_not_finite_values():
    class Own:
        name, weight = "own", 3.0

        def __call__(self, batch):
            return Scored(torch.tensor([1.0, self.second]))

    own = Own()
    own.second = 2.0
    assert fuse(batch_of(2), [own])[0]["rewards"].tolist() == [3.0, 6.0]
    own.second = math.nan
    with pytest.raises(RewardError, match=r"reward 'own', sample 1 .*: gave nan, not a finite number"):
        fuse(batch_of(2), [own])


def test_what_a_function_logs():
    def f(completions, log_metric, log_extra, trainer_state):
        log_metric("step", trainer_state.global_step)
        log_extra("first_letter", [c[0] for c in completions])
        return [1.0] * len(completions)

    out, metrics = fuse(batch_of(2), [adapt(f, "f")])
    assert metrics.mean("reward/f/step") == 0.0
    assert out["data.first_letter"] == ["r", "r"]


def test_a_model_as_a_reward():
    def score(batch):
        return batch.with_columns({"scores": [0.5, math.nan]})

    with pytest.raises(RewardError, match="reward 'model', sample 1"):
        fuse(batch_of(2), [ModelReward("model", score)])
    out, _ = fuse(batch_of(2), [ModelReward("model", score, weight=2.0, on_error="skip")])
    assert out["rewards"].tolist() == [1.0]


def test_columns_are_checked_before_anything_runs():
    def f(completions, answer):
        return [1.0]

    check_columns([adapt(f, "f")], ["answer", "topic"])
    with pytest.raises(ConfigError, match="reward 'f': it needs the data column answer; the data set has: topic"):
        check_columns([adapt(f, "f")], ["topic"])
