"""`podium eval`"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer

from podium.cli.console import number, print_json, print_table, sort_arguments
from podium.core.errors import ConfigError


def command(
    arguments: Annotated[
        list[str], typer.Argument(metavar="RECIPE.yaml | RUN | KEY=VALUE", help="A recipe or a run, and other settings.")
    ],
    model: Annotated[str | None, typer.Option(help="Model to measure. By default: a run's trained model, a recipe's.")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="One JSON object on stdout.")] = False,
) -> None:
    """Measure a model on a recipe's held-out data, with the recipe's rewards.

    Held-out data are `data.eval_path`, or `data.eval_samples` rows that training never sees.
    Decoding is greedy unless `evaluation.temperature` says otherwise.

    [bold]Examples[/bold]

      podium eval runs/grpo-20261130-120000

      podium eval recipes/grpo.yaml --model ./my-model data.eval_samples=500 --json
    """
    given = sort_arguments(arguments)
    if given.settings_file is None:
        raise ConfigError("no recipe and no run", where="command line", remedy="give a recipe's YAML file or a run's folder")
    path = model or _trained_model(given.run)
    from podium import recipes

    values: dict[str, Any] = {"model": {"path": path}} if path else {}
    settings = recipes.load(given.settings_file, overrides=given.overrides, values=values)
    metrics = recipes.build(settings).evaluate()
    if as_json:
        print_json({"model": settings.model.path, **metrics})
        return
    shown = [(name, number(value)) for name, value in metrics.items()]
    print_table(f"{settings.model.path}, held out", ("metric", "value"), shown)


def _trained_model(run: Path | None) -> str | None:
    """The model that a run made; an error when it has made none yet."""
    if run is None:
        return None
    if not (run / "model" / "config.json").is_file():
        raise ConfigError(
            f"the run '{run}' has no trained model yet", where="--model", remedy="finish the run, or give --model"
        )
    return str(run / "model")
