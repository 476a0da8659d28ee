"""Train engines, by the name that a pool's `backend` gives."""

from __future__ import annotations

import inspect
from typing import Any

from podium.core.errors import ConfigError
from podium.core.ranks import TAKES_THE_REST, WorkerContext, axes_of
from podium.core.registry import Registry
from podium.engines.train.sharded import ShardedEngine
from podium.engines.train.single import SingleDeviceEngine

_PLANNED = ("megatron", "deepspeed")


class TrainEngines(Registry[Any]):
    """Registered train engines. A backend that is known but not built yet is said to be so, by name."""

    def get(self, name: str) -> Any:
        """The engine's class. Raises ConfigError for a backend that is not there."""
        if name in _PLANNED and name not in self:
            raise ConfigError(
                f"the train backend '{name}' is not in this version of Podium",
                remedy="use one that is: " + ", ".join(self),
            )
        return super().get(name)


TRAIN_ENGINES = TrainEngines("train engine")
TRAIN_ENGINES.register("single")(SingleDeviceEngine)
for _name in ("ddp", *TAKES_THE_REST):
    TRAIN_ENGINES.register(_name)(ShardedEngine)


def create_train_engine(backend: str, model: Any, *, context: WorkerContext | None = None, **options: Any) -> Any:
    """The engine of a backend. With one worker every built-in backend is the engine of one device.

    Args:
        context: the worker's place among those of its role; None: it is alone.
        options: of the engine (`optimizer`, `microbatch_tokens`, `total_updates`, `offload_optimizer`).

    Raises ConfigError for a backend that is not there, and for what it does not do.
    """
    engine = TRAIN_ENGINES.get("ddp" if backend == "single" and context and context.world_size > 1 else backend)
    if engine is not ShardedEngine:
        if "context" in inspect.signature(engine).parameters:
            options["context"] = context
        return engine(model, **options)
    if context is None or context.world_size == 1:
        return SingleDeviceEngine(model, **options)
    return ShardedEngine(model, context=context, **options)


__all__ = ["TRAIN_ENGINES", "ShardedEngine", "SingleDeviceEngine", "axes_of", "create_train_engine"]
