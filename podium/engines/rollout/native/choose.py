"""Which native engine a model gets: the paged one on a GPU, the one with a slot a sequence on a CPU."""

from __future__ import annotations

import logging
from typing import Any

from transformers import PreTrainedModel, PreTrainedTokenizerBase

from podium.core.errors import ModelError
from podium.engines.base import RolloutEngine
from podium.engines.rollout.native.engine import NativeEngine
from podium.engines.rollout.native.paged_engine import PagedEngine
from podium.models.fused import lay_together
from podium.models.lm_head import base_of

_log = logging.getLogger(__name__)


def native_engine(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    *,
    max_concurrent: int = 256,
    prefill_tokens: int | None = None,
    max_cache_tokens: int | None = None,
    page_size: int | None = None,
    steps_per_look: int | None = None,
    graphs: bool | None = None,
    fused: bool | None = None,
) -> RolloutEngine:
    """The engine for this model's device. An option left out has the engine's own default.

    On a CPU keys and values are read where they lie, one slot a sequence: pages would be gathered in every layer of every
    step. `page_size`, `steps_per_look`, `graphs` and `fused` belong to the paged engine; they ask for it on a CPU too.

    Raises:
        ModelError: neither engine can run the model; `rollout.engine=hf` can.
    """
    if model.device.type == "cuda":  # before an engine keeps their addresses
        lay_together(base_of(model))
    options = _given(prefill_tokens=prefill_tokens, max_cache_tokens=max_cache_tokens)
    paged = _given(page_size=page_size, steps_per_look=steps_per_look, graphs=graphs, fused=fused)
    if model.device.type == "cuda" or paged:
        try:
            return PagedEngine(model, tokenizer, max_concurrent=max_concurrent, **options, **paged)
        except ModelError as error:
            if paged:
                raise
            _log.warning("%s runs without pages and graphs, slower (%s)", type(model).__name__, error.what)
    return NativeEngine(model, tokenizer, max_concurrent=max_concurrent, **options)


def _given(**options: Any) -> dict[str, Any]:
    return {name: value for name, value in options.items() if value is not None}
