"""REINFORCE++ with a group baseline (Hu 2025, arXiv:2501.03262): less the group's mean, whitened over the batch."""

from __future__ import annotations

from pydantic import Field

from podium.core.settings import GroupSettings, KLSettings
from podium.recipes._online import group_stages, scored_evaluation
from podium.trainer.recipe import register_recipe


class ReinforcePlusPlusBaselineSettings(GroupSettings):
    algorithm: str = "reinforce_plus_plus_baseline"
    advantage: str = "reinforce_plus_plus_baseline"
    """A registered advantage estimator, or your own."""
    kl: KLSettings = Field(default_factory=lambda: KLSettings(coef=0.001, place="loss", estimator="k2"))
    """The KL term against the reference."""


register_recipe(
    ReinforcePlusPlusBaselineSettings, "prompts", group_stages, scored_evaluation, about="group mean, batch-wide deviation"
)
