"""`podium doctor`"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer

from podium.cli.console import print_json, print_table
from podium.core.errors import ConfigError


def command(
    arguments: Annotated[list[str], typer.Argument(metavar="[numerics] RUN", help="A run's folder.")],
    rows: Annotated[int, typer.Option(min=1, help="Samples that `numerics` replays.")] = 4,
    device: Annotated[str, typer.Option(help="Where `numerics` replays them.")] = "cpu",
    as_json: Annotated[bool, typer.Option("--json", help="One JSON object on stdout.")] = False,
) -> None:
    """Say what is wrong with a run and why.

    `podium doctor RUN` reads metrics, samples, alarms and reports of hangs. `podium doctor numerics RUN` replays a few saved
    samples to find why training and rollout give other log-probs: stale or partial weights, truncated sampling, temperature,
    template or retokenisation, precision, kernel. Both end with status 1 where they find an error.

    [bold]Examples[/bold]

      podium doctor runs/grpo-20261130-120000

      podium doctor numerics runs/grpo-20261130-120000
    """
    if len(arguments) == 1:
        bad = _run(arguments[0], as_json)
    elif len(arguments) == 2 and arguments[0] == "numerics":
        bad = _numerics(arguments[1], rows, device, as_json)
    else:
        raise ConfigError(
            f"'{' '.join(arguments)}' is no run",
            where="command line",
            remedy="podium doctor RUN, or podium doctor numerics RUN",
        )
    if bad:
        raise typer.Exit(1)


def _run(path: str, as_json: bool) -> bool:
    from podium.doctor.run import examine, read_run

    facts = read_run(path)
    found = examine(facts)
    if as_json:
        print_json({"run": str(path), "steps": len(facts.steps), "findings": [vars(f) for f in found]})
        return any(f.severity == "error" for f in found)
    state = "finished" if facts.finished else "not finished"
    print(f"{Path(path)}: {len(facts.steps)} steps, {state}\n")
    if not found:
        print("Nothing is wrong that the run's folder could tell.")
    for finding in found:
        print(f"{finding.severity}: {finding.cause}")
        print(f"  {finding.what}")
        print(f"  seen in: {finding.evidence}")
        if finding.remedy:
            print(f"  -> {finding.remedy}")
        print()
    return any(f.severity == "error" for f in found)


def _numerics(path: str, rows: int, device: str, as_json: bool) -> bool:
    from podium.doctor.decide import CAUSES
    from podium.doctor.numerics import as_plain, examine_numerics

    report = examine_numerics(path, rows=rows, device=device)
    found: Any = report.diagnosis
    if as_json:
        print_json(as_plain(report))
        return found.cause != "none"
    weights = report.weights or "weights that are not there any more"
    print(
        f"{report.rows} samples of policy version {report.version} ({weights}); versions to compare with: {report.versions}\n"
    )
    if found.cause == "none":
        print(f"Training and rollout agree: {found.gap:.2g} nats a token.")
        return False
    print(f"They differ by {found.gap:.3g} nats a token.")
    print(f"cause: {found.cause}" + (f", on the {found.side} side" if found.side else ""))
    print(f"  {CAUSES[found.cause]}")
    if found.detail:
        print(f"  {found.detail}")
    if found.left is not None:
        print(f"  replayed so, {found.left:.2g} nats a token are left of {found.gap:.3g}")
    if found.table:
        print()
        rows_ = [(cause, detail, f"{left:.3g}") for cause, detail, left in found.table[:6]]
        print_table("Replays, best first", ("cause", "replayed with", "left, nats a token"), rows_)
    return True
