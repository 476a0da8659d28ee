"""CISPO (MiniMax 2025, arXiv:2506.13585): importance weights are clipped, gradients are not."""

from __future__ import annotations

from pydantic import Field

from podium.core.settings import GroupSettings
from podium.recipes._online import group_stages, scored_evaluation
from podium.trainer.recipe import register_recipe


class CISPOSettings(GroupSettings):
    algorithm: str = "cispo"
    policy_loss: str = "cispo"
    """A registered policy loss."""
    clip_low: float | None = Field(default=1.0, gt=0, le=1)
    """Weights are clipped below 1 - clip_low; 1: not at all."""
    clip_high: float | None = Field(default=4.0, gt=0)
    """Weights are clipped above 1 + clip_high."""


register_recipe(CISPOSettings, "prompts", group_stages, scored_evaluation, about="clipped importance weights, no token dropped")
