"""Chunked log-probs against plain log_softmax: values, gradients, every chunk size."""

from __future__ import annotations

import pytest
import torch
from torch.testing import assert_close

from podium.algorithms import entropy_from_logits, log_probs_from_hidden, log_probs_from_logits
from podium.algorithms import log_probs as module

N, D, V = 11, 6, 17
VARIANTS = [
    {},
    {"temperature": 0.7},
    {"scale": 0.25},
    {"softcap": 2.0},
    {"temperature": 1.3, "scale": 3.0, "softcap": 1.5},
]


def inputs(dtype: torch.dtype = torch.float32, bias: bool = True, n: int = N) -> dict[str, torch.Tensor | None]:
    generator = torch.Generator().manual_seed(3)
    shapes = {"hidden": (n, D), "weight": (V, D), "bias": (V,)}
    tensors = {k: torch.randn(s, generator=generator).to(dtype).requires_grad_() for k, s in shapes.items()}
    tensors["targets"] = torch.randint(0, V, (n,), generator=generator)
    return tensors if bias else tensors | {"bias": None}


def plain(hidden, weight, targets, *, bias=None, temperature=1.0, softcap=None, scale=1.0):
    logits = torch.nn.functional.linear(hidden, weight, bias)
    logits = logits.to(torch.promote_types(logits.dtype, torch.float32)) * scale
    if softcap is not None:
        logits = softcap * torch.tanh(logits / softcap)
    log_p = torch.log_softmax(logits / temperature, dim=-1)
    return log_p.gather(1, targets[:, None])[:, 0], -(log_p.exp() * log_p).sum(dim=1)


def gradients(outputs, tensors):
    """Of an arbitrary weighted sum of the outputs, for everything that has a gradient."""
    weights = [torch.linspace(-1, 2, out.shape[0], dtype=out.dtype) * (i + 1) for i, out in enumerate(outputs)]
    total = sum((w * out).sum() for w, out in zip(weights, outputs, strict=True))
    leaves = [t for t in tensors.values() if t is not None and t.requires_grad]
    return torch.autograd.grad(total, leaves, retain_graph=True)


@pytest.mark.parametrize("block", [1, 3, N])
@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("variant", VARIANTS, ids=str)
def test_values_and_gradients_at_every_chunk_size(variant, bias: bool, block: int, monkeypatch):
    monkeypatch.setitem(module.BLOCK_ELEMENTS, "cpu", block * V)
    tensors = inputs(bias=bias)
    expected = plain(**tensors, **variant)
    for chunk in (*range(1, N + 2), None):
        log_probs = log_probs_from_hidden(**tensors, **variant, chunk_tokens=chunk)
        assert_close(log_probs, expected[0], rtol=1e-5, atol=1e-5)
        assert_close(gradients([log_probs], tensors), gradients(expected[:1], tensors), rtol=1e-5, atol=1e-5)
        both = log_probs_from_hidden(**tensors, **variant, with_entropy=True, chunk_tokens=chunk)
        assert_close(both, expected, rtol=1e-5, atol=1e-5)
        assert_close(gradients(both, tensors), gradients(expected, tensors), rtol=1e-5, atol=1e-5)
        # only the entropy is used
        assert_close(gradients(both[1:], tensors), gradients(expected[1:], tensors), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("with_entropy", [False, True])
def test_gradients_agree_with_finite_differences(with_entropy: bool):
    tensors = inputs(torch.float64, n=4)

    def function(hidden, weight, bias):
        return log_probs_from_hidden(
            hidden,
            weight,
            tensors["targets"],
            bias=bias,
            temperature=0.8,
            softcap=3.0,
            scale=1.5,
            with_entropy=with_entropy,
            chunk_tokens=3,
        )

    assert torch.autograd.gradcheck(function, [tensors[k] for k in ("hidden", "weight", "bias")])


@pytest.mark.parametrize("frozen", ["hidden", "weight", "bias"])
def test_what_needs_no_gradient_gets_none(frozen: str):
    tensors = inputs()
    tensors[frozen].requires_grad_(False)
    log_probs_from_hidden(**tensors).sum().backward()
    assert [name for name, t in tensors.items() if t.grad is None] == [frozen, "targets"]


def test_a_tied_weight_gets_both_gradients():
    weight = torch.randn(V, D, requires_grad=True)
    targets = torch.arange(5)

    def grad(function):
        return torch.autograd.grad(function(torch.tanh(weight[3:8]), weight, targets).sum(), weight)[0]

    assert_close(grad(log_probs_from_hidden), grad(lambda *a: plain(*a)[0]), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("with_entropy", [False, True])
def test_no_tokens(with_entropy: bool):
    tensors = inputs(n=0)
    result = log_probs_from_hidden(**tensors, with_entropy=with_entropy)
    outputs = result if with_entropy else (result,)
    assert all(out.shape == (0,) and out.dtype == torch.float32 for out in outputs)
    sum(out.sum() for out in outputs).backward()
    assert not tensors["weight"].grad.any() and tensors["hidden"].grad.shape == (0, D)


def test_no_gradient_is_kept_when_none_is_wanted():
    tensors = inputs()
    with torch.no_grad():
        assert not log_probs_from_hidden(**tensors).requires_grad


def test_bf16_results_are_fp32_and_the_weight_gradient_is_summed_in_fp32():
    tensors = inputs(torch.bfloat16, n=400)
    log_probs, entropy = log_probs_from_hidden(**tensors, with_entropy=True, chunk_tokens=2)
    assert log_probs.dtype == entropy.dtype == torch.float32
    expected = plain(**tensors)
    assert_close((log_probs, entropy), expected, rtol=1e-5, atol=1e-5)  # the same bf16 logits
    log_probs.sum().backward()
    assert all(tensors[k].grad.dtype == torch.bfloat16 for k in ("hidden", "weight", "bias"))
    exact = {k: t.detach().double() if t.is_floating_point() else t for k, t in tensors.items()}
    exact["weight"].requires_grad_()
    plain(**exact)[0].sum().backward()
    error = (tensors["weight"].grad - exact["weight"].grad).norm() / exact["weight"].grad.norm()
    assert error < 0.01  # 200 chunks added up in bf16 would be several times that


def test_large_logits_stay_finite():
    hidden = torch.full((2, D), 1e4, requires_grad=True)
    log_probs, entropy = log_probs_from_hidden(hidden, torch.randn(V, D), torch.tensor([0, 1]), with_entropy=True)
    (log_probs + entropy).sum().backward()
    assert all(torch.isfinite(x).all() for x in (log_probs, entropy, hidden.grad))


def test_only_a_chunk_of_logits_exists_at_a_time():
    tensors = inputs(torch.bfloat16, bias=False, n=64)
    largest = 0

    class Watch(torch.utils._python_dispatch.TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            nonlocal largest
            out = func(*args, **(kwargs or {}))
            for tensor in out if isinstance(out, tuple) else (out,):
                if isinstance(tensor, torch.Tensor):
                    largest = max(largest, tensor.numel())
            return out

    with Watch():
        log_probs, entropy = log_probs_from_hidden(**tensors, with_entropy=True, chunk_tokens=8)
        (log_probs + entropy).sum().backward()
    assert largest == max(8 * V, 64 * D)


def test_plain_forms_agree():
    logits, targets = torch.randn(2, 3, V), torch.randint(0, V, (2, 3))
    eye = torch.eye(V)
    log_probs, entropy = log_probs_from_hidden(logits.view(6, V), eye, targets.view(6), temperature=0.5, with_entropy=True)
    assert_close(log_probs_from_logits(logits, targets, temperature=0.5).view(6), log_probs)
    assert_close(entropy_from_logits(logits / 0.5).view(6), entropy)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"hidden": torch.zeros(2, 3, D)}, "Flatten the tokens"),
        ({"weight": torch.zeros(V, D + 1)}, r"\[N, D\]"),
        ({"targets": torch.zeros(N)}, "int64"),
        ({"targets": torch.zeros(3).long()}, r"shape \[11\]"),
        ({"bias": torch.zeros(3)}, r"bias must have shape \[17\]"),
        ({"weight": torch.zeros(V, D, dtype=torch.bfloat16)}, "share a dtype"),
        ({"temperature": 0.0}, "temperature must be above 0"),
        ({"softcap": -1.0}, "softcap"),
        ({"chunk_tokens": 0}, "chunk_tokens"),
    ],
)
def test_errors(change, message: str):
    with pytest.raises(ValueError, match=message):
        log_probs_from_hidden(**(inputs() | change))


@pytest.mark.parametrize("chunk", [3, 100])
def test_a_second_backward_pass_gives_the_same(chunk: int) -> None:
    """The first one overwrites the logits that the forward pass left."""
    torch.manual_seed(0)
    hidden, weight = torch.randn(8, 4, requires_grad=True), torch.randn(20, 4, requires_grad=True)
    targets = torch.randint(20, (8,))
    log_probs, entropy = log_probs_from_hidden(hidden, weight, targets, chunk_tokens=chunk, with_entropy=True, softcap=2.0)
    total = (log_probs * torch.arange(8.0) + entropy).sum()
    first = torch.autograd.grad(total, (hidden, weight), retain_graph=True)
    second = torch.autograd.grad(total, (hidden, weight))
    for a, b in zip(first, second, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-6, atol=1e-6)
