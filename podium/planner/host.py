"""What a run needs beside its devices: the host's memory, and disk for checkpoints and the model."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

from podium.controller.placement import Placed
from podium.core.ranks import Ranks
from podium.core.settings import RecipeSettings
from podium.planner.memory import RoleSpec
from podium.planner.roles import Needs, reads_parts

if TYPE_CHECKING:
    from podium.planner.plan import Plan

PROCESS = 1.5e9
"""Host memory of a worker without any model: the interpreter, torch, transformers, a GPU's context."""


def state_bytes(role: RoleSpec) -> float:
    """A trained role's state in a checkpoint: weights (those that train), masters, moments; of all ranks together."""
    if role.lora:
        return (4 + role.moment_bytes) * role.adapter
    whole = replace(role, ranks=Ranks(), single=True, offload=False)
    return whole.weights + whole.masters + whole.moments + (8.0 - 4.0) * role.shape.scores * role.shape.hidden


def _read_at_once(role: RoleSpec, settings: RecipeSettings, needs: Needs) -> float:
    """Weights in a worker's host memory while they are loaded: the whole model, or the worker's own part."""
    whole = role.itemsize * role.shape.total
    return whole / (role.shard * role.tensor) if reads_parts(settings, needs, role) else whole


def host_and_disk(plan: Plan, settings: RecipeSettings, needs: Needs, placed: Sequence[Placed]) -> None:
    """Fills in what the plan's busiest node needs of its memory, and what the run folder needs of the disk."""
    trained = {role.role: role for pool in plan.pools for role in pool.roles if role.trains}
    plan.checkpoint_bytes = sum(state_bytes(role) for role in trained.values())
    main = trained.get("actor") or next(iter(trained.values()), None)
    exported = main.itemsize * main.shape.total + 4 * main.adapter if main is not None and settings.checkpoint.export else 0.0
    plan.export_bytes = exported
    # While one is written the kept ones are still there.
    plan.disk_bytes = plan.checkpoint_bytes * (settings.checkpoint.keep + 1) + exported
    busiest: dict[str, float] = {}
    for pool, spots in zip(plan.pools, placed, strict=True):
        load = max((_read_at_once(role, settings, needs) for role in pool.roles), default=0.0)
        tokens = settings.batch.planned_microbatch_tokens
        offloaded = sum(role.on_host for role in pool.roles)
        offloaded += max((role.host_per_token * tokens for role in pool.roles), default=0.0)
        for spot in spots.places:
            # On a CPU the models themselves are in this memory.
            models = pool.peak.total if pool.device.is_cpu else load
            busiest[spot.node] = busiest.get(spot.node, 0.0) + PROCESS + models + offloaded
    nodes = max(1, len(busiest))
    copies = 0.0 if all(pool.device.is_cpu for pool in plan.pools) else plan.checkpoint_bytes / nodes
    plan.host_bytes = max(busiest.values(), default=0.0) + copies
