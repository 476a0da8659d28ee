"""Safe-RLHF's advantage and its multiplier, by hand."""

from __future__ import annotations

import json
import math

import pytest
import torch
from torch.testing import assert_close

from podium.algorithms import LagrangeMultiplier, constrained_advantages


def test_constrained_advantages_by_hand():
    reward, cost = torch.tensor([[1.0, -2.0]]), torch.tensor([[3.0, 1.0]])
    assert_close(constrained_advantages(reward, cost, 0.5), torch.tensor([[(1 - 1.5) / 1.5, (-2 - 0.5) / 1.5]]))
    assert torch.equal(constrained_advantages(reward, cost, 0.0), reward)
    assert not constrained_advantages(reward.requires_grad_(), cost, 1.0).requires_grad


def test_a_huge_multiplier_leaves_the_cost_alone():
    got = constrained_advantages(torch.tensor([5.0]), torch.tensor([2.0]), 1e6)
    assert got.item() == pytest.approx(-2.0, rel=1e-4)


@pytest.mark.parametrize("multiplier", [-0.1, math.nan, math.inf])
def test_constrained_advantages_refuse(multiplier: float):
    with pytest.raises(ValueError, match="multiplier must be a finite number"):
        constrained_advantages(torch.zeros(1), torch.zeros(1), multiplier)
    with pytest.raises(ValueError, match=r"one shape; got \[1\] and \[2\]"):
        constrained_advantages(torch.zeros(1), torch.zeros(2), 1.0)


def test_update_by_hand():
    multiplier = LagrangeMultiplier(threshold=0.5, initial=2.0, lr=0.1, maximum=10.0)
    multiplier.update(1.5)  # ln 2 + .1 * 2 * (1.5 - .5)
    assert multiplier.value == pytest.approx(2.0 * math.exp(0.2))
    multiplier.update(0.5)
    assert multiplier.value == pytest.approx(2.0 * math.exp(0.2))
    before = multiplier.value
    multiplier.update(-0.5)
    assert multiplier.value == pytest.approx(before * math.exp(-0.1 * before))


def test_the_step_is_that_of_gradient_ascent_on_the_logarithm():
    """What PKU's code does with SGD on log lambda: the loss -(cost - threshold) * exp(log lambda)."""
    log_multiplier = torch.tensor(math.log(1.7), dtype=torch.float64, requires_grad=True)
    optimizer = torch.optim.SGD([log_multiplier], lr=0.3)
    ours = LagrangeMultiplier(threshold=0.2, initial=1.7, lr=0.3, maximum=100.0)
    for cost in (1.0, -0.4, 0.2, 0.9):
        optimizer.zero_grad()
        (-(cost - 0.2) * log_multiplier.exp()).backward()
        optimizer.step()
        ours.update(cost)
        assert ours.value == pytest.approx(float(log_multiplier.detach().exp()))


def test_bounds_hold_whatever_the_cost():
    multiplier = LagrangeMultiplier(threshold=0.0, initial=1.0, lr=1.0, maximum=3.0, minimum=0.5)
    multiplier.update(1e300)
    assert multiplier.value == 3.0
    for _ in range(5):
        multiplier.update(-1e300)
    assert multiplier.value == 0.5
    free = LagrangeMultiplier(threshold=0.0, initial=1.0, lr=1.0, maximum=3.0)
    free.update(-1e300)
    assert 0 < free.value < 1e-20  # and can come back
    with pytest.raises(ValueError, match="mean cost is nan"):
        free.update(math.nan)


def test_it_is_switched_while_a_run_goes_on():
    multiplier = LagrangeMultiplier(threshold=0.0, initial=2.0, lr=0.1, maximum=3.0)
    multiplier.switch(threshold=1.0, lr=0.2)
    assert (multiplier.threshold, multiplier.lr, multiplier.value) == (1.0, 0.2, 2.0)
    multiplier.switch(maximum=1.5)
    assert multiplier.value == 1.5
    multiplier.switch(value=0.7)
    assert multiplier.value == 0.7
    with pytest.raises(ValueError, match="within"):
        multiplier.switch(value=9.0, lr=5.0)
    assert (multiplier.value, multiplier.lr) == (0.7, 0.2)


def test_a_learning_rate_of_zero_keeps_it():
    multiplier = LagrangeMultiplier(threshold=0.0, initial=0.3, lr=0.0)
    multiplier.update(100.0)
    assert multiplier.value == pytest.approx(0.3)


def test_state_survives_json():
    multiplier = LagrangeMultiplier(threshold=0.1, initial=1.3, lr=0.2, maximum=7.0, minimum=0.01)
    multiplier.update(0.7)
    restored = LagrangeMultiplier(threshold=0.0)
    restored.load_state_dict(json.loads(json.dumps(multiplier.state_dict())))
    for each in (multiplier, restored):
        each.update(-0.3)
    assert restored.value == multiplier.value and repr(restored) == repr(multiplier)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"threshold": math.nan}, "threshold must be a finite"),
        ({"threshold": 0.0, "initial": 0.0}, "above 0 and within"),
        ({"threshold": 0.0, "initial": 6.0}, "above 0 and within"),
        ({"threshold": 0.0, "lr": -0.1}, "lr must be"),
        ({"threshold": 0.0, "minimum": 2.0, "maximum": 1.0}, "minimum <= maximum"),
        ({"threshold": 0.0, "maximum": math.inf}, "maximum above 0 and finite"),
    ],
)
def test_wrong_settings(settings: dict[str, float], message: str):
    with pytest.raises(ValueError, match=message):
        LagrangeMultiplier(**settings)
