"""The reference: the policy's starting point, frozen."""

from __future__ import annotations

from podium.controller.dispatch import dispatch
from podium.core.batch import Batch
from podium.core.work import Work
from podium.engines.base import TrainEngine
from podium.workers.actor import log_probs_as
from podium.workers.base import weights_digest, work_of_engine


class ReferenceWorker:
    """Log-probs under weights that never change."""

    def __init__(self, engine: TrainEngine) -> None:
        self.engine = engine

    @dispatch("broadcast")
    def weights_digest(self) -> str:
        """What tells these weights from others."""
        return weights_digest(self.engine)

    @dispatch("broadcast")
    def row_work(self) -> Work:
        """What a row costs this role's model."""
        return work_of_engine(self.engine)

    @dispatch("rows")
    def compute_log_probs(self, batch: Batch, name: str = "ref_log_probs") -> Batch:
        """Log-probs of the responses under the reference, as the column `name` (nats, fp32)."""
        return log_probs_as(self.engine, batch, name)
