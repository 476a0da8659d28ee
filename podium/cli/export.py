"""`podium export`"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from podium.cli.console import print_json
from podium.core.errors import command_name


def command(
    run: Annotated[Path, typer.Argument(metavar="RUN", help="The run's folder; the run may be going on.")],
    destination: Annotated[Path, typer.Argument(metavar="DEST", help="A new folder for the model.")],
    step: Annotated[int | None, typer.Option(help="Whose checkpoint; by default the newest.")] = None,
    role: Annotated[str | None, typer.Option(help="actor, critic, reward ...; by default the actor.")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="End with one JSON object on stdout.")] = False,
) -> None:
    """Write a checkpoint's model as a Hugging Face folder (an adapter is merged).

    [bold]Example[/bold]

      podium export runs/grpo-20261130-120000 ./my-model --step 200
    """
    from podium.trainer.export import export_checkpoint

    made = export_checkpoint(run, destination, step=step, role=role)
    if as_json:
        print_json({"run": str(run), "step": made, "model": str(destination)})
        return
    print(f"step {made} of {run} is in {destination}")
    if (destination / "generation_config.json").exists():
        print(f"talk to it: {command_name()} chat {destination}")
