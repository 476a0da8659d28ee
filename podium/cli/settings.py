"""`podium settings`"""

from __future__ import annotations

from typing import Annotated

import typer

from podium.cli.console import print_json, print_table
from podium.core.errors import ConfigError, did_you_mean


def command(
    algorithm: Annotated[
        str, typer.Argument(help="Whose settings: grpo, ppo, dpo, sft and others (docs/overview.md).")
    ] = "grpo",
    filter: Annotated[str, typer.Argument(help="Only settings with this in their name or description.")] = "",
    as_json: Annotated[bool, typer.Option("--json", help="One JSON object a line.")] = False,
) -> None:
    """List every setting of an algorithm: name, type, default, meaning.

    [bold]Examples[/bold]

      podium settings

      podium settings ppo clip
    """
    from podium.core.config import describe
    from podium.trainer.recipe import find_recipe

    rows = describe(find_recipe(algorithm).settings)
    shown = [row for row in rows if filter.lower() in f"{row[0]} {row[3]}".lower()]
    if not shown:
        raise ConfigError(
            f"no setting of {algorithm} matches '{filter}'",
            where="command line",
            remedy=did_you_mean(filter, [r[0] for r in rows]),
        )
    if as_json:
        for name, kind, default, meaning in shown:
            print_json({"name": name, "type": kind, "default": default, "meaning": meaning})
        return
    print_table(f"{algorithm}: {len(shown)} settings", ("setting", "type", "default", "meaning"), shown)
