"""A checkpoint on disk does not know how many workers wrote it: four to two and one, one to four."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist

from podium.checkpoints.store import CheckpointStore
from tests.parallel.processes import on_ranks, once
from tests.parallel.test_sharded_training import sharded, single, steps

FOUR = ({"shard": 4}, {"data": 2, "shard": 2}, {"shard": 2, "tensor": 2})


def loaded(engine: Any, folder: str) -> Any:
    engine.load_state_dict(CheckpointStore(folder).load()[1]["role_actor"])
    return engine


def four_ranks(rank: int, folder: str) -> dict[str, Any]:
    out: dict[str, Any] = {}
    for sizes in FOUR:
        engine, batch, loss = sharded(rank, "policy", sizes)
        out[f"from one {sizes}"] = steps(loaded(engine, f"{folder}/one"), batch, loss, 1)
    engine, batch, loss = sharded(rank, "policy", FOUR[1])
    steps(engine, batch, loss, 2)
    state = engine.state_dict()
    if rank == 0:
        CheckpointStore(f"{folder}/four").save(2, {"role_actor": state})
    dist.barrier()
    out["on"] = steps(engine, batch, loss, 1)
    return out


def two_ranks(rank: int, folder: str) -> Any:
    engine, batch, loss = sharded(rank, "policy", {"shard": 2})
    return steps(loaded(engine, f"{folder}/four"), batch, loss, 1)


def four_then_two(folder: Path) -> Any:
    engine, batch, loss = single("policy")
    steps(engine, batch, loss, 2)
    CheckpointStore(folder / "one").save(2, {"role_actor": engine.state_dict()})
    on = steps(engine, batch, loss, 1)
    return on, on_ranks(four_ranks, 4, str(folder), timeout=280)[0], on_ranks(two_ranks, 2, str(folder), timeout=280)[0]


@pytest.mark.slow
def test_the_next_step_is_the_same(tmp_path_factory: pytest.TempPathFactory) -> None:
    folder, (one, four, two) = once(tmp_path_factory, "layouts", four_then_two)
    engine, batch, loss = single("policy")
    back = steps(loaded(engine, str(folder / "four")), batch, loss, 1)
    for found in (*four.values(), two, back):
        assert found[0]["loss"] == pytest.approx(one[0]["loss"], rel=1e-6)
        assert found[0]["grad_norm"] == pytest.approx(one[0]["grad_norm"], rel=1e-5)
