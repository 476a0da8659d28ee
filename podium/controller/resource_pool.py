"""Pools of devices, and which role plays on which."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from pydantic import Field, model_validator

from podium.core.config import Settings, parse
from podium.core.errors import ResourceError

ROLES = ("actor", "critic", "reference", "reward", "cost", "rollout")


class PoolSettings(Settings):
    gpus: list[int] = Field(default_factory=list)
    """GPU ids; empty: the run's device."""
    backend: str = "single"
    """The role's engine: `single` (one device), and for roles that only generate, a rollout engine."""

    @model_validator(mode="after")
    def _once(self) -> PoolSettings:
        twice = sorted({g for g in self.gpus if self.gpus.count(g) > 1})
        if twice or any(g < 0 for g in self.gpus):
            raise ValueError(f"GPU ids must be distinct and not negative, got {self.gpus}")
        return self


@dataclass
class ResourcePool:
    """Which devices each role uses, and with which backend.

    `ResourcePool({"actor": {"gpus": [0, 1], "backend": "single"}})`. Raises ConfigError for an unknown key, ResourceError
    for an unknown role.
    """

    roles: Mapping[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        unknown = sorted(set(self.roles) - set(ROLES))
        if unknown:
            raise ResourceError(f"unknown role '{unknown[0]}'", where="resource_pool", remedy="roles: " + ", ".join(ROLES))
        self.pools: dict[str, PoolSettings] = {
            role: p if isinstance(p, PoolSettings) else parse(PoolSettings, p, f"resource_pool.{role}")
            for role, p in self.roles.items()
        }

    def backends(self) -> dict[str, str]:
        """Each role's train engine, where its pool names one."""
        return {role: pool.backend for role, pool in self.pools.items()}

    def check(self, known_backends: Mapping[str, set[str]]) -> None:
        """Raises ResourceError that names the first role whose backend is not there, and those that are.

        Args:
            known_backends: for each role, the backends of this version.
        """
        for role, pool in self.pools.items():
            known = known_backends.get(role, {"single"})
            if pool.backend not in known:
                raise ResourceError(
                    f"backend '{pool.backend}' is not in this version of Podium for the role '{role}'",
                    where=f"resource_pool.{role}.backend",
                    remedy="there is: " + ", ".join(sorted(known)),
                )

    def notes(self, device: str, available_gpus: int) -> list[str]:
        """What a user should know when pools resolve to fewer devices than they name."""
        asked = sorted({g for pool in self.pools.values() for g in pool.gpus})
        if not asked or (available_gpus == 1 and asked == [0]):
            return []
        return [f"the pools name {len(asked)} GPUs; this run has one device, so every role plays on {device}"]
