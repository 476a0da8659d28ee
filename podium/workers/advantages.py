"""From a batch's rewards to its advantages: pure functions over batches, for stages and for a loop of your own."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from podium.algorithms import kl
from podium.algorithms.advantage_estimators import find_advantage_estimator
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


def column_of(name: str) -> str:
    """Estimators call the tokens that the policy wrote `mask`."""
    return "response_mask" if name == "mask" else name
