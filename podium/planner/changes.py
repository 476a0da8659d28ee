"""The smallest change of the settings that makes a run fit: candidates in order of what they cost, tried one after another."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from podium.core.config import apply_overrides, parse
from podium.core.errors import PodiumError
from podium.core.settings import RecipeSettings
from podium.planner.devices import Cluster
from podium.planner.plan import Plan, PoolPlan, plan_run
from podium.planner.roles import Needs, Sizes


def smallest_change(settings: RecipeSettings, needs: Needs, cluster: Cluster, plan: Plan, sizes: Sizes) -> list[str] | None:
    """Overrides (`key=value`) under which the plan fits; None where none of those that are known does.

    First what changes no number of the run (smaller micro-batches, layers computed again, weights cut over devices that are
    there, more devices, one copy of the weights a node to generate from, the optimizer's state in the host's memory), then what
    changes how precisely or what is trained (moments in 8 bits, weights in 16, an adapter, a base in 4 bits).
    """
    values = settings.model_dump(mode="json")
    for change in candidates(settings, cluster, plan, sizes):
        try:
            changed = parse(type(settings), apply_overrides(values, change), "plan")
            if plan_run(changed, needs, cluster, sizes).fits:
                return change
        except PodiumError:  # this cluster or model does not allow it
            continue
    return None


def candidates(settings: RecipeSettings, cluster: Cluster, plan: Plan, sizes: Sizes) -> Iterator[list[str]]:
    """Lists of overrides, smallest change first."""
    if all(pool.fits for pool in plan.pools):  # the disk, or the host's memory
        yield ["checkpoint.keep=1"]
        yield from _less_state(settings, plan)
        return
    micro, again = list(_smaller_microbatches(settings, sizes)), list(_computed_again(settings))
    least = micro[-1:]
    tight = [*least, *(["batch.activation_checkpointing=full"] if again else [])]
    yield from ([m] for m in micro)
    yield from ([c] for c in _fewer_sequences(settings))
    for change in again:
        yield [change]
        yield [*least, change]
    spread = list(_spread(settings, cluster, plan))
    if spread:
        spread += [[*spread[-1], *divided] for divided in _divided_rollout(settings, cluster, plan, spread[-1])]
    for over in spread:
        yield over
        yield [*least, *over]
    yield from ([*tight, *over] for over in spread)
    for fewer in (*_offloaded(settings, plan), *_less_state(settings, plan)):
        yield fewer
        yield [*least, *fewer]
        yield [*tight, *fewer]
        yield from ([*tight, *over, *fewer] for over in spread[-2:])


def _computed_again(settings: RecipeSettings) -> Iterator[str]:
    """More of the backward pass computed again instead of kept, least first."""
    known = ("none", "selective", "full", "offload")
    for kind in known[known.index(settings.batch.activation_checkpointing) + 1 :]:
        yield f"batch.activation_checkpointing={kind}"


def _of_optimizers(settings: RecipeSettings, change: str) -> list[str]:
    return [f"{name}.{change}" for name in ("optimizer", "critic") if hasattr(settings, name)]


def _offloaded(settings: RecipeSettings, plan: Plan) -> Iterator[list[str]]:
    if settings.model.lora is None and not settings.optimizer.offload and any(not pool.device.is_cpu for pool in plan.pools):
        yield _of_optimizers(settings, "offload=true")


def _less_state(settings: RecipeSettings, plan: Plan) -> Iterator[list[str]]:
    """Fewer bits of moments and weights; an adapter; fewer bits of its base."""
    lora = settings.model.lora is not None
    if not lora and settings.optimizer.states != "8bit":
        yield _of_optimizers(settings, "states=8bit")
    lower_bits = ["model.dtype=bfloat16"] if _in_fp32_on_gpu(plan) else []
    if lower_bits:
        yield lower_bits
    if not lora:
        yield [*lower_bits, "model.lora.rank=16"]
        yield [*lower_bits, "model.lora.rank=16", "model.quantization=4bit"]
    elif settings.model.quantization == "none":
        yield ["model.quantization=4bit"]


def _in_fp32_on_gpu(plan: Plan) -> bool:
    return any(role.itemsize == 4 and role.cuda for pool in plan.pools for role in pool.roles)


def _smaller_microbatches(settings: RecipeSettings, sizes: Sizes) -> Iterator[str]:
    """Halved, down to one sequence of full length; `auto` has tried them."""
    if settings.batch.microbatch_tokens == "auto":
        return
    least, tokens = sizes.prompt + sizes.response, settings.batch.planned_microbatch_tokens
    while tokens > least:
        tokens = max(least, tokens // 2)
        yield f"batch.microbatch_tokens={tokens}"


def _fewer_sequences(settings: RecipeSettings) -> Iterator[str]:
    rollout = getattr(settings, "rollout", None)
    most = rollout.max_concurrent if rollout is not None else 0
    while most > 16:
        most //= 2
        yield f"rollout.max_concurrent={most}"


def _spread(settings: RecipeSettings, cluster: Cluster, plan: Plan) -> Iterator[list[str]]:
    """Weights and optimizer cut over the pool's devices; over more devices of its nodes; over more nodes."""
    bad = next(pool for pool in plan.pools if not pool.fits)
    if bad.device.is_cpu:
        return
    for size in [n for n in range(2, bad.devices + 1) if bad.devices % n == 0]:
        yield _sharded(settings, bad, size)
    named = [p for p in settings.resource_pool.values() if isinstance(p, dict) and (p.get("gpus") or p.get("gpus_per_node"))]
    if len(named) > 1 or len(plan.pools) > 1:
        return  # which of the others should give up devices is not for a plan to say
    most = max(machine.devices for machine in cluster.machines)
    alike = sum(machine.devices == most for machine in cluster.machines)
    sizes = [(1, n) for n in _doubling(most)] + [(n, most) for n in _doubling(alike)]
    for nodes, per_node in sizes:
        count = nodes * per_node
        if count > bad.devices:
            where = [f"resource_pool.{bad.name}.gpus_per_node={per_node}", f"resource_pool.{bad.name}.nodes={nodes}"]
            kind = ["executor.kind=ray"] if settings.executor.kind == "local" else []
            clear = [f"resource_pool.{bad.name}.gpus=[]"] if named and named[0].get("gpus") else []
            where = where if nodes > 1 else where[:1]
            yield [*kind, *clear, *where, *_sharded(settings, bad, count)]


def _divided_rollout(settings: RecipeSettings, cluster: Cluster, plan: Plan, over: list[str]) -> Iterator[list[str]]:
    """Generation from one copy of the weights for all devices of a node, instead of one each. `over`: the pool's layout."""
    pool = next((p for p in plan.pools if any(role.role == "actor" for role in p.roles)), None)
    rollout = getattr(settings, "rollout", None)
    if pool is None or pool.fits or rollout is None or rollout.engine != "native":
        return
    whole_nodes = any("gpus_per_node=" in change for change in over)
    tensor = max(machine.devices for machine in cluster.machines) if whole_nodes else pool.devices // pool.nodes
    if settings.model.lora is None and "rollout" not in settings.resource_pool and tensor > 1:
        yield [f"resource_pool.rollout={{shares: {pool.name}, parallel: {{tensor: {tensor}}}}}"]


def _doubling(most: int) -> list[int]:
    out, n = [], 2
    while n < most:
        out.append(n)
        n *= 2
    return [*out, most] if most > 1 else out


def _sharded(settings: RecipeSettings, pool: PoolPlan, size: int) -> list[str]:
    """Every role of the pool that has weights of its own, cut over so many devices."""
    over: list[str] = []
    for role in pool.roles:
        if role.shares:
            continue
        given: Any = settings.resource_pool.get(role.role)
        tensor = role.tensor if not role.single else 1
        shard = max(1, size // tensor)
        if isinstance(given, str):
            over.append(f"resource_pool.{role.role}={{shares: {given}, backend: sharded, parallel: {{shard: {shard}}}}}")
            continue
        over.append(f"resource_pool.{role.role}.parallel.shard={shard}")
        if not role.trains:
            over.append(f"resource_pool.{role.role}.backend=sharded")
    return over
