"""The algorithms agree with verl's and TRL's, where those have the same function. Deliberate differences are tested too.

Skipped where verl or TRL is not installed: `pip install verl==0.9.1 trl`.
"""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
from torch.testing import assert_close

from podium.algorithms import (
    ADVANTAGE_ESTIMATORS,
    CORRECTIONS,
    POLICY_LOSSES,
    KLController,
    clipped_policy_loss,
    clipped_value_loss,
    entropy_from_logits,
    gae,
    group_relative,
    kl_estimate,
    leave_one_out,
    log_probs_from_logits,
    token_weights,
    whiten,
)

B, T = 6, 9


@pytest.fixture(scope="module")
def verl():
    return pytest.importorskip("verl.trainer.ppo.core_algos", reason="verl==0.9.1 is not installed", exc_type=ImportError)


@pytest.fixture(scope="module")
def trl():
    return pytest.importorskip("trl.trainer.utils", reason="trl is not installed", exc_type=ImportError)


def draw(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


@pytest.fixture
def mask() -> torch.Tensor:
    """Responses of several lengths, with environment tokens inside, and one row with nothing in it."""
    mask = torch.arange(T) < torch.tensor([9, 7, 4, 1, 9, 0])[:, None]
    mask[0, 3:5] = False
    mask[4, 0] = False
    return mask


REWARDS = torch.tensor([1.0, 0.0, 2.0, 0.5, 0.5, -1.0])
GROUP_ID = torch.tensor([3, 3, 3, 8, 8, 8])


def at_first_token(rewards: torch.Tensor) -> torch.Tensor:
    return torch.cat([rewards[:, None], torch.zeros(B, T - 1)], dim=1)


def test_gae(verl, mask):
    rewards, values = draw(B, T, seed=1) * mask, draw(B, T, seed=2)
    theirs, their_returns = verl.compute_gae_advantage_return(rewards, values, mask.float(), gamma=0.9, lam=0.8)
    ours, our_returns = gae(rewards, values, mask, gamma=0.9, gae_lambda=0.8)
    assert_close(whiten(ours, mask), theirs * mask)
    assert_close(our_returns, their_returns * mask)


def test_gae_keeps_a_reward_on_an_environment_token_that_verl_drops(verl):
    mask, rewards = torch.tensor([[1, 1, 0]]), torch.tensor([[0.0, 0.0, 1.0]])
    _, theirs = verl.compute_gae_advantage_return(rewards, torch.zeros(1, 3), mask, gamma=1.0, lam=1.0)
    _, ours = gae(rewards, torch.zeros(1, 3), mask, gamma=1.0, gae_lambda=1.0)
    assert not theirs[0, :2].any()
    assert_close(ours[0, :2], torch.ones(2))


@pytest.mark.parametrize("normalize", [True, False])
def test_group_relative(verl, mask, normalize: bool):
    theirs, _ = verl.compute_grpo_outcome_advantage(
        at_first_token(REWARDS), mask.float(), GROUP_ID.numpy(), epsilon=1e-4, norm_adv_by_std_in_grpo=normalize
    )
    ours = group_relative(REWARDS, GROUP_ID, normalize=normalize, epsilon=1e-4)
    assert_close(ours[:, None] * mask, theirs)


def test_leave_one_out(verl, mask):
    theirs, _ = verl.compute_rloo_outcome_advantage(at_first_token(REWARDS), mask.float(), GROUP_ID.numpy())
    assert_close(leave_one_out(REWARDS, GROUP_ID)[:, None] * mask, theirs)


def test_optimal_baseline(verl, mask):
    mask = mask | (torch.arange(B) == 5)[:, None]  # verl divides by 0 for a group of empty responses only
    theirs, _ = verl.compute_opo_outcome_advantage(at_first_token(REWARDS), mask.float(), GROUP_ID.numpy())
    ours = ADVANTAGE_ESTIMATORS["opo"](rewards=REWARDS, group_id=GROUP_ID, mask=mask)["advantages"]
    assert_close(ours, theirs)


@pytest.mark.parametrize("gamma", [1.0, 0.9])
def test_reinforce_plus_plus(verl, mask, gamma: float):
    rewards = draw(B, T, seed=14) * mask
    theirs, their_returns = verl.compute_reinforce_plus_plus_outcome_advantage(
        rewards, mask.float(), config=SimpleNamespace(gamma=gamma)
    )
    given = {"token_rewards": rewards, "mask": mask, "gamma": gamma}
    assert_close(ADVANTAGE_ESTIMATORS["reinforce_plus_plus"](**given)["advantages"], theirs)
    assert_close(ADVANTAGE_ESTIMATORS["reinforce"](**given)["advantages"], their_returns)


def test_reinforce_plus_plus_baseline(verl, mask):
    theirs, _ = verl.compute_reinforce_plus_plus_baseline_outcome_advantage(
        at_first_token(REWARDS), mask.float(), GROUP_ID.numpy()
    )
    ours = ADVANTAGE_ESTIMATORS["reinforce_plus_plus_baseline"](rewards=REWARDS, group_id=GROUP_ID, mask=mask)["advantages"]
    assert_close(ours, theirs)


def test_remax(verl, mask):
    rewards, baseline = draw(B, T, seed=15) * mask, draw(B, seed=16)
    theirs, _ = verl.compute_remax_outcome_advantage(rewards, baseline, mask.float())
    ours = ADVANTAGE_ESTIMATORS["remax"](token_rewards=rewards, baseline_rewards=baseline, mask=mask)["advantages"]
    assert_close(ours, theirs * mask)  # verl leaves the reward to come on the environment's tokens


@pytest.mark.parametrize("name", ["rloo", "opo", "reinforce_plus_plus_baseline"])
def test_a_group_of_one_has_no_baseline_in_verl(verl, name: str):
    mask, index = torch.ones(2, 2), torch.tensor([0, 1])
    theirs, _ = getattr(verl, f"compute_{name}_outcome_advantage")(torch.tensor([[3.0, 0], [1, 0]]), mask, index.numpy())
    assert theirs.abs().min() > 0
    ours = ADVANTAGE_ESTIMATORS[name](rewards=torch.tensor([3.0, 1.0]), group_id=index, mask=mask.bool())["advantages"]
    assert not ours.any()


def test_equal_rewards_give_exactly_zero_here_and_a_rounding_error_in_verl(verl):
    rewards, index = torch.full((7,), 0.1), torch.zeros(7).long()
    theirs, _ = verl.compute_grpo_outcome_advantage(rewards[:, None].clone(), torch.ones(7, 1), index.numpy())
    assert theirs.abs().min() > 1e-3
    assert not group_relative(rewards, index).any()


def test_a_group_of_empty_responses_is_not_a_number_in_verl_s_opo(verl):
    mask, index = torch.zeros(2, 2), torch.zeros(2).long()
    theirs, _ = verl.compute_opo_outcome_advantage(torch.tensor([[1.0, 0], [2, 0]]), mask, index.numpy())
    assert theirs.isnan().all()
    ours = ADVANTAGE_ESTIMATORS["opo"](rewards=torch.tensor([1.0, 2.0]), group_id=index, mask=mask.bool())["advantages"]
    assert torch.equal(ours, torch.zeros(2, 2))


def test_verl_reads_values_outside_the_mask_and_cannot_whiten_one_token(verl):
    mask, values = torch.tensor([[1.0, 1.0, 0.0]]), torch.tensor([[1.0, 1.0, torch.nan]])
    theirs, _ = verl.compute_gae_advantage_return(torch.zeros(1, 3), values, mask, gamma=1.0, lam=1.0)
    assert theirs.isnan().all()
    ours, _ = gae(torch.zeros(1, 3), values, mask, gamma=1.0, gae_lambda=1.0)
    assert_close(ours, torch.tensor([[-1.0, -1.0, 0.0]]))
    one = torch.tensor([[1.0, 0.0, 0.0]])
    with pytest.raises(ValueError, match="sum of the mask is one"):
        verl.compute_gae_advantage_return(torch.zeros(1, 3), torch.ones(1, 3), one, gamma=1.0, lam=1.0)
    assert torch.equal(whiten(torch.ones(1, 3), one), torch.zeros(1, 3))


def test_a_group_of_one_is_zero_here_and_the_raw_reward_in_verl(verl):
    one = {"token_level_rewards": torch.tensor([[3.0]]), "response_mask": torch.ones(1, 1)}
    theirs, _ = verl.compute_grpo_outcome_advantage(**one, index=GROUP_ID[:1].numpy())
    assert_close(theirs, torch.tensor([[3.0]]))
    assert group_relative(torch.tensor([3.0]), GROUP_ID[:1]) == 0


@pytest.mark.parametrize(("clip_low", "clip_high", "dual_clip"), [(0.2, 0.2, 3.0), (0.1, 0.3, 1.5)])
def test_policy_loss(verl, mask, clip_low: float, clip_high: float, dual_clip: float):
    log_probs = (-draw(B, T, seed=3).abs()).requires_grad_()
    old, advantages = (log_probs + 0.5 * draw(B, T, seed=4)).detach(), draw(B, T, seed=5)
    theirs, their_fraction, _, their_dual_fraction = verl.compute_policy_loss(
        old,
        log_probs,
        advantages,
        mask.float(),
        cliprange_low=clip_low,
        cliprange_high=clip_high,
        clip_ratio_c=dual_clip,
        cliprange=0.2,
    )
    loss, metrics = clipped_policy_loss(log_probs, old, advantages, clip_low=clip_low, clip_high=clip_high, dual_clip=dual_clip)
    weights = token_weights(mask, "token_mean")
    ours = (weights * loss).sum()
    assert_close(ours, theirs)
    assert_close(torch.autograd.grad(ours, log_probs), torch.autograd.grad(theirs, log_probs))
    assert_close((weights * metrics["clip_fraction"]).sum(), their_fraction)
    assert_close((weights * metrics["dual_clip_fraction"]).sum(), their_dual_fraction)


OBJECTIVES = {
    # our name: verl's function, its settings, ours
    "clip": ("vanilla", {"clip_ratio_c": 3.0}, {"dual_clip": 3.0}),
    "gspo": ("gspo", {}, {}),
    "cispo": ("cispo", {}, {}),
    "reinforce": ("reinforce", {}, {}),
}


@pytest.mark.parametrize("weighted", [False, True])
@pytest.mark.parametrize("name", OBJECTIVES)
def test_policy_objectives(verl, mask, name: str, weighted: bool):
    """Loss and gradient, with and without importance weights; verl's reduction is by our token weights too."""
    theirs_name, their_settings, our_settings = OBJECTIVES[name]
    config_class = pytest.importorskip("verl.workers.config", exc_type=ImportError).ActorConfig
    config = config_class(
        strategy="fsdp",
        rollout_n=1,
        use_dynamic_bsz=True,
        clip_ratio_low=0.1,
        clip_ratio_high=0.3,
        **their_settings,
    )
    log_probs = (-draw(B, T, seed=3).abs()).requires_grad_()
    old, advantages = (log_probs + 0.3 * draw(B, T, seed=4)).detach(), draw(B, T, seed=5)
    weights = draw(B, T, seed=17).abs() if weighted else None
    theirs, their_metrics = getattr(verl, f"compute_policy_loss_{theirs_name}")(
        old, log_probs, advantages, mask.float(), "token-mean", config, weights
    )
    clips = {} if name == "reinforce" else {"clip_low": 0.1, "clip_high": 0.3}
    loss, metrics = POLICY_LOSSES[name](log_probs, old, advantages, mask, **clips, **our_settings)
    share = token_weights(mask, "token_mean")
    ours = (share * loss * (1.0 if weights is None else weights)).sum()
    assert_close(ours, theirs)
    assert_close(torch.autograd.grad(ours, log_probs), torch.autograd.grad(theirs, log_probs))
    if clips:
        assert float((share * metrics["clip_fraction"]).sum()) == pytest.approx(their_metrics["actor/pg_clipfrac"])


@pytest.fixture(scope="module")
def corrections():
    return pytest.importorskip(
        "verl.trainer.ppo.rollout_corr_helper", reason="verl==0.9.1 is not installed", exc_type=ImportError
    )


@pytest.mark.parametrize(
    ("name", "settings", "theirs"),
    [
        ("token_truncated", {"cap": 1.5}, {"rollout_is": "token", "rollout_is_threshold": 1.5}),
        ("sequence_truncated", {"cap": 1.5}, {"rollout_is": "sequence", "rollout_is_threshold": 1.5}),
        ("token_masked", {"low": 0.5, "high": 2.0}, {"rollout_is": "token", "rollout_is_threshold": "0.5_2.0"}),
    ],
)
def test_importance_weights(corrections, mask, name: str, settings: dict, theirs: dict):
    old, rollout = -draw(B, T, seed=18).abs(), -draw(B, T, seed=19).abs()
    weights, _, metrics = corrections.compute_rollout_correction_and_rejection_mask(old, rollout, mask.float(), **theirs)
    ours = CORRECTIONS[name](old, rollout, mask, **settings)
    assert_close(ours.importance_weights, weights.batch["rollout_is_weights"] * mask)
    means = {key: float(total) / float(count) for key, (total, count) in ours.metrics.items()}
    assert means["effective_sample_size"] == pytest.approx(metrics["rollout_corr/rollout_is_eff_sample_size"], rel=1e-5)
    assert means["rollout_kl"] == pytest.approx(metrics["rollout_corr/kl"], rel=1e-5)
    assert means["rollout_kl_k3"] == pytest.approx(metrics["rollout_corr/k3_kl"], rel=1e-5)
    if name == "token_masked":  # verl keeps the token in the denominators, with the weight 0; here it leaves the mask
        assert torch.equal(ours.corrected_mask, mask & (weights.batch["rollout_is_weights"] > 0))


def test_rejected_sequences(corrections, mask):
    """verl's band is on the inverse ratio: rollout over training."""
    old, rollout = -draw(B, T, seed=18).abs(), -draw(B, T, seed=19).abs()
    kept, metrics = corrections.compute_rollout_rejection_mask(
        old - rollout, mask.float(), rollout_rs="seq_mean_k1", rollout_rs_threshold=f"{1 / 1.25}_{1 / 0.9}"
    )
    ours = CORRECTIONS["sequence_rejected"](old, rollout, mask, low=0.9, high=1.25)
    assert 0 < int(ours.corrected_mask.sum()) < int(mask.sum())
    assert torch.equal(ours.corrected_mask, kept.bool())
    rejected = float(ours.metrics["rejected"][0])
    assert rejected == pytest.approx(metrics["rollout_rs_seq_masked_fraction"] * B)  # they divide by empty rows too


@pytest.mark.parametrize(
    ("ours", "theirs"),
    [
        ("token_mean", "token-mean"),
        ("sequence_mean_token_mean", "seq-mean-token-mean"),
        ("sequence_mean_token_sum", "seq-mean-token-sum"),
    ],
)
def test_reductions(verl, mask, ours: str, theirs: str):
    loss = draw(B, T, seed=6)
    assert_close((token_weights(mask, ours) * loss).sum(), verl.agg_loss(loss, mask.float(), theirs))


def test_constant_reduction_counts_all_rows(verl, mask):
    loss = draw(B, T, seed=6)
    theirs = verl.agg_loss(loss, mask.float(), "seq-mean-token-sum-norm", global_batch_size=B, loss_scale_factor=32)
    assert_close((token_weights(mask, "constant", constant_length=32) * loss).sum(), theirs)


def test_value_loss(verl, mask):
    values, old, returns = (draw(B, T, seed=seed) for seed in (7, 8, 9))
    theirs, their_fraction = verl.compute_value_loss(values, returns, old, mask.float(), cliprange_value=0.5)
    loss, metrics = clipped_value_loss(values, old, returns, clip=0.5)
    weights = token_weights(mask, "token_mean")
    assert_close((weights * loss).sum(), theirs)
    assert_close((weights * metrics["value_clip_fraction"]).sum(), their_fraction)


@pytest.mark.parametrize("estimator", ["k1", "k2", "k3"])
def test_kl(verl, estimator: str):
    log_probs, ref = draw(B, T, seed=10), draw(B, T, seed=11).mul(0.5)
    ours = kl_estimate(log_probs, ref, estimator=estimator)
    theirs = verl.kl_penalty(log_probs, ref, estimator)
    below = theirs < 10  # verl cuts k3 off at 10
    assert below.float().mean() > 0.9
    assert_close(ours[below], theirs[below])


def test_kl_controller(verl):
    settings = SimpleNamespace(type="adaptive", kl_coef=0.1, target_kl=0.05, horizon=1000)
    theirs, ours = verl.get_kl_controller(settings), KLController("adaptive", kl_coef=0.1, target=0.05, horizon=1000)
    for observed in (0.01, 0.2, 0.05, 0.052):
        theirs.update(observed, 64)
        ours.update(observed, 64)
        assert ours.value == pytest.approx(theirs.value)


def test_entropy_and_log_probs_agree_with_trl(trl):
    logits, targets = draw(3, 4, 50, seed=12), torch.randint(0, 50, (3, 4))
    assert_close(entropy_from_logits(logits), trl.entropy_from_logits(logits))
    theirs = trl.selective_log_softmax(logits, targets, temperature=0.7)
    assert_close(log_probs_from_logits(logits, targets, temperature=0.7), theirs)


def test_group_standard_deviation_agrees_with_trl(trl):
    grouped = REWARDS.view(2, 3)
    theirs = (grouped - grouped.mean(dim=1, keepdim=True)) / (trl.nanstd(grouped, dim=1, keepdim=True) + 1e-4)
    assert_close(group_relative(REWARDS, GROUP_ID), theirs.flatten())
