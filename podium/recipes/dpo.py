"""DPO: direct preference optimisation (Rafailov et al. 2023, arXiv:2305.18290). No reward model, no rollout."""

from __future__ import annotations

from pydantic import Field

from podium.algorithms.losses import preference_loss
from podium.recipes._preference import PairSettings, check_pairs, pair_evaluation
from podium.stages.base import Stage
from podium.stages.rollout import LogProbStage
from podium.stages.update import UpdateStage
from podium.trainer.recipe import register_recipe


class DPOSettings(PairSettings):
    algorithm: str = "dpo"
    beta: float = Field(default=0.1, gt=0)
    """Weight of the implicit KL term: the larger, the nearer the reference."""
    label_smoothing: float = Field(default=0.0, ge=0, lt=0.5)
    """The share of pairs that are taken to be labelled the wrong way round (conservative DPO)."""


def stages(settings: DPOSettings) -> list[Stage]:
    """The reference's log-probs, and one pass of updates on the step's pairs."""
    check_pairs(settings)
    loss = preference_loss(kind="dpo", beta=settings.beta, label_smoothing=settings.label_smoothing)
    return [LogProbStage("reference", "ref_log_probs"), UpdateStage("actor", loss)]


register_recipe(DPOSettings, "preferences", stages, pair_evaluation, about="preferences, without a reward model")
