"""The worked examples of docs/executors.md: a module of one's own under torchrun; an engine of one's own."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


def lines_of(processes: int, steps: int) -> list[tuple[float, float]]:
    """(share that is right, gradient norm) of each step of examples/spmd_own_module.py."""
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(processes)]
    done = subprocess.run(
        [*command, "examples/spmd_own_module.py", "--steps", str(steps)],
        cwd=ROOT,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=200,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    return [(float(a), float(b)) for a, b in re.findall(r"right ([\d.]+)  gradient norm ([\d.]+)", done.stdout)]


def test_a_module_wrapped_with_fsdp_by_its_owner_is_a_role():
    steps = lines_of(2, 8)
    assert len(steps) == 8 and steps[-1][0] > steps[0][0] + 0.1  # rank 0 alone prints, and it learns


@pytest.mark.slow
def test_it_has_the_numbers_of_one_process():
    for two, one in zip(lines_of(2, 4), lines_of(1, 4), strict=True):
        assert two == pytest.approx(one, rel=1e-3)
