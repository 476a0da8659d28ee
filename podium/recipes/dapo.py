"""DAPO (Yu et al. 2025, arXiv:2503.14476): clip-higher, dynamic sampling, overlong shaping, token-level loss."""

from __future__ import annotations

from pydantic import Field

from podium.core.settings import GroupSettings
from podium.recipes._online import group_stages, scored_evaluation
from podium.trainer.recipe import register_recipe


class DAPOSettings(GroupSettings):
    algorithm: str = "dapo"
    clip_high: float | None = Field(default=0.28, gt=0)
    """The ratio is clipped above 1 + clip_high."""
    sampling_rounds: int = Field(default=4, ge=0)
    """Dynamic sampling: groups whose rewards are all equal are replaced, in up to so many rollouts a step. 0: off."""


register_recipe(
    DAPOSettings,
    "prompts",
    group_stages,
    scored_evaluation,
    about="GRPO with clip-higher, dynamic sampling and overlong shaping",
)
