"""What an engine is: the two interfaces that workers use, and the request form of generation."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, Protocol

from podium.algorithms.base import Loss
from podium.core.batch import Batch
from podium.core.metrics import Metrics

Writer = Literal["policy", "environment"]
FinishReason = Literal["stop", "length", "aborted"]


@dataclass(frozen=True)
class SamplingParams:
    """How one response is sampled. `temperature` 0 is greedy; `top_k` 0 and `top_p` 1 leave the distribution whole.

    A sampled token's log-prob is that of the whole distribution at `temperature` (at 1 when greedy): what training
    recomputes. Truncation (top-k, top-p, min-p) changes which token is drawn, not the log-prob reported. `logit_bias` and
    `bad_words` change the logits before they are divided by the temperature, so both; training does not know of them.
    """

    max_new_tokens: int = 256
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    stop: tuple[str, ...] = ()
    """Strings that end the response; the token that completes one is kept."""
    stop_token_ids: tuple[int, ...] = ()
    """Tokens that end the response besides the model's own end tokens; kept."""
    bad_words: tuple[str, ...] = ()
    """Texts that are not written: the token that would complete one (as it is tokenised at the start of a text, or after a
    space) cannot be drawn."""
    logit_bias: tuple[tuple[int, float], ...] = ()
    """(token id, what is added to its logit); minus infinity forbids the token."""


@dataclass(frozen=True)
class Request:
    """One response to generate. `seed` alone decides its random draws, whatever batch it is in.

    `response_ids` continues an interrupted response: tokens that are already there. They count towards `max_new_tokens`;
    the trajectory has the new segments only (`engines.rollout.requests` has `resume` and `join`).
    """

    prompt_ids: tuple[int, ...]
    sampling: SamplingParams
    seed: int = 0
    response_ids: tuple[int, ...] = ()


@dataclass
class Segment:
    """Tokens written by one writer at one policy version; log-probs are there for the policy's tokens only."""

    writer: Writer
    token_ids: list[int] = field(default_factory=list)
    log_probs: list[float] = field(default_factory=list)
    policy_version: int = 0


@dataclass
class Trajectory:
    """What a request became: segments after the prompt, in order."""

    request_id: int
    prompt_ids: tuple[int, ...]
    segments: list[Segment]
    finish_reason: FinishReason

    @property
    def response_ids(self) -> list[int]:
        return [token for segment in self.segments for token in segment.token_ids]


class RolloutEngine(Protocol):
    """Generation as requests. `generate` (engines.rollout.generate) is a loop over it."""

    policy_version: int

    def submit(self, request: Request) -> int:
        """Queues a request and returns its id. Raises RolloutError where it can never be served."""
        ...

    def step(self) -> list[Trajectory]:
        """Advances the running requests; returns those that finished.

        By one token, or by several where the engine looks at its device less often.
        """
        ...

    def abort(self, request_id: int) -> Trajectory | None:
        """Ends a request at the token border; what it has so far, or None when it is not known (any more)."""
        ...

    @property
    def pending(self) -> int:
        """Requests that are queued or running."""
        ...

    def update_weights(self, version: int) -> None:
        """Takes the policy's new version; after this every token is sampled from it, and no cache of older ones is used."""
        ...

    def release(self) -> None:
        """Frees what the engine holds between rollouts (caches, not weights). Requests that are pending stay."""
        ...


class TrainEngine(Protocol):
    """A model with an optimizer that runs any `Loss`."""

    policy_version: int
    """Updates made so far."""

    def compute(self, batch: Batch, outputs: Sequence[str]) -> Batch:
        """Forward only. `log_probs`, `entropy`, `values` come back as token columns, `scores` as a sequence column."""
        ...

    def update(self, minibatch: Batch, loss: Loss) -> Metrics:
        """One optimizer step over the whole minibatch, whatever micro-batches it takes."""
        ...

    def state_dict(self) -> dict[str, Any]:
        """Weights, master weights, optimizer, schedule, version: tensors and plain values."""
        ...

    def load_state_dict(self, state: dict[str, Any]) -> None: ...
