"""`generate(batch)`: a loop over the request interface of any engine."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch

from podium.core.batch import Batch, Ragged
from podium.core.errors import RolloutError
from podium.engines.base import Request, RolloutEngine, SamplingParams, Trajectory

Progress = Callable[[int, int, int], None]


def generate(engine: RolloutEngine, batch: Batch, sampling: SamplingParams, *, on_progress: Progress | None = None) -> Batch:
    """One response for each row.

    Args:
        batch: with `prompt_ids` and `sample_seed`.
        sampling: for all rows.
        on_progress: called after each step with (responses finished, responses in all, tokens of those finished).

    Returns:
        The batch, rows in the order they came, with the columns of `response_columns`.

    Raises:
        RolloutError: a row cannot be served, or logits are not finite. No request of this call is left in the engine.
    """
    rows: dict[int, int] = {}
    done: dict[int, Trajectory] = {}
    try:
        seeds = batch["sample_seed"].tolist()
        for row, (prompt, seed) in enumerate(zip(batch["prompt_ids"].to_list(), seeds, strict=True)):
            try:
                rows[engine.submit(Request(tuple(prompt), sampling, seed))] = row
            except RolloutError as error:
                raise RolloutError(error.what, where=f"row {row} of the batch", remedy=error.remedy) from error
        tokens = 0
        while len(done) < len(rows):
            for trajectory in engine.step():
                if trajectory.request_id in rows:
                    done[rows[trajectory.request_id]] = trajectory
                    tokens += len(trajectory.response_ids)
            if on_progress is not None:
                on_progress(len(done), len(rows), tokens)
    finally:
        for request_id, row in rows.items():
            if row not in done:
                engine.abort(request_id)
        engine.release()
    return batch.with_columns(response_columns([done[row] for row in range(len(batch))], engine.policy_version))


def response_columns(trajectories: Sequence[Trajectory], version: int = 0) -> dict[str, Ragged | torch.Tensor | list[str]]:
    """The columns that a rollout adds, one row per trajectory.

    `response_ids`; `response_mask` (the policy's tokens) and `loss_mask` (the same, until someone masks more);
    `rollout_log_probs` (0 where the environment wrote); `finish_reason`; `policy_version` (that of the last segment;
    `version` where there is none).
    """
    segments = [trajectory.segments for trajectory in trajectories]
    mask = Ragged.from_rows(([s.writer == "policy" for s in row for _ in s.token_ids] for row in segments), dtype=torch.bool)
    log_probs = [
        [value for s in row for value in (s.log_probs if s.writer == "policy" else [0.0] * len(s.token_ids))]
        for row in segments
    ]
    return {
        "response_ids": Ragged.from_rows((t.response_ids for t in trajectories), dtype=torch.int64),
        "response_mask": mask,
        "loss_mask": Ragged(mask.values.clone(), mask.offsets),
        "rollout_log_probs": Ragged.from_rows(log_probs, dtype=torch.float32),
        "finish_reason": [trajectory.finish_reason for trajectory in trajectories],
        "policy_version": torch.tensor([row[-1].policy_version if row else version for row in segments], dtype=torch.int64),
    }
