"""`PPOTrainer`: the trainer with `algorithm: ppo`, by the name that other programs use."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from podium.core.config import load_yaml
from podium.trainer.trainer import Trainer, one_source


class PPOTrainer(Trainer):
    """`Trainer` whose recipe is PPO, whatever the settings say of the algorithm."""

    def __init__(
        self, config: Mapping[str, Any] | str | Path | None = None, *, config_path: str | Path | None = None, **given: Any
    ) -> None:
        source = one_source(config, config_path)
        values = load_yaml(source) if isinstance(source, str | Path) else dict(source or {})
        super().__init__(config={**values, "algorithm": "ppo"}, **given)
