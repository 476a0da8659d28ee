"""Normalising, dynamic scaling, clipping, conditions and gates, by hand-computed numbers."""

from __future__ import annotations

import math

import pytest
import torch

from podium.core.batch import Batch
from podium.core.config import parse
from podium.core.errors import CheckpointError, ConfigError, RewardError
from podium.core.settings import RewardSettings, ShapingSettings
from podium.rewards.fusion import fuse
from podium.rewards.loading import load_rewards
from podium.rewards.shaping import Moments, Shaper

NAN = math.nan


def shaped(settings, scores, weights=None, **keywords):
    shaper = Shaper({name: ShapingSettings(**s) for name, s in settings.items()})
    tensors = {name: torch.tensor(values) for name, values in scores.items()}
    total, metrics = shaper(tensors, weights or dict.fromkeys(scores, 1.0), **keywords)
    return total.tolist(), metrics.means()


# ---------------------------------------------------------------------- normalising


def test_by_batch_then_weight():
    # mean 2, population deviation sqrt(2/3)
    total, metrics = shaped({"a": {"normalize": "batch"}}, {"a": [1.0, 2.0, 3.0]}, {"a": 2.0})
    assert total == pytest.approx([-2 * math.sqrt(1.5), 0.0, 2 * math.sqrt(1.5)])
    assert metrics["a/shaped"] == pytest.approx(0.0)


def test_by_group_and_what_does_not_apply():
    scores = {"a": [1.0, 3.0, 5.0, NAN, 4.0, 4.0], "b": [0.5] * 6}
    groups = torch.tensor([7, 7, 2, 2, 9, 9])
    total, _ = shaped({"a": {"normalize": "group"}, "b": {}}, scores, groups=groups)
    # group 7: mean 2, deviation 1; group 2: one value, so 0, and nothing; group 9: no variance, so 0
    assert total == pytest.approx([-0.5, 1.5, 0.5, 0.5, 0.5, 0.5])
    with pytest.raises(RewardError, match=r"needs the column 'group_id'\n.*normalize: batch"):
        shaped({"a": {"normalize": "group"}}, {"a": [1.0]})


def test_running_statistics_take_a_step_in_before_they_scale_it():
    shaper = Shaper({"a": ShapingSettings(normalize="running")})
    one, two = torch.tensor([1.0, 3.0]), torch.tensor([5.0, 7.0, NAN])
    assert shaper({"a": one}, {"a": 1.0})[0].tolist() == [-1.0, 1.0]  # mean 2, deviation 1
    total, _ = shaper({"a": two}, {"a": 1.0})
    # 1, 3, 5, 7: mean 4, deviation sqrt(5)
    assert total.tolist() == pytest.approx([1 / math.sqrt(5), 3 / math.sqrt(5), 0.0])
    before = shaper.state_dict()
    again, _ = shaper({"a": two}, {"a": 1.0}, learn=False)
    assert shaper.state_dict() == before
    assert torch.equal(again, total)
    raw, metrics = shaper({"a": two}, {"a": 1.0}, raw=True, learn=False)
    assert raw.tolist() == [5.0, 7.0, 0.0]
    assert "a/shaped" not in metrics


def test_merged_moments_are_those_of_all_values_at_once():
    values = torch.randn(1000, generator=torch.Generator().manual_seed(0)) * 3 + 100
    moments = Moments()
    for part in values.split([1, 0, 499, 500]):
        moments.update(part)
    assert moments.mean == pytest.approx(float(values.double().mean()), abs=1e-9)
    assert moments.deviation == pytest.approx(float(values.double().std(correction=0)), abs=1e-9)


def test_a_restored_shaper_goes_on_bit_for_bit():
    settings = {"a": ShapingSettings(normalize="running", clip=2.0)}
    steps = [torch.randn(5, generator=torch.Generator().manual_seed(i)) for i in range(6)]
    whole, first = Shaper(settings), Shaper(settings)
    expected = [whole({"a": s}, {"a": 0.3})[0] for s in steps]
    for step in steps[:3]:
        first({"a": step}, {"a": 0.3})
    second = Shaper(settings)
    second.load_state_dict(first.state_dict())
    assert all(torch.equal(second({"a": s}, {"a": 0.3})[0], e) for s, e in zip(steps[3:], expected[3:], strict=True))


def test_a_resume_with_another_scaling():
    saved = Shaper({"a": ShapingSettings(normalize="running")}).state_dict()
    with pytest.raises(CheckpointError, match=r"were \['a'\], now are none"):
        Shaper({"a": ShapingSettings()}).load_state_dict(saved)


def test_clipping_comes_after_normalising():
    assert shaped({"a": {"clip": 1.0}}, {"a": [-5.0, 0.5, 5.0]}, {"a": 2.0})[0] == [-2.0, 1.0, 2.0]
    assert shaped({"a": {"clip": 1.0}}, {"a": [-5.0, 0.5, 5.0]}, raw=True)[0] == [-5.0, 0.5, 5.0]


# ---------------------------------------------------------------------- conditions, gates


def test_a_source_that_counts_only_if_another_passes():
    settings = {"style": {"only_if": {"source": "right", "at_least": 1.0}}, "right": {}}
    scores = {"style": [0.5, 0.5, 0.5], "right": [1.0, 0.0, NAN]}
    total, metrics = shaped(settings, scores)
    assert total == [1.5, 0.0, 0.0]
    assert metrics["style/counts"] == pytest.approx(1 / 3)


def test_a_chain_breaks_where_one_does_not_count():
    settings = {
        "a": {"only_if": {"source": "b", "at_least": 1.0}},
        "b": {"only_if": {"source": "c", "at_least": 1.0}},
        "c": {},
    }
    assert shaped(settings, {"a": [10.0, 10.0], "b": [1.0, 1.0], "c": [1.0, 0.0]})[0] == [12.0, 0.0]


def test_statistics_are_of_the_rows_that_count():
    settings = {"a": {"normalize": "batch", "only_if": {"source": "b", "at_least": 1.0}}, "b": {}}
    total, _ = shaped(settings, {"a": [1.0, 3.0, 100.0], "b": [1.0, 1.0, 0.0]})
    assert total == [0.0, 2.0, 0.0]


def test_gates_replace_the_whole_reward_by_the_lowest_floor():
    settings = {"safe": {"gate": {"at_least": 0.5, "floor": -1.0}}, "short": {"gate": {"at_least": 0.0, "floor": -3.0}}}
    scores = {"safe": [1.0, 0.2, 0.2, NAN], "short": [1.0, 1.0, -1.0, 1.0]}
    total, metrics = shaped(settings, scores)
    assert total == pytest.approx([2.0, -1.0, -3.0, 1.0])
    assert metrics["safe/gate_failed"] == 0.5
    assert shaped(settings, scores, raw=True)[0] == total  # a constraint holds in an evaluation too


def test_unknown_sources_and_circles():
    condition = {"at_least": 1.0}
    with pytest.raises(ConfigError, match=r"reward 'a': only_if names 'rigth', .*\n.*did you mean 'right'"):
        Shaper({"a": ShapingSettings(only_if={"source": "rigth", **condition}), "right": ShapingSettings()})
    a, b = ShapingSettings(only_if={"source": "b", **condition}), ShapingSettings(only_if={"source": "a", **condition})
    with pytest.raises(ConfigError, match="only_if goes in a circle: a if b, b if a"):
        Shaper({"a": a, "b": b, "c": ShapingSettings()})
    with pytest.raises(ConfigError, match="circle: a if a"):
        Shaper({"a": ShapingSettings(only_if={"source": "a", **condition})})
    with pytest.raises(ConfigError, match=r"normalise[\s\S]*did you mean 'normalize'"):
        parse(RewardSettings, {"function": "exact_match", "normalise": "batch"})


# ---------------------------------------------------------------------- through fuse


def test_settings_of_functions_and_raw_columns():
    def right(completions):
        return [1.0, 0.0, 1.0]

    def long(completions):
        return [10.0, 20.0, 30.0]

    rewards = load_rewards(
        [
            RewardSettings(function=right),
            RewardSettings(function=long, weight=0.1, clip=15.0, only_if={"source": "right", "at_least": 1}),
        ]
    )
    batch = Batch({"prompt": ["p"] * 3, "response": ["a", "b", "c"]})
    out, metrics = fuse(batch, rewards)
    assert out["rewards"].tolist() == pytest.approx([2.0, 0.0, 2.5])
    assert out["reward.long"].tolist() == [10.0, 20.0, 30.0]
    assert metrics.mean("reward/long") == 20.0
    assert metrics.mean("reward/long/shaped") == 12.5
    assert fuse(batch, rewards, raw=True)[0]["rewards"].tolist() == pytest.approx([2.0, 0.0, 4.0])
