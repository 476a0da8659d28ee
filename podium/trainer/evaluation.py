"""What is measured on held-out rows when nobody says otherwise."""

from __future__ import annotations

from collections.abc import Sequence

from podium.core.settings import EvaluationSettings
from podium.stages.base import Stage
from podium.stages.evaluation import SolvedStage
from podium.stages.reward import RewardStage
from podium.stages.rollout import RolloutStage

# Evaluation draws its samples from seeds of its own, the same at every evaluation.
EVALUATION_STEP = -1


def evaluation_stages(stages: Sequence[Stage], settings: EvaluationSettings) -> list[Stage]:
    """One response per held-out prompt, scored by the run's own reward stages; nothing where the run generates nothing."""
    rewards = [stage for stage in stages if isinstance(stage, RewardStage)]
    if not rewards or not any(isinstance(stage, RolloutStage) for stage in stages):
        return []
    return [RolloutStage(group_size=1, temperature=settings.temperature), *rewards, SolvedStage(settings.solved_at)]
