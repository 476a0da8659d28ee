"""`podium profile`"""

from __future__ import annotations

import json
import os
import shutil
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Annotated, Any

import typer

from podium.cli.console import print_json, print_table, sort_arguments
from podium.core.errors import ConfigError
from podium.core.jsonable import jsonable


def command(
    arguments: Annotated[
        list[str], typer.Argument(metavar="RECIPE.yaml | RUN | KEY=VALUE", help="A recipe or a run, and other settings.")
    ],
    steps: Annotated[int, typer.Option(min=1, help="Steps that are timed; one more is recorded for kernels.")] = 3,
    warmup: Annotated[int, typer.Option(min=0, help="Steps before them, which compile and allocate.")] = 1,
    as_json: Annotated[bool, typer.Option("--json", help="End with one JSON object on stdout.")] = False,
) -> None:
    """Train a few real steps and show where their time and memory go.

    Shows each stage's time, tokens/s and MFU (2 operations a parameter and token forward, 6 for an update, and attention, over
    the rate of a matrix product that is measured first); the time by kind of kernel; memory by owner (weights, masters,
    moments, gradients, activations, KV cache). Writes profile.json and profile.png into a folder under run.folder.

    Everything is loaded and trained as `podium train` would, in this process; the trained weights are thrown away. A run's
    folder stands for its settings: its steps start from the model that the run started from.

    [bold]Examples[/bold]

      podium profile recipes/grpo.yaml model.path=./my-model data.path=problems.jsonl

      podium profile runs/grpo-20261130-120000 batch.microbatch_tokens=16384

      podium profile recipes/grpo.yaml --steps 5 --json
    """
    given = sort_arguments(arguments)
    if given.settings_file is None:
        raise ConfigError("no recipe and no run", where="command line", remedy="give a recipe's YAML file or a run's folder")
    os.environ.setdefault("KINETO_LOG_LEVEL", "6")  # before torch is there: else the recorder says on stderr when it starts
    from podium import recipes
    from podium.profiling.run import profile_run

    settings = recipes.load(given.settings_file, overrides=given.overrides, values={})
    trainer = recipes.build(settings)
    with _folder(settings) as folder:
        profile = profile_run(trainer, steps=steps, warmup=warmup, note=lambda line: print(line, file=sys.stderr))
        trainer.close()
        if not as_json:
            show(profile)
        _write(folder, profile, settings.algorithm)
    if as_json:
        from podium.profiling.report import as_plain

        print_json({**as_plain(profile), "folder": str(folder)})
        return
    print(f"\npicture  {folder / 'profile.png'}\nnumbers  {folder / 'profile.json'}")


@contextmanager
def _folder(settings: Any) -> Iterator[Path]:
    """A folder of its own, with the settings. It has no checkpoint, so nothing resumes from it.

    It is made first: where it cannot be, that is said before the steps are. It goes again where the profile does not come out.
    """
    from podium.core.config import dump_yaml
    from podium.runs.folder import RunFolder, default_name

    root = Path(settings.run.folder)
    root_is_new = not root.exists()
    run = RunFolder.create(root, f"profile-{default_name(settings.algorithm)}")
    try:
        run.write_settings(dump_yaml(settings))
        yield run.path
    except BaseException:
        shutil.rmtree(run.path, ignore_errors=True)
        if root_is_new:
            with suppress(OSError):  # others are in it by now
                root.rmdir()
        raise


def _write(folder: Path, profile: Any, algorithm: str) -> None:
    """Numbers and picture."""
    from podium.core.files import writing
    from podium.profiling.report import as_plain, draw

    with writing(folder / "profile.json", "the profile"):
        (folder / "profile.json").write_text(json.dumps(jsonable(as_plain(profile)), indent=1) + "\n")
    with writing(folder / "profile.png", "the picture"):
        draw(profile, folder / "profile.png", algorithm)


def show(profile: Any) -> None:
    """The tables."""
    from podium.profiling.report import kernel_rows, memory_rows, seconds, stage_rows

    mfu = f", {100 * profile.mfu:.1f}% MFU over all" if profile.mfu is not None else ""
    print(
        f"{profile.device}, {profile.dtype}: {seconds(profile.step_seconds)} a step (mean of {profile.steps}), "
        f"{profile.tokens:,.0f} tokens a step, {profile.tokens_per_second:,.0f} tokens/s{mfu}; "
        f"a matrix product reaches {profile.rate / 1e12:.3g} TFLOP/s\n"
    )
    header = ("stage", "time", "share", "tokens", "tokens/s", "TFLOP/s", "MFU", "peak memory")
    print_table("Time of a step by stage", header, stage_rows(profile), fixed=8)
    names, rows = kernel_rows(profile)
    print()
    print_table("Kernels by kind, ms of one recorded step", ("kind", *names), rows, fixed=len(names) + 1)
    print()
    print_table("Memory by owner", ("owner", "role", "bytes", "in host memory"), memory_rows(profile), fixed=4)
    for line in profile.notes:
        print(f"note: {line}")
