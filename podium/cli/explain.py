"""`podium explain`"""

from __future__ import annotations

from typing import Annotated, Any

import typer

from podium.cli.console import print_json, print_table, sort_arguments
from podium.core.errors import ConfigError


def command(
    arguments: Annotated[
        list[str], typer.Argument(metavar="RECIPE.yaml | RUN | KEY=VALUE", help="A recipe or a run, and other settings.")
    ],
    as_json: Annotated[bool, typer.Option("--json", help="One JSON object on stdout.")] = False,
) -> None:
    """Show what a recipe would do, without loading anything.

    Prints the batch arithmetic (prompts, sequences, tokens per step, micro-batches, updates), the models that are
    loaded and why, and the stages of a step in their order with what they read and write.

    [bold]Examples[/bold]

      podium explain recipes/grpo.yaml

      podium explain recipes/ppo.yaml batch.group_size=4 batch.minibatch_sequences=32
    """
    given = sort_arguments(arguments)
    if given.settings_file is None:
        raise ConfigError("no recipe and no run", where="command line", remedy="give a recipe's YAML file or a run's folder")
    from podium import recipes

    settings = recipes.load(given.settings_file, overrides=given.overrides, values={})
    show(settings, recipes.build(settings), as_json=as_json)


def show(settings: Any, trainer: Any, *, as_json: bool = False) -> None:
    """The arithmetic and the stages of a run that is built but not loaded."""
    from podium import recipes
    from podium.stages.graph import describe

    arithmetic = recipes.explain(settings)
    stages = describe(trainer.graph)
    if as_json:
        print_json(
            {
                "arithmetic": [{"name": n, "value": v, "how": how} for n, v, how in arithmetic],
                "stages": [{"name": n, "roles": r, "reads": i, "writes": o} for n, r, i, o in stages],
            }
        )
        return
    print_table(f"{settings.algorithm}: one step", ("", "value", "how it comes about"), arithmetic, fixed=2)
    print()
    rows = [(str(i), *stage) for i, stage in enumerate(stages, start=1)]
    print_table("Stages", ("", "stage", "roles", "reads", "writes"), rows, fixed=3)
