"""Estimates of the KL divergence from a reference, and the coefficient in front of it."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any

from torch import Tensor

from podium.algorithms._lookup import look_up

# exp(20) is 5e8: see policy_losses.LARGEST_LOG_RATIO.
LARGEST_LOG_RATIO = 20.0


def _k1(log_ratio: Tensor) -> Tensor:
    return -log_ratio


def _k2(log_ratio: Tensor) -> Tensor:
    return 0.5 * log_ratio.square()


def _k3(log_ratio: Tensor) -> Tensor:
    bounded = log_ratio.clamp(-LARGEST_LOG_RATIO, LARGEST_LOG_RATIO)
    return bounded.exp() - 1 - bounded


KL_ESTIMATORS: dict[str, Callable[[Tensor], Tensor]] = {"k1": _k1, "k2": _k2, "k3": _k3}


def kl_estimate(log_probs: Tensor, ref_log_probs: Tensor, *, estimator: str) -> Tensor:
    """Estimate KL(policy, reference) from tokens that the policy sampled (Schulman 2020, joschu.net/blog/kl-approx.html).

    With l = ref_log_probs - log_probs:    k1 = -l,    k2 = l^2 / 2,    k3 = exp(l) - 1 - l

    k1 is unbiased, noisy and may be negative. k2 is biased. k3 is unbiased and never negative. As a term of a loss, k1 is
    no use: its gradient is zero on average. In k3 the exponent is held within +-LARGEST_LOG_RATIO.

    Shapes: both alike, any shape; the result has that shape, and gradients. Raises `ValueError` for another estimator.
    """
    return look_up(KL_ESTIMATORS, estimator, "KL estimator")(ref_log_probs - log_probs)


def adapted_kl_coef(kl_coef: float, observed_kl: float, n_samples: int, *, target: float, horizon: float) -> float:
    """The adaptive KL coefficient (Ziegler et al. 2019, arXiv:1909.08593, sec. 2.2).

    e = clip((observed_kl - target) / target, -0.2, 0.2),    kl_coef <- kl_coef * (1 + e * n_samples / horizon)

    `observed_kl` is the mean KL of a sequence or of a token, whichever `target` is meant as; `n_samples` counts the
    sequences seen since the last update. The paper's K_beta is `n_samples / horizon` here, as in its public code.
    """
    error = min(max(observed_kl / target - 1.0, -0.2), 0.2)
    return kl_coef * (1.0 + error * n_samples / horizon)


class KLController:
    """The coefficient of the KL penalty during a run.

    kind "adaptive" moves it so that the KL stays near `target`; "fixed" keeps it; "none" is 0, and no reference is needed.

        controller = KLController("adaptive", kl_coef=0.1, target=0.05)
        controller.update(observed_kl=0.08, n_samples=64)     # once a step
        controller.switch("fixed")                            # between two steps; keeps the coefficient reached so far
    """

    KINDS = ("adaptive", "fixed", "none")

    def __init__(self, kind: str, *, kl_coef: float = 0.0, target: float | None = None, horizon: float = 10_000.0) -> None:
        self._become(kind, kl_coef, target, horizon)

    def _become(self, kind: str, kl_coef: float, target: float | None, horizon: float) -> None:
        look_up(dict.fromkeys(self.KINDS), kind, "kind of KL controller")
        if not (math.isfinite(kl_coef) and kl_coef >= 0):
            raise ValueError(f"kl_coef must be a finite number, not negative; got {kl_coef}.")
        if target is not None and not (math.isfinite(target) and target > 0):
            raise ValueError(f"The KL target must be above 0; got {target}.")
        if not horizon > 0:
            raise ValueError(f"horizon must be above 0 (a number of samples); got {horizon}.")
        if kind == "adaptive" and (target is None or kl_coef == 0):
            raise ValueError(
                "An adaptive KL controller needs a target and a kl_coef above 0 to start from; "
                f"got target={target}, kl_coef={kl_coef}."
            )
        self.kind, self.kl_coef, self.target, self.horizon = kind, float(kl_coef), target, horizon

    @property
    def value(self) -> float:
        """The coefficient to use now."""
        return 0.0 if self.kind == "none" else self.kl_coef

    def update(self, observed_kl: float, n_samples: int) -> None:
        """Take in the mean KL observed over `n_samples` samples. Only an adaptive controller moves."""
        if self.kind != "adaptive":
            return
        if not math.isfinite(observed_kl):
            raise ValueError(f"The observed KL is {observed_kl}: the log-probs of the policy or the reference are broken.")
        assert self.target is not None
        self.kl_coef = adapted_kl_coef(self.kl_coef, observed_kl, n_samples, target=self.target, horizon=self.horizon)

    def switch(
        self,
        kind: str,
        *,
        kl_coef: float | None = None,
        target: float | None = None,
        horizon: float | None = None,
    ) -> None:
        """Become another kind, between two steps; what is not given stays as it is. On an error nothing changes."""
        self._become(
            kind,
            self.kl_coef if kl_coef is None else kl_coef,
            self.target if target is None else target,
            self.horizon if horizon is None else horizon,
        )

    def state_dict(self) -> dict[str, Any]:
        """Everything, as plain JSON values."""
        return {"kind": self.kind, "kl_coef": self.kl_coef, "target": self.target, "horizon": self.horizon}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Become what `state_dict` described."""
        self._become(**state)

    def __repr__(self) -> str:
        return f"KLController({self.kind!r}, kl_coef={self.kl_coef}, target={self.target}, horizon={self.horizon})"
