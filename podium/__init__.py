"""Podium: reinforcement-learning post-training of language models.

Importing this package loads nothing heavy: every public name is fetched from its module on first use.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

__version__ = "0.1.0"

if TYPE_CHECKING:
    from podium.algorithms.kl import KLController as KLController
    from podium.controller.resource_pool import ResourcePool as ResourcePool
    from podium.core.batch import Batch as Batch
    from podium.models.heads import ActorModel as ActorModel
    from podium.models.heads import CriticModel as CriticModel
    from podium.models.heads import RewardModel as RewardModel
    from podium.models.heads import load_reward_model as load_reward_model
    from podium.models.own import BaseParallelModel as BaseParallelModel
    from podium.models.wrapper import ModelWrapper as ModelWrapper
    from podium.recipes import train as train
    from podium.rewards.stepwise import StepwiseRewardInjector as StepwiseRewardInjector
    from podium.stages.policy import GRPOStage as GRPOStage
    from podium.stages.policy import PPOStage as PPOStage
    from podium.stages.reward import CostStage as CostStage
    from podium.stages.reward import RewardStage as RewardStage
    from podium.stages.rollout import RolloutStage as RolloutStage
    from podium.stages.stepwise import StepwiseRewardStage as StepwiseRewardStage
    from podium.trainer import LLMTrainer as LLMTrainer
    from podium.trainer import Trainer as Trainer
    from podium.workers.advantages import estimate_advantages as estimate_advantages
    from podium.workers.advantages import estimate_constrained_advantages as estimate_constrained_advantages

_HOMES = {
    "podium.core.batch": ("Batch",),
    "podium.algorithms.kl": ("KLController",),
    "podium.controller.resource_pool": ("ResourcePool",),
    "podium.models.heads": ("ActorModel", "CriticModel", "RewardModel", "load_reward_model"),
    "podium.models.own": ("BaseParallelModel",),
    "podium.models.wrapper": ("ModelWrapper",),
    "podium.recipes": ("train",),
    "podium.workers.advantages": ("estimate_advantages", "estimate_constrained_advantages"),
    "podium.rewards.stepwise": ("StepwiseRewardInjector",),
    "podium.stages.policy": ("GRPOStage", "PPOStage"),
    "podium.stages.reward": ("CostStage", "RewardStage"),
    "podium.stages.rollout": ("RolloutStage",),
    "podium.stages.stepwise": ("StepwiseRewardStage",),
    "podium.trainer": ("LLMTrainer", "Trainer"),
}
_HOME_OF = {name: module for module, names in _HOMES.items() for name in names}

__all__ = ["__version__", *_HOME_OF]


def __getattr__(name: str) -> Any:
    home = _HOME_OF.get(name)
    if home is None:
        raise AttributeError(f"module 'podium' has no attribute '{name}'")
    value = getattr(importlib.import_module(home), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *_HOME_OF})
