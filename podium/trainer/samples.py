"""A step's first rows, as they stand in the run's `samples/`."""

from __future__ import annotations

import re
from typing import Any

import torch
from torch import Tensor

from podium.core.batch import Batch
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
    out = []
    for i in range(len(rows)):
        row = {**{n: _item(rows[n][i]) for n in kept}, **{n: float(rows[n][i]) for n in numbers}}
        if tokens is None or sizes[i] <= tokens:
            row |= {name: encoded(rows[name][i]) for name in each}
        out.append(row)
    return out


def _item(value: Any) -> Any:
    return value.item() if hasattr(value, "item") else value


def encoded(column: Tensor) -> Encoded | None:
    """A row's values as JSON, to six digits; None where nothing was measured. A number that is not finite is null.

    Written by one formatting of the whole row: number by number it would take some milliseconds of every step.
    """
    if not column.is_floating_point():
        return Encoded(str((column.to(torch.int8) if column.dtype == torch.bool else column).tolist()))
    values = column.tolist()
    text = f"[{', '.join(['%.6g'] * len(values)) % tuple(values)}]"
    if "n" in text:  # nan, inf
        text = _NO_NUMBER.sub("null", text)
        if values and all(v != v for v in values):
            return None
    elif "." not in text and "e" not in text and values:
        return Encoded(str(values))  # whole numbers: read back as floats
    return Encoded(text)
