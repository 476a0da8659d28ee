"""Composite stages: everything of an algorithm that comes after the reward."""

from __future__ import annotations

from typing import Any, Literal

from podium.algorithms.base import Loss
from podium.algorithms.kl import KLController
from podium.algorithms.losses import policy_loss, value_loss
from podium.core.batch import Batch
from podium.core.errors import ConfigError
from podium.stages.advantage import AdvantageStage, TokenRewardStage, update_controller
from podium.stages.base import Stage, StepContext
from podium.stages.rollout import LogProbStage, ValueStage
from podium.stages.update import UpdateStage

ControllerKind = Literal["adaptive", "fixed", "none"]


class PPOStage(Stage):
    """PPO with a critic (Schulman et al. 2017): KL in the reward, GAE, clipped policy and value losses.

    Args:
        kl_controller: "adaptive" moves `kl_coef` towards `kl_target` nats per sequence, "fixed" keeps it, "none" needs no
            reference model.
        use_stepwise_reward: adds `step_rewards` at their tokens, where a stage writes them.
        gamma, gae_lambda: discount and GAE's lambda.
        clip_low, clip_high, dual_clip, value_clip: the clipping ranges.
        entropy_coef: entropy bonus.
        one_update: the step makes one optimizer update: old log-probs are those of the update itself, and the pass
            that computes them is left out.
        critic_warmup_steps: steps at the start in which only the critic learns.
        loss_reduction: how token losses become one number (`algorithms.reduce`); "constant" needs `constant_length`.
    """

    name = "ppo"

    def __init__(
        self,
        *,
        kl_controller: ControllerKind = "adaptive",
        kl_coef: float = 0.05,
        kl_target: float = 0.05,
        kl_horizon: int = 10_000,
        kl_estimator: str = "k1",
        use_stepwise_reward: bool = False,
        gamma: float = 1.0,
        gae_lambda: float = 0.95,
        clip_low: float = 0.2,
        clip_high: float = 0.2,
        dual_clip: float | None = None,
        value_clip: float | None = 0.2,
        entropy_coef: float = 0.0,
        one_update: bool = False,
        critic_warmup_steps: int = 0,
        loss_reduction: str = "token_mean",
        constant_length: int | None = None,
        whiten_advantages: bool = True,
    ) -> None:
        _check_controller(kl_controller, kl_coef)
        self.controller = None
        if kl_controller != "none" and kl_coef > 0:
            self.controller = KLController(kl_controller, kl_coef=kl_coef, target=kl_target, horizon=kl_horizon)
        self.kl_estimator, self.stepwise = kl_estimator, use_stepwise_reward
        self.gae = {"gamma": gamma, "gae_lambda": gae_lambda, "whiten_advantages": whiten_advantages}
        self.one_update, self.critic_warmup_steps = one_update, critic_warmup_steps
        self.policy_loss = policy_loss(
            clip_low=clip_low,
            clip_high=clip_high,
            dual_clip=dual_clip,
            entropy_coef=entropy_coef,
            one_update=one_update,
            reduction=loss_reduction,
            constant_length=constant_length if loss_reduction == "constant" else None,
        )
        self.value_loss = value_loss(clip=value_clip)

    def expand(self) -> list[Stage]:
        stages: list[Stage] = []
        if not self.one_update:
            stages.append(LogProbStage("actor", "old_log_probs"))
        if self.controller is not None:
            stages.append(LogProbStage("reference", "ref_log_probs"))
        return [
            *stages,
            ValueStage(),
            TokenRewardStage(
                self.controller,
                estimator=self.kl_estimator,
                stepwise=self.stepwise,
                policy_log_probs=_policy_log_probs(self.one_update),
            ),
            AdvantageStage("gae", **self.gae),
            UpdateStage("critic", self.value_loss),
            UpdateStage("actor", self.policy_loss, skip_steps=self.critic_warmup_steps),
        ]


class GRPOStage(Stage):
    """GRPO (Shao et al. 2024): a group's own rewards are the baseline; no critic.

    Args:
        estimator: "grpo", or another registered estimator over groups ("dr_grpo", "rloo").
        kl_coef: weight of the KL term in the loss (0: no reference model). `kl_estimator`: "k1", "k2" or "k3".
        kl_controller, kl_target, kl_horizon: "adaptive" moves the weight.
        Others as in `PPOStage`.
    """

    name = "grpo"

    def __init__(
        self,
        *,
        estimator: str = "grpo",
        kl_coef: float = 0.0,
        kl_estimator: str = "k3",
        kl_controller: ControllerKind = "fixed",
        kl_target: float = 0.05,
        kl_horizon: int = 10_000,
        clip_low: float = 0.2,
        clip_high: float = 0.2,
        dual_clip: float | None = None,
        entropy_coef: float = 0.0,
        one_update: bool = False,
        loss_reduction: str = "token_mean",
        constant_length: int | None = None,
        **estimator_settings: Any,
    ) -> None:
        _check_controller(kl_controller, kl_coef)
        self.controller = None
        if kl_coef > 0 and kl_controller != "none":
            self.controller = KLController(kl_controller, kl_coef=kl_coef, target=kl_target, horizon=kl_horizon)
        self.estimator, self.estimator_settings, self.one_update = estimator, estimator_settings, one_update
        self.loss_settings: dict[str, Any] = {
            "clip_low": clip_low,
            "clip_high": clip_high,
            "dual_clip": dual_clip,
            "entropy_coef": entropy_coef,
            "kl_estimator": kl_estimator,
            "one_update": one_update,
            "reduction": loss_reduction,
            "constant_length": constant_length if loss_reduction == "constant" else None,
        }

    def policy_loss(self) -> Loss:
        """The loss at the controller's present coefficient."""
        return policy_loss(**self.loss_settings, kl_coef=self.controller.value if self.controller is not None else 0.0)

    def expand(self) -> list[Stage]:
        stages: list[Stage] = []
        if not self.one_update:
            stages.append(LogProbStage("actor", "old_log_probs"))
        if self.controller is not None:
            stages.append(LogProbStage("reference", "ref_log_probs"))
            stages.append(KLControllerStage(self.controller, _policy_log_probs(self.one_update)))
        return [*stages, AdvantageStage(self.estimator, **self.estimator_settings), UpdateStage("actor", self.policy_loss)]


def _policy_log_probs(one_update: bool) -> str:
    """With one update a step there is no pass for old log-probs; the rollout's are those of the same weights."""
    return "rollout_log_probs" if one_update else "old_log_probs"


def _check_controller(kind: str, kl_coef: float) -> None:
    if kind == "adaptive" and kl_coef <= 0:
        raise ConfigError("the adaptive controller starts from kl_coef, which is 0", where="kl.coef", remedy="set kl.coef=0.05")


class KLControllerStage(Stage):
    """Watches the KL against the reference and moves the coefficient of a KL term in the loss."""

    name = "kl"
    after = ("update_actor",)  # the update uses the coefficient that the step began with

    def __init__(self, controller: KLController, policy_log_probs: str = "rollout_log_probs") -> None:
        self.controller = controller
        self.reads = ("ref_log_probs", policy_log_probs, "response_mask")

    def run(self, batch: Batch, context: StepContext) -> Batch:
        update_controller(self.controller, batch, context)
        return Batch()

    def state_dict(self) -> dict[str, Any]:
        return self.controller.state_dict()

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.controller.load_state_dict(state)
