"""The plan of a run: each pool's memory by role and phase, the step's time, host memory, disk, and what does not fit."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from podium.controller.placement import Place, Placed, place
from podium.controller.resource_pool import ResourcePool
from podium.core.settings import RecipeSettings
from podium.planner.devices import Cluster, Device, Machine, cpu_device
from podium.planner.host import host_and_disk
from podium.planner.memory import (
    RoleSpec,
    cache_bytes,
    decode_bytes,
    generation_copy,
    hand_over_bytes,
    rows_that_fit,
)
from podium.planner.roles import Needs, Sizes, reads_parts, role_spec
from podium.planner.throughput import (
    Work,
    forward_seconds,
    hand_over_seconds,
    rollout_seconds,
    update_seconds,
)


@dataclass(frozen=True)
class Phase:
    """A phase of a step on one device: what stays, and what it adds. `note` says what it depends on."""

    name: str
    stays: float
    adds: float
    note: str = ""

    @property
    def total(self) -> float:
        return self.stays + self.adds


@dataclass(frozen=True)
class Seconds:
    """A part of the step: by the roofline, and what a run is likely to take."""

    name: str
    pool: str
    floor: float
    likely: float


@dataclass
class PoolPlan:
    """One pool: every device of it is alike."""

    name: str
    roles: list[RoleSpec]
    device: Device
    devices: int
    nodes: int
    phases: list[Phase] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)

    @property
    def peak(self) -> Phase:
        return max(self.phases, key=lambda phase: phase.total)

    @property
    def fits(self) -> bool:
        return self.peak.total <= self.device.usable


@dataclass
class Plan:
    """What a run needs. `problems` is empty where it fits; `change` are settings that would make it fit."""

    cluster: Cluster
    pools: list[PoolPlan]
    seconds: list[Seconds]
    tokens_per_step: float
    host_bytes: float
    host_memory: float
    checkpoint_bytes: float
    export_bytes: float
    disk_bytes: float
    disk_free: float | None
    problems: list[str] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    change: list[str] | None = None

    @property
    def fits(self) -> bool:
        return not self.problems

    @property
    def step_seconds(self) -> float:
        return sum(part.likely for part in self.seconds)


def plan_run(settings: RecipeSettings, needs: Needs, cluster: Cluster, sizes: Sizes | None = None) -> Plan:
    """The plan of a run on a cluster. Nothing is loaded.

    Args:
        settings: the run's.
        needs: the roles that its graph calls (`planner.roles.needs_of`).
        cluster: where it is to run.
        sizes: lengths of prompts and responses, where they are known better than the settings say.

    Raises:
        ResourceError: the pools do not fit the cluster. ConfigError: heads do not divide by the tensor ranks.
        ModelError: a model's config cannot be read.
    """
    sizes = sizes or Sizes.of(settings)
    if settings.batch.microbatch_tokens == "auto" and cluster.devices and settings.run.device != "cpu":
        return _with_measured_budget(settings, needs, cluster, sizes)
    placed = _placed(settings, needs, cluster)
    made = [_pool(settings, needs, cluster, each, sizes) for each in placed]
    pools = [pool for pool, _ in made]
    seconds = [part for _, parts in made for part in parts]
    rows = needs.sequences(settings)
    plan = Plan(
        cluster=cluster,
        pools=pools,
        seconds=_in_order(seconds, needs),
        tokens_per_step=rows * (sizes.mean_prompt + sizes.mean_response),
        host_bytes=0.0,
        host_memory=min(machine.memory for machine in cluster.machines),
        checkpoint_bytes=0.0,
        export_bytes=0.0,
        disk_bytes=0.0,
        disk_free=cluster.machines[0].disk,
    )
    host_and_disk(plan, settings, needs, placed)
    _judge(plan)
    if settings.executor.kind == "local" and sum(pool.devices for pool in pools) > 1:
        plan.notes.append(
            "executor.kind=local plays on one device; the pools above need executor.kind=ray, or spmd under torchrun"
        )
    return plan


def _with_measured_budget(settings: RecipeSettings, needs: Needs, cluster: Cluster, sizes: Sizes) -> Plan:
    """The plan for the most tokens in a pass that fit: `auto` finds about as many by running one (`engines.train.budget`)."""
    from podium.engines.train.budget import LEAST, MOST

    tokens = MOST
    while True:
        batch = settings.batch.model_copy(update={"microbatch_tokens": tokens})
        plan = plan_run(settings.model_copy(update={"batch": batch}), needs, cluster, sizes)
        if plan.fits or tokens <= LEAST:
            plan.notes.append(f"batch.microbatch_tokens=auto is measured in the run; planned here with {tokens:,}")
            return plan
        tokens //= 2


# ------------------------------------------------------------------ pools


def _placed(settings: RecipeSettings, needs: Needs, cluster: Cluster) -> list[Placed]:
    """Where the roles' workers go."""
    pool = ResourcePool(settings.resource_pool)
    on_cpus = settings.run.device == "cpu" or not cluster.devices
    asked = any(not p.asks_nothing for p in pool.pools.values())
    if settings.executor.kind == "local" and settings.executor.workers == 1 and not asked:
        first = next((m for m in cluster.machines if m.devices and not on_cpus), cluster.machines[0])
        gpu = None if on_cpus or not first.devices else 0
        roles = tuple(needs.roles)
        return [Placed(roles[0], roles, (Place(first.name, gpu),), {role: pool.ranks(role, 1) for role in roles})]
    return place(pool, needs.roles, cluster.nodes, workers=settings.executor.workers, on_cpus=on_cpus)


def _device_of(placed: Placed, cluster: Cluster, settings: RecipeSettings) -> Device:
    """The smallest of the pool's devices. CPU processes of a node share its memory."""
    by_node: dict[str, int] = {}
    for spot in placed.places:
        by_node[spot.node] = by_node.get(spot.node, 0) + 1
    machines: list[Machine] = [cluster.machine(name) for name in by_node]
    if placed.device == "cpu":
        memory = min(machine.memory / by_node[machine.name] for machine in machines)
        return cpu_device(memory, settings.run.threads or max(1, machines[0].cpus // max(by_node.values())))
    devices = [machine.device for machine in machines if machine.device is not None]
    return min(devices, key=lambda device: device.memory)


def _pool(
    settings: RecipeSettings, needs: Needs, cluster: Cluster, placed: Placed, sizes: Sizes
) -> tuple[PoolPlan, list[Seconds]]:
    device = _device_of(placed, cluster, settings)
    workers = len(placed.places)
    roles = [role_spec(settings, needs, role, placed.ranks[role], device, workers, placed.roles) for role in placed.roles]
    nodes = len({spot.node for spot in placed.places})
    pool = PoolPlan(placed.name, roles, device, workers, nodes)
    parts: list[Seconds] = []
    stays = sum(role.stays for role in roles)
    tensor = ResourcePool(settings.resource_pool).rollout_tensor
    actor = next((role for role in roles if role.role == "actor"), None)
    copy = generation_copy(actor, tensor) if actor is not None and needs.generates else 0.0
    per_node = -(-workers // nodes)
    for role in roles:
        pool.phases += _phases_of(pool, role, settings, needs, sizes, stays + copy)
        parts += _seconds_of(pool, role, settings, needs, sizes, per_node)
    if actor is not None and needs.generates:
        _rollout(pool, parts, actor, settings, needs, sizes, stays + copy, copy, tensor, per_node)
    pool.phases += _loading(pool, copy, [role.role for role in roles if not reads_parts(settings, needs, role)])
    if not pool.phases:
        pool.phases.append(Phase("idle", stays, 0.0))
    order = [*(f"load {role.role}" for role in roles), "rollout", *needs.order, "hand-over"]
    pool.phases.sort(key=lambda phase: order.index(name) if (name := phase.name.split(" + ")[0]) in order else len(order))
    return pool, parts


def _loading(pool: PoolPlan, copy: float, whole_roles: list[str]) -> list[Phase]:
    """What is not read in parts is whole on each device before it is cut over ranks (see `ShardedEngine`); FSDP's in fp32."""
    phases = []
    for role in pool.roles:
        if role.shard * role.tensor > 1 and role.role in whole_roles:
            whole = (4 if role.full and role.shard > 1 else role.itemsize) * role.shape.total
            others = sum(other.weights for other in pool.roles if other is not role)
            made = copy if role.role == "actor" else 0.0
            phases.append(Phase(f"load {role.role}", others + made, float(whole), "whole, before it is cut over the ranks"))
    return phases


def _rollout(
    pool: PoolPlan,
    parts: list[Seconds],
    actor: RoleSpec,
    settings: Any,
    needs: Needs,
    sizes: Sizes,
    stays: float,
    copy: float,
    tensor: int,
    per_node: int,
) -> None:
    replicas = max(1, (pool.devices if copy else actor.ranks.data_size) // (tensor if copy else 1))
    rows = needs.sequences(settings) / replicas
    most = max(1, min(settings.rollout.max_concurrent, int(-(-rows // 1))))
    beside = decode_bytes(actor, most, sizes.prompt)
    longest = sizes.prompt + sizes.response
    fit = rows_that_fit(actor, pool.device.usable - stays - beside, longest, most, tensor)
    cache = cache_bytes(actor, max(1, min(most, fit)), longest, tensor)
    note = f"{min(most, fit)} of {most} sequences of {longest:,} tokens at once"
    if 0 < fit < most:
        pool.notes.append(f"rollout: the cache has room for {fit} sequences of full length, of {most}; the others wait")
    pool.phases.insert(0, Phase("rollout", stays, beside + cache, note))
    at_once = min(most, fit) or most  # where none fits, the time is that of the run that would
    work = Work(rows, sizes.mean_prompt, sizes.mean_response, settings.batch.group_size, at_once)
    floor = rollout_seconds(actor, pool.device, work, tensor)
    parts.append(Seconds("rollout", pool.name, floor, floor / pool.device.decode_share))
    if copy:
        pool.phases.append(
            Phase("hand-over", stays, hand_over_bytes(actor, tensor), "weights to generation, in 256 MiB messages")
        )
        floor = hand_over_seconds(copy, pool.device, same_node=pool.devices <= per_node)
        parts.append(Seconds("hand-over", pool.name, floor, floor / 0.8))


def _microbatch(role: RoleSpec, settings: RecipeSettings, needs: Needs, sizes: Sizes) -> tuple[int, int, int]:
    """Tokens of a micro-batch, response tokens among them, micro-batches of an update: on one device."""
    group = settings.batch.group_size if needs.generates else 1
    rows = (settings.batch.minibatch_sequences or needs.sequences(settings)) / role.ranks.data_size
    each = sizes.response + sizes.prompt / group
    whole = max(1.0, rows) * each
    tokens = max(min(settings.batch.planned_microbatch_tokens, whole), sizes.prompt + sizes.response)
    return int(tokens), int(tokens * sizes.response / each), max(1, int(-(-whole // tokens)))


def _phases_of(
    pool: PoolPlan, role: RoleSpec, settings: RecipeSettings, needs: Needs, sizes: Sizes, stays: float
) -> list[Phase]:
    tokens, responses, passes = _microbatch(role, settings, needs, sizes)
    phases = []
    if needs.forward.get(role.role):
        name = " + ".join(needs.forward[role.role])
        phases.append(Phase(name, stays, role.forward_bytes(tokens, responses), f"{tokens:,} tokens in a pass"))
    if role.trains:
        room = pool.device.usable - stays
        needed = role.update_bytes(tokens, responses, passes)
        taken = role.update_bytes(tokens, responses, passes, room=room)
        note = f"{tokens:,} tokens in each of {passes} passes"
        if taken > needed * 1.01 and stays + needed <= pool.device.usable:
            note += f"; takes up to {(taken - needed) / 1e9:.1f} GB more where it is free"
        phases.append(Phase(f"update {role.role}", stays, needed, note))
    return phases


def _seconds_of(
    pool: PoolPlan, role: RoleSpec, settings: RecipeSettings, needs: Needs, sizes: Sizes, per_node: int
) -> list[Seconds]:
    group = settings.batch.group_size if needs.generates else 1
    rows = needs.sequences(settings) / role.ranks.data_size
    updates = settings.batch.updates_per_step
    work = Work(rows, sizes.mean_prompt, sizes.mean_response, group, passes=settings.batch.epochs, updates=updates)
    share = pool.device.train_share
    parts = []
    for name in needs.forward.get(role.role, ()):
        floor = forward_seconds(role, pool.device, work)
        parts.append(Seconds(name, pool.name, floor, floor / share))
    if role.trains:
        floor = update_seconds(role, pool.device, work, same_node=pool.devices <= per_node)
        parts.append(Seconds(f"update {role.role}", pool.name, floor, floor / share))
    return parts


def _in_order(parts: list[Seconds], needs: Needs) -> list[Seconds]:
    order = ["rollout", *needs.order, "hand-over"]
    return sorted(parts, key=lambda part: order.index(part.name) if part.name in order else len(order))


# ------------------------------------------------------------------ what does not fit


def _judge(plan: Plan) -> None:
    for pool in plan.pools:
        peak, device = pool.peak, pool.device
        if not pool.fits:
            plan.problems.append(
                f"pool {pool.name}: '{peak.name}' needs {_gb(peak.total)} of each device, {device.name} has "
                f"{_gb(device.usable)} for tensors ({_gb(peak.total - device.usable)} too much)"
            )
    if plan.host_bytes > plan.host_memory and not all(pool.device.is_cpu for pool in plan.pools):
        plan.problems.append(f"host memory: a node needs {_gb(plan.host_bytes)}, it has {_gb(plan.host_memory)}")
    if plan.disk_free is not None and plan.disk_bytes > plan.disk_free:
        plan.problems.append(
            f"disk: checkpoints and the model take {_gb(plan.disk_bytes)}, {_gb(plan.disk_free)} are free (checkpoint.keep)"
        )


def _gb(size: float) -> str:
    return f"{size / 1e9:.1f} GB" if size >= 1e8 else f"{size / 1e6:.1f} MB"
