"""Every technique of the training engine on and off: time and memory, the rest as it is (a part of `update.py`).

Where the plain form would not fit into memory otherwise, both are measured in micro-batches of a quarter.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from typing import Any
from unittest.mock import patch

import torch
from models import make_rows

from podium.core.jsonable import jsonable
from podium.engines.train.adamw_8bit import AdamW8bit
from podium.models.attention import IMPLEMENTATION

Switch = Callable[[Any], AbstractContextManager[Any]]
"""Called with the engine: the setting lasts as long as the context."""


def patched(place: str, value: Any) -> Switch:
    return lambda engine: patch(place, value)


@contextmanager
def padded(engine: Any) -> Iterator[None]:
    """Padded rows of like length through the library's own layers and attention."""
    model = engine.model
    model.packs = False
    model.model.set_attn_implementation("sdpa")
    try:
        yield
    finally:
        model.packs = True
        model.model.set_attn_implementation(IMPLEMENTATION)


def recompute(kind: str) -> Switch:
    @contextmanager
    def switch(engine: Any) -> Iterator[None]:
        engine.model.recompute = kind
        yield
        engine.model.recompute = "none"

    return switch


def optimizer(make: Callable[[list[dict[str, Any]]], torch.optim.Optimizer]) -> Switch:
    """Another update rule over the same masters; moments begin anew before and after."""

    @contextmanager
    def switch(engine: Any) -> Iterator[None]:
        before = engine._optimizer._adamw
        before.state.clear()
        engine._optimizer._adamw = make(_groups(engine))
        yield
        engine._optimizer._adamw.state.clear()
        engine._optimizer._adamw = before

    return switch


def _groups(engine: Any) -> list[dict[str, Any]]:
    return [{"params": g["params"], "weight_decay": g["weight_decay"]} for g in engine._optimizer._adamw.param_groups]


@dataclass(frozen=True)
class Technique:
    """A line of the table: what it says, and what is set while it is measured."""

    name: str
    switch: Switch
    quarter: bool = False


WITHOUT_FUSED = patched("podium.models.lm_head.why_not_fused", lambda base: "switched off")

TECHNIQUES = (
    Technique("without cuDNN attention", patched("podium.models.cudnn_attention._installed", lambda: False)),
    Technique("without kept logits", patched("podium.algorithms._tiled_log_probs._free_bytes", lambda device: 0)),
    Technique("without tiled log-probs", patched("podium.algorithms.log_probs._tiled", lambda hidden: False)),
    Technique("without fused layers", WITHOUT_FUSED, quarter=True),
    Technique("padded rows, not fused", padded, quarter=True),
    Technique("recompute selective", recompute("selective")),
    Technique("recompute full", recompute("full")),
    Technique("AdamW foreach", optimizer(lambda groups: torch.optim.AdamW(groups, lr=1e-6, foreach=True))),
    Technique("AdamW 8 bits", optimizer(lambda groups: AdamW8bit(groups, lr=1e-6, betas=(0.9, 0.999), eps=1e-8))),
)


def table(run: Any, engine: Any) -> dict[str, dict[str, float]]:
    """`run`: `update.Run`. Seconds and the most memory of each line, printed as they come."""
    whole, out = engine.microbatch_tokens, {}

    def add(name: str, rows: Any, switch: Switch | None = None, quarter: bool = False) -> None:
        engine.microbatch_tokens = whole // 4 if quarter else whole
        if switch is None:
            out[name] = run.measure(engine, rows, warmup=1, steps=2)
        else:
            with switch(engine):
                out[name] = run.measure(engine, rows, warmup=1, steps=2)
        engine.microbatch_tokens = whole
        print("  ", name, json.dumps(jsonable(out[name])), flush=True)

    rows = run.rows()
    add("all on", rows)
    add("all on, quarter micro-batches", rows, quarter=True)
    for technique in TECHNIQUES:
        add(
            technique.name + (", quarter micro-batches" if technique.quarter else ""), rows, technique.switch, technique.quarter
        )
    half = 16 if run.size == "tiny" else 512
    for shared in (True, False):
        rows = make_rows([2 * half] * 32, half, group=8, shared=shared, vocabulary=run.shape.vocabulary)
        add(f"4 prompts x 8 answers, {'shared' if shared else 'each with its own'}", rows)
    return out
