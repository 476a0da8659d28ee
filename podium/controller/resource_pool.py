"""Pools of devices, and which role plays on which."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

from pydantic import Field, model_validator

from podium.core.config import Settings, parse
from podium.core.errors import ConfigError, ResourceError, did_you_mean
from podium.core.ranks import Ranks, axes_of

ROLES = ("actor", "critic", "reference", "reward", "cost", "rollout", "teacher", "cost_critic")
DEVICES = ("gpus", "gpus_per_node", "nodes", "gpu_type", "gpu_memory_gb", "cpus")


class PoolSettings(Settings):
    """Where a role plays: its devices, or the role whose pool it shares; its engine; how its workers divide the work."""

    gpus: list[int] = Field(default_factory=list)
    """GPU ids of one node (of each, where `nodes` is above 1). Roles with the same list share its processes."""
    gpus_per_node: int = Field(default=0, ge=0)
    """So many GPUs of each node, whichever are free."""
    nodes: int = Field(default=1, ge=1)
    """Nodes that the pool spans."""
    gpu_type: str | None = None
    """Only GPUs of this type: `H100`, `A100`, `T4`... (as the cluster calls them; a part of the name will do)."""
    gpu_memory_gb: float | None = Field(default=None, gt=0)
    """Only GPUs with at least so much memory, in GB (1e9 bytes)."""
    cpus: int = Field(default=0, ge=0)
    """A pool without GPUs, of so many processes."""
    shares: str | None = None
    """Plays in the processes of this role, instead of its own. `{"reference": "actor"}` is short for it."""
    backend: str = "auto"
    """The role's train engine (`single`, `sharded`, your own), or rollout engine; `auto`: by the number of its workers."""
    parallel: dict[str, int] = Field(default_factory=dict)
    """Sizes of the axes `shard`, `tensor`, `sequence`; `data` takes what is left of the pool's processes."""

    @model_validator(mode="after")
    def _possible(self) -> PoolSettings:
        twice = sorted({g for g in self.gpus if self.gpus.count(g) > 1})
        if twice or any(g < 0 for g in self.gpus):
            raise ValueError(f"GPU ids must be distinct and not negative, got {self.gpus}")
        ways = [name for name in ("gpus", "gpus_per_node", "cpus", "shares") if getattr(self, name)]
        if len(ways) > 1:
            raise ValueError(f"{ways[0]} and {ways[1]} are both given; give one")
        return self

    @property
    def devices(self) -> dict[str, Any]:
        """What the pool asks of the cluster."""
        return {name: getattr(self, name) for name in DEVICES}

    @property
    def asks_nothing(self) -> bool:
        """No device is named."""
        return not (self.gpus or self.gpus_per_node or self.cpus)


@dataclass(frozen=True)
class PoolGroup:
    """Roles that play in the same processes, and the devices these have. It is called by its first role."""

    name: str
    roles: tuple[str, ...]
    settings: PoolSettings


@dataclass
class ResourcePool:
    """Which devices each role uses, and with which backend.

    `ResourcePool({"actor": {"gpus": [0, 1]}, "reference": "actor", "reward": {"gpus_per_node": 1, "gpu_type": "T4"}})`.
    Roles that are not named play in the first pool. Raises ConfigError for an unknown key, ResourceError for an unknown role
    or a GPU in two pools.
    """

    roles: Mapping[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        unknown = [role for role in self.roles if role not in ROLES and role.rpartition("_")[0] not in ("reward", "cost")]
        if unknown:
            known = f"{did_you_mean(unknown[0], ROLES)} Roles: {', '.join(ROLES)}"
            raise ResourceError(f"unknown role '{unknown[0]}'", where="resource_pool", remedy=known)
        self.pools: dict[str, PoolSettings] = {role: _pool(role, p) for role, p in self.roles.items()}
        self._check_shared()
        self._check_rollout_home()

    @classmethod
    def of(cls, given: Any) -> ResourcePool:
        """From a mapping, None, or one that is there."""
        return given if isinstance(given, ResourcePool) else cls(given or {})

    def backends(self) -> dict[str, str]:
        """Each role's train engine, where its pool names one."""
        return {role: pool.backend for role, pool in self.pools.items()}

    def ranks(self, role: str, workers: int) -> Ranks:
        """How the role divides its work among the workers of its pool. Raises ResourceError where that does not come out."""
        pool = self.pools.get(role, PoolSettings())
        return axes_of(pool.backend, pool.parallel, workers, f"resource_pool.{role}.parallel")

    @property
    def rollout_tensor(self) -> int:
        """How many of the actor's workers have one copy of the model between them while they generate."""
        pool = self.pools.get("rollout")
        return pool.parallel.get("tensor", 1) if pool is not None else 1

    def check_rollout(self, workers: int) -> None:
        """Raises ResourceError where the actor's workers cannot generate as the pool of `rollout` says."""
        pool = self.pools.get("rollout")
        if pool is None:
            return
        Ranks.fit(pool.parallel, workers, "resource_pool.rollout.parallel")
        odd = [axis for axis in ("shard", "sequence") if pool.parallel.get(axis, 1) > 1]
        if odd:
            raise ResourceError(
                f"generation is not divided along '{odd[0]}'",
                where="resource_pool.rollout.parallel",
                remedy="use tensor; data takes what is left",
            )

    def groups(self, roles: Iterable[str], default: PoolSettings) -> list[PoolGroup]:
        """The pools that these roles need, in their order.

        Args:
            default: for a pool that names no devices.
        """
        homes: dict[str, list[str]] = {}
        for role in roles:
            homes.setdefault(self._home(role), []).append(role)
        # A role that has no pool of its own joins the first one, whichever role comes first.
        strays = homes.pop("", [])
        if strays:
            first = next(iter(homes), min(strays, key=lambda role: ROLES.index(role) if role in ROLES else len(ROLES)))
            homes[first] = [*homes.get(first, []), *strays]
        order = list(roles)
        return [
            PoolGroup(home, tuple(sorted(members, key=order.index)), self._settings(home, default))
            for home, members in homes.items()
        ]

    def _settings(self, home: str, default: PoolSettings) -> PoolSettings:
        pool = self.pools.get(home)
        return default if pool is None or pool.asks_nothing else pool

    def _home(self, role: str) -> str:
        """The role whose pool this one plays in; "" for one that none is named for."""
        pool = self.pools.get(role)
        if pool is None:
            return ""
        if pool.shares:
            return self._home(pool.shares)
        if pool.asks_nothing:
            return ""
        same = [r for r, p in self.pools.items() if p.gpus and not p.shares and p.devices == pool.devices]
        return same[0] if same else role

    def _check_shared(self) -> None:
        for role, pool in self.pools.items():
            where, seen, target = f"resource_pool.{role}", [role], pool.shares
            while target:
                if target not in self.pools:
                    raise ResourceError(f"shares '{target}', which has no pool", where=where, remedy=_names(self.pools, role))
                if target in seen:
                    raise ResourceError(f"shares in a circle: {' -> '.join([*seen, target])}", where=where, remedy="break it")
                seen.append(target)
                target = self.pools[target].shares
        taken: dict[int, str] = {}
        for role, pool in self.pools.items():
            for gpu in pool.gpus:
                other = taken.setdefault(gpu, role)
                if self.pools[other].devices != pool.devices:
                    raise ResourceError(
                        f"GPU {gpu} is in the pools of '{other}' and '{role}', whose lists differ",
                        where=f"resource_pool.{role}.gpus",
                        remedy="give both the same list (they then share its processes), or lists without a common GPU",
                    )

    def _check_rollout_home(self) -> None:
        """The actor's workers generate: a pool of the rollout's own would stay empty."""
        home, actor = (self._home(role) for role in ("rollout", "actor"))
        if "rollout" in self.pools and home and home != actor:
            raise ResourceError(
                f"rollout has devices of its own (in the pool of '{home}'), and it is the actor's workers that generate",
                where="resource_pool.rollout",
                remedy="rollout: {shares: actor, parallel: {tensor: 2}}, where actor has a pool; else leave its devices out",
            )

    def check(self, known_backends: Mapping[str, set[str]]) -> None:
        """Raises ResourceError that names the first role whose backend is not there, and those that are.

        Args:
            known_backends: for each role, the backends of this version.
        """
        for role, pool in self.pools.items():
            known = known_backends.get(role, {"single"})
            if pool.backend not in known | {"auto"}:
                raise ResourceError(
                    f"backend '{pool.backend}' is not in this version of Podium for the role '{role}'",
                    where=f"resource_pool.{role}.backend",
                    remedy="there is: " + ", ".join(sorted(known)),
                )

    def notes(self, device: str, available_gpus: int) -> list[str]:
        """What a user should know when pools resolve to fewer devices than they name."""
        more = sum(pool.cpus or pool.gpus_per_node * pool.nodes for pool in self.pools.values())
        if more > 1:
            return [f"the pools ask for {more} processes; this run has one (executor.kind=ray has several)"]
        asked = sorted({g for pool in self.pools.values() for g in pool.gpus})
        if not asked or (available_gpus == 1 and asked == [0]):
            return []
        return [f"the pools name {len(asked)} GPUs; this run has one device, so every role plays on {device}"]


def _pool(role: str, given: Any) -> PoolSettings:
    if isinstance(given, PoolSettings):
        return given
    if isinstance(given, str):
        given = {"shares": given}
    if not isinstance(given, Mapping):
        raise ConfigError(f"expected settings of a pool, got {given!r}", where=f"resource_pool.{role}", remedy="{gpus: [0]}")
    return parse(PoolSettings, given, f"resource_pool.{role}")


def _names(pools: Mapping[str, Any], but: str) -> str:
    others = [name for name in pools if name != but]
    return "pools here: " + ", ".join(others) if others else "give that role a pool"
