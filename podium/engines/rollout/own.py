"""The rollout of a model class of the user's own: requests over its `generate`."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from podium.core.errors import RolloutError
from podium.engines.base import Request, Segment, Trajectory
from podium.engines.rollout.native.sampler import Sampler
from podium.engines.rollout.requests import Limits
from podium.engines.rollout.steering import Steering, steered
from podium.engines.rollout.stopping import StopRule
from podium.engines.rollout.whole_batches import WholeBatches
from podium.models.own import BaseParallelModel


class OwnEngine(WholeBatches):
    """A `RolloutEngine` over `BaseParallelModel.generate`. A step serves a whole batch of waiting requests to its end.

    Tokens are drawn here, by the same sampler as in the native engine: a sample depends on its seed and the model's logits.

    Args:
        max_concurrent: rows of one batch.
    """

    def __init__(self, model: BaseParallelModel, tokenizer: Any, *, max_concurrent: int = 256) -> None:
        super().__init__(Limits(model.max_positions, len(tokenizer), "max_positions"), max_concurrent, tokenizer)
        self.model = model
        self._ends = frozenset([tokenizer.eos_token_id]) - {None}
        self._sampler = Sampler()

    def step(self) -> list[Trajectory]:
        """Serves the requests that have waited longest. Raises RolloutError where a log-prob is not finite."""
        served = dict(list(self._waiting.items())[: self.max_concurrent])
        if not served:
            return []
        finished = self._serve(served)
        for request_id in served:
            del self._waiting[request_id]
        return finished

    def release(self) -> None:
        """Frees what the sampler keeps between steps."""
        self._sampler.release()

    @torch.no_grad()
    def _serve(self, served: dict[int, Request]) -> list[Trajectory]:
        requests = list(served.values())
        rules = [StopRule(self.tokenizer, r.sampling, self._ends, r.prompt_ids, r.response_ids) for r in requests]
        steerings = [Steering.of(self.tokenizer, r.sampling, self._limits.vocabulary) for r in requests]
        segments = [Segment("policy", policy_version=self.policy_version) for _ in requests]
        reasons: list[Any] = [None] * len(requests)

        def draw(rows: list[int], logits: Tensor) -> tuple[Tensor, list[bool]]:
            picked = [requests[row] for row in rows]
            written = [(*requests[row].response_ids, *segments[row].token_ids) for row in rows]
            positions = [len(tokens) for tokens in written]
            logits = steered(logits, [steerings[row] for row in rows], written)
            tokens, log_probs = self._sampler(logits, [r.seed for r in picked], positions, [r.sampling for r in picked])
            for row, token, log_prob in zip(rows, tokens.tolist(), log_probs.tolist(), strict=True):
                if log_prob - log_prob != 0:
                    raise RolloutError(
                        f"{type(self.model).__name__}'s logits are not finite", remedy="look for NaN in the weights"
                    )
                segments[row].token_ids.append(token)
                segments[row].log_probs.append(log_prob)
                reasons[row] = rules[row].push(token)
            return tokens, [reasons[row] is not None for row in rows]

        training = self.model.training
        self.model.eval()
        try:
            self.model.generate([(*r.prompt_ids, *r.response_ids) for r in requests], draw)
        finally:
            self.model.train(training)
        if None in reasons:
            raise RolloutError(
                f"{type(self.model).__name__}.generate returned before draw() had ended row {reasons.index(None)}",
                remedy="go on until draw() says that every row has ended",
            )
        return [
            Trajectory(request_id, request.prompt_ids, [segment], reason)
            for (request_id, request), segment, reason in zip(served.items(), segments, reasons, strict=True)
        ]
