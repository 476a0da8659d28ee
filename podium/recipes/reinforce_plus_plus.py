"""REINFORCE++ (Hu 2025, arXiv:2501.03262): no critic and no group; advantages are whitened over the batch."""

from __future__ import annotations

from pydantic import Field

from podium.core.settings import BatchSettings, GroupSettings, KLSettings
from podium.recipes._online import group_stages, scored_evaluation
from podium.trainer.recipe import register_recipe


class ReinforcePlusPlusSettings(GroupSettings):
    algorithm: str = "reinforce_plus_plus"
    advantage: str = "reinforce_plus_plus"
    """A registered advantage estimator, or your own."""
    batch: BatchSettings = Field(default_factory=lambda: BatchSettings(prompts_per_step=128, group_size=1))
    """Sizes: each says its unit."""
    kl: KLSettings = Field(default_factory=lambda: KLSettings(coef=0.01, place="reward", estimator="k1"))
    """The KL term against the reference."""


register_recipe(
    ReinforcePlusPlusSettings,
    "prompts",
    group_stages,
    scored_evaluation,
    about="batch-wide normalisation, one response a prompt",
)
