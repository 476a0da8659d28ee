"""From pools to places: which process plays on which device of the cluster, checked before anything is started."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from podium.controller.resource_pool import PoolGroup, PoolSettings, ResourcePool
from podium.core.errors import ResourceError
from podium.core.ranks import Ranks


@dataclass(frozen=True)
class Node:
    """A machine of the cluster: what of it is free."""

    name: str
    cpus: int
    gpus: tuple[int, ...] = ()
    gpu_type: str | None = None
    gpu_memory_gb: float | None = None

    def __str__(self) -> str:
        kind = f" {self.gpu_type}" if self.gpu_type else ""
        memory = f" of {self.gpu_memory_gb:.0f} GB" if self.gpu_memory_gb else ""
        gpus = f"{len(self.gpus)}{kind} GPUs{memory}" if self.gpus else "no GPU"
        return f"{self.name}: {gpus}, {self.cpus} CPUs"


@dataclass(frozen=True)
class Place:
    """One process: its node and its device."""

    node: str
    gpu: int | None = None


@dataclass(frozen=True)
class Placed:
    """A pool on the cluster: one process a place, in rank order, and how each role divides its work among them."""

    name: str
    roles: tuple[str, ...]
    places: tuple[Place, ...]
    ranks: dict[str, Ranks]

    @property
    def device(self) -> str:
        return "cpu" if self.places[0].gpu is None else "cuda"


def default_pool(nodes: Sequence[Node], workers: int) -> PoolSettings:
    """The pool of a run that names none: so many GPUs where the cluster has any, else so many CPU processes.

    On several nodes it takes as few as give each the same number.
    """
    if not any(node.gpus for node in nodes):
        return PoolSettings(cpus=workers)
    for count in range(1, len(nodes) + 1):
        share = workers // count
        if workers % count == 0 and sum(len(node.gpus) >= share for node in nodes) >= count:
            return PoolSettings(gpus_per_node=share, nodes=count)
    return PoolSettings(gpus_per_node=workers)


def place(
    pool: ResourcePool, roles: Sequence[str], nodes: Sequence[Node], *, workers: int = 1, on_cpus: bool = False
) -> list[Placed]:
    """A place for every process of every pool.

    Args:
        pool: what each role asks for.
        roles: those of the run.
        nodes: the cluster.
        workers: processes of the pool where none is described.
        on_cpus: that pool takes no GPU.

    Raises ResourceError for the first pool that does not fit: what is missing, where, and what would do.
    """
    free = {node.name: node for node in nodes}
    placed = []
    # Named GPUs first: a pool that takes any must not take those.
    default = PoolSettings(cpus=workers) if on_cpus else default_pool(nodes, workers)
    groups = pool.groups(roles, default)
    for group in sorted(groups, key=lambda g: not g.settings.gpus):
        where = f"resource_pool.{group.name}"
        places = _on_cpus(group, free, where) if group.settings.cpus else _on_gpus(group, free, where)
        for spot in places:
            free[spot.node] = _without(free[spot.node], spot)
        ranks = {role: pool.ranks(role, len(places)) for role in group.roles}
        placed.append(Placed(group.name, group.roles, tuple(places), ranks))
    return sorted(placed, key=lambda p: [g.name for g in groups].index(p.name))


def _without(node: Node, spot: Place) -> Node:
    if spot.gpu is None:
        return Node(node.name, node.cpus - 1, node.gpus, node.gpu_type, node.gpu_memory_gb)
    gpus = tuple(gpu for gpu in node.gpus if gpu != spot.gpu)
    return Node(node.name, node.cpus - 1, gpus, node.gpu_type, node.gpu_memory_gb)


def _on_cpus(group: PoolGroup, free: dict[str, Node], where: str) -> list[Place]:
    wanted, there = group.settings.cpus, sum(max(0, node.cpus) for node in free.values())
    if wanted > there:
        raise ResourceError(
            f"{wanted} processes are asked for, and {there} CPUs are free: {_shown(free)}",
            where=f"{where}.cpus",
            remedy=f"cpus: {there} would do" if there else "let its roles share another pool",
        )
    places: list[Place] = []
    for node in free.values():
        places += [Place(node.name)] * min(max(0, node.cpus), wanted - len(places))
    return places


def _on_gpus(group: PoolGroup, free: dict[str, Node], where: str) -> list[Place]:
    settings = group.settings
    fitting = [node for node in free.values() if _is_of_kind(node, settings)]
    if not fitting:
        _refuse_kind(settings, free, where)
    wanted = len(settings.gpus) or settings.gpus_per_node
    if settings.gpus:
        able = [node for node in fitting if set(settings.gpus) <= set(node.gpus)]
    else:
        able = sorted((n for n in fitting if len(n.gpus) >= wanted), key=lambda n: (len(n.gpus), n.name))
    if len(able) < settings.nodes:
        _refuse_number(settings, fitting, free, wanted, able, where)
    return [Place(node.name, gpu) for node in able[: settings.nodes] for gpu in settings.gpus or node.gpus[:wanted]]


def _is_of_kind(node: Node, settings: PoolSettings) -> bool:
    kind = settings.gpu_type is None or settings.gpu_type.lower() in (node.gpu_type or "").lower()
    return bool(node.gpus) and kind and (settings.gpu_memory_gb or 0) <= (node.gpu_memory_gb or float("inf"))


def _refuse_kind(settings: PoolSettings, free: dict[str, Node], where: str) -> None:
    have = [node for node in free.values() if node.gpus]
    if not have:
        raise ResourceError(
            f"GPUs are asked for, and none is free: {_shown(free)}", where=where, remedy="use cpus: N, or share another pool"
        )
    if settings.gpu_type and not any(settings.gpu_type.lower() in (n.gpu_type or "").lower() for n in have):
        types = sorted({node.gpu_type for node in have if node.gpu_type})
        remedy = "there is: " + ", ".join(types) if types else "the cluster does not say which types it has: leave gpu_type out"
        raise ResourceError(
            f"no node has a free GPU of the type '{settings.gpu_type}'", where=f"{where}.gpu_type", remedy=remedy
        )
    most = max((node.gpu_memory_gb or 0 for node in have), default=0)
    raise ResourceError(
        f"no node has a free GPU{f' of type {settings.gpu_type}' if settings.gpu_type else ''} "
        f"with {settings.gpu_memory_gb:g} GB: {_shown(free)}",
        where=f"{where}.gpu_memory_gb",
        remedy=f"at most {most:.0f}",
    )


def _refuse_number(
    settings: PoolSettings, fitting: list[Node], free: dict[str, Node], wanted: int, able: list[Node], where: str
) -> None:
    if settings.gpus:
        best = max(fitting, key=lambda node: len(set(settings.gpus) & set(node.gpus)))
        missing = sorted(set(settings.gpus) - set(best.gpus))
        what = f"GPUs {missing} are not there (or taken) on {best.name}, which has {list(best.gpus)} free"
        if able:
            what = f"the GPUs {settings.gpus} are on {len(able)} nodes, and {settings.nodes} are asked for"
        raise ResourceError(what, where=f"{where}.gpus", remedy=f"{_shown(free)}; take ids from these")
    most = max(len(node.gpus) for node in fitting)
    enough = sum(len(node.gpus) >= wanted for node in fitting)
    spread = [
        f"nodes: {count}, gpus_per_node: {wanted * settings.nodes // count}"
        for count in range(1, len(fitting) + 1)
        if wanted * settings.nodes % count == 0
        and sum(len(node.gpus) * count >= wanted * settings.nodes for node in fitting) >= count
    ]
    fits = spread[0] if spread else f"gpus_per_node: {most} with nodes: {sum(len(n.gpus) >= most for n in fitting)}"
    raise ResourceError(
        f"{settings.nodes} x {wanted} GPUs are asked for, and {enough} nodes have {wanted} free: {_shown(free)}",
        where=f"{where}.gpus_per_node",
        remedy=f"{fits} would do",
    )


def _shown(free: dict[str, Node]) -> str:
    return "; ".join(str(node) for node in free.values()) or "the cluster has no node"
