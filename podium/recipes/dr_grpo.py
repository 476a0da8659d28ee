"""Dr.GRPO (Liu et al. 2025, arXiv:2503.20783): GRPO without the division by deviation and by length."""

from __future__ import annotations

from podium.core.settings import GroupSettings, Reduction
from podium.recipes._online import group_stages, scored_evaluation
from podium.trainer.recipe import register_recipe


class DrGRPOSettings(GroupSettings):
    algorithm: str = "dr_grpo"
    advantage: str = "dr_grpo"
    """A registered advantage estimator, or your own."""
    loss_reduction: Reduction = "constant"
    """How token losses become one number; `constant`: over `rollout.max_new_tokens`."""


register_recipe(DrGRPOSettings, "prompts", group_stages, scored_evaluation, about="GRPO without its two biases")
