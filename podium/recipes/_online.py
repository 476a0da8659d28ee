"""What the recipes that generate have in common: settings become keywords of stages."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from podium.core.errors import ConfigError
from podium.core.settings import GroupSettings, OnlineSettings, RewardSettings, SampledSettings
from podium.rewards.stepwise import StepwiseRewardInjector
from podium.stages.advantage import advantage_estimator_of
from podium.stages.base import Stage
from podium.stages.policy import GRPOStage
from podium.stages.reward import RewardStage
from podium.stages.rollout import RolloutStage
from podium.stages.sampling import DynamicSamplingStage, GreedyBaselineStage
from podium.stages.stepwise import StepwiseRewardStage
from podium.trainer.evaluation import evaluation_stages


def rollout_stage(settings: SampledSettings) -> RolloutStage:
    return RolloutStage(group_size=settings.batch.group_size)


def reward_stage(settings: SampledSettings, shaping: Sequence[RewardSettings] = ()) -> RewardStage:
    """All reward sources of the settings, and those that shape training only. Raises ConfigError where there is none."""
    models = [settings.model.reward_path] if settings.model.reward_path else []
    if not models and not settings.rewards:
        raise ConfigError(
            "no reward is set",
            where="rewards",
            remedy="add `rewards: [{function: my_file.py:my_reward}]`, a built-in, or model.reward_path",
        )
    if settings.model.reward_heads and not models:
        raise ConfigError("heads of no model", where="model.reward_heads", remedy="set model.reward_path")
    return RewardStage(models=models, functions=[*settings.rewards, *shaping], weights=settings.model.reward_heads or None)


def step_reward_stages(settings: OnlineSettings) -> list[Stage]:
    """Step-wise rewards, where the settings have any."""
    if not settings.step_rewards:
        return []
    injectors = []
    for given in settings.step_rewards:
        source = RewardSettings(function=given.function, options=given.options)
        options = given.model_dump(include={"unit", "name", "weight", "on_error"})
        injectors.append(StepwiseRewardInjector(source, **options))
    return [StepwiseRewardStage(injectors)]


def _overlong(settings: GroupSettings) -> list[RewardSettings]:
    """DAPO's soft punishment of overlong responses, as one more reward source of training (an evaluation measures answers)."""
    if not settings.overlong_buffer:
        return []
    most = settings.rollout.max_new_tokens
    if settings.overlong_buffer >= most:
        raise ConfigError(
            f"overlong_buffer={settings.overlong_buffer} leaves no length free of the penalty: responses have at most "
            f"{most} tokens",
            where="overlong_buffer",
            remedy=f"set it well below rollout.max_new_tokens, for example to {max(1, most // 5)}",
        )
    options = {"max_tokens": most, "buffer_tokens": settings.overlong_buffer, "penalty": settings.overlong_penalty}
    return [RewardSettings(function="overlong", options=options)]


def kl_keywords(settings: OnlineSettings) -> dict[str, Any]:
    """The section `kl` as keywords of an on-policy stage (its place apart)."""
    kl = settings.kl
    return {
        "kl_controller": kl.controller,
        "kl_coef": 0.0 if kl.controller == "none" else kl.coef,
        "kl_target": kl.target,
        "kl_horizon": kl.horizon,
        "kl_estimator": kl.estimator,
    }


def update_keywords(settings: OnlineSettings) -> dict[str, Any]:
    """The policy's update as keywords of an on-policy stage (`stages.policy.PolicyUpdate`)."""
    return {
        "policy_loss": settings.policy_loss,
        "clip_low": settings.clip_low,
        "clip_high": settings.clip_high,
        "dual_clip": settings.dual_clip,
        "entropy_coef": settings.entropy_coef,
        "one_update": settings.batch.updates_per_step == 1,
        "loss_reduction": settings.loss_reduction,
        "constant_length": settings.rollout.max_new_tokens,
        "correction": settings.correction.kind,
        "correction_settings": settings.correction.model_dump(exclude={"kind"}, exclude_none=True),
    }


def group_stages(settings: GroupSettings) -> list[Stage]:
    """Rollout, reward, and what an algorithm without a critic makes of them."""
    estimator = advantage_estimator_of(settings.advantage)
    _check_baseline(settings, estimator.needs)
    rollout, reward = rollout_stage(settings), reward_stage(settings, _overlong(settings))
    sampled: list[Stage] = [rollout, reward]
    if settings.sampling_rounds:
        sampled = [DynamicSamplingStage(rollout, reward, rounds=settings.sampling_rounds)]
    if "baseline_rewards" in estimator.needs:
        sampled.append(GreedyBaselineStage(reward))
    learn = GRPOStage(
        estimator=settings.advantage,
        kl_place=settings.kl.place,
        use_stepwise_reward=bool(settings.step_rewards),
        **kl_keywords(settings),
        **update_keywords(settings),
    )
    return [*sampled, *step_reward_stages(settings), learn]


# What an estimator reads, and what a run must have for it.
_MISSING = {
    "values": ("a critic's values", "set algorithm: ppo"),
    "teacher_log_probs": ("a teacher's log-probs", "set algorithm: distillation and model.teacher_path"),
}


def _check_baseline(settings: GroupSettings, needs: tuple[str, ...]) -> None:
    """Raises ConfigError where the estimator cannot have what it reads, naming the setting that gives it."""
    name, size = settings.advantage, settings.batch.group_size
    for column, (what, remedy) in _MISSING.items():
        if column in needs:
            raise ConfigError(f"the advantage estimator '{name}' needs {what}", where="advantage", remedy=remedy)
    if "group_id" in needs and size < 2:
        raise ConfigError(
            f"group_size={size}: the advantage estimator '{name}' takes a group as its own baseline, and one response has none",
            where="batch.group_size",
            remedy="set batch.group_size=8, or algorithm: ppo",
        )
    if settings.sampling_rounds and size < 2:
        raise ConfigError(
            f"sampling_rounds={settings.sampling_rounds} replaces groups whose rewards are all equal; "
            f"with group_size={size} every group is such a one",
            where="sampling_rounds",
            remedy="set batch.group_size=8, or sampling_rounds=0",
        )


def scored_evaluation(settings: SampledSettings) -> list[Stage]:
    """One response per held-out prompt, scored by the same rewards."""
    return evaluation_stages([rollout_stage(settings), reward_stage(settings)], settings.evaluation)
