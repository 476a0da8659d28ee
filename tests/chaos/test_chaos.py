"""A small `make chaos`: a few faults, and the same numbers all the same."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]


def test_runs_that_are_killed_end_as_those_that_are_not(tmp_path):
    command = [sys.executable, ROOT / "benchmarks" / "chaos.py", "--faults", "4", "--seed", "5", "--algorithms", "ppo"]
    done = subprocess.run(command, capture_output=True, text=True, cwd=tmp_path, timeout=280)
    assert done.returncode == 0, done.stdout + done.stderr
    report = json.loads(done.stdout.splitlines()[-1])
    assert sum(report["faults"].values()) == 4 and report["wrong"] == [] and report["ended_the_process"] >= 2
