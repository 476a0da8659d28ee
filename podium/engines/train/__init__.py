"""Train engines, by the name that a pool's `backend` gives."""

from __future__ import annotations

from typing import Any

from podium.core.errors import ConfigError
from podium.core.registry import Registry
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


def sharded(model: Any, **settings: Any) -> Any:
    """A `ShardedEngine` (imported when one is made: it brings torch's distributed modules)."""
    from podium.engines.train.sharded import ShardedEngine

    return ShardedEngine(model, **settings)


# "fsdp" is the same engine; its name says that all workers go to the axis `shard` where the pool does not say otherwise.
for _name in ("sharded", "fsdp", "fsdp2"):
    TRAIN_ENGINES.register(_name)(sharded)

__all__ = ["TRAIN_ENGINES", "SingleDeviceEngine"]
