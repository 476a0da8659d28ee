"""`podium quickstart`"""

from __future__ import annotations

from typing import Annotated

import typer

from podium.core.errors import ConfigError, did_you_mean

ALGORITHMS = ("grpo", "ppo")


def command(
    algorithm: Annotated[str, typer.Option(help="grpo, or ppo with a critic.")] = "grpo",
    seed: Annotated[int, typer.Option(help="All randomness follows from it.", min=0)] = 0,
    steps: Annotated[int | None, typer.Option(help="RL steps; by default the recipe's.", min=1)] = None,
    executor: Annotated[str | None, typer.Option(help="Where workers live: local, ray, or spmd under torchrun.")] = None,
    workers: Annotated[int | None, typer.Option(help="CPU processes (or GPUs) that the roles share.", min=1)] = None,
    as_json: Annotated[bool, typer.Option("--json", help="End with one JSON object on stdout.")] = False,
) -> None:
    """A guided first run: a small model learns to sort numbers on this machine, in two to three minutes.

    Makes a Llama of a million parameters and its tokenizer on the spot, lets it imitate sloppy answers (SFT), then
    improves it by reinforcement learning against a checker. Nothing is downloaded.

    [bold]Examples[/bold]

      podium quickstart

      podium quickstart --algorithm ppo --json

      podium quickstart --executor ray --workers 2
    """
    if algorithm not in ALGORITHMS:
        raise ConfigError(
            f"the quick start has no '{algorithm}'", where="--algorithm", remedy=did_you_mean(algorithm, ALGORITHMS)
        )
    from podium.cli.train import executor_values
    from podium.quickstart import run

    chosen = executor_values(executor, workers).get("executor")
    run(algorithm=algorithm, seed=seed, steps=steps, as_json=as_json, executor=chosen)
