"""DPO, IPO, KTO and reward losses over heads, by hand."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.testing import assert_close

from podium.algorithms import (
    dpo_loss,
    ipo_loss,
    kahneman_tversky_loss,
    kto_loss,
    kto_reference_point,
    pairwise_reward_loss,
    preference_loss,
    sequence_log_ratios,
    value_loss,
)


def vector(*values: float) -> Tensor:
    return torch.tensor(values, dtype=torch.float64)


def sigmoid(x: float) -> float:
    return 1 / (1 + math.exp(-x))


def test_sequence_log_ratios_by_hand():
    log_probs = torch.tensor([[-1.0, -2.0, torch.nan], [-3.0, torch.nan, torch.nan]]).requires_grad_()
    ref = torch.tensor([[-2.0, -2.5, 0.0], [0.0, 0.0, 0.0]])
    mask = torch.tensor([[1, 1, 0], [0, 0, 0]]).bool()
    assert_close(sequence_log_ratios(log_probs, ref, mask), torch.tensor([1.5, 0.0]))
    mean = sequence_log_ratios(log_probs, ref, mask, mean=True)
    assert_close(mean, torch.tensor([0.75, 0.0]))
    mean.sum().backward()
    assert_close(log_probs.grad, torch.tensor([[0.5, 0.5, 0], [0, 0, 0]]))


def test_dpo_by_hand():
    loss, metrics = dpo_loss(vector(3.0, -1.0, 2.0), vector(1.0, 1.0, 2.0), beta=0.5)
    assert_close(loss, vector(-math.log(sigmoid(1.0)), -math.log(sigmoid(-1.0)), math.log(2)))
    assert_close(metrics["accuracy"], vector(1, 0, 0))
    assert_close(metrics["margin"], vector(1, -1, 0))
    assert_close(metrics["chosen_reward"], vector(1.5, -0.5, 1))
    assert_close(metrics["rejected_reward"], vector(0.5, 0.5, 1))
    smooth, _ = dpo_loss(vector(3.0), vector(1.0), beta=0.5, label_smoothing=0.25)
    assert_close(smooth, vector(-0.75 * math.log(sigmoid(1.0)) - 0.25 * math.log(sigmoid(-1.0))))


def test_ipo_by_hand():
    loss, metrics = ipo_loss(vector(3.0, 5.0), vector(1.0, 0.0), beta=0.25)  # the target is 1 / (2 * .25) = 2
    assert_close(loss, vector(0.0, 9.0))
    assert_close(metrics["margin"], vector(0.5, 1.25))


def test_kto_by_hand():
    label = torch.tensor([True, False, True])
    loss, metrics = kahneman_tversky_loss(
        vector(3.0, 3.0, 1.0),
        label,
        vector(1.0, 1.0, 1.0),
        beta=0.5,
        desirable_weight=2.0,
        undesirable_weight=3.0,
    )
    assert_close(loss, vector(2 * (1 - sigmoid(1.0)), 3 * (1 - sigmoid(-1.0)), 2 * 0.5))
    assert_close(metrics["accuracy"], vector(1, 0, 0))
    assert_close(metrics["margin"], vector(1, -1, 0))
    assert_close(metrics["reward"], vector(1.5, 1.5, 0.5))


def test_kto_reference_point_by_hand():
    assert_close(kto_reference_point(vector(1.0, -2.0, 4.0)), torch.tensor(1.0, dtype=torch.float64))
    assert kto_reference_point(vector(-1.0, -2.0)) == 0
    assert kto_reference_point(torch.zeros(0)) == 0
    assert not kto_reference_point(vector(1.0).requires_grad_()).requires_grad


@pytest.mark.parametrize(
    ("build", "message"),
    [
        (lambda: preference_loss(kind="dpoo"), r"'dpoo'. Did you mean 'dpo'\?"),  # type: ignore[arg-type]
        (lambda: preference_loss(beta=0.0), "beta must be above 0"),
        (lambda: preference_loss(kind="ipo", beta=-1.0), "beta must be above 0"),
        (lambda: preference_loss(label_smoothing=0.5), "label_smoothing must be"),
        (lambda: preference_loss(kind="ipo", label_smoothing=0.1), "no place in IPO"),
        (lambda: kto_loss(beta=0.0), "beta must be above 0"),
        (lambda: kto_loss(undesirable_weight=-1.0), "weights must not be negative"),
    ],
)
def test_wrong_settings_are_found_when_the_loss_is_built(build: Any, message: str):
    with pytest.raises(ValueError, match=message):
        build()


PAIRS = {"pair_id": torch.tensor([7, 2, 2, 7]), "chosen": torch.tensor([True, False, True, False])}


@pytest.mark.parametrize("label_smoothing", [0.0, 0.1])
def test_the_first_step_of_dpo_is_ln_2(label_smoothing: float):
    log_probs = -5 * torch.rand(4, 300, generator=torch.Generator().manual_seed(0))
    columns = {**PAIRS, "ref_log_probs": log_probs, "loss_mask": torch.ones(4, 300).bool()}
    loss, metrics = preference_loss(label_smoothing=label_smoothing).function({"log_probs": log_probs}, columns)
    assert loss[PAIRS["chosen"]].tolist() == pytest.approx([math.log(2)] * 2, abs=1e-5)
    assert not metrics["accuracy"].any() and not metrics["margin"].any()


def test_a_pair_of_equal_answers_gives_ln_2_and_gradients_that_cancel():
    log_probs = torch.tensor([[-1.0, -2.0], [-3.0, -1.0], [-3.0, -1.0], [-1.0, -2.0]]).requires_grad_()
    columns = {**PAIRS, "ref_log_probs": torch.zeros(4, 2), "loss_mask": torch.ones(4, 2).bool()}
    loss, _ = preference_loss().function({"log_probs": log_probs}, columns)
    assert loss[PAIRS["chosen"]].tolist() == pytest.approx([math.log(2)] * 2)
    loss.sum().backward()
    assert not (log_probs.grad[0] + log_probs.grad[3]).any() and not (log_probs.grad[1] + log_probs.grad[2]).any()


def test_a_reward_loss_over_heads_takes_each_pair_s_own_score():
    loss = pairwise_reward_loss(heads=True)
    assert loss.columns == ("pair_id", "chosen", "head")
    scores = torch.tensor([[1.0, 9.0], [0.0, 2.0], [5.0, 4.0], [3.0, 9.0]], dtype=torch.float64).requires_grad_()
    columns = {**PAIRS, "head": torch.tensor([0, 1, 1, 0])}
    value, metrics = loss.function({"scores": scores}, columns)
    assert_close(value.detach(), vector(math.log(1 + math.exp(2)), 0, math.log(1 + math.exp(-2)), 0))
    assert_close(metrics["score_margin"], vector(-2, 0, 2, 0))
    value.sum().backward()
    assert_close(scores.grad != 0, torch.tensor([[True, False], [False, True], [False, True], [True, False]]))


@pytest.mark.parametrize(
    ("scores", "head", "message"),
    [
        (torch.zeros(4), [0, 0, 0, 0], "it has one head"),
        (torch.zeros(4, 2), [0, 2, 2, 0], "numbered from 0"),
        (torch.zeros(4, 2), [0, 1, 1, 1], "about the same head"),
    ],
)
def test_heads_that_do_not_fit_are_named(scores: Tensor, head: list[int], message: str):
    with pytest.raises(ValueError, match=message):
        pairwise_reward_loss(heads=True).function({"scores": scores}, {**PAIRS, "head": torch.tensor(head)})


def test_a_cost_critic_has_columns_of_its_own():
    loss = value_loss(values="cost_values", returns="cost_returns", clip=0.5)
    assert loss.columns == ("cost_values", "cost_returns") and loss.outputs == ("values",)
    value, _ = loss.function({"values": vector(3.0)}, {"cost_values": vector(1.0), "cost_returns": vector(4.0)})
    assert_close(value, vector(0.5 * 2.5**2))
