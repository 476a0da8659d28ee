"""GSPO (Zheng et al. 2025, arXiv:2507.18071): the ratio, its clipping and its optimisation are of whole sequences."""

from __future__ import annotations

from pydantic import Field

from podium.core.settings import GroupSettings, Reduction
from podium.recipes._online import group_stages, scored_evaluation
from podium.trainer.recipe import register_recipe


class GSPOSettings(GroupSettings):
    algorithm: str = "gspo"
    policy_loss: str = "gspo"
    """A registered policy loss."""
    clip_low: float | None = Field(default=3e-4, gt=0, le=1)
    """The sequence's ratio (a geometric mean over its tokens) is clipped below 1 - clip_low."""
    clip_high: float | None = Field(default=4e-4, gt=0)
    """The sequence's ratio is clipped above 1 + clip_high."""
    loss_reduction: Reduction = "sequence_mean_token_mean"
    """How token losses become one number."""


register_recipe(GSPOSettings, "prompts", group_stages, scored_evaluation, about="sequence-level ratio and clipping")
