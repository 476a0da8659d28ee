"""The contract between a loss and the engine that runs it."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

from torch import Tensor

LossFunction = Callable[[Mapping[str, Tensor], Mapping[str, Tensor]], tuple[Tensor, dict[str, Tensor]]]


@dataclass(frozen=True)
class Loss:
    """A per-token (or per-sequence) loss that an engine can run on any micro-batch.

    `function(outputs, columns)` returns the loss, of the mask's shape, and metrics of that shape (detached; the engine
    averages them over the mask). It must treat each row (with `keep_together`, each set of rows) by itself.
    """

    name: str
    function: LossFunction
    # What the model must compute: "log_probs", "entropy", "values" ([b, T]) or "scores" ([b]).
    outputs: tuple[str, ...]
    # Batch columns handed over: token columns padded to [b, T], others [b].
    columns: tuple[str, ...]
    # The column that says which entries count.
    mask: str = "loss_mask"
    # A mode of `reduce.token_weights`, and its length if it is "constant".
    reduction: str = "token_mean"
    constant_length: int | None = None
    # A column whose equal values must share a micro-batch (pairs).
    keep_together: str | None = None
    # Set on a loss that holds only for the one update on fresh samples: the loss for every other case.
    otherwise: Loss | None = None
