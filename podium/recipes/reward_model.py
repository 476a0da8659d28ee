"""A reward model from preference pairs (Bradley and Terry 1952; Ouyang et al. 2022, equation 1)."""

from __future__ import annotations

from pydantic import Field, field_validator

from podium.algorithms.losses import pairwise_reward_loss
from podium.recipes._preference import PairSettings, check_pairs
from podium.stages.base import Stage
from podium.stages.evaluation import PairAccuracyStage
from podium.stages.update import UpdateStage
from podium.trainer.recipe import register_recipe


class RewardModelSettings(PairSettings):
    algorithm: str = "reward_model"
    heads: list[str] = Field(default_factory=list)
    """Names of several scores (`[helpfulness, honesty]`); a pair's column `aspect` says which it judges. Empty: one score."""

    @field_validator("heads")
    @classmethod
    def _distinct(cls, heads: list[str]) -> list[str]:
        if len(set(heads)) < len(heads):
            raise ValueError("each name once")
        return heads


def stages(settings: RewardModelSettings) -> list[Stage]:
    """One pass of updates on the step's pairs."""
    check_pairs(settings)
    return [UpdateStage("reward", pairwise_reward_loss(heads=len(settings.heads) > 1))]


def evaluation(settings: RewardModelSettings) -> list[Stage]:
    """How often the chosen answer of a held-out pair scores higher (by the head that the pair is about)."""
    return [PairAccuracyStage(settings.heads if len(settings.heads) > 1 else ())]


register_recipe(RewardModelSettings, "preferences", stages, evaluation, about="a scorer from preference pairs")
