"""From logits to tokens on the device, and the tokens' way to the host."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from types import ModuleType

import numpy as np
import torch
from torch import Tensor

from podium.engines.rollout.native.paged_cache import RowState
from podium.engines.rollout.native.paged_scheduler import Row


@dataclass
class Look:
    """Tokens on their way to the host: `tokens [steps, rows]` (-1: none) and log-probs, there once `event` is."""

    rows: list[Row]
    steps: int
    tokens: Tensor
    scores: Tensor
    event: torch.cuda.Event | None
    version: int

    @classmethod
    def at(cls, state: RowState, rows: list[Row], steps: int, slots: Tensor, version: int) -> Look:
        """Starts the copy of what `rows` (in these `slots`) wrote in the last `steps` steps."""
        tokens, scores = state.tokens_out[:steps, slots], state.scores_out[:steps, slots]
        event = None
        if state.device.type == "cuda":
            tokens, scores = _to_host(tokens), _to_host(scores)
            event = torch.cuda.Event()
            event.record()
        for row in rows:
            row.under_way += steps
        return cls(rows, steps, tokens, scores, event, version)

    def read(self) -> Iterator[tuple[Row, list[int], list[float], bool]]:
        """Waits for the copy; each row's tokens and log-probs up to one that is not finite, and whether there was one."""
        if self.event is not None:
            self.event.synchronize()
        tokens, scores = self.tokens.numpy(), self.scores.numpy()
        written = (tokens >= 0).sum(0)
        bad = (tokens >= 0) & ~np.isfinite(scores)
        ends = np.where(bad.any(0), bad.argmax(0), written)
        columns, log_probs = tokens.T.tolist(), scores.T.tolist()
        for i, row in enumerate(self.rows):
            row.under_way -= self.steps
            end = int(ends[i])
            yield row, columns[i][:end], log_probs[i][:end], end < written[i]


@dataclass(frozen=True)
class Draws:
    """What drawing for a batch takes beyond temperature: whether any row is truncated (top-k, top-p, min-p), and whether
    anything is added to any row's logits. What no row asks for costs nothing.
    """

    truncated: bool = False
    biased: bool = False

    @classmethod
    def of(cls, rows: list[Row]) -> Draws:
        samplings = [row.sequence.request.sampling for row in rows]
        return cls(
            any(s.temperature and (s.top_k or s.top_p < 1 or s.min_p) for s in samplings),
            any(row.sequence.steering is not None for row in rows),
        )


def draw(ops: ModuleType, logits: Tensor, which: Tensor, slots: Tensor, state: RowState, draws: Draws) -> None:
    """Draws a token for each of N samples: from row `which [N]` of the logits `[M, V]`, for row `slots [N]` of the state.

    Nothing here asks the device for a number.
    """
    if draws.biased:
        logits = logits[which].float().scatter_add_(1, state.bias_ids[slots], state.bias[slots])
        which = state.all_slots[: len(slots)]
    ops.sample(logits, which, slots, state, truncated=draws.truncated)


def _to_host(tensor: Tensor) -> Tensor:
    """A pinned copy that is filled in the stream's order."""
    host = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True)
    return host.copy_(tensor, non_blocking=True)
