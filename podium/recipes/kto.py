"""KTO (Ethayarajh et al. 2024, arXiv:2402.01306): answers marked as good or bad, no pairs needed."""

from __future__ import annotations

from pydantic import Field

from podium.algorithms.losses import kto_loss
from podium.core.errors import ConfigError
from podium.core.settings import BatchSettings, RecipeSettings
from podium.stages.base import Stage
from podium.stages.preference import DesirabilityStage, ReferencePointStage
from podium.stages.rollout import LogProbStage
from podium.stages.update import UpdateStage
from podium.trainer.recipe import register_recipe


class KTOSettings(RecipeSettings):
    algorithm: str = "kto"
    batch: BatchSettings = Field(default_factory=lambda: BatchSettings(prompts_per_step=64, group_size=1))
    """Sizes: each says its unit."""
    beta: float = Field(default=0.1, gt=0)
    """Weight of the implicit KL term: the larger, the nearer the reference."""
    desirable_weight: float = Field(default=1.0, gt=0)
    """Weight of answers marked as good. The paper: desirable_weight x their number within 1 to 4/3 of the same for bad ones."""
    undesirable_weight: float = Field(default=1.0, gt=0)
    """Weight of answers marked as bad."""


def stages(settings: KTOSettings) -> list[Stage]:
    """The reference's log-probs, the reference point, and one pass of updates on the step's rows."""
    if settings.batch.group_size != 1 or settings.batch.prompts_per_step < 2:
        raise ConfigError(
            f"group_size={settings.batch.group_size}, prompts_per_step={settings.batch.prompts_per_step}: KTO generates "
            "nothing, and its reference point needs another row's answer",
            where="batch",
            remedy="leave group_size at 1, and prompts_per_step at 2 or more",
        )
    weights = {"desirable_weight": settings.desirable_weight, "undesirable_weight": settings.undesirable_weight}
    loss = kto_loss(beta=settings.beta, **weights)
    return [LogProbStage("reference", "ref_log_probs"), ReferencePointStage(), UpdateStage("actor", loss)]


def evaluation(settings: KTOSettings) -> list[Stage]:
    """How far held-out good and bad answers have moved."""
    return [DesirabilityStage()]


register_recipe(KTOSettings, "unpaired", stages, evaluation, about="answers marked as good or bad")
