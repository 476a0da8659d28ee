"""The advantage estimators that a recipe can name.

An estimator is one function: it takes columns and its own settings by keyword and returns new columns.

    @advantage_estimator("mine", needs=("rewards", "mask"))
    def my_estimator(*, rewards, mask, scale=1.0):
        return {"advantages": broadcast_to_tokens(scale * rewards, mask)}

The columns are padded tensors: `rewards` [B], `token_rewards` [B, T], `values` [B, T], `mask` [B, T] bool (the tokens that the
policy wrote), `group_id` [B], and any other column that the batch has. An estimator sees the whole batch of a step.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from podium.algorithms._lookup import look_up
from podium.algorithms.advantages import broadcast_to_tokens, gae, group_relative, leave_one_out, whiten

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
