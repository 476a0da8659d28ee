"""GRPO: group-relative policy optimisation (Shao et al. 2024). No critic; a group's own rewards are the baseline."""

from __future__ import annotations

from podium.core.errors import ConfigError
from podium.core.settings import OnlineSettings
from podium.recipes._online import reward_stage, rollout_stage
from podium.stages.base import Stage
from podium.stages.policy import GRPOStage
from podium.trainer.evaluation import evaluation_stages
from podium.trainer.recipe import RECIPES, Recipe


class GRPOSettings(OnlineSettings):
    algorithm: str = "grpo"
    advantage: str = "grpo"
    """A registered estimator: `grpo` (divided by the group's deviation), `dr_grpo` (not divided), `rloo`, or your own."""


def stages(settings: GRPOSettings) -> list[Stage]:
    """Rollout, reward, and what GRPO makes of them."""
    if settings.batch.group_size < 2:
        raise ConfigError(
            f"group_size={settings.batch.group_size}: a group is its own baseline, so one response has none",
            where="batch.group_size",
            remedy="set batch.group_size=8, or algorithm: ppo",
        )
    kl = settings.kl
    if kl.place == "reward" and kl.coef > 0:
        raise ConfigError("GRPO adds its KL term to the loss", where="kl.place", remedy="set kl.place=loss, or algorithm: ppo")
    return [
        rollout_stage(settings),
        reward_stage(settings),
        GRPOStage(
            estimator=settings.advantage,
            kl_coef=0.0 if kl.controller == "none" else kl.coef,
            kl_estimator=kl.estimator,
            kl_controller=kl.controller,
            kl_target=kl.target,
            kl_horizon=kl.horizon,
            clip_low=settings.clip_low,
            clip_high=settings.clip_high,
            dual_clip=settings.dual_clip,
            entropy_coef=settings.entropy_coef,
            one_update=settings.batch.updates_per_step == 1,
            loss_reduction=settings.loss_reduction,
            constant_length=settings.rollout.max_new_tokens,
        ),
    ]


def evaluation(settings: GRPOSettings) -> list[Stage]:
    """One response per held-out prompt, scored by the same rewards."""
    return evaluation_stages([rollout_stage(settings), reward_stage(settings)], settings.evaluation)


RECIPES.register("grpo")(Recipe("grpo", GRPOSettings, "prompts", stages, evaluation, "group baseline, no critic"))
