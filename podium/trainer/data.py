"""The rows of a run: loaded, tokenised, some held out."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from podium.core.batch import Batch
from podium.core.errors import DataError
from podium.core.settings import RecipeSettings
from podium.data.prepare import DataReport, prepare
from podium.data.sources import load_rows
from podium.data.split import first, hold_out
from podium.trainer.recipe import DataKind

UNIT: dict[DataKind, int] = {"prompts": 1, "supervised": 1, "preferences": 2, "unpaired": 1}
"""Adjacent batch rows that stay together, by kind."""


@dataclass
class Data:
    """Training rows, held-out rows (or None), and what to tell the user about them."""

    train: Batch
    held_out: Batch | None
    lines: list[str] = field(default_factory=list)


def load_data(settings: RecipeSettings, kind: DataKind, tokenizer: Any, rows: Any = None, eval_rows: Any = None) -> Data:
    """Loads `data.path` (or takes `rows`) and the held-out rows.

    Args:
        rows, eval_rows: lists of dicts instead of paths.

    Raises DataError for rows that cannot be used.
    """
    data = settings.data
    train, report = _prepare(settings, kind, tokenizer, rows if rows is not None else data.path)
    lines = [f"data: {line}" for line in report.lines()]
    if eval_rows is not None or data.eval_path:
        source = eval_rows if eval_rows is not None else data.eval_path
        held_out, report = _prepare(settings, kind, tokenizer, source)
        if data.eval_samples:
            held_out = first(held_out, data.eval_samples)
        lines += [f"held out: {line}" for line in report.lines()]
    elif data.eval_samples:
        train, held_out = hold_out(train, data.eval_samples, settings.run.seed)
        lines.append(f"held out: {data.eval_samples} of the rows")
    else:
        held_out = None
    if not len(train):
        raise DataError("no row is left to train on", where=data.path, remedy="raise data.max_prompt_tokens or add rows")
    return Data(train, held_out, lines)


def _prepare(settings: RecipeSettings, kind: DataKind, tokenizer: Any, source: Any) -> tuple[Batch, DataReport]:
    rows = load_rows(source, settings.data.options)
    return prepare(kind, rows, tokenizer, settings.data, getattr(settings, "heads", None))
