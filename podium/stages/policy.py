"""Composite stages: everything of an algorithm that comes after the reward."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from typing import Any, Literal

from podium.algorithms.base import Loss
from podium.algorithms.constraints import LagrangeMultiplier
from podium.algorithms.kl import KLController
from podium.algorithms.losses import policy_loss, value_loss
from podium.algorithms.policy_losses import find_policy_objective
from podium.core.batch import Batch
from podium.core.errors import ConfigError
from podium.stages.advantage import AdvantageStage, TokenCostStage, TokenRewardStage, advantage_estimator_of, update_controller
from podium.stages.base import Stage, StepContext
from podium.stages.constraint import ConstrainedAdvantageStage
from podium.stages.correction import CorrectionStage
from podium.stages.rollout import LogProbStage, ValueStage
from podium.stages.update import UpdateStage
from podium.workers.advantages import COST_COLUMNS, COST_OUTPUTS, REWARD_OUTPUTS

ControllerKind = Literal["adaptive", "fixed", "none"]
KLPlace = Literal["reward", "loss"]


@dataclass(frozen=True)
class PolicyUpdate:
    """How the policy follows its advantages: keywords of every stage below.

    Attributes:
        policy_loss: a registered policy loss ("clip", "gspo", "cispo", "reinforce").
        clip_low, clip_high: its clipping range; None: the loss's own default. dual_clip: for "clip".
        entropy_coef: entropy bonus.
        one_update: the step makes one optimizer update: old log-probs are those of the update itself, and the pass
            that computes them is left out (unless a correction needs it).
        loss_reduction: how token losses become one number (`algorithms.reduce`); "constant" needs `constant_length`.
        correction: "none", or a kind of importance correction between rollout and training (`algorithms.corrections`), with
            `correction_settings` of its own.
    """

    policy_loss: str = "clip"
    clip_low: float | None = None
    clip_high: float | None = None
    dual_clip: float | None = None
    entropy_coef: float = 0.0
    one_update: bool = False
    loss_reduction: str = "token_mean"
    constant_length: int | None = None
    correction: str = "none"
    correction_settings: Mapping[str, float] = field(default_factory=dict)

    @property
    def corrected(self) -> bool:
        return self.correction != "none"

    @property
    def old_pass(self) -> bool:
        """The log-probs at the start of the update need a forward pass of their own."""
        return self.corrected or not self.one_update

    @property
    def policy_log_probs(self) -> str:
        """The column of the policy's log-probs: without a pass of training's own, the rollout's, of the same weights."""
        return "old_log_probs" if self.old_pass else "rollout_log_probs"

    def stages(self) -> list[Stage]:
        """What comes before the update, whatever the advantages."""
        stages: list[Stage] = [LogProbStage("actor", "old_log_probs")] if self.old_pass else []
        if self.corrected:
            stages.append(CorrectionStage(self.correction, **self.correction_settings))
        return stages

    def loss(self, *, kl_coef: float = 0.0, kl_estimator: str = "k3") -> Loss:
        has = find_policy_objective(self.policy_loss).settings
        range_of_clip = {"clip_low": self.clip_low, "clip_high": self.clip_high}
        return policy_loss(
            objective=self.policy_loss,
            **{name: bound for name, bound in range_of_clip.items() if name in has},
            dual_clip=self.dual_clip,
            entropy_coef=self.entropy_coef,
            kl_coef=kl_coef,
            kl_estimator=kl_estimator,
            one_update=not self.old_pass,
            corrected=self.corrected,
            reduction=self.loss_reduction,
            constant_length=self.constant_length if self.loss_reduction == "constant" else None,
        )


class OnPolicyStage(Stage):
    """What the composites share: a policy update, and a KL term of a controller.

    Args:
        kl_controller: "adaptive" moves `kl_coef` towards `kl_target` nats per sequence, "fixed" keeps it, "none" needs no
            reference model (nor does a `kl_coef` of 0).
        kl_place: the KL term is taken from each token's reward, or added to the loss.
        kl_estimator: "k1", "k2" or "k3".
    """

    def __init__(
        self,
        update: PolicyUpdate,
        *,
        kl_controller: ControllerKind,
        kl_coef: float,
        kl_target: float,
        kl_horizon: int,
        kl_estimator: str,
        kl_place: KLPlace,
    ) -> None:
        if kl_controller == "adaptive" and kl_coef <= 0:
            raise ConfigError(
                "the adaptive controller starts from kl_coef, which is 0", where="kl.coef", remedy="set kl.coef=0.05"
            )
        self.update, self.kl_estimator, self.kl_place = update, kl_estimator, kl_place
        self.controller: KLController | None = None
        if kl_controller != "none" and kl_coef > 0:
            self.controller = KLController(kl_controller, kl_coef=kl_coef, target=kl_target, horizon=kl_horizon)

    def log_prob_stages(self) -> list[Stage]:
        """The passes that the update and the KL term need."""
        reference = [LogProbStage("reference", "ref_log_probs")] if self.controller is not None else []
        return [*self.update.stages(), *reference]

    def token_rewards(self, *, stepwise: bool) -> TokenRewardStage:
        """Rewards at their tokens, less the KL term where it has its place there."""
        in_reward = self.controller if self.kl_place == "reward" else None
        return TokenRewardStage(
            in_reward, estimator=self.kl_estimator, stepwise=stepwise, policy_log_probs=self.update.policy_log_probs
        )

    def policy_loss(self) -> Loss:
        """The policy's loss, at the controller's present coefficient where the KL term has its place there."""
        in_loss = self.controller if self.kl_place == "loss" else None
        return self.update.loss(kl_coef=in_loss.value if in_loss else 0.0, kl_estimator=self.kl_estimator)

    def actor_update(self, *, skip_steps: int = 0) -> list[Stage]:
        """The policy's update; with a KL term in the loss, also what moves its coefficient afterwards."""
        update: list[Stage] = [UpdateStage("actor", self.policy_loss, skip_steps=skip_steps)]
        if self.controller is not None and self.kl_place == "loss":
            update.append(KLControllerStage(self.controller, self.update.policy_log_probs))
        return update


class PPOStage(OnPolicyStage):
    """PPO with a critic (Schulman et al. 2017): KL in the reward, GAE, clipped policy and value losses.

    Args:
        kl_controller, kl_coef, kl_target, kl_horizon, kl_estimator: see `OnPolicyStage`; the KL term is in the reward.
        use_stepwise_reward: adds `step_rewards` at their tokens, where a stage writes them.
        gamma, gae_lambda: discount and GAE's lambda.
        value_clip: values move no further than this from the old ones in an update.
        critic_warmup_steps: steps at the start in which only the critic learns.
        update: see `PolicyUpdate`.
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
        value_clip: float | None = 0.2,
        critic_warmup_steps: int = 0,
        whiten_advantages: bool = True,
        **update: Any,
    ) -> None:
        super().__init__(
            PolicyUpdate(**update),
            kl_controller=kl_controller,
            kl_coef=kl_coef,
            kl_target=kl_target,
            kl_horizon=kl_horizon,
            kl_estimator=kl_estimator,
            kl_place="reward",
        )
        self.stepwise, self.whiten_advantages, self.value_clip = use_stepwise_reward, whiten_advantages, value_clip
        self.gae: dict[str, Any] = {"gamma": gamma, "gae_lambda": gae_lambda}
        self.critic_warmup_steps = critic_warmup_steps
        self.policy_loss()  # what cannot be is said now

    def expand(self) -> list[Stage]:
        return [
            *self.log_prob_stages(),
            ValueStage(),
            self.token_rewards(stepwise=self.stepwise),
            *self.advantages(),
            UpdateStage("critic", value_loss(clip=self.value_clip)),
            *self.actor_update(skip_steps=self.critic_warmup_steps),
        ]

    def advantages(self) -> list[Stage]:
        return [AdvantageStage("gae", whiten_advantages=self.whiten_advantages, **self.gae)]


class SafeRLHFStage(PPOStage):
    """Safe-RLHF (Dai et al. 2023, arXiv:2310.12773): PPO for the reward, under a bound on the mean cost.

    A second critic learns the cost (`costs`, of a `CostStage`); a Lagrange multiplier weighs the two advantages, rises while
    the mean cost is above `cost_threshold` and falls below it.

    Args:
        cost_threshold: the mean cost of a response that is allowed.
        multiplier, multiplier_lr, multiplier_min, multiplier_max: the multiplier's start, learning rate and bounds.
        ppo: keywords of `PPOStage`.
    """

    name = "safe_rlhf"

    def __init__(
        self,
        *,
        cost_threshold: float = 0.0,
        multiplier: float = 1.0,
        multiplier_lr: float = 0.1,
        multiplier_min: float = 1e-4,
        multiplier_max: float = 5.0,
        **ppo: Any,
    ) -> None:
        super().__init__(**ppo)
        self.multiplier = LagrangeMultiplier(
            threshold=cost_threshold, initial=multiplier, lr=multiplier_lr, minimum=multiplier_min, maximum=multiplier_max
        )

    def advantages(self) -> list[Stage]:
        raw: dict[str, Any] = {"whiten_advantages": False, **self.gae}  # whitened once, when they are one
        return [
            ValueStage("cost_critic", "cost_values"),
            TokenCostStage(),
            AdvantageStage("gae", outputs=REWARD_OUTPUTS, name="reward_advantages", **raw),
            AdvantageStage("gae", columns=COST_COLUMNS, outputs=COST_OUTPUTS, name="cost_advantages", **raw),
            ConstrainedAdvantageStage(self.multiplier, whiten_advantages=self.whiten_advantages),
            UpdateStage("cost_critic", value_loss(clip=self.value_clip, values="cost_values", returns="cost_returns")),
        ]


class GRPOStage(OnPolicyStage):
    """GRPO (Shao et al. 2024), and every other algorithm without a critic.

    Args:
        estimator: "grpo", or another registered estimator; keywords that are not listed here are its settings.
        kl_coef, kl_estimator, kl_controller, kl_target, kl_horizon, kl_place: see `OnPolicyStage`.
        use_stepwise_reward: adds `step_rewards`, where a stage writes them.
        others: see `PolicyUpdate`.
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
        kl_place: KLPlace = "loss",
        use_stepwise_reward: bool = False,
        **others: Any,
    ) -> None:
        known = {part.name for part in fields(PolicyUpdate)}
        super().__init__(
            PolicyUpdate(**{name: value for name, value in others.items() if name in known}),
            kl_controller=kl_controller,
            kl_coef=kl_coef,
            kl_target=kl_target,
            kl_horizon=kl_horizon,
            kl_estimator=kl_estimator,
            kl_place=kl_place,
        )
        settings = {name: value for name, value in others.items() if name not in known}
        self.estimator, self.stepwise = estimator, use_stepwise_reward
        needs = advantage_estimator_of(estimator).needs
        self.shaped = self.stepwise or (self.controller is not None and kl_place == "reward")
        if self.shaped and not {"rewards", "token_rewards"} & set(needs):
            raise ConfigError(
                f"the advantage estimator '{estimator}' reads no rewards, so nothing can be added to them",
                where="kl.place",
                remedy="set kl.place=loss, and no step-wise rewards",
            )
        self.placed = self.shaped or "token_rewards" in needs
        columns = {"policy_log_probs": self.update.policy_log_probs}
        if self.shaped:
            columns["rewards"] = "shaped_rewards"
        self.advantage = AdvantageStage(estimator, columns=columns, **settings)
        self.policy_loss()  # what cannot be is said now

    def expand(self) -> list[Stage]:
        placed = [self.token_rewards(stepwise=self.stepwise)] if self.placed else []
        return [*self.log_prob_stages(), *placed, self.advantage, *self.actor_update()]


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
