"""Online DPO (Guo et al. 2024, arXiv:2402.04792): pairs are the best and the worst of the policy's own answers."""

from __future__ import annotations

from pydantic import Field

from podium.algorithms.losses import preference_loss
from podium.core.errors import ConfigError
from podium.core.settings import SampledSettings
from podium.recipes._online import reward_stage, rollout_stage, scored_evaluation
from podium.stages.base import Stage
from podium.stages.rollout import LogProbStage
from podium.stages.sampling import BestWorstStage
from podium.stages.update import UpdateStage
from podium.trainer.recipe import register_recipe


class OnlineDPOSettings(SampledSettings):
    algorithm: str = "online_dpo"
    beta: float = Field(default=0.1, gt=0)
    """Weight of the implicit KL term: the larger, the nearer the reference."""


def stages(settings: OnlineDPOSettings) -> list[Stage]:
    """Rollout, reward, pairs, and DPO on them."""
    if settings.batch.group_size < 2:
        raise ConfigError(
            f"group_size={settings.batch.group_size}: a pair takes two responses to a prompt",
            where="batch.group_size",
            remedy="set batch.group_size=2 or more",
        )
    return [
        rollout_stage(settings),
        reward_stage(settings),
        BestWorstStage(),
        LogProbStage("reference", "ref_log_probs"),
        UpdateStage("actor", preference_loss(kind="dpo", beta=settings.beta)),
    ]


register_recipe(OnlineDPOSettings, "prompts", stages, scored_evaluation, about="DPO on the policy's own best and worst answers")
