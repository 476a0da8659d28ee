"""RLOO (Ahmadian et al. 2024, arXiv:2402.14740): REINFORCE with the mean of the other responses as baseline."""

from __future__ import annotations

from pydantic import Field

from podium.core.settings import GroupSettings, KLSettings, Reduction
from podium.recipes._online import group_stages, scored_evaluation
from podium.trainer.recipe import register_recipe


class RLOOSettings(GroupSettings):
    algorithm: str = "rloo"
    advantage: str = "rloo"
    """A registered advantage estimator, or your own."""
    kl: KLSettings = Field(default_factory=lambda: KLSettings(coef=0.05, place="reward", estimator="k1"))
    """The KL term against the reference."""
    loss_reduction: Reduction = "sequence_mean_token_sum"
    """How token losses become one number; this one makes it REINFORCE over whole sequences."""


register_recipe(RLOOSettings, "prompts", group_stages, scored_evaluation, about="leave-one-out baseline")
