"""Safe-RLHF (Dai et al. 2023, arXiv:2310.12773): as much reward as a bound on the mean cost allows."""

from __future__ import annotations

from pydantic import Field

from podium.core.errors import ConfigError
from podium.core.settings import LagrangeSettings, ModelSettings, RewardSettings
from podium.recipes._online import reward_stage, rollout_stage, scored_evaluation, step_reward_stages
from podium.recipes.ppo import PPOSettings, ppo_keywords
from podium.stages.base import Stage
from podium.stages.policy import SafeRLHFStage
from podium.stages.reward import CostStage
from podium.trainer.recipe import register_recipe


class CostModelSettings(ModelSettings):
    cost_path: str | None = None
    """A sequence-classification model whose score is a cost (in addition to `costs`)."""


class SafeRLHFSettings(PPOSettings):
    algorithm: str = "safe_rlhf"
    model: CostModelSettings = Field(default_factory=CostModelSettings)
    """Models and tokenizer."""
    costs: list[RewardSettings] = Field(default_factory=list)
    """Cost sources, summed by weight: like rewards, and more is worse. `model.cost_path` is one more."""
    lagrange: LagrangeSettings = Field(default_factory=LagrangeSettings)
    """The multiplier and the threshold it holds the mean cost at."""


def cost_stage(settings: SafeRLHFSettings) -> CostStage:
    """All cost sources of the settings. Raises ConfigError where there is none."""
    models = [settings.model.cost_path] if settings.model.cost_path else []
    if not models and not settings.costs:
        raise ConfigError(
            "no cost is set",
            where="costs",
            remedy="add `costs: [{function: my_file.py:my_cost}]` or model.cost_path, or use algorithm: ppo",
        )
    return CostStage(models=models, functions=settings.costs)


def stages(settings: SafeRLHFSettings) -> list[Stage]:
    """Rollout, reward, cost, and what Safe-RLHF makes of them."""
    lagrange = settings.lagrange
    return [
        rollout_stage(settings),
        reward_stage(settings),
        cost_stage(settings),
        *step_reward_stages(settings),
        SafeRLHFStage(
            cost_threshold=lagrange.threshold,
            multiplier=lagrange.initial,
            multiplier_lr=lagrange.lr,
            multiplier_min=lagrange.minimum,
            multiplier_max=lagrange.maximum,
            **ppo_keywords(settings),
        ),
    ]


def evaluation(settings: SafeRLHFSettings) -> list[Stage]:
    """One response per held-out prompt, scored by the same rewards and costs."""
    return [*scored_evaluation(settings), cost_stage(settings)]


register_recipe(SafeRLHFSettings, "prompts", stages, evaluation, about="PPO under a bound on the mean cost")
