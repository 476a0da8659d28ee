"""What is measured on held-out rows when nobody says otherwise."""

from __future__ import annotations

from collections.abc import Sequence

from podium.core.settings import EvaluationSettings
from podium.stages.base import Stage
from podium.stages.evaluation import SolvedStage
from podium.stages.reward import RewardStage, ScoringStage
from podium.stages.rollout import RolloutStage
from podium.stages.sampling import DynamicSamplingStage

# Evaluation draws its samples from seeds of its own, the same at every evaluation.
EVALUATION_STEP = -1


def evaluation_stages(stages: Sequence[Stage], settings: EvaluationSettings) -> list[Stage]:
    """One response per held-out prompt, scored by the run's own reward stages; nothing where the run generates nothing."""
    parts = [part for stage in stages for part in _sampled(stage)]
    rewards = [stage for stage in parts if isinstance(stage, ScoringStage)]
    if not any(isinstance(stage, RewardStage) for stage in rewards) or not any(isinstance(s, RolloutStage) for s in parts):
        return []
    return [RolloutStage(group_size=1, temperature=settings.temperature), *rewards, SolvedStage(settings.solved_at)]


def _sampled(stage: Stage) -> list[Stage]:
    """The rollout and the reward that a stage stands for: an evaluation takes every group as it is."""
    return [stage.rollout, stage.reward] if isinstance(stage, DynamicSamplingStage) else [stage]
