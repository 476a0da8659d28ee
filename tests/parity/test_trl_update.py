"""An update of ours and one of TRL's trainer, as `benchmarks/update.py` times them, have the same gradient."""

from __future__ import annotations

import sys
import tempfile
from pathlib import Path

import pytest

pytest.importorskip("trl", reason="trl is not installed", exc_type=ImportError)
pytest.importorskip("trl.trainer.grpo_trainer", reason="trl's trainer does not load", exc_type=ImportError)

sys.path.insert(0, str(Path(__file__).parents[2] / "benchmarks"))

import trl_peer
import update


def test_the_same_rows_give_the_same_gradient_norm(rows: int = 5):  # a last micro-batch that is smaller
    run = update.Run("tiny", "cpu", 1e11, 1, None)
    with run.engine() as engine:
        ours = run.measure(engine, run.rows(), warmup=1)["grad_norm"]
    inputs = trl_peer.padded_inputs(run.rows(), "cpu")
    with (
        tempfile.TemporaryDirectory() as folder,
        trl_peer.trainer_of(run.shape, "cpu", trl_peer.Setting(rows), folder) as trainer,
    ):
        theirs = trl_peer.one_update(trainer, inputs, rows, "cpu")["grad_norm"]
    assert theirs == pytest.approx(ours, rel=1e-5)
