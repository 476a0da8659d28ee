"""Hand-overs within one process: shared memory, copies, casts; and what verification finds."""

from __future__ import annotations

import time
from typing import Any

import pytest
import torch
from torch import Tensor

from podium.core.errors import ConfigError, RolloutError
from podium.engines.layout import Box, Layout, TensorShards
from podium.engines.train import SingleDeviceEngine
from podium.hybrid.engine import MovedHandOver, SharedHandOver, hand_over_between
from podium.hybrid.plan import make_plan
from podium.hybrid.transfer import Moved, Transport
from podium.hybrid.verify import check_canary, check_shared_storage, fingerprint, mismatched_tensors
from podium.models.heads import ActorModel
from podium.models.storage import by_columns
from tests.tiny import tiny_model


def tensors(dtype: torch.dtype = torch.float32, seed: int = 0) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    shapes: dict[str, tuple[int, ...]] = {"q": (8, 6), "norm": (7,), "deep": (3, 4, 5), "scale": ()}
    return {name: torch.randn(shape, generator=generator).to(dtype) for name, shape in shapes.items()}


# ------------------------------------------------------------------ one device: nothing moves


def test_on_one_device_nothing_moves_and_nothing_is_allocated(monkeypatch: pytest.MonkeyPatch) -> None:
    model = tiny_model("qwen2")
    engine = SingleDeviceEngine(ActorModel(model))
    before = {p.data_ptr() for p in model.parameters()}
    hand_over = hand_over_between(engine, model)
    assert isinstance(hand_over, SharedHandOver)
    monkeypatch.setattr(torch.Tensor, "copy_", lambda *_: pytest.fail("a weight was copied"))
    report = hand_over(version=3)
    assert report.version == 3 and report.moved == Moved(0, 0, 0, 0)
    assert {p.data_ptr() for p in model.parameters()} == before


def test_a_shared_hand_over_takes_under_a_millisecond() -> None:
    model = tiny_model("llama", num_hidden_layers=32, hidden_size=16, intermediate_size=16, num_attention_heads=2)
    hand_over = hand_over_between(SingleDeviceEngine(ActorModel(model)), model)
    seconds = []
    for version in range(20):
        start = time.perf_counter()
        hand_over(version)
        seconds.append(time.perf_counter() - start)
    assert len(list(model.parameters())) == 32 * 9 + 2
    assert min(seconds) < 1e-3


def test_memory_that_is_no_longer_shared_is_named() -> None:
    model = tiny_model("llama")
    actor = ActorModel(model)
    hand_over = hand_over_between(SingleDeviceEngine(actor), model)
    hand_over(1)
    model.model.norm.weight.data = model.model.norm.weight.data.clone()
    with pytest.raises(RolloutError, match=r"'model.norm.weight' first"):
        hand_over(2)
    other = tiny_model("llama")
    with pytest.raises(RolloutError, match=r"not shared .*'model.embed_tokens.weight' first"):
        SharedHandOver(actor, other)
    with pytest.raises(RolloutError, match="not shared"):
        check_shared_storage(model, other)
    for mine, theirs in zip(model.parameters(), other.parameters(), strict=True):
        theirs.data = mine.data
    shared = SharedHandOver(actor, other)
    shared(1)
    other.model.norm.weight.data = other.model.norm.weight.data.clone()
    with pytest.raises(RolloutError, match=r"1 parameters are not shared .*'model.norm.weight' first"):
        shared(2)


# ------------------------------------------------------------------ copies in one process


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_another_module_gets_the_weights(dtype: torch.dtype) -> None:
    source = tensors()
    target = {name: torch.zeros_like(t, dtype=dtype) for name, t in source.items()}
    target["q"] = by_columns(target["q"])
    hand_over = MovedHandOver(source, target)
    for version in (1, 2):
        source["q"] += 1
        report = hand_over(version)
        assert all(torch.equal(target[name], source[name].to(dtype)) for name in source)
        elements = sum(t.numel() for t in source.values())
        assert report.moved == Moved(0, 0, elements * dtype.itemsize, 0)


def test_what_is_shared_is_not_copied() -> None:
    source = tensors()
    target = {**source, "norm": torch.zeros(7)}
    assert MovedHandOver(source, target)(1).moved == Moved(copied=28)
    assert torch.equal(target["norm"], source["norm"])


def test_only_the_adapter_moves() -> None:
    from podium.core.settings import LoraSettings
    from podium.models.adapters import add_lora

    trained, generating = tiny_model("llama"), tiny_model("llama", seed=1)
    for model in (trained, generating):
        add_lora(model, LoraSettings(rank=2, target_modules=["q_proj"]))
    hand_over = hand_over_between(SingleDeviceEngine(ActorModel(trained)), generating)
    assert all(torch.equal(a, b) for a, b in zip(trained.parameters(), generating.parameters(), strict=True))
    adapter = [p for p in trained.parameters() if p.requires_grad]
    with torch.no_grad():
        for parameter in adapter:
            parameter.add_(1)
    report = hand_over(1)
    assert report.moved.copied == sum(p.numel() * 4 for p in adapter) == 2 * (2 * 64 + 64 * 2) * 4
    assert all(torch.equal(a, b) for a, b in zip(trained.parameters(), generating.parameters(), strict=True))


def test_other_models_are_refused() -> None:
    with pytest.raises(ConfigError, match=r"needs 'q' of shape \[9, 6\]; training has the shape \[8, 6\]"):
        MovedHandOver(tensors(), {"q": torch.zeros(9, 6)})
    with pytest.raises(ConfigError, match="no such tensor"):
        MovedHandOver(tensors(), {"other": torch.zeros(2)})


def test_who_shares_a_device_reads_and_who_does_not_is_sent_to() -> None:
    from podium.hybrid.plan import Transfer
    from podium.hybrid.same_device import is_near, place_of

    a, b = ("host", "uuid-a", 0), ("host", "uuid-b", 1)
    places = [a, a, b, ("host", "uuid-a", 3), ("other", "uuid-a", 0), None, None]
    box = Box.whole((2,))
    near = {(i, j) for i in range(7) for j in range(7) if i != j and is_near(Transfer("w", box, i, j, 8), places)}
    # Another device, the same one under another number, another host's, CPUs: by messages.
    assert near == {(0, 1), (1, 0)}
    assert place_of(torch.device("cpu")) is None


# ------------------------------------------------------------------ verification


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16, torch.float64])
def test_fingerprints_of_boxes_add_up(dtype: torch.dtype) -> None:
    for tensor in tensors(dtype).values():
        whole = Box.whole(tensor.shape)
        want = fingerprint(tensor, whole)
        if not tensor.shape:
            continue
        for dim in range(tensor.ndim):
            cut = 2
            parts = []
            for start, stop in ((0, cut), (cut, tensor.shape[dim])):
                box = Box(
                    tuple(start if d == dim else 0 for d in range(tensor.ndim)),
                    tuple(stop if d == dim else n for d, n in enumerate(tensor.shape)),
                )
                parts.append(fingerprint(tensor[box.within(whole)], box))
            assert int(sum(parts)) == int(want)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
def test_fingerprints_see_one_bit_and_an_exchange(dtype: torch.dtype) -> None:
    bits = {2: torch.int16, 4: torch.int32, 8: torch.int64}[dtype.itemsize]
    for name, tensor in tensors(dtype).items():
        box = Box.whole(tensor.shape)
        want = int(fingerprint(tensor, box))
        for place in range(tensor.numel()):
            for bit in (0, 1, dtype.itemsize * 8 - 2):
                other = tensor.clone()
                other.view(-1).view(bits)[place] ^= 1 << bit
                assert int(fingerprint(other, box)) != want, (name, place, bit)
        if tensor.ndim:
            other = tensor.clone()
            other.view(-1)[[0, -1]] = tensor.view(-1)[[-1, 0]]
            assert int(fingerprint(other, box)) != want
            assert int(fingerprint(tensor.flip(0), box)) != want


@pytest.mark.parametrize("name", tensors())
def test_a_wrong_weight_stops_the_run_and_is_named(name: str) -> None:
    source = tensors()
    target = {n: torch.zeros_like(t, dtype=torch.bfloat16) for n, t in source.items()}
    hand_over = MovedHandOver(source, target)
    hand_over(1)
    target[name].view(-1)[-1] += 1
    with pytest.raises(RolloutError, match=f"'{name}' on rank 0 is not what training holds"):
        hand_over.check()
    hand_over(2)


def test_a_plan_that_forgets_a_piece_is_found() -> None:
    source, target = {"w": torch.arange(6.0)}, {"w": torch.zeros(6)}
    whole = Layout(1, {"w": TensorShards((6,), torch.float32, (Box.whole((6,)),))})
    plan = make_plan(whole, whole)
    broken = type(plan)(plan.source, plan.target, (), ())
    Transport(broken, 0, source, target).run()
    assert mismatched_tensors(broken, 0, source, {"w": torch.ones(6)}) == [("w", 0)]
    Transport(plan, 0, source, target).run()
    assert mismatched_tensors(plan, 0, source, target) == []


def test_the_canary_runs_as_often_as_it_is_told() -> None:
    calls: list[int] = []

    def canary() -> Any:
        calls.append(len(calls))
        return torch.tensor([-1.0, -2.0]), torch.tensor([-1.0, -2.0 - 0.04 * len(calls)])

    hand_over = MovedHandOver(tensors(), tensors(seed=1), canary=canary, canary_every=2, canary_tolerance=0.05)
    hand_over(1)
    hand_over(2)
    assert calls == [0]
    with pytest.raises(RolloutError, match=r"differ by 0.08 nats on the canary tokens"):
        hand_over(3)


def test_a_canary_that_is_not_finite_is_found() -> None:
    with pytest.raises(RolloutError, match="differ by nan"):
        check_canary([float("nan")], [0.0], 0.1)
