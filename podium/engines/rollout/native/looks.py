"""From logits to tokens on the device, and the tokens' way to the host."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from types import ModuleType

import numpy as np
import torch
from torch import Tensor

from podium.engines.rollout.native.paged_cache import RowState, to_device
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


def draw(ops: ModuleType, logits: Tensor, which: Tensor, slots: Tensor, rows: list[Row], state: RowState) -> None:
    """Draws a token for each of `rows`, whose slots are given, from its row `which` of the logits.

    By way of torch where one of them truncates: what its top-k, top-p and min-p leave is not known before the whole row is.
    """
    if not any(truncates(row) for row in rows):
        ops.sample(logits, which, slots, state)
        return
    from podium.engines.rollout.native import plain

    settings = np.zeros((3, len(state.temperature)))
    settings[1] = 1.0
    for slot, row in zip(slots.tolist(), rows, strict=True):
        s = row.sequence.request.sampling
        settings[:, slot] = s.top_k, s.top_p, s.min_p
    top_k, top_p, min_p = to_device(settings, state.device)
    plain.sample(logits, which, slots, state, (top_k.long(), top_p.float(), min_p.float()))


def truncates(row: Row) -> bool:
    """Whether top-k, top-p or min-p take tokens from the row's choice."""
    s = row.sequence.request.sampling
    return bool(s.temperature and (s.top_k or s.top_p < 1 or s.min_p))


def _to_host(tensor: Tensor) -> Tensor:
    """A pinned copy that is filled in the stream's order."""
    host = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True)
    return host.copy_(tensor, non_blocking=True)
