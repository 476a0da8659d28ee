"""The command line: which commands there are, and how an error reaches the user."""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from typing import Annotated

import typer

from podium import __version__
from podium.cli import chat, data, doctor, evaluate, explain, export, plan, profile, quickstart, settings, train
from podium.core.errors import PodiumError

app = typer.Typer(
    name="podium",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode="rich",
    context_settings={"help_option_names": ["-h", "--help"]},
)
app.command("quickstart")(quickstart.command)
app.command("train")(train.command)
app.command("eval")(evaluate.command)
app.command("export")(export.command)
app.command("chat")(chat.command)
app.command("explain")(explain.command)
app.command("plan")(plan.command)
app.command("profile")(profile.command)
app.command("doctor")(doctor.command)
app.command("settings")(settings.command)
app.add_typer(data.app, name="data")


def _show_version(asked: bool) -> None:
    if asked:
        print(f"podium {__version__}")
        raise typer.Exit()


@app.callback()
def root(
    version: Annotated[
        bool, typer.Option("--version", callback=_show_version, is_eager=True, help="Show it, and exit.")
    ] = False,
    debug: Annotated[bool, typer.Option("--debug", help="Show the traceback of an error. Works after a command too.")] = False,
) -> None:
    """Reinforcement-learning post-training of language models.

    [bold]First steps[/bold]

      podium quickstart              a small model learns to sort numbers, in minutes

      podium explain recipe.yaml     what a run would do; nothing is loaded

      podium train recipe.yaml       the run
    """


def main(arguments: Sequence[str] | None = None) -> None:
    """Runs a command and ends the process: status 0, 2 where the user can mend it, 130 after Ctrl-C (from typer)."""
    given = list(sys.argv[1:] if arguments is None else arguments)
    debug = "--debug" in given
    if not sys.stderr.isatty():
        # transformers' and the hub's own bars are noise in a log file.
        os.environ.setdefault("HF_HUB_DISABLE_PROGRESS_BARS", "1")
    try:
        app(args=[argument for argument in given if argument != "--debug"], prog_name="podium")
    except PodiumError as error:
        if debug:
            raise
        _show_error(error)
        sys.exit(error.exit_code)


def _show_error(error: PodiumError) -> None:
    """The message in red where stderr is a terminal, plain elsewhere; never a traceback."""
    from rich.console import Console
    from rich.text import Text

    Console(stderr=True, soft_wrap=True).print(Text(f"error: {error}", style="red"))
