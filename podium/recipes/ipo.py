"""IPO (Azar et al. 2023, arXiv:2310.12036): preferences with a bounded margin, so that sure pairs are not overfitted."""

from __future__ import annotations

from pydantic import Field

from podium.algorithms.losses import preference_loss
from podium.recipes._preference import PairSettings, check_pairs, pair_evaluation
from podium.stages.base import Stage
from podium.stages.rollout import LogProbStage
from podium.stages.update import UpdateStage
from podium.trainer.recipe import register_recipe


class IPOSettings(PairSettings):
    algorithm: str = "ipo"
    beta: float = Field(default=0.1, gt=0)
    """The margin of log-ratios that is aimed at is 1 / (2 beta)."""


def stages(settings: IPOSettings) -> list[Stage]:
    """The reference's log-probs, and one pass of updates on the step's pairs."""
    check_pairs(settings)
    return [LogProbStage("reference", "ref_log_probs"), UpdateStage("actor", preference_loss(kind="ipo", beta=settings.beta))]


register_recipe(IPOSettings, "preferences", stages, pair_evaluation, about="preferences, with a bounded margin")
