"""Rollout engines by name. An engine's module is imported when it is made."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from podium.core.errors import ConfigError, ResourceError, did_you_mean
from podium.core.registry import Registry

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

    from podium.engines.base import RolloutEngine

EngineClass = Callable[..., "RolloutEngine"]

ROLLOUT_ENGINES: Registry[Callable[[], EngineClass]] = Registry("rollout engine")
"""Name to a function that imports and returns the engine's class: `(model, tokenizer, *, max_concurrent, ...)`."""


@ROLLOUT_ENGINES.register("native")
def _native() -> EngineClass:
    from podium.engines.rollout.native.choose import native_engine

    return native_engine


@ROLLOUT_ENGINES.register("hf")
def _hf() -> EngineClass:
    from podium.engines.rollout.hf import HFEngine

    return HFEngine


@ROLLOUT_ENGINES.register("own")
def _own() -> EngineClass:
    from podium.engines.rollout.own import OwnEngine

    return OwnEngine


def _planned(name: str) -> Callable[[], EngineClass]:
    def refuse() -> EngineClass:
        raise ResourceError(
            f"the rollout engine '{name}' is not in this version",
            where="rollout.engine",
            remedy="use native (in process, the trainer's own weights) or hf",
        )

    return refuse


for _name in ("vllm", "sglang", "openai", "tensorrt_llm"):
    ROLLOUT_ENGINES.register(_name)(_planned(_name))


def create_rollout_engine(
    name: str, model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, **options: Any
) -> RolloutEngine:
    """The engine called `name` over this model.

    Args:
        options: `max_concurrent` and what the engine alone knows (`rollout.backend_options`).

    Raises:
        ConfigError: unknown name, or an option that the engine does not have.
        ResourceError: the engine is not in this version.
    """
    import inspect

    engine = ROLLOUT_ENGINES.get(name)()
    known = [p.name for p in inspect.signature(engine).parameters.values() if p.kind is p.KEYWORD_ONLY]
    for option in options:
        if option not in known:
            raise ConfigError(
                f"the rollout engine '{name}' has no option '{option}'",
                where="rollout.backend_options",
                remedy=did_you_mean(option, known),
            )
    return engine(model, tokenizer, **options)


__all__ = ["ROLLOUT_ENGINES", "create_rollout_engine"]
