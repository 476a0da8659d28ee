"""The advantage estimators that a recipe can name.

An estimator is one function: it takes columns and its own settings by keyword and returns new columns.

    @advantage_estimator("mine", needs=("rewards", "mask"))
    def my_estimator(*, rewards, mask, scale=1.0):
        return {"advantages": broadcast_to_tokens(scale * rewards, mask)}

The columns are padded tensors: `rewards` [B], `token_rewards` [B, T], `values` [B, T], `mask` [B, T] bool (the tokens that the
policy wrote), `group_id` [B], and any other column that the batch has. `policy_log_probs` [B, T] stands for `old_log_probs`,
or `rollout_log_probs` where a step has no pass for old ones. An estimator sees the whole batch of a step.

What the ones over groups say of a group of one, or of a group whose rewards are all equal: exactly 0, nothing was compared.
(`reinforce_plus_plus_baseline` then whitens, which shifts that 0 with all others.)
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from podium.algorithms._lookup import look_up
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

Columns = dict[str, Tensor]


@dataclass(frozen=True)
class AdvantageEstimator:
    """A registered estimator: what it reads, what it writes, and the function. Call it like the function."""

    name: str
    function: Callable[..., Columns]
    needs: tuple[str, ...]
    writes: tuple[str, ...]

    @property
    def settings(self) -> dict[str, Any]:
        """The estimator's own settings and their defaults."""
        parameters = inspect.signature(self.function).parameters
        return {name: p.default for name, p in parameters.items() if name not in self.needs}

    def __call__(self, **columns_and_settings: Any) -> Columns:
        missing = [name for name in self.needs if name not in columns_and_settings]
        if missing:
            raise ValueError(f"Advantage estimator {self.name!r} needs the columns {missing}, which are not there.")
        for name in columns_and_settings:
            if name not in self.needs:
                look_up(self.settings, name, f"setting of advantage estimator {self.name!r}:")
        return self.function(**columns_and_settings)


ADVANTAGE_ESTIMATORS: dict[str, AdvantageEstimator] = {}


def advantage_estimator(
    name: str, *, needs: tuple[str, ...], writes: tuple[str, ...] = ("advantages",)
) -> Callable[[Callable[..., Columns]], Callable[..., Columns]]:
    """Register a function as the advantage estimator `name`; the function itself stays as it is.

    `needs` are the columns handed over; every other parameter is a setting and must have a default. `writes` are the
    columns that come back. Raises `ValueError` for a name that is taken or a signature that doesn't fit.
    """

    def register(function: Callable[..., Columns]) -> Callable[..., Columns]:
        if name in ADVANTAGE_ESTIMATORS:
            raise ValueError(f"There is already an advantage estimator {name!r}.")
        estimator = AdvantageEstimator(name, function, needs, writes)
        absent = [column for column in needs if column not in inspect.signature(function).parameters]
        unset = [key for key, default in estimator.settings.items() if default is inspect.Parameter.empty]
        if absent or unset:
            raise ValueError(
                f"Advantage estimator {name!r}: every column in `needs` must be a parameter (missing: {absent}) and every "
                f"other parameter must have a default (without: {unset})."
            )
        ADVANTAGE_ESTIMATORS[name] = estimator
        return function

    return register


def find_advantage_estimator(name: str) -> AdvantageEstimator:
    """The estimator registered as `name`; `ValueError` with the nearest name if there is none."""
    return look_up(ADVANTAGE_ESTIMATORS, name, "advantage estimator")


@advantage_estimator("grpo", needs=("rewards", "group_id", "mask"))
def grpo(*, rewards: Tensor, group_id: Tensor, mask: Tensor, epsilon: float = 1e-4) -> Columns:
    """`group_relative`, given to every token of the response."""
    return {"advantages": broadcast_to_tokens(group_relative(rewards, group_id, epsilon=epsilon), mask)}


@advantage_estimator("dr_grpo", needs=("rewards", "group_id", "mask"))
def dr_grpo(*, rewards: Tensor, group_id: Tensor, mask: Tensor) -> Columns:
    """`group_relative` without the division by the standard deviation."""
    return {"advantages": broadcast_to_tokens(group_relative(rewards, group_id, normalize=False), mask)}


@advantage_estimator("rloo", needs=("rewards", "group_id", "mask"))
def rloo(*, rewards: Tensor, group_id: Tensor, mask: Tensor) -> Columns:
    """`leave_one_out`, given to every token of the response."""
    return {"advantages": broadcast_to_tokens(leave_one_out(rewards, group_id), mask)}


@advantage_estimator("gae", needs=("token_rewards", "values", "mask"), writes=("advantages", "returns"))
def gae_whitened(
    *,
    token_rewards: Tensor,
    values: Tensor,
    mask: Tensor,
    gamma: float = 1.0,
    gae_lambda: float = 0.95,
    whiten_advantages: bool = True,
) -> Columns:
    """`gae`, its advantages whitened over all tokens of the batch (the returns are not)."""
    advantages, returns = gae(token_rewards, values, mask, gamma=gamma, gae_lambda=gae_lambda)
    return {"advantages": whiten(advantages, mask) if whiten_advantages else advantages, "returns": returns}


@advantage_estimator("opo", needs=("rewards", "group_id", "mask"))
def opo(*, rewards: Tensor, group_id: Tensor, mask: Tensor) -> Columns:
    """`optimal_baseline`, given to every token of the response; a response's length is its tokens in the mask."""
    return {"advantages": broadcast_to_tokens(optimal_baseline(rewards, group_id, mask.bool().sum(dim=1)), mask)}


@advantage_estimator("reinforce", needs=("token_rewards", "mask"))
def reinforce(*, token_rewards: Tensor, mask: Tensor, gamma: float = 1.0) -> Columns:
    """REINFORCE (Williams 1992): `returns_to_go`, no baseline."""
    return {"advantages": returns_to_go(token_rewards, mask, gamma=gamma)}


@advantage_estimator("reinforce_plus_plus", needs=("token_rewards", "mask"))
def reinforce_plus_plus(*, token_rewards: Tensor, mask: Tensor, gamma: float = 1.0) -> Columns:
    """REINFORCE++ (Hu 2025, arXiv:2501.03262): `returns_to_go`, whitened over all tokens of the batch."""
    return {"advantages": whiten(returns_to_go(token_rewards, mask, gamma=gamma), mask)}


@advantage_estimator("reinforce_plus_plus_baseline", needs=("rewards", "group_id", "mask"))
def reinforce_plus_plus_baseline(*, rewards: Tensor, group_id: Tensor, mask: Tensor) -> Columns:
    """REINFORCE++ with a baseline (Hu 2025, arXiv:2501.03262): reward less the group's mean, whitened over the batch's tokens.

    The mean over tokens is not 0 when lengths differ, so whitening gives a group without a difference a small advantage.
    Where no group of the batch has a difference, all are exactly 0.
    """
    return {"advantages": whiten(broadcast_to_tokens(group_relative(rewards, group_id, normalize=False), mask), mask)}


@advantage_estimator("remax", needs=("token_rewards", "baseline_rewards", "mask"))
def remax(*, token_rewards: Tensor, baseline_rewards: Tensor, mask: Tensor) -> Columns:
    """ReMax (Li et al. 2023, arXiv:2310.10505): `returns_to_go` less the reward of the greedy response, [B]."""
    returns = returns_to_go(token_rewards, mask)
    return {"advantages": returns - broadcast_to_tokens(baseline_rewards.detach().to(returns.dtype), mask)}


@advantage_estimator("distillation", needs=("teacher_log_probs", "policy_log_probs", "mask"))
def distillation(*, teacher_log_probs: Tensor, policy_log_probs: Tensor, mask: Tensor, clip: float | None = None) -> Columns:
    """`distillation_advantages`: the teacher's log-prob less the policy's, token by token."""
    return {"advantages": distillation_advantages(teacher_log_probs, policy_log_probs, mask, clip=clip)}
