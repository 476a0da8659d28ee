"""GRPO: group-relative policy optimisation (Shao et al. 2024, arXiv:2402.03300). A group's own rewards are the baseline."""

from __future__ import annotations

from podium.core.settings import GroupSettings
from podium.recipes._online import group_stages, scored_evaluation
from podium.trainer.recipe import register_recipe


class GRPOSettings(GroupSettings):
    algorithm: str = "grpo"


register_recipe(GRPOSettings, "prompts", group_stages, scored_evaluation, about="group baseline, no critic")
