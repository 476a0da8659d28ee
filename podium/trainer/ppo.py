"""`PPOTrainer`: the trainer with `algorithm: ppo`, by the name that other programs use."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from podium.core.config import load_yaml
from podium.trainer.trainer import Trainer


class PPOTrainer(Trainer):
    """`Trainer` whose recipe is PPO, whatever the settings say of the algorithm."""

    def __init__(self, config: Mapping[str, Any] | str, **given: Any) -> None:
        values = load_yaml(config) if isinstance(config, str) else dict(config)
        super().__init__(config={**values, "algorithm": "ppo"}, **given)
