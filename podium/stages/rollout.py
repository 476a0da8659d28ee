"""Sampling responses, and what the other models say about them."""

from __future__ import annotations

from typing import Any

import torch

from podium.core.batch import Batch
from podium.core.metrics import Metrics
from podium.stages.base import Stage, StepContext

GENERATED = (
    "response_ids",
    "response_mask",
    "loss_mask",
    "rollout_log_probs",
    "finish_reason",
    "policy_version",
    "group_id",
    "sample_seed",
    "response",
)


class RolloutStage(Stage):
    """The actor samples `group_size` responses to each prompt.

    Args:
        model: the actor: a path, a `transformers` model or an `ActorModel`; by default the settings' `model.path`.
        tokenizer: the model's tokenizer, where `model` is no path.
        max_length: the longest response, in tokens (the settings' `rollout.max_new_tokens`).
        group_size: responses per prompt; by default the settings' `batch.group_size`.
        temperature: instead of the settings' `rollout.temperature`; 0 is greedy.
    """

    name = "rollout"
    reads = ("prompt_ids",)
    writes = GENERATED
    changes_rows = True
    roles = ("actor",)

    def __init__(
        self,
        model: Any = None,
        tokenizer: Any = None,
        max_length: int | None = None,
        *,
        group_size: int | None = None,
        temperature: float | None = None,
    ) -> None:
        self.model, self.tokenizer, self.max_length = model, tokenizer, max_length
        self.group_size, self.temperature = group_size, temperature

    def models(self) -> dict[str, Any]:
        return {"actor": self.model} if self.model is not None else {}

    def settings(self) -> dict[str, Any]:
        given = {
            "rollout.max_new_tokens": self.max_length,
            "rollout.temperature": self.temperature,
            "batch.group_size": self.group_size,
        }
        return {key: value for key, value in given.items() if value is not None}

    def run(self, batch: Batch, context: StepContext) -> Batch:
        actor = context.roles["actor"]
        out = actor.generate_sequences(
            batch,
            group_size=self.group_size or context.group_size,
            step=context.step,
            round=context.rollout_round,
            temperature=self.temperature,
            on_progress=context.progress_of(self.label),
        ).result()
        _measure(out, context.metrics)
        return out


def _measure(batch: Batch, metrics: Metrics) -> None:
    lengths = batch.lengths("response")
    rows = len(batch)
    metrics.add("rollout/response_tokens", float(lengths.sum()), rows)
    metrics.add("rollout/cut_share", sum(r == "length" for r in batch["finish_reason"]), rows)
    metrics.add("rollout/tokens", float(lengths.sum()))
    sampled = batch["response_mask"].values
    metrics.add("rollout/log_prob", float(batch["rollout_log_probs"].values[sampled].sum()), float(sampled.sum()))


class LogProbStage(Stage):
    """A role's log-probs of the sampled tokens, as the column `column`."""

    reads = ("prompt_ids", "response_ids")

    def __init__(self, role: str, column: str) -> None:
        self.name, self.roles, self.column, self.writes = column, (role,), column, (column,)
        if role == "actor":  # it can be compared with what the rollout saw
            self.optional_reads = ("rollout_log_probs", "response_mask")

    def run(self, batch: Batch, context: StepContext) -> Batch:
        role = context.roles[self.roles[0]]
        out = role.compute_log_probs(batch.select(*self.reads), name=self.column).result()
        if "rollout_log_probs" in batch:
            _compare(batch, out[self.column].values, context.metrics)
        return out


def _compare(batch: Batch, log_probs: torch.Tensor, metrics: Metrics) -> None:
    """How far training's log-probs are from those of the rollout: near 0, or weights or kernels differ."""
    mask = batch["response_mask"].values
    gap = (log_probs - batch["rollout_log_probs"].values)[mask].abs()
    metrics.add("rollout/log_prob_gap", float(gap.sum()), float(mask.sum()))


class ValueStage(Stage):
    """A critic's values before each token, as the column `column`."""

    reads = ("prompt_ids", "response_ids")

    def __init__(self, role: str = "critic", column: str = "values") -> None:
        self.name, self.roles, self.column, self.writes = column, (role,), column, (column,)

    def run(self, batch: Batch, context: StepContext) -> Batch:
        return context.roles[self.roles[0]].compute_values(batch.select(*self.reads), name=self.column).result()
