"""SFT: supervised fine-tuning on prompts with completions, or on chat messages."""

from __future__ import annotations

from pydantic import Field

from podium.algorithms.losses import supervised_loss
from podium.core.errors import ConfigError
from podium.core.settings import BatchSettings, RewardSettings, SampledSettings
from podium.recipes._online import scored_evaluation
from podium.stages.base import Stage
from podium.stages.evaluation import LikelihoodStage
from podium.stages.update import UpdateStage
from podium.trainer.recipe import register_recipe


class SFTSettings(SampledSettings):
    algorithm: str = "sft"
    batch: BatchSettings = Field(default_factory=lambda: BatchSettings(prompts_per_step=64, group_size=1))
    """Sizes: each says its unit."""
    rewards: list[RewardSettings] = Field(default_factory=list)
    """With rewards set, an evaluation also generates an answer to each held-out prompt and scores it."""


def stages(settings: SFTSettings) -> list[Stage]:
    """One update on the step's rows."""
    if settings.batch.group_size != 1:
        raise ConfigError(
            f"group_size={settings.batch.group_size}: SFT generates nothing", where="batch.group_size", remedy="leave it at 1"
        )
    return [UpdateStage("actor", supervised_loss())]


def evaluation(settings: SFTSettings) -> list[Stage]:
    """Likelihood of the held-out completions; with rewards, also answers of the model's own."""
    if not settings.rewards and not settings.model.reward_path:
        return [LikelihoodStage()]
    return scored_evaluation(settings)


register_recipe(SFTSettings, "supervised", stages, evaluation, about="supervised fine-tuning")
