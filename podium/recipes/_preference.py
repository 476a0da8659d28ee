"""What the recipes that learn from preference pairs have in common."""

from __future__ import annotations

from pydantic import Field

from podium.core.errors import ConfigError
from podium.core.settings import BatchSettings, RecipeSettings
from podium.stages.base import Stage
from podium.stages.preference import PreferenceAccuracyStage


class PairSettings(RecipeSettings):
    """Recipes whose rows come in pairs."""

    batch: BatchSettings = Field(default_factory=lambda: BatchSettings(prompts_per_step=64, group_size=2))
    """`prompts_per_step` counts pairs; a pair has `group_size` 2 rows."""


def check_pairs(settings: PairSettings) -> None:
    """Raises ConfigError where the sizes would tear a pair apart."""
    batch = settings.batch
    if batch.group_size != 2 or batch.minibatch_sequences % 2:
        raise ConfigError(
            f"group_size={batch.group_size}, minibatch_sequences={batch.minibatch_sequences}: a pair has two rows",
            where="batch",
            remedy="leave group_size at 2; minibatch_sequences must be even",
        )


def pair_evaluation(settings: PairSettings) -> list[Stage]:
    """How often the policy has moved towards the chosen answer of a held-out pair more than towards the other."""
    return [PreferenceAccuracyStage()]
