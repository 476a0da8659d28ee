"""The optimizer's state in the CPU's memory, on one device: the same numbers bit for bit, also over a resume."""

from __future__ import annotations

from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
from torch import Tensor, nn

from podium.core.settings import OptimizerSettings
from podium.engines.train import SingleDeviceEngine, create_train_engine, offload
from podium.engines.train.offload import OffloadedAdamW
from podium.engines.train.optim import MasterAdamW
from podium.models.heads import ActorModel
from podium.models.storage import store_by_columns
from podium.recipes import build, load
from tests.properties.test_train_invariance import CASES, rows
from tests.tiny import tiny_model, tiny_tokenizer

SETTINGS = OptimizerSettings(lr=1e-3, weight_decay=0.1, max_grad_norm=0.5)


@pytest.fixture(autouse=True)
def small_buckets() -> Any:
    """A few parameters in each, so that both staging buffers are used again and again."""
    with patch.object(offload, "_BUCKET", 5_000):
        yield


def engine(offloaded: bool, dtype: torch.dtype = torch.float32, settings: OptimizerSettings = SETTINGS) -> SingleDeviceEngine:
    model = ActorModel(tiny_model("qwen2", dtype=dtype))
    return SingleDeviceEngine(model, optimizer=settings, microbatch_tokens=60, offload_optimizer=offloaded)


def weights(trained: SingleDeviceEngine) -> list[Tensor]:
    return [p.detach().clone() for p in trained.model.parameters()]


def same(a: list[Tensor], b: list[Tensor]) -> bool:
    return all(torch.equal(x, y) for x, y in zip(a, b, strict=True))


@pytest.mark.parametrize("states", ["fp32", "8bit"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_the_same_numbers(dtype: torch.dtype, states: Any) -> None:
    settings = SETTINGS.model_copy(update={"states": states})
    results = []
    for offloaded in (False, True):
        trained = engine(offloaded, dtype, settings)
        metrics = [trained.update(rows(), CASES["policy"][1]).means() for _ in range(3)]
        results.append((metrics, weights(trained)))
    assert results[0][0] == results[1][0]
    assert same(results[0][1], results[1][1])


@pytest.mark.parametrize("before", [False, True])
@pytest.mark.parametrize("after", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_checkpoint_is_the_same_and_either_goes_on_from_it(dtype: torch.dtype, before: bool, after: bool) -> None:
    _, loss = CASES["policy"]
    whole = engine(False, dtype)
    for _ in range(3):
        whole.update(rows(), loss)
    first = engine(before, dtype)
    first.update(rows(), loss)
    state = first.state_dict()
    assert set(state["optimizer"]["masters"]) == (set() if dtype == torch.float32 else set(state["model"]))
    second = engine(after, dtype)
    second.load_state_dict(state)
    for _ in range(2):
        second.update(rows(), loss)
    assert same(weights(second), weights(whole))


def test_a_checkpoint_whose_moments_lie_otherwise_than_the_masters() -> None:
    """A rollout engine of a CPU may lay matrices by columns; a file gives every tensor by rows."""
    _, loss = CASES["policy"]

    def by_columns(offload: bool) -> SingleDeviceEngine:
        model = tiny_model("qwen2")
        store_by_columns(model)
        return SingleDeviceEngine(ActorModel(model), optimizer=SETTINGS, microbatch_tokens=60, offload_optimizer=offload)

    whole = by_columns(False)
    for _ in range(3):
        whole.update(rows(), loss)

    def by_rows(state: Any) -> Any:
        if isinstance(state, dict):
            return {name: by_rows(value) for name, value in state.items()}
        return state.contiguous().clone() if isinstance(state, Tensor) else state

    first, second = by_columns(True), by_columns(True)
    first.update(rows(), loss)
    second.load_state_dict(by_rows(first.state_dict()))
    for _ in range(2):
        second.update(rows(), loss)
    assert same(weights(second), weights(whole))


def test_parameters_that_get_a_gradient_only_later() -> None:
    """The staging memory is made at the first update, and has room for what any other one brings."""
    results = []
    for kind in (MasterAdamW, OffloadedAdamW):
        torch.manual_seed(0)
        small, large = (nn.Parameter(torch.randn(size)) for size in (10, 7_000))
        optimizer = kind([("small", small), ("large", large)], SETTINGS)
        for parameters in ([small], [small, large]):
            optimizer.backward(torch.stack([p.square().sum() for p in parameters]).sum())
            optimizer.step()
        results.append([small.detach().clone(), large.detach().clone()])
    assert same(*results)


def test_what_is_where() -> None:
    """Masters and moments are apart from the parameters, and no gradient outlives a step."""
    trained = engine(True)
    optimizer = trained._optimizer
    assert isinstance(optimizer, MasterAdamW) and optimizer.moment_bytes == 0
    trained.update(rows(), CASES["policy"][1])
    addresses = {p.data_ptr() for p in trained.model.parameters()}
    assert not addresses & {m.data_ptr() for m in optimizer._masters.values()}
    assert all(p.grad is None for p in trained.model.parameters())
    assert all(m.grad is None for m in optimizer._masters.values())
    assert not optimizer._sums  # type: ignore[attr-defined]


def test_a_gradient_that_is_not_finite_changes_nothing() -> None:
    trained = engine(True, torch.bfloat16)
    before = weights(trained)
    batch = rows().with_columns({"advantages": [torch.full_like(a, float("inf")) for a in rows()["advantages"]]})
    metrics = trained.update(batch, CASES["policy"][1])
    assert metrics.mean("skipped_updates") == 1 and same(before, weights(trained))
    trained.update(rows(), CASES["policy"][1])
    again = engine(False, torch.bfloat16)
    again.update(rows(), CASES["policy"][1])
    assert same(weights(trained), weights(again))


def test_adapters_offload_too() -> None:
    pytest.importorskip("peft")
    from tests.unit.test_models_low_rank import adapted

    results = []
    for offloaded in (False, True):
        model = ActorModel(adapted("llama"))
        trained = SingleDeviceEngine(model, optimizer=SETTINGS, microbatch_tokens=60, offload_optimizer=offloaded)
        trained.update(rows(), CASES["policy"][1])
        results.append(weights(trained))
    assert same(*results)


def test_by_its_setting(tmp_path: Path) -> None:
    """A recipe trains with it; the run's weights are those without it."""
    assert create_train_engine("single", ActorModel(tiny_model()), optimizer=SETTINGS, offload_optimizer=True)._offload
    results = []
    for offloaded in (False, True):
        settings = load(
            values={
                "algorithm": "grpo",
                "optimizer": {"offload": offloaded, "lr": 1e-3},
                "batch": {"prompts_per_step": 2, "group_size": 2},
                "rollout": {"max_new_tokens": 4},
                "rewards": [{"function": lambda completions, **_: [float(len(text)) for text in completions]}],
                "run": {
                    "folder": str(tmp_path / str(offloaded)),
                    "steps": 2,
                    "trackers": [],
                    "progress": False,
                    "device": "cpu",
                },
            }
        )
        actor, data = tiny_model("llama"), [{"prompt": f"{n} + 1 ="} for n in range(4)]
        build(settings, models={"actor": actor}, tokenizer=tiny_tokenizer(), data=data).train()
        results.append([p.detach().clone() for p in actor.parameters()])
    assert same(*results)
