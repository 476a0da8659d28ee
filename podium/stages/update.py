"""Updating a role's weights on a step's batch."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from podium.algorithms.base import Loss
from podium.core.batch import Batch
from podium.stages.base import Stage, StepContext


class UpdateStage(Stage):
    """Minimises a loss over the step's rows.

    Args:
        role: whose weights change.
        loss: what is minimised; the columns that it names are what the stage reads. A function is asked at every step (a
            coefficient that moves).
        columns: the token columns that hold the sequences.
        skip_steps: the first so many steps leave the role alone (a critic that warms up first).
    """

    def __init__(
        self,
        role: str,
        loss: Loss | Callable[[], Loss],
        *,
        columns: Sequence[str] = ("prompt_ids", "response_ids"),
        skip_steps: int = 0,
    ) -> None:
        self.name, self.roles, self.updates = f"update_{role}", (role,), role
        self.make_loss: Callable[[], Loss] = (lambda: loss) if isinstance(loss, Loss) else loss
        now = self.make_loss()
        self.reads = tuple(dict.fromkeys((*columns, *now.columns, now.mask)))
        self.skip_steps = skip_steps

    def run(self, batch: Batch, context: StepContext) -> Batch:
        if context.step >= self.skip_steps:
            role = context.roles[self.roles[0]]
            context.metrics.merge(role.update(batch.select(*self.reads), self.make_loss()).result(), prefix=f"{self.roles[0]}/")
        return Batch()
