"""A constraint on the mean cost of responses: the Lagrangian's advantage, and its multiplier during a run."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from torch import Tensor


def constrained_advantages(reward_advantages: Tensor, cost_advantages: Tensor, multiplier: float) -> Tensor:
    """Safe-RLHF's advantage (Dai et al. 2023, arXiv:2310.12773, eq. 30 as an advantage): A = (A_R - lambda A_C) / (1 + lambda).

    Ascending it descends the Lagrangian of "most reward, with a mean cost of at most the threshold". The division keeps the
    size of the step when lambda grows; it doesn't change the direction. With lambda 0 it is A_R itself.

    Shapes: both alike, any shape; the result has that shape, without gradient. Raises `ValueError` for shapes that differ, or
    a multiplier that is negative or not finite.
    """
    if reward_advantages.shape != cost_advantages.shape:
        shapes = f"{list(reward_advantages.shape)} and {list(cost_advantages.shape)}"
        raise ValueError(f"reward_advantages and cost_advantages must have one shape; got {shapes}.")
    if not (math.isfinite(multiplier) and multiplier >= 0):
        raise ValueError(f"The multiplier must be a finite number, not negative; got {multiplier}.")
    return (reward_advantages.detach() - multiplier * cost_advantages.detach()) / (1.0 + multiplier)


class LagrangeMultiplier:
    """The weight of the cost against the reward during a run (Dai et al. 2023, arXiv:2310.12773, eq. 31).

    ln lambda <- ln lambda + lr * lambda * (mean_cost - threshold),    then lambda is held within [minimum, maximum]

    That is gradient ascent of lambda * (mean_cost - threshold) in ln lambda: while the constraint is broken the cost weighs
    more and more, while it holds less and less, and lambda stays above 0.

        multiplier = LagrangeMultiplier(threshold=0.0, initial=1.0, lr=0.1, maximum=5.0)
        advantages = constrained_advantages(reward_advantages, cost_advantages, multiplier.value)
        multiplier.update(mean_cost=0.3)          # once a step, after its value was used
        multiplier.switch(threshold=0.1)          # between two steps; keeps the multiplier reached so far

    `mean_cost` is the step's own mean. PKU's public code takes the mean of the last 128 costs, which lags, has an upper
    bound only, and can wait some steps before it starts to move (`lambda_update_delay_steps`).

    Args:
        threshold: the largest mean cost of a response that is allowed, in the cost model's unit (the paper's -d).
        initial: lambda at the start, above 0: from 0 it could never move.
        lr: the multiplier's own learning rate; 0 keeps it fixed, which is reward shaping.
        maximum: the largest lambda; it bounds how far the reward can be given up.
        minimum: the smallest. With 0 a constraint that holds for long lets lambda become so small that it comes back slowly.
    """

    def __init__(
        self, *, threshold: float, initial: float = 1.0, lr: float = 0.1, maximum: float = 5.0, minimum: float = 0.0
    ) -> None:
        self._become(threshold, initial, lr, maximum, minimum)

    def _become(self, threshold: float, value: float, lr: float, maximum: float, minimum: float) -> None:
        if not math.isfinite(threshold):
            raise ValueError(f"The cost threshold must be a finite number; got {threshold}.")
        if not (math.isfinite(lr) and lr >= 0):
            raise ValueError(f"lr must be a finite number, not negative; got {lr}.")
        if not (0 <= minimum <= maximum and math.isfinite(maximum) and maximum > 0):
            raise ValueError(f"Need 0 <= minimum <= maximum, maximum above 0 and finite; got {minimum} and {maximum}.")
        if not (value > 0 and minimum <= value <= maximum):
            raise ValueError(f"The multiplier must be above 0 and within [{minimum}, {maximum}]; got {value}.")
        self.threshold, self.lr = float(threshold), float(lr)
        self.maximum, self.minimum = float(maximum), float(minimum)
        self._value = float(value)

    @property
    def value(self) -> float:
        """The multiplier to use now."""
        return self._value

    def update(self, mean_cost: float) -> None:
        """Take in the mean cost of a step's responses. Raises `ValueError` where it is not a finite number."""
        if not math.isfinite(mean_cost):
            raise ValueError(f"The mean cost is {mean_cost}: a cost model's scores are broken.")
        log_value = math.log(self._value) + self.lr * self._value * (mean_cost - self.threshold)
        lowest = math.log(self.minimum) if self.minimum > 0 else math.log(1e-30)  # 0 itself would never come back
        self._value = min(max(math.exp(min(max(log_value, lowest), math.log(self.maximum))), self.minimum), self.maximum)

    def switch(
        self,
        *,
        threshold: float | None = None,
        value: float | None = None,
        lr: float | None = None,
        maximum: float | None = None,
        minimum: float | None = None,
    ) -> None:
        """Change settings between two steps; what is not given stays as it is. On an error nothing changes.

        New bounds move a multiplier that lies outside them to the nearer one, unless `value` says where it is to be.
        """
        maximum = self.maximum if maximum is None else maximum
        minimum = self.minimum if minimum is None else minimum
        kept = min(max(self._value, minimum), maximum) if value is None else value
        self._become(self.threshold if threshold is None else threshold, kept, self.lr if lr is None else lr, maximum, minimum)

    def state_dict(self) -> dict[str, Any]:
        """Everything, as plain JSON values."""
        return {
            "threshold": self.threshold,
            "value": self._value,
            "lr": self.lr,
            "maximum": self.maximum,
            "minimum": self.minimum,
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Become what `state_dict` described."""
        self._become(**state)

    def __repr__(self) -> str:
        bounds = f"maximum={self.maximum}, minimum={self.minimum}"
        return f"LagrangeMultiplier(threshold={self.threshold}, value={self._value}, lr={self.lr}, {bounds})"
