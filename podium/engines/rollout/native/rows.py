"""What the host tells the device of a running row: how its tokens are drawn and where it ends."""

from __future__ import annotations

from podium.engines.rollout.native.paged_cache import RowState
from podium.engines.rollout.native.paged_scheduler import Row
from podium.engines.rollout.native.scheduler import STOPS


def set_row(state: RowState, slot: int, row: Row) -> None:
    """Writes a row's part of the host's copy; `RowState.upload` sends it."""
    request, sampling = row.sequence.request, row.sequence.request.sampling
    stops = () if row.sequence.watched else sorted(row.sequence.rule.end_ids)[:STOPS]
    draws = (sampling.temperature, sampling.top_k, sampling.top_p, sampling.min_p)
    state.set_row(slot, row.sequence.most, len(request.prompt_ids), request.seed, draws, stops)
    if row.sequence.steering is not None:
        state.set_bias(slot, row.sequence.steering.at(row.sequence.tokens))


def follows(row: Row) -> bool:
    """Its biases depend on the tokens before (bad words of several tokens), so the host must look at every step."""
    return row.sequence.steering is not None and row.sequence.steering.follows


def set_biases(state: RowState, rows: list[Row]) -> None:
    """Sends the biases that hold for the next token. All of the rows' tokens must have been read."""
    for slot, row in enumerate(rows):
        if row.sequence.steering is not None and follows(row):
            state.set_bias(slot, row.sequence.steering.at(row.sequence.tokens))
    state.upload_bias(len(rows))
