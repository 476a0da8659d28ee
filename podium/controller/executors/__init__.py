"""Where workers live: one module per executor."""

from __future__ import annotations

from typing import Any

from podium.controller.resource_pool import ResourcePool
from podium.core.errors import ConfigError
from podium.core.settings import ExecutorSettings


def create_executor(
    settings: ExecutorSettings, pool: ResourcePool | None = None, device: str = "auto", *, deadline: float = 0.0
) -> Any:
    """The executor that the settings name, for a run on `device` (the setting `run.device`).

    Args:
        deadline: the longest that one call of a role may take, and that ranks wait for each other, in seconds (the setting
            `deadlines.call`); 0: a year.

    Raises ResourceError where it cannot be had (no Ray, no torchrun); ConfigError for several workers in one process.
    """
    longest = deadline or 365 * 24 * 3600.0
    if settings.kind == "ray":
        from podium.controller.executors.ray import RayExecutor

        return RayExecutor(pool, workers=settings.workers, address=settings.address, deadline_seconds=longest)
    if settings.kind == "spmd":
        from podium.controller.executors.spmd import SpmdExecutor

        return SpmdExecutor(pool, deadline_seconds=longest, device=None if device == "auto" else device)
    if settings.workers > 1:
        raise ConfigError(
            f"{settings.workers} workers do not go into one process",
            where="executor.workers",
            remedy="executor.kind=ray, or executor.kind=spmd under torchrun",
        )
    from podium.controller.executors.local import LocalExecutor

    return LocalExecutor()
