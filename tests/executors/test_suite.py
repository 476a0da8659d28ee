"""One suite over every executor: in this process, two processes as under torchrun (gloo), two Ray actors."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from podium.controller.executors.local import LocalExecutor
from tests.executors.suite import CHECKS, ROLES

ROOT = Path(__file__).parents[2]


def torchrun(out: Path, names: list[str], world: int = 2, seconds: float = 120) -> list[dict]:
    """Runs checks under torchrun's variables, and gives what each rank wrote (None for one that wrote nothing)."""
    start_ranks(["tests.executors.spmd_run", str(out), *names], world, seconds)
    files = [Path(f"{out}.{r}") for r in range(world)]
    return [json.loads(f.read_text()) if f.exists() else None for f in files]


def start_ranks(command: list[str], world: int = 2, seconds: float = 120) -> None:
    """Starts a module on several ranks as torchrun does, and waits."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    common = {**os.environ, "WORLD_SIZE": str(world), "LOCAL_WORLD_SIZE": str(world), "MASTER_ADDR": "127.0.0.1"}
    ranks = [
        subprocess.Popen(
            [sys.executable, "-m", *command],
            env={**common, "RANK": str(r), "LOCAL_RANK": str(r), "MASTER_PORT": str(port), "OMP_NUM_THREADS": "1"},
            cwd=ROOT,
        )
        for r in range(world)
    ]
    try:
        for rank in ranks:
            rank.wait(seconds)
    finally:
        for rank in ranks:
            rank.kill()


@pytest.fixture(scope="module")
def spmd(tmp_path_factory):
    return torchrun(tmp_path_factory.mktemp("spmd") / "out", list(CHECKS))


@pytest.mark.parametrize("name", CHECKS)
def test_local(name):
    CHECKS[name](LocalExecutor().launch(ROLES))


@pytest.mark.parametrize("name", CHECKS)
def test_spmd(name, spmd):
    for results in spmd:
        assert results is not None and results[name] == "", results and results[name]


@pytest.mark.parametrize("name", CHECKS)
def test_ray(name, ray_roles):
    CHECKS[name](ray_roles)
