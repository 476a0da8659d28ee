"""Algorithms as pure functions on tensors: tensors and keyword scalars in, tensors out."""

from podium.algorithms.advantage_estimators import (
    ADVANTAGE_ESTIMATORS,
    AdvantageEstimator,
    advantage_estimator,
    find_advantage_estimator,
)
from podium.algorithms.advantages import (
    broadcast_to_tokens,
    distillation_advantages,
    gae,
    group_relative,
    leave_one_out,
    optimal_baseline,
    returns_to_go,
    whiten,
)
from podium.algorithms.base import Loss
from podium.algorithms.constraints import LagrangeMultiplier, constrained_advantages
from podium.algorithms.corrections import CORRECTIONS, Corrected, Correction, correction, find_correction
from podium.algorithms.entropy import entropy_from_logits
from podium.algorithms.kl import (
    KL_ESTIMATORS,
    KLController,
    adapted_kl_coef,
    kl_estimate,
)
from podium.algorithms.log_probs import log_probs_from_hidden, log_probs_from_logits
from podium.algorithms.losses import (
    LOSSES,
    kto_loss,
    loss_builder,
    pairwise_reward_loss,
    policy_loss,
    preference_loss,
    supervised_loss,
    value_loss,
)
from podium.algorithms.policy_losses import (
    POLICY_LOSSES,
    PolicyObjective,
    clipped_policy_loss,
    find_policy_objective,
    policy_objective,
)
from podium.algorithms.preference_losses import (
    bradley_terry_loss,
    dpo_loss,
    ipo_loss,
    kahneman_tversky_loss,
    kto_reference_point,
    sequence_log_ratios,
)
from podium.algorithms.reduce import REDUCTIONS, Counts, check_reduction, token_weights
from podium.algorithms.supervised import negative_log_likelihood
from podium.algorithms.value_losses import clipped_value_loss

__all__ = [
    "ADVANTAGE_ESTIMATORS",
    "CORRECTIONS",
    "KL_ESTIMATORS",
    "LOSSES",
    "POLICY_LOSSES",
    "REDUCTIONS",
    "AdvantageEstimator",
    "Corrected",
    "Correction",
    "Counts",
    "KLController",
    "LagrangeMultiplier",
    "Loss",
    "PolicyObjective",
    "adapted_kl_coef",
    "advantage_estimator",
    "bradley_terry_loss",
    "broadcast_to_tokens",
    "check_reduction",
    "clipped_policy_loss",
    "clipped_value_loss",
    "constrained_advantages",
    "correction",
    "distillation_advantages",
    "dpo_loss",
    "entropy_from_logits",
    "find_advantage_estimator",
    "find_correction",
    "find_policy_objective",
    "gae",
    "group_relative",
    "ipo_loss",
    "kahneman_tversky_loss",
    "kl_estimate",
    "kto_loss",
    "kto_reference_point",
    "leave_one_out",
    "log_probs_from_hidden",
    "log_probs_from_logits",
    "loss_builder",
    "negative_log_likelihood",
    "optimal_baseline",
    "pairwise_reward_loss",
    "policy_loss",
    "policy_objective",
    "preference_loss",
    "returns_to_go",
    "sequence_log_ratios",
    "supervised_loss",
    "token_weights",
    "value_loss",
    "whiten",
]
