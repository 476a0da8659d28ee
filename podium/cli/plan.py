"""`podium plan`"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer

from podium.cli.console import print_json, print_table, sort_arguments
from podium.core.errors import ConfigError


def command(
    arguments: Annotated[
        list[str], typer.Argument(metavar="RECIPE.yaml | RUN | KEY=VALUE", help="A recipe or a run, and other settings.")
    ],
    cluster: Annotated[
        Path | None, typer.Option(help="A cluster described in YAML (docs/plan.md); by default this machine.")
    ] = None,
    prompt_tokens: Annotated[
        float | None, typer.Option(help="Mean prompt length, for the times; by default the longest.")
    ] = None,
    response_tokens: Annotated[
        float | None, typer.Option(help="Mean response length, for the times; by default rollout.max_new_tokens.")
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="One JSON object on stdout.")] = False,
) -> None:
    """Show whether a run fits, and how long a step takes. Loads no weights and needs no GPU.

    Memory of each pool's devices by role and by phase of a step, time by a roofline, host memory, disk for checkpoints. Where
    something does not fit: what, and the smallest change of the settings that makes it fit. Ends with status 1 then.

    [bold]Examples[/bold]

      podium plan recipes/grpo.yaml model.path=./my-model

      podium plan recipes/ppo.yaml --cluster cluster.yaml --response-tokens 800

      podium plan runs/grpo-20261130-120000 batch.microbatch_tokens=4096
    """
    given = sort_arguments(arguments)
    if given.settings_file is None:
        raise ConfigError("no recipe and no run", where="command line", remedy="give a recipe's YAML file or a run's folder")
    from podium import recipes

    settings = recipes.load(given.settings_file, overrides=given.overrides, values={})
    made = plan_of(settings, cluster=cluster, prompt=prompt_tokens, response=response_tokens)
    if as_json:
        print_json(as_plain(made))
    else:
        show(made)
    if not made.fits:
        raise typer.Exit(1)


def plan_of(
    settings: Any,
    *,
    cluster: Path | None = None,
    prompt: float | None = None,
    response: float | None = None,
    graph: Any = None,
) -> Any:
    """A recipe's plan, with the smallest change that makes it fit where it does not."""
    from podium.planner.changes import smallest_change
    from podium.planner.devices import load_cluster, this_machine
    from podium.planner.plan import plan_run
    from podium.planner.roles import Sizes, needs_of
    from podium.stages.graph import StageGraph
    from podium.trainer.recipe import SOURCES, find_recipe

    recipe = find_recipe(settings.algorithm)
    needs = needs_of(graph or StageGraph(recipe.stages(settings), SOURCES[recipe.data]), recipe.data)
    machines = load_cluster(cluster) if cluster is not None else this_machine(settings.run.device, disk_of=settings.run.folder)
    sizes = Sizes.of(settings, prompt, response)
    made = plan_run(settings, needs, machines, sizes)
    if not made.fits:
        made.change = smallest_change(settings, needs, machines, made, sizes)
    return made


def as_plain(plan: Any) -> dict[str, Any]:
    """The plan as plain values, sizes in bytes."""
    return {
        "fits": plan.fits,
        "problems": plan.problems,
        "change": plan.change,
        "notes": plan.notes,
        "pools": [
            {
                "name": pool.name,
                "device": pool.device.name,
                "devices": pool.devices,
                "usable_bytes": pool.device.usable,
                "roles": {
                    r.role: {"parameters": r.shape.total, "weights": r.weights, "masters": r.masters, "moments": r.moments}
                    for r in pool.roles
                },
                "phases": {phase.name: phase.total for phase in pool.phases},
                "notes": pool.notes,
            }
            for pool in plan.pools
        ],
        "seconds": {part.name: part.likely for part in plan.seconds},
        "roofline_seconds": {part.name: part.floor for part in plan.seconds},
        "step_seconds": plan.step_seconds,
        "host_bytes": plan.host_bytes,
        "checkpoint_bytes": plan.checkpoint_bytes,
        "disk_bytes": plan.disk_bytes,
    }


def show(plan: Any) -> None:
    """The whole plan as tables."""
    print(f"Cluster: {plan.cluster.title}\n")
    for pool in plan.pools:
        where = f"{pool.devices} x {pool.device.name}" + (f" on {pool.nodes} nodes" if pool.nodes > 1 else "")
        title = f"Pool {pool.name}: {where}, {size(pool.device.usable)} of {size(pool.device.memory)} for tensors, each"
        print(title)
        print_table("", ("role", "model", "layout", "weights", "masters", "moments"), [_role_row(r) for r in pool.roles])
        print()
        rows = [
            (
                phase.name,
                size(phase.stays),
                size(phase.adds),
                size(phase.total) + ("  <- too much" if phase.total > pool.device.usable else ""),
                phase.note,
            )
            for phase in pool.phases
        ]
        print_table("", ("phase", "stays", "adds", "in all", ""), rows)
        for note in pool.notes:
            print(f"  {note}")
        print()
    _show_time(plan)
    print(f"host memory  {size(plan.host_bytes)} on the busiest node, of {size(plan.host_memory)}")
    free = f", {size(plan.disk_free)} free" if plan.disk_free is not None else ""
    print(
        f"disk         {size(plan.checkpoint_bytes)} a checkpoint, {size(plan.disk_bytes)} with those kept and the model{free}"
    )
    for note in plan.notes:
        print(f"note         {note}")
    print()
    show_verdict(plan)


def show_verdict(plan: Any) -> None:
    """Whether it fits; else what does not, and what would do."""
    if plan.fits:
        print("It fits.")
        return
    print("It does not fit.")
    for problem in plan.problems:
        print(f"  {problem}")
    if plan.change:
        print("The smallest change that makes it fit:")
        print("  " + " ".join(f"'{c}'" if any(x in c for x in " {[") else c for c in plan.change))
    else:
        print("No micro-batch, recomputation, layout, precision or adapter makes it fit here.")
        print("  -> take larger devices or a smaller model")


def short(plan: Any) -> str:
    """One line: the fullest pool, the time of a step."""
    pool = max(plan.pools, key=lambda p: p.peak.total / p.device.usable)
    line = (
        f"plan: at most {size(pool.peak.total)} of {size(pool.device.usable)} on {pool.device.name} "
        f"({pool.peak.name}), {size(plan.disk_bytes)} of disk; about {seconds(plan.step_seconds)} a step where "
        "every text is as long as allowed"
    )
    return line if plan.fits else f"{line}\nplan: it does not fit: " + "; ".join(plan.problems)


def _role_row(role: Any) -> tuple[str, ...]:
    ranks = role.ranks
    cut = "one device" if role.single else " x ".join(f"{n} {v}" for n, v in ranks.sizes.items() if v > 1) or "one device"
    if role.single and ranks.workers > 1:
        cut = f"copy on each of {ranks.workers}"
    if role.shares:
        cut = f"weights of the {role.shares}"
    kind = f"{role.shape.total / 1e9:.3g}B, " + (
        role.quantization if role.quantization != "none" else ("bf16" if role.itemsize == 2 else "fp32")
    )
    if role.lora and role.trains:
        kind += f", LoRA {role.lora}"
    masters = size(role.masters) if role.masters else "-"
    if role.offload:
        masters = "host"
    return role.role, kind, cut, size(role.weights), masters, "host" if role.offload else size(role.moments)


def _show_time(plan: Any) -> None:
    rows = [(p.name, p.pool, seconds(p.floor), seconds(p.likely)) for p in plan.seconds]
    rows.append(("a step", "", seconds(sum(p.floor for p in plan.seconds)), seconds(plan.step_seconds)))
    print_table("Time of a step", ("part", "pool", "roofline", "likely"), rows)
    if plan.step_seconds:
        print(f"  {plan.tokens_per_step:,.0f} tokens a step, about {plan.tokens_per_step / plan.step_seconds:,.0f} tokens/s\n")


def size(value: float) -> str:
    """Bytes for reading: GB are 1e9."""
    if value <= 0:
        return "-"
    return f"{value / 1e9:,.1f} GB" if value >= 1e8 else f"{value / 1e6:,.1f} MB"


def seconds(value: float) -> str:
    if value >= 100:
        return f"{value:,.0f} s"
    return f"{value:.1f} s" if value >= 1 else f"{value * 1e3:.3g} ms"
