"""Hand-computed values of the losses, their gradients, and the `Loss` objects that recipes use."""

from __future__ import annotations

import math

import pytest
import torch
from torch.testing import assert_close

from podium.algorithms import (
    LOSSES,
    POLICY_LOSSES,
    bradley_terry_loss,
    clipped_policy_loss,
    clipped_value_loss,
    entropy_from_logits,
    find_policy_objective,
    loss_builder,
    negative_log_likelihood,
    pairwise_reward_loss,
    policy_loss,
    policy_objective,
    supervised_loss,
    value_loss,
)

LOG = torch.log


def vector(*values: float) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.float64)


def test_policy_loss_by_hand():
    ratio = vector(1.0, 1.5, 1.5, 0.5, 0.5, 1.25)
    advantages = vector(2.0, 2.0, -2.0, 2.0, -2.0, 1.0)
    loss, metrics = clipped_policy_loss(LOG(ratio), torch.zeros(6), advantages, clip_low=0.2, clip_high=0.3)
    assert_close(loss, vector(-2.0, -1.3 * 2, 3.0, -1.0, 0.8 * 2, -1.25))
    assert_close(metrics["ratio"], ratio)
    assert_close(metrics["clip_fraction"], vector(0, 1, 0, 0, 1, 0))
    assert_close(metrics["approx_kl"], ratio - 1 - LOG(ratio))


def test_policy_loss_at_the_start_of_an_update():
    log_probs = torch.randn(3, 5).requires_grad_()
    advantages = torch.randn(3, 5)
    loss, metrics = clipped_policy_loss(log_probs, log_probs.detach(), advantages)
    assert torch.equal(metrics["ratio"], torch.ones(3, 5))
    assert not metrics["clip_fraction"].any() and not metrics["approx_kl"].any()
    assert torch.equal(loss, -advantages)
    loss.sum().backward()  # the gradient is that of REINFORCE
    assert_close(log_probs.grad, -advantages)
    assert not any(value.requires_grad for value in metrics.values())


def test_clipped_tokens_have_no_gradient():
    log_probs = LOG(vector(1.5, 0.5, 1.5, 0.5)).requires_grad_()
    clipped_policy_loss(log_probs, torch.zeros(4), vector(1, -1, -1, 1))[0].sum().backward()
    assert_close(log_probs.grad, vector(0, 0, 1.5, -0.5))


def test_dual_clip_bounds_negative_advantages_only():
    ratio, advantages = vector(10.0, 10.0, 2.0), vector(-1.0, 1.0, -1.0)
    loss, metrics = clipped_policy_loss(LOG(ratio), torch.zeros(3), advantages, dual_clip=3.0)
    assert_close(loss, vector(3.0, -1.2, 2.0))
    assert_close(metrics["dual_clip_fraction"], vector(1, 0, 0))


def test_policy_loss_stays_finite():
    log_probs = torch.tensor([-1.0, -900.0]).requires_grad_()
    loss, metrics = clipped_policy_loss(log_probs, torch.tensor([-900.0, -1.0]), torch.tensor([-1.0, 1.0]))
    loss.sum().backward()
    assert all(torch.isfinite(x).all() for x in (loss, log_probs.grad, *metrics.values()))


@pytest.mark.parametrize("settings", [{"clip_low": -0.1}, {"clip_low": 1.5}, {"clip_high": -1}, {"dual_clip": 1.0}])
def test_policy_loss_refuses_bounds_that_make_no_sense(settings):
    with pytest.raises(ValueError, match=next(iter(settings))):
        clipped_policy_loss(torch.zeros(1), torch.zeros(1), torch.zeros(1), **settings)


def test_value_loss_by_hand():
    values, old, returns = vector(1.0, 3.0, 0.0), vector(1.0, 1.0, 1.0), vector(2.0, 4.0, -1.0)
    loss, metrics = clipped_value_loss(values, old, returns)
    assert_close(loss, vector(0.5, 0.5, 0.5))
    assert_close(metrics, {"value_error": vector(1, 1, 1)})
    loss, metrics = clipped_value_loss(values, old, returns, clip=0.5)
    assert_close(loss, vector(0.5, 0.5 * 2.5**2, 0.5 * 1.5**2))
    assert_close(metrics["value_clip_fraction"], vector(0, 1, 1))
    with pytest.raises(ValueError, match="clip"):
        clipped_value_loss(values, old, returns, clip=-1.0)


def test_bradley_terry_by_hand():
    loss, metrics = bradley_terry_loss(vector(1.0, 0.0, 2.0), vector(1.0, 1.0, 0.0))
    assert_close(loss, vector(math.log(2), math.log(1 + math.e), math.log(1 + math.exp(-2))))
    assert_close(metrics, {"accuracy": vector(0, 0, 1), "score_margin": vector(0, -1, 2)})
    assert_close(bradley_terry_loss(vector(3.0), vector(1.0), margin=2.0)[0], vector(math.log(2)))


def test_entropy_by_hand():
    logits = torch.tensor([[0.0, 0.0, 0.0, 0.0], [0.0, math.log(3.0), -math.inf, -math.inf]])
    expected = torch.tensor([math.log(4), 0.25 * math.log(4) + 0.75 * math.log(4 / 3)])
    assert_close(entropy_from_logits(logits), expected)
    assert entropy_from_logits(logits.bfloat16()).dtype == torch.float32


def run(loss, outputs, columns):
    assert set(outputs) == set(loss.outputs) and set(columns) == set(loss.columns)
    return loss.function(outputs, columns)


def test_policy_loss_object_asks_only_for_what_it_uses():
    loss = policy_loss()
    assert loss.outputs == ("log_probs",) and loss.columns == ("old_log_probs", "advantages", "loss_mask")
    full = policy_loss(entropy_coef=0.5, kl_coef=2.0, kl_estimator="k2", reduction="constant", constant_length=7)
    assert full.outputs == ("log_probs", "entropy")
    assert full.columns == ("old_log_probs", "advantages", "loss_mask", "ref_log_probs")
    outputs = {"log_probs": vector(0.0, 0.0), "entropy": vector(1.0, 3.0)}
    columns = {"old_log_probs": vector(0, 0), "advantages": vector(1, -1), "ref_log_probs": vector(-2.0, 1.0)}
    columns["loss_mask"] = torch.ones(2).bool()
    value, metrics = run(full, outputs, columns)
    assert_close(value, vector(-1 - 0.5 + 2 * 2, 1 - 1.5 + 2 * 0.5))
    assert_close(metrics["ref_kl"], vector(2, 0.5))
    assert {"ratio", "clip_fraction", "approx_kl", "entropy", "ref_kl"} == set(metrics)


def test_one_update_needs_no_old_log_probs_and_has_the_same_gradient():
    loss = policy_loss(one_update=True, kl_coef=0.1)
    assert loss.columns == ("advantages", "loss_mask", "ref_log_probs")
    columns = {"advantages": vector(1, -1), "ref_log_probs": vector(-2.0, 1.0), "loss_mask": torch.ones(2).bool()}
    log_probs = vector(-0.5, -1.5)

    def gradient(loss, columns):
        leaf = log_probs.clone().requires_grad_()
        value, _ = run(loss, {"log_probs": leaf}, columns)
        return value.detach(), torch.autograd.grad(value.sum(), leaf)[0]

    assert_close(gradient(loss, columns), gradient(policy_loss(kl_coef=0.1), columns | {"old_log_probs": log_probs}))


def test_wrong_settings_are_found_when_the_loss_is_built():
    with pytest.raises(ValueError, match=r"Did you mean 'token_mean'\?"):
        policy_loss(reduction="token_meen")
    with pytest.raises(ValueError, match="constant_length"):
        policy_loss(reduction="constant")
    with pytest.raises(ValueError, match="Unknown KL estimator 'k4'"):
        policy_loss(kl_estimator="k4")
    with pytest.raises(ValueError, match="kl_coef"):
        policy_loss(kl_coef=-0.1)


def test_value_and_supervised_loss_objects():
    loss, _ = run(value_loss(clip=0.5), {"values": vector(3.0)}, {"values": vector(1.0), "returns": vector(4.0)})
    assert_close(loss, vector(0.5 * 2.5**2))
    loss, metrics = run(supervised_loss(), {"log_probs": vector(-1.5, 0.0)}, {})
    assert_close(loss, vector(1.5, 0.0))
    assert metrics == {}
    assert_close(negative_log_likelihood(vector(-2.0)), vector(2.0))


def test_pairwise_reward_loss_finds_the_partner_in_any_order():
    loss = pairwise_reward_loss()
    assert loss.mask == "chosen" and loss.keep_together == "pair_id" and loss.outputs == ("scores",)
    scores = vector(1.0, 5.0, 4.0, 1.0).requires_grad_()
    columns = {"pair_id": torch.tensor([9, 3, 9, 3]), "chosen": torch.tensor([False, True, True, False])}
    value, metrics = run(loss, {"scores": scores}, columns)
    assert_close(value.detach(), vector(0, math.log(1 + math.exp(-4)), math.log(1 + math.exp(-3)), 0))
    assert_close(metrics["score_margin"], vector(0, 4, 3, 0))
    assert_close(metrics["accuracy"], vector(0, 1, 1, 0))
    assert_close(metrics["rejected_score"], vector(0, 1, 1, 0))
    value.sum().backward()
    assert (scores.grad[columns["chosen"]] < 0).all() and (scores.grad[~columns["chosen"]] > 0).all()


@pytest.mark.parametrize(("pair_id", "chosen"), [([1, 1, 2], [1, 0, 1]), ([1, 1, 2, 2], [1, 1, 1, 0]), ([1, 1, 1], [1, 0, 0])])
def test_pairwise_reward_loss_refuses_broken_pairs(pair_id, chosen):
    columns = {"pair_id": torch.tensor(pair_id), "chosen": torch.tensor(chosen).bool()}
    with pytest.raises(ValueError, match="one chosen and one rejected"):
        pairwise_reward_loss().function({"scores": torch.zeros(len(pair_id))}, columns)


def cases():
    generator = torch.Generator().manual_seed(0)

    def draw(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=generator, dtype=torch.float64)

    log_probs = -draw(2, 3).abs()
    policy = {"old_log_probs": log_probs + 0.3 * draw(2, 3), "advantages": draw(2, 3), "loss_mask": torch.ones(2, 3).bool()}
    both = {"log_probs": log_probs, "entropy": draw(2, 3).abs()}
    yield policy_loss(), {"log_probs": log_probs}, policy
    yield policy_loss(clip_low=0.1, clip_high=0.5, dual_clip=1.2), {"log_probs": log_probs}, policy
    for estimator in ("k1", "k2", "k3"):
        columns = policy | {"ref_log_probs": log_probs + draw(2, 3)}
        yield policy_loss(entropy_coef=0.1, kl_coef=0.3, kl_estimator=estimator), both, columns
    yield value_loss(), {"values": draw(2, 3)}, {"values": draw(2, 3), "returns": draw(2, 3)}
    yield value_loss(clip=0.2), {"values": draw(2, 3)}, {"values": draw(2, 3), "returns": draw(2, 3)}
    yield supervised_loss(), {"log_probs": log_probs}, {}
    pairs = {"pair_id": torch.tensor([0, 1, 1, 0]), "chosen": torch.tensor([1, 0, 1, 0]).bool()}
    yield pairwise_reward_loss(margin=0.5), {"scores": draw(4)}, pairs


@pytest.mark.parametrize(("loss", "outputs", "columns"), list(cases()))
def test_gradients_agree_with_finite_differences(loss, outputs, columns):
    names = list(outputs)

    def total(*tensors: torch.Tensor) -> torch.Tensor:
        return loss.function(dict(zip(names, tensors, strict=True)), columns)[0]

    inputs = [outputs[name].clone().requires_grad_() for name in names]
    assert torch.autograd.gradcheck(total, inputs)
    value, metrics = loss.function(outputs, columns)
    for metric in metrics.values():
        assert metric.shape == value.shape and not metric.requires_grad


def test_the_gradient_step_raises_the_probability_of_good_tokens():
    log_probs = torch.zeros(2, requires_grad=True)
    columns = {"old_log_probs": torch.zeros(2), "advantages": torch.tensor([1.0, -1.0]), "loss_mask": torch.ones(2).bool()}
    policy_loss().function({"log_probs": log_probs}, columns)[0].sum().backward()
    assert log_probs.grad[0] < 0 < log_probs.grad[1]  # descent adds to the first and takes from the second


def test_adding_a_policy_objective_with_settings_of_its_own(monkeypatch):
    monkeypatch.setattr("podium.algorithms.policy_losses.POLICY_LOSSES", {**POLICY_LOSSES})

    @policy_objective("scaled")
    def scaled(log_probs, old_log_probs, advantages, mask, *, scale=2.0):
        if scale < 0:
            raise ValueError(f"scale must not be negative; got {scale}.")
        return -scale * advantages * log_probs, {"largest": log_probs.detach().max(dim=1, keepdim=True).values}

    assert find_policy_objective("scaled").settings == {"scale": 2.0}
    columns = {"advantages": torch.tensor([[2.0]]), "loss_mask": torch.ones(1, 1).bool()}
    value, _ = run(policy_loss(objective="scaled", scale=3.0, one_update=True), {"log_probs": torch.tensor([[-1.0]])}, columns)
    assert_close(value, torch.tensor([[6.0]]))
    again = policy_loss(objective="scaled", scale=3.0, one_update=True).otherwise
    assert again is not None
    value, _ = run(again, {"log_probs": torch.tensor([[-1.0]])}, {**columns, "old_log_probs": torch.tensor([[-2.0]])})
    assert_close(value, torch.tensor([[6.0]]))
    with pytest.raises(ValueError, match="scale must not be negative"):
        policy_loss(objective="scaled", scale=-1.0)
    with pytest.raises(
        ValueError, match=r"'scaled' has no setting 'clip_low'. It has: scale. Those that have it: cispo, clip, gspo"
    ):
        policy_loss(objective="scaled", clip_low=0.1)
    with pytest.raises(ValueError, match="already a policy objective 'scaled'"):
        policy_objective("scaled")(scaled)
    with pytest.raises(ValueError, match=r"takes 4 tensors by position.*no default: \['scale'\]"):
        policy_objective("broken")(lambda log_probs, advantages, *, scale: None)


def test_every_builder_has_defaults_and_a_name_of_its_own():
    assert all(builder().name for builder in LOSSES.values())
    with pytest.raises(ValueError, match="already a loss 'policy'"):
        loss_builder("policy")(policy_loss)
