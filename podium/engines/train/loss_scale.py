"""Loss scaling for fp16 (Micikevicius et al. 2018, arXiv:1710.03740): small gradients are kept from becoming 0."""

from __future__ import annotations

from typing import Any


class LossScale:
    """The factor on the loss before its backward pass; gradients are divided by it before they are used.

    An update whose gradient overflows is left out and halves the factor; `growth_interval` good ones in a row double it.
    Powers of 2 only, so scaling rounds nothing.
    """

    def __init__(self, value: float = 2.0**16, growth_interval: int = 2000) -> None:
        self.value, self.growth_interval = value, growth_interval
        self.good = 0
        """Good updates since the last change."""

    def update(self, applied: bool) -> None:
        """After each update: whether its gradient was finite."""
        self.good = self.good + 1 if applied else 0
        if not applied:
            self.value = max(self.value / 2, 1.0)
        elif self.good == self.growth_interval:
            self.value, self.good = self.value * 2, 0

    def state_dict(self) -> dict[str, Any]:
        return {"value": self.value, "good": self.good}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.value, self.good = state["value"], state["good"]
