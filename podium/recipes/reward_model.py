"""A reward model from preference pairs (Bradley and Terry 1952; Ouyang et al. 2022, equation 1)."""

from __future__ import annotations

from pydantic import Field

from podium.algorithms.losses import pairwise_reward_loss
from podium.core.errors import ConfigError
from podium.core.settings import BatchSettings, RecipeSettings
from podium.stages.base import Stage
from podium.stages.evaluation import PairAccuracyStage
from podium.stages.update import UpdateStage
from podium.trainer.recipe import RECIPES, Recipe


class RewardModelSettings(RecipeSettings):
    algorithm: str = "reward_model"
    batch: BatchSettings = Field(default_factory=lambda: BatchSettings(prompts_per_step=64, group_size=2))
    """`prompts_per_step` counts pairs; a pair has `group_size` 2 rows."""


def stages(settings: RewardModelSettings) -> list[Stage]:
    """One update on the step's pairs."""
    batch = settings.batch
    if batch.group_size != 2 or batch.minibatch_sequences % 2:
        raise ConfigError(
            f"group_size={batch.group_size}, minibatch_sequences={batch.minibatch_sequences}: a pair has two rows",
            where="batch",
            remedy="leave group_size at 2; minibatch_sequences must be even",
        )
    return [UpdateStage("reward", pairwise_reward_loss())]


def evaluation(settings: RewardModelSettings) -> list[Stage]:
    """How often the chosen answer of a held-out pair scores higher."""
    return [PairAccuracyStage()]


RECIPES.register("reward_model")(
    Recipe("reward_model", RewardModelSettings, "preferences", stages, evaluation, "a scorer from preference pairs")
)
