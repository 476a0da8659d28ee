"""PPO with a critic (Schulman et al. 2017; for language models, Ziegler et al. 2019 and Ouyang et al. 2022)."""

from __future__ import annotations

from typing import Any

from pydantic import Field

from podium.core.errors import ConfigError
from podium.core.settings import BatchSettings, KLSettings, OnlineSettings, OptimizerSettings
from podium.recipes._online import (
    kl_keywords,
    reward_stage,
    rollout_stage,
    scored_evaluation,
    step_reward_stages,
    update_keywords,
)
from podium.stages.base import Stage
from podium.stages.policy import PPOStage
from podium.trainer.recipe import register_recipe


class PPOSettings(OnlineSettings):
    algorithm: str = "ppo"
    critic: OptimizerSettings = Field(default_factory=lambda: OptimizerSettings(lr=1e-5))
    """The critic's optimizer."""
    batch: BatchSettings = Field(default_factory=lambda: BatchSettings(prompts_per_step=128, group_size=1))
    """Sizes: each says its unit."""
    kl: KLSettings = Field(default_factory=lambda: KLSettings(coef=0.05, place="reward", estimator="k1"))
    """The KL term against the reference."""
    gamma: float = Field(default=1.0, gt=0, le=1)
    """Discount per token."""
    gae_lambda: float = Field(default=0.95, ge=0, le=1)
    """GAE's lambda: 1 is the plain return less the value, 0 one step of temporal difference."""
    value_clip: float | None = Field(default=0.2, gt=0)
    """Values may move this far from the old ones in an update; None: freely."""
    critic_warmup_steps: int = Field(default=0, ge=0)
    """Steps at the start in which only the critic learns."""
    whiten_advantages: bool = True
    """Advantages to mean 0 and deviation 1 over a step's tokens."""


def ppo_keywords(settings: PPOSettings) -> dict[str, Any]:
    """The settings as keywords of `PPOStage`. Raises ConfigError for a KL term in the loss."""
    if settings.kl.place == "loss" and settings.kl.coef > 0:
        raise ConfigError(
            "PPO takes its KL term in the reward", where="kl.place", remedy="set kl.place=reward, or algorithm: grpo"
        )
    return {
        "use_stepwise_reward": bool(settings.step_rewards),
        "gamma": settings.gamma,
        "gae_lambda": settings.gae_lambda,
        "value_clip": settings.value_clip,
        "critic_warmup_steps": settings.critic_warmup_steps,
        "whiten_advantages": settings.whiten_advantages,
        **kl_keywords(settings),
        **update_keywords(settings),
    }


def stages(settings: PPOSettings) -> list[Stage]:
    """Rollout, reward, and what PPO makes of them."""
    scored = [rollout_stage(settings), reward_stage(settings), *step_reward_stages(settings)]
    return [*scored, PPOStage(**ppo_keywords(settings))]


register_recipe(PPOSettings, "prompts", stages, scored_evaluation, about="clipped policy gradient with a critic")
