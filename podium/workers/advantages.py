"""From a batch's rewards to its advantages: pure functions over batches, for stages and for a loop of your own."""

from __future__ import annotations

from typing import Any

from podium.algorithms import kl
from podium.algorithms.advantage_estimators import find_advantage_estimator
from podium.core import schema
from podium.core.batch import Batch, Ragged, resolve
from podium.core.errors import ConfigError


def place_token_rewards(batch: Batch, *, kl_coef: float = 0.0, kl_estimator: str = "k1") -> Batch:
    """`token_rewards`: the response's reward at its last sampled token, step-wise rewards at their tokens, less the KL term.

    r_t = step_t + [t = last] * R - kl_coef * KL_t (Ziegler et al. 2019, equation 2, per token). A response without sampled
    tokens gets no reward.

    Args:
        batch: with `rewards` and `response_mask`; `step_rewards` are added where they are there; with `kl_coef` > 0 also
            `ref_log_probs`, and `old_log_probs` or `rollout_log_probs`.
    """
    mask = batch.padded("response_mask").bool()
    out = batch.padded("step_rewards").clone() if "step_rewards" in batch else mask.float() * 0.0
    has = mask.any(dim=1)
    last = mask.shape[1] - 1 - mask.flip(1).float().argmax(dim=1)
    rows = has.nonzero()[:, 0]  # none where every response is empty
    out[rows, last[rows]] += batch["rewards"][rows]
    if kl_coef > 0:
        policy = batch.padded(policy_column(batch))
        penalty = kl.kl_estimate(policy, batch.padded("ref_log_probs"), estimator=kl_estimator)
        out = out - kl_coef * penalty * mask
    return Batch({"token_rewards": Ragged.from_padded(out, batch.lengths("response"))})


def policy_column(batch: Batch) -> str:
    """The policy's log-probs to compare with the reference's: training's own (the same code) where they are there."""
    return "old_log_probs" if "old_log_probs" in batch else "rollout_log_probs"


def estimate_advantages(batch: Any, *, estimator: str = "gae", kl_coef: float = 0.0, **settings: Any) -> Batch:
    """Adds `advantages` (and `returns` where the estimator gives them) to a batch. A pure function.

    Args:
        batch: with `rewards` and what the estimator needs (`values` for gae, `group_id` for grpo); a role's future will do.
        estimator: a registered name ("gae", "grpo", ...); `settings` are its own (gamma, gae_lambda, ...).
        kl_coef: weight of a KL penalty in the token rewards (needs `ref_log_probs`).

    Raises BatchError for a column that is not there, ValueError for an unknown estimator or setting.
    """
    batch = resolve(batch)
    spec = find_advantage_estimator(estimator)
    if kl_coef and ("token_rewards" not in spec.needs or "token_rewards" in batch):
        unused = "token_rewards" not in spec.needs
        why = "reads no token rewards" if unused else "is given token rewards that are placed already"
        raise ConfigError(f"kl_coef={kl_coef} has no place: the estimator '{estimator}' {why}", where="estimate_advantages")
    if "token_rewards" in spec.needs and "token_rewards" not in batch:
        batch = batch.union(place_token_rewards(batch, kl_coef=kl_coef))
    inputs = {name: batch.padded(column_of(name)) for name in spec.needs}
    for name, padded in spec(**inputs, **settings).items():
        batch = batch.with_padded(name, padded) if schema.lookup(name).kind == "token" else batch.with_columns({name: padded})
    return batch


def column_of(name: str) -> str:
    """Estimators call the tokens that the policy wrote `mask`."""
    return "response_mask" if name == "mask" else name
