"""From a batch's rewards to its advantages: pure functions over batches, for stages and for a loop of your own."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from podium.algorithms import kl
from podium.algorithms.advantage_estimators import find_advantage_estimator
from podium.algorithms.advantages import whiten
from podium.algorithms.constraints import constrained_advantages
from podium.core import schema
from podium.core.batch import Batch, Ragged, resolve
from podium.core.errors import ConfigError


def place_token_rewards(batch: Batch, *, kl_coef: float = 0.0, kl_estimator: str = "k1") -> Batch:
    """`token_rewards`: the response's reward at its last sampled token, step-wise rewards at their tokens, less the KL term;
    and `shaped_rewards`, their sum over the response.

    r_t = step_t + [t = last] * R - kl_coef * KL_t (Ziegler et al. 2019, equation 2, per token). A response without sampled
    tokens gets no reward.

    Args:
        batch: with `rewards` and `response_mask`; `step_rewards` are added where they are there; with `kl_coef` > 0 also
            `ref_log_probs`, and `old_log_probs` or `rollout_log_probs`.
    """
    mask = batch.padded("response_mask").bool()
    out = at_last_token(batch["rewards"], mask)
    if "step_rewards" in batch:
        out += batch.padded("step_rewards")
    if kl_coef > 0:
        policy = batch.padded(policy_column(batch))
        penalty = kl.kl_estimate(policy, batch.padded("ref_log_probs"), estimator=kl_estimator)
        out = out - kl_coef * penalty * mask
    return Batch({"token_rewards": Ragged.from_padded(out, batch.lengths("response")), "shaped_rewards": out.sum(dim=1)})


def at_last_token(per_sequence: Tensor, mask: Tensor) -> Tensor:
    """`[B]` as `[B, T]`: each row's number at its last masked token, 0 elsewhere; a row without such a token gets none."""
    out = torch.zeros(mask.shape)
    last = mask.shape[1] - 1 - mask.flip(1).float().argmax(dim=1)
    rows = mask.any(dim=1).nonzero()[:, 0]  # none where every response is empty
    out[rows, last[rows]] = per_sequence[rows]
    return out


def policy_column(batch: Batch) -> str:
    """The policy's log-probs to compare with the reference's: training's own (the same code) where they are there."""
    return "old_log_probs" if "old_log_probs" in batch else "rollout_log_probs"


def estimate_advantages(
    batch: Any,
    *,
    estimator: str = "gae",
    kl_coef: float = 0.0,
    columns: Mapping[str, str] | None = None,
    outputs: Mapping[str, str] | None = None,
    **settings: Any,
) -> Batch:
    """Adds `advantages` (and `returns` where the estimator gives them) to a batch. A pure function.

    Args:
        batch: with `rewards` and what the estimator needs (`values` for gae, `group_id` for grpo); a role's future will do.
        estimator: a registered name ("gae", "grpo", ...); `settings` are its own (gamma, gae_lambda, ...).
        kl_coef: weight of a KL penalty in the token rewards (needs `ref_log_probs`).
        columns: what the estimator reads from other columns than those of its own names (`{"values": "cost_values"}`).
        outputs: other names for what it gives (`{"advantages": "cost_advantages"}`).

    Raises BatchError for a column that is not there, ValueError for an unknown estimator or setting.
    """
    batch = resolve(batch)
    spec = find_advantage_estimator(estimator)
    if kl_coef and ("token_rewards" not in spec.needs or "token_rewards" in batch):
        unused = "token_rewards" not in spec.needs
        why = "reads no token rewards" if unused else "is given token rewards that are placed already"
        raise ConfigError(f"kl_coef={kl_coef} has no place: the estimator '{estimator}' {why}", where="estimate_advantages")
    if "token_rewards" in spec.needs and "token_rewards" not in batch and "token_rewards" not in (columns or {}):
        batch = batch.union(place_token_rewards(batch, kl_coef=kl_coef))
    read_from = {"policy_log_probs": policy_column(batch), **(columns or {})}
    inputs = {name: batch.padded(read_from.get(name, column_of(name))) for name in spec.needs}
    for written, padded in spec(**inputs, **settings).items():
        name = (outputs or {}).get(written, written)
        batch = batch.with_padded(name, padded) if schema.lookup(name).kind == "token" else batch.with_columns({name: padded})
    return batch


def estimate_constrained_advantages(
    batch: Any,
    multiplier: float,
    *,
    kl_coef: float = 0.0,
    gamma: float = 1.0,
    gae_lambda: float = 0.95,
    whiten_advantages: bool = True,
) -> Batch:
    """Safe-RLHF's advantages and both critics' targets: GAE of reward and of cost, set against each other. A pure function.

    Args:
        batch: with `rewards`, `values`, `costs`, `cost_values`; with `kl_coef` also `ref_log_probs`.
        multiplier: the Lagrange multiplier's present value.
        kl_coef: weight of a KL penalty in the rewards.

    Returns:
        the batch with `advantages`, `returns`, `cost_returns` and what they were made of.
    """
    gae: dict[str, Any] = {
        "gamma": gamma,
        "gae_lambda": gae_lambda,
        "whiten_advantages": False,
    }  # whitened once, when they are one
    batch = estimate_advantages(batch, kl_coef=kl_coef, outputs=REWARD_OUTPUTS, **gae)
    batch = batch.union(place_token_costs(batch))
    batch = estimate_advantages(batch, columns=COST_COLUMNS, outputs=COST_OUTPUTS, **gae)
    return batch.union(combine_advantages(batch, multiplier, whiten_advantages=whiten_advantages))


REWARD_OUTPUTS = {"advantages": "reward_advantages"}
COST_COLUMNS = {"token_rewards": "token_costs", "values": "cost_values"}
COST_OUTPUTS = {"advantages": "cost_advantages", "returns": "cost_returns"}
"""The same estimator over rewards and over costs: what it reads, and what its results are called."""


def place_token_costs(batch: Batch) -> Batch:
    """`token_costs`: the response's cost at its last sampled token."""
    token_costs = at_last_token(batch["costs"], batch.padded("response_mask").bool())
    return batch.with_padded("token_costs", token_costs).select("token_costs")


def combine_advantages(batch: Batch, multiplier: float, *, whiten_advantages: bool = True) -> Batch:
    """`advantages`: those of reward less those of cost, as the multiplier weighs them (`constrained_advantages`)."""
    reward, cost = batch.padded("reward_advantages"), batch.padded("cost_advantages")
    advantages = constrained_advantages(reward, cost, multiplier)
    if whiten_advantages:
        advantages = whiten(advantages, batch.padded("response_mask").bool())
    return batch.with_padded("advantages", advantages).select("advantages")


def column_of(name: str) -> str:
    """Estimators call the tokens that the policy wrote `mask`."""
    return "response_mask" if name == "mask" else name
