"""Importance correction: training's log-probs against those that the tokens were sampled with."""

from __future__ import annotations

from typing import Any

import torch

from podium.algorithms.corrections import find_correction
from podium.core.batch import Batch
from podium.core.errors import ConfigError
from podium.stages.base import Stage, StepContext


class CorrectionStage(Stage):
    """Weights and a mask for the policy's loss, from the ratio of the training policy to the rollout policy.

    The two differ where kernels, dtypes or weights do.

    Args:
        kind: a registered correction ("token_truncated", "sequence_truncated", "token_masked", "sequence_rejected"); `settings`
            are its own (`cap`, or `low` and `high`).

    Raises ConfigError for an unknown kind or setting.
    """

    name = "correction"
    reads = ("old_log_probs", "rollout_log_probs", "loss_mask")
    writes = ("importance_weights", "corrected_mask")

    def __init__(self, kind: str, **settings: Any) -> None:
        try:
            self.correction = find_correction(kind)
            nothing = torch.zeros(0, 0)
            self.correction(nothing, nothing, nothing.bool(), **settings)  # bounds that make no sense are said now
        except ValueError as error:
            raise ConfigError(str(error), where="correction") from None
        self.correction_settings = settings

    def run(self, batch: Batch, context: StepContext) -> Batch:
        columns = (batch.padded(name) for name in self.reads)
        corrected = self.correction(*columns, **self.correction_settings)
        for name, (total, count) in corrected.metrics.items():
            context.metrics.add(f"correction/{name}", float(total), float(count))
        out = batch.with_padded("importance_weights", corrected.importance_weights)
        return out.with_padded("corrected_mask", corrected.corrected_mask).select(*self.writes)
