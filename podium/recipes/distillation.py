"""On-policy distillation (Agarwal et al. 2023, arXiv:2306.13649; Gu et al. 2023, arXiv:2306.08543): the student answers,
and a teacher says of each token how likely it was.

The loss is the reverse KL of the student from the teacher, estimated at the tokens that the student sampled.
"""

from __future__ import annotations

from pydantic import Field

from podium.core.errors import ConfigError
from podium.core.settings import BatchSettings, ModelSettings, OnlineSettings
from podium.recipes._online import kl_keywords, reward_stage, rollout_stage, scored_evaluation, update_keywords
from podium.stages.base import Stage
from podium.stages.policy import GRPOStage
from podium.stages.rollout import LogProbStage
from podium.trainer.recipe import register_recipe


class TeacherModelSettings(ModelSettings):
    teacher_path: str | None = None
    """The teacher: a causal LM with the same tokenizer."""


class DistillationSettings(OnlineSettings):
    algorithm: str = "distillation"
    model: TeacherModelSettings = Field(default_factory=TeacherModelSettings)
    """Models and tokenizer."""
    batch: BatchSettings = Field(default_factory=lambda: BatchSettings(prompts_per_step=128, group_size=1))
    """Sizes: each says its unit."""


def stages(settings: DistillationSettings) -> list[Stage]:
    """Rollout, the teacher's log-probs, and a policy gradient on the difference. Rewards, where set, are only measured."""
    if settings.step_rewards:
        raise ConfigError("distillation learns from the teacher alone", where="step_rewards", remedy="leave them out")
    if not settings.model.teacher_path:
        raise ConfigError("no teacher is set", where="model.teacher_path", remedy="give a causal LM with the same tokenizer")
    measured = [reward_stage(settings)] if settings.rewards or settings.model.reward_path else []
    student = GRPOStage(
        estimator="distillation", kl_place=settings.kl.place, **kl_keywords(settings), **update_keywords(settings)
    )
    return [rollout_stage(settings), *measured, LogProbStage("teacher", "teacher_log_probs"), student]


def evaluation(settings: DistillationSettings) -> list[Stage]:
    """With rewards: one response per held-out prompt, scored."""
    return scored_evaluation(settings) if settings.rewards or settings.model.reward_path else []


register_recipe(DistillationSettings, "prompts", stages, evaluation, about="a student learns from a teacher on its own answers")
