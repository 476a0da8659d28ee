"""What the recipes that generate have in common."""

from __future__ import annotations

from podium.core.errors import ConfigError
from podium.core.settings import OnlineSettings
from podium.stages.reward import RewardStage
from podium.stages.rollout import RolloutStage


def rollout_stage(settings: OnlineSettings) -> RolloutStage:
    return RolloutStage(group_size=settings.batch.group_size)


def reward_stage(settings: OnlineSettings) -> RewardStage:
    """All reward sources of the settings. Raises ConfigError where there is none."""
    models = [settings.model.reward_path] if settings.model.reward_path else []
    if not models and not settings.rewards:
        raise ConfigError(
            "no reward is set",
            where="rewards",
            remedy="add `rewards: [{function: my_file.py:my_reward}]`, a built-in, or model.reward_path",
        )
    return RewardStage(models=models, functions=settings.rewards)
