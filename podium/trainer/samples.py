"""A step's first rows, as they stand in the run's `samples/`."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any

import torch

from podium.core.batch import Batch, Ragged
from podium.runs.folder import Encoded

MOST_TOKENS = 4096
"""Tokens of a step that are written with their log-probs."""

_PER_TOKEN = (
    "prompt_ids",
    "response_ids",
    "response_mask",
    "rollout_log_probs",
    "old_log_probs",
    "train_log_probs",
    "ref_log_probs",
    "advantages",
)
_NO_NUMBER = re.compile(r"-?(?:nan|inf)")


def sampled_rows(batch: Batch, count: int, tokens: int | None = MOST_TOKENS) -> list[dict[str, Any]]:
    """The first rows as plain values; the first of these, up to so many tokens (None: all), with what a replay needs."""
    rows = batch.slice(0, min(count, len(batch)))
    numbers = [n for n in ("rewards", *(n for n in rows.names if n.startswith("reward."))) if n in rows]
    kept = [n for n in ("prompt", "response", "finish_reason", "group_id", "policy_version") if n in rows]
    each = [n for n in _PER_TOKEN if n in rows]
    sizes = (rows.lengths("prompt") + rows.lengths("response")).cumsum(0).tolist()
    whole = sum(tokens is None or size <= tokens for size in sizes)  # so many first rows come with their tokens
    columns: dict[str, list[Any]] = {n: [float(v) for v in rows[n].tolist()] for n in numbers}
    columns |= {n: _encoded_rows(rows[n].slice(0, whole)) for n in each}
    out: list[dict[str, Any]] = []
    for i in range(len(rows)):
        row = {n: _item(rows[n][i]) for n in kept}
        out.append(row | {n: values[i] for n, values in columns.items() if i < len(values)})
    return out


def _encoded_rows(column: Ragged) -> list[Encoded | None]:
    values = column.values
    if values.dtype == torch.bool:
        column = Ragged(values.to(torch.int8), column.offsets)
    return [encoded(row) for row in column.to_list()]


def _item(value: Any) -> Any:
    return value.item() if hasattr(value, "item") else value


def encoded(values: Sequence[float]) -> Encoded | None:
    """A row's values as JSON, to six digits; None where nothing was measured. A number that is not finite is null.

    Written by one formatting of the whole row: number by number it would take some milliseconds of every step.
    """
    if not values or isinstance(values[0], int):
        return Encoded(str(list(values)))
    text = f"[{', '.join(['%.6g'] * len(values)) % tuple(values)}]"
    if "n" in text:  # nan, inf
        return None if all(v != v for v in values) else Encoded(_NO_NUMBER.sub("null", text))
    if "." not in text and "e" not in text:
        return Encoded(str(list(values)))  # whole numbers: read back as floats
    return Encoded(text)
