"""What engines share that serve a batch of waiting requests to its end, in one step."""

from __future__ import annotations

from itertools import count
from typing import Any

from podium.core.errors import RolloutError
from podium.engines.base import Request, Trajectory
from podium.engines.rollout.requests import Limits
from podium.engines.rollout.steering import Steering


class WholeBatches:
    """The queue, and the parts of a `RolloutEngine` that only touch it; a subclass writes `step`.

    A request cannot be interrupted while it is served: `abort` finds only what waits.

    Args:
        limits: what a request is checked against.
        max_concurrent: rows of one batch.
        tokenizer: of the model.
    """

    def __init__(self, limits: Limits, max_concurrent: int, tokenizer: Any) -> None:
        if max_concurrent < 1:
            raise RolloutError(f"max_concurrent={max_concurrent} must be at least 1")
        self.max_concurrent, self.tokenizer = max_concurrent, tokenizer
        self.policy_version = 0
        self._limits = limits
        self._waiting: dict[int, Request] = {}
        self._ids = count()

    def submit(self, request: Request) -> int:
        """Queues a request. Raises RolloutError where the prompt is empty or too long, or a setting is out of range."""
        self._limits.check(request)
        Steering.of(self.tokenizer, request.sampling, self._limits.vocabulary)  # raises where a bad word has no such tokens
        request_id = next(self._ids)
        self._waiting[request_id] = request
        return request_id

    def abort(self, request_id: int) -> Trajectory | None:
        """Takes back a request that waits."""
        request = self._waiting.pop(request_id, None)
        return None if request is None else Trajectory(request_id, request.prompt_ids, [], "aborted")

    @property
    def pending(self) -> int:
        return len(self._waiting)

    def update_weights(self, version: int) -> None:
        """Nothing to move: the model is the trainer's."""
        self.policy_version = version

    def release(self) -> None:
        """Nothing is held between steps."""
