"""OPO (Hao et al. 2025, arXiv:2505.23585): the baseline of least gradient variance, a mean weighted by length."""

from __future__ import annotations

from podium.core.settings import GroupSettings
from podium.recipes._online import group_stages, scored_evaluation
from podium.trainer.recipe import register_recipe


class OPOSettings(GroupSettings):
    algorithm: str = "opo"
    advantage: str = "opo"
    """A registered advantage estimator, or your own."""


register_recipe(
    OPOSettings, "prompts", group_stages, scored_evaluation, about="length-weighted optimal baseline, exactly on policy"
)
