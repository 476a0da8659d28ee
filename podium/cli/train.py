"""`podium train`"""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Annotated, Any

import typer

from podium.cli.console import Given, print_change, print_json, sort_arguments
from podium.core.errors import ConfigError, command_name


def command(
    arguments: Annotated[
        list[str] | None,
        typer.Argument(metavar="RECIPE.yaml | KEY=VALUE", help="A recipe, and settings that differ from it."),
    ] = None,
    algorithm: Annotated[
        str | None, typer.Option(help="Without a recipe: grpo, ppo, dpo, sft and others (docs/overview.md).")
    ] = None,
    model: Annotated[str | None, typer.Option(help="Model folder, hub name or GGUF file (model.path).")] = None,
    data: Annotated[str | None, typer.Option(help="JSONL or parquet file, or reasoning_gym:TASK (data.path).")] = None,
    reward: Annotated[
        list[str] | None, typer.Option(help="FILE.py:FUNCTION, MODULE:FUNCTION or a built-in. May be given several times.")
    ] = None,
    executor: Annotated[
        str | None, typer.Option(help="Where workers live: local, ray, or spmd under torchrun (executor.kind).")
    ] = None,
    workers: Annotated[
        int | None, typer.Option(help="GPUs, or CPU processes, that the roles share (executor.workers).", min=1)
    ] = None,
    resume: Annotated[
        bool, typer.Option("--resume", help="Go on with a run: the folder given, else the newest one of this recipe.")
    ] = False,
    accept_changes: Annotated[
        bool, typer.Option("--accept-changes", help="Resume although settings differ from the checkpoint's.")
    ] = False,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Check settings, graph and files, show the arithmetic, load nothing.")
    ] = False,
    as_json: Annotated[bool, typer.Option("--json", help="End with one JSON object on stdout.")] = False,
) -> None:
    """Train a model.

    Settings come from the recipe, the options below and KEY=VALUE, later ones winning. A misspelt key is an error.
    `podium settings ALGORITHM` lists them all. Ctrl-C saves a checkpoint and stops; --resume goes on from it exactly.

    [bold]Examples[/bold]

      podium train recipes/grpo.yaml model.path=./my-model data.path=problems.jsonl

      podium train --algorithm grpo --model ./my-model --data problems.jsonl --reward score.py:correct run.steps=50

      podium train recipes/grpo.yaml --dry-run

      podium train --resume runs/grpo-20261130-120000

      podium train recipes/grpo.yaml --executor ray --workers 4

      torchrun --nproc-per-node 4 -m podium train recipes/grpo.yaml --executor spmd
    """
    given = sort_arguments(arguments)
    values = _values(algorithm, model, data, reward)
    if resume and given.recipe is None and given.run is None and not values:
        given.run = _newest_run(given)
    if given.run is not None and not resume:
        raise ConfigError(f"'{given.run}' is a run", where="command line", remedy="add --resume to go on with it")
    if given.settings_file is None and not values and not given.overrides:
        raise ConfigError(
            "nothing to train", where="command line", remedy="give a recipe, or --algorithm, --model, --data and --reward"
        )
    from podium import recipes

    values |= executor_values(executor, workers)
    settings = recipes.load(given.settings_file, overrides=given.overrides, values=values)
    trainer = recipes.build(settings)
    if dry_run:
        from podium.cli.explain import show

        trainer.check_files()
        show(settings, trainer, as_json=as_json)
        _say_plan(settings, trainer)
        return
    _say_plan(settings, trainer)
    result = _train(trainer, str(given.run) if given.run is not None else resume, accept_changes)
    trainer.close()
    if trainer.executor.writes:
        _report(result, as_json)
    if result.interrupted:
        raise typer.Exit(130)


def _say_plan(settings: Any, trainer: Any) -> None:
    """One line on stderr: the fullest device, the time of a step. A run whose plan cannot be made goes on without."""
    from podium.cli.plan import plan_of, short

    if os.environ.get("RANK", "0") != "0":  # under torchrun one of them says it
        return
    try:
        line = short(plan_of(settings, graph=trainer.graph))
    except Exception as error:
        line = f"plan: none could be made ({str(error).splitlines()[0][:160] if str(error) else type(error).__name__})"
    print(line, file=sys.stderr)


def _values(algorithm: str | None, model: str | None, data: str | None, reward: list[str] | None) -> dict[str, Any]:
    """The options as settings; those not given are left out."""
    values: dict[str, Any] = {}
    if algorithm is not None:
        values["algorithm"] = algorithm
    if model is not None:
        values["model"] = {"path": model}
    if data is not None:
        values["data"] = {"path": data}
    if reward:
        values["rewards"] = [{"function": function} for function in reward]
    return values


def executor_values(executor: str | None, workers: int | None) -> dict[str, Any]:
    """The two options as settings; several workers without an executor are Ray's."""
    if executor is None and workers is None:
        return {}
    kind = executor or ("ray" if (workers or 1) > 1 else "local")
    if kind == "local" and (workers or 1) > 1:
        raise ConfigError(f"{workers} workers do not go into one process", where="--workers", remedy="--executor ray")
    return {"executor": {"kind": kind, **({"workers": workers} if workers is not None else {})}}


def _train(trainer: Any, resume: bool | str, accept_changes: bool) -> Any:
    """Runs it. Settings that have changed since the checkpoint are shown; where somebody is there to answer, they are asked."""
    from podium.trainer.changes import ChangedSettings

    try:
        return trainer.train(resume=resume, accept_changes=accept_changes)
    except ChangedSettings as error:
        if not (sys.stdin.isatty() and sys.stderr.isatty()):
            raise
        typer.echo(error.what, err=True)
        if not typer.confirm("Go on with the new ones?", err=True):
            raise
        return trainer.train(resume=resume, accept_changes=True)


def _newest_run(given: Given) -> Path:
    from podium.core.settings import RunSettings
    from podium.runs.folder import latest_run

    folder = RunSettings().folder
    for text in given.overrides:
        key, _, value = text.partition("=")
        folder = value if key == "run.folder" else folder
    found = latest_run(folder)
    if found is None:
        raise ConfigError(f"there is no run in '{folder}'", where="--resume", remedy="give the run's folder")
    return found.path


def _report(result: Any, as_json: bool) -> None:
    if as_json:
        print_json(vars(result))
        return
    if result.interrupted:
        print(f"Stopped after step {result.steps}. Go on with: {command_name()} train --resume {result.run_folder}")
        return
    print_change(result.evaluation_before, result.evaluation_after)
    print(f"{result.steps} steps in {result.seconds:.0f} s")
    folder = Path(result.run_folder)
    for label, name in (("run", ""), ("plot", "plot.png"), ("model", "model")):
        if (folder / name).exists():
            print(f"{label:<6}{folder / name}")
    if (folder / "model" / "generation_config.json").exists():
        print(f"talk to it: {command_name()} chat {folder / 'model'}")
