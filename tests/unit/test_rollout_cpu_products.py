"""Products on a CPU, of packed weights and by way of fp32: the same numbers, of the weights as they are now."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

from podium.engines.base import Request, SamplingParams
from podium.engines.rollout.native import cpu_products
from podium.engines.rollout.native.cpu_products import PackedProducts, WideProducts, can_pack, products_for
from podium.engines.rollout.native.engine import NativeEngine
from tests.parity.test_native_vs_hf import run
from tests.tiny import tiny_model, tiny_tokenizer


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("shape", [(300, 40), (3, 1000), (70, 7000)])  # several parts, one part, parts that do not fit evenly
@pytest.mark.parametrize("bias", [False, True])
def test_the_product_is_that_of_fp32_rounded_once(dtype: torch.dtype, shape: tuple[int, int], bias: bool) -> None:
    x, weight = torch.randn(2, 3, shape[1]).to(dtype), torch.randn(*shape).to(dtype)
    added = torch.randn(shape[0]).to(dtype) if bias else None
    with torch.inference_mode(), WideProducts():
        got = F.linear(x, weight, added)
    want = F.linear(x.float(), weight.float(), None if added is None else added.float())
    assert got.dtype == dtype
    assert got.shape == (2, 3, shape[0])
    # A sum in another order may round to the other neighbour.
    torch.testing.assert_close(got.float(), want, rtol=torch.finfo(dtype).eps, atol=1e-3)


def test_few_rows_and_other_kinds_are_left_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(WideProducts, "_linear", None)  # calling it would fail
    with WideProducts():
        F.linear(torch.randn(3, 8).bfloat16(), torch.randn(5, 8).bfloat16())
        F.linear(torch.randn(64, 8), torch.randn(5, 8))


@pytest.mark.parametrize(("unit", "least", "used"), [(False, 0, True), (True, 0, False), (False, 1 << 30, False)])
def test_where_they_are_used(monkeypatch: pytest.MonkeyPatch, unit: bool, least: int, used: bool) -> None:
    monkeypatch.setattr(cpu_products, "without_unit", lambda dtype: dtype == torch.bfloat16 and not unit)
    monkeypatch.setattr(cpu_products, "_LEAST_PARAMETERS", least)
    calls: list[int] = []
    monkeypatch.setattr(WideProducts, "_linear", lambda self, x, *_: calls.append(1) or x)
    for dtype, expected in ((torch.bfloat16, used), (torch.float32, False)):
        calls.clear()
        layer = torch.nn.Linear(8, 8, bias=False, dtype=dtype)
        with products_for(layer), torch.no_grad():
            layer(torch.randn(16, 8, dtype=dtype))
        assert bool(calls) == expected


def test_log_probs_are_near_those_of_a_training_forward(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cpu_products, "without_unit", lambda dtype: dtype == torch.bfloat16)
    monkeypatch.setattr(cpu_products, "_LEAST_PARAMETERS", 0)
    model = tiny_model(dtype=torch.bfloat16, initializer_range=0.05)
    requests = [Request((5, 6, 7, 8 + i), SamplingParams(max_new_tokens=20), i) for i in range(6)]
    out = run(NativeEngine(model, tiny_tokenizer()), requests)
    model.set_attn_implementation("sdpa")
    off = []
    for t in out:
        with torch.no_grad():
            logits = model(torch.tensor([[*t.prompt_ids, *t.response_ids]])).logits[0, 3:-1].float()
        want = logits.log_softmax(-1).gather(-1, torch.tensor(t.response_ids)[:, None])[:, 0]
        off.append((want - torch.tensor(t.segments[0].log_probs)).abs())
    assert float(torch.cat(off).mean()) < 0.01


# ------------------------------------------------------------------ packed weights


def packed_kinds() -> list[torch.dtype]:
    return [kind for kind in (torch.float32, torch.bfloat16) if can_pack(kind)]


@pytest.mark.parametrize("dtype", packed_kinds())
@pytest.mark.parametrize("rows", [1, 3, 16, 300])
@pytest.mark.parametrize("bias", [False, True])
def test_a_packed_weight_gives_the_same_product(dtype: torch.dtype, rows: int, bias: bool) -> None:
    layer = torch.nn.Linear(256, 300, bias=bias, dtype=dtype)
    x = torch.randn(2, rows, 256).to(dtype)
    products = PackedProducts(layer)
    with torch.inference_mode(), products:
        got = layer(x)
    assert products.bytes == layer.weight.numel() * dtype.itemsize
    assert got.dtype == dtype and got.shape == (2, rows, 300)
    tolerance = 1e-5 if dtype == torch.float32 else 1e-2
    torch.testing.assert_close(got, layer(x).detach(), rtol=tolerance, atol=tolerance)
    products.clear()
    assert products.bytes == 0


@pytest.mark.parametrize("dtype", packed_kinds())
@pytest.mark.parametrize("way", ["in place", "an optimizer", "other memory", "a part of the memory"])
def test_the_product_is_of_the_weight_as_it_is_now(dtype: torch.dtype, way: str) -> None:
    """Nobody says that it changed: a rollout under old weights would go unseen."""
    layer, x = torch.nn.Linear(256, 512, bias=False, dtype=dtype), torch.randn(4, 256).to(dtype)
    products = PackedProducts(layer)
    with torch.inference_mode(), products:
        before = layer(x)
    if way == "in place":
        with torch.no_grad():
            layer.weight.mul_(2)
    elif way == "an optimizer":
        layer(x).sum().backward()
        torch.optim.SGD(layer.parameters(), lr=1.0).step()
    elif way == "other memory":
        layer.weight.data = layer.weight.data * 2
    else:
        with torch.no_grad():
            layer.weight[:7].add_(1)
    with torch.inference_mode(), products:
        after = layer(x)
    assert not torch.equal(before, after)
    torch.testing.assert_close(after, layer(x).detach(), rtol=1e-2, atol=1e-2)


def test_only_the_model_s_own_weights_are_packed() -> None:
    """One that is made anew at each call would be packed, and kept, at each call."""
    layer, x = torch.nn.Linear(256, 512, bias=False), torch.randn(4, 256)
    products = PackedProducts(layer)
    with torch.inference_mode(), products:
        made = F.linear(x, layer.weight * 2)
        assert products.bytes == 0
        part = F.linear(x, layer.weight[:300])  # rows of it, as fused layers have them, are its memory
    torch.testing.assert_close(made, 2 * layer(x).detach())
    torch.testing.assert_close(part, layer(x)[:, :300].detach())
    assert products.bytes == 300 * 256 * 4


def test_an_engine_packs_for_a_rollout_and_gives_it_back(monkeypatch: pytest.MonkeyPatch) -> None:
    if not can_pack(torch.float32):
        pytest.skip("this torch has no oneDNN")
    monkeypatch.setattr(cpu_products, "_LEAST_PARAMETERS", 0)
    monkeypatch.setattr(cpu_products, "_LEAST_WEIGHT", 0)
    model = tiny_model(initializer_range=0.05)
    requests = [Request((5, 6, 7, 8 + i), SamplingParams(max_new_tokens=20), i) for i in range(6)]
    engine = NativeEngine(model, tiny_tokenizer())
    first = run(engine, requests)
    assert engine.cache_bytes > sum(p.numel() * p.element_size() for p in model.parameters() if p.dim() == 2)
    with torch.no_grad():
        for p in model.parameters():
            p.mul_(1.1)
    engine.update_weights(1)
    second = run(engine, requests)
    engine.release()
    assert engine.cache_bytes == 0
    fresh = run(NativeEngine(model, tiny_tokenizer()), requests)
    assert [t.response_ids for t in second] == [t.response_ids for t in fresh]
    assert [t.response_ids for t in second] != [t.response_ids for t in first]
