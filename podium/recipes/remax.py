"""ReMax (Li et al. 2023, arXiv:2310.10505): REINFORCE with the greedy response's reward as baseline."""

from __future__ import annotations

from pydantic import Field

from podium.core.settings import BatchSettings, GroupSettings, KLSettings, Reduction
from podium.recipes._online import group_stages, scored_evaluation
from podium.trainer.recipe import register_recipe


class ReMaxSettings(GroupSettings):
    algorithm: str = "remax"
    advantage: str = "remax"
    """A registered advantage estimator, or your own."""
    batch: BatchSettings = Field(default_factory=lambda: BatchSettings(prompts_per_step=128, group_size=1))
    """Sizes: each says its unit."""
    kl: KLSettings = Field(default_factory=lambda: KLSettings(coef=0.05, place="reward", estimator="k1"))
    """The KL term against the reference."""
    loss_reduction: Reduction = "sequence_mean_token_sum"
    """How token losses become one number."""


register_recipe(
    ReMaxSettings, "prompts", group_stages, scored_evaluation, about="greedy-response baseline, one response a prompt"
)
