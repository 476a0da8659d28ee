"""The training pass's kernels against the same functions in torch. On a GPU, or anywhere under Triton's interpreter."""

from __future__ import annotations

import os

import pytest
import torch
from torch import Tensor

pytest.importorskip("triton")
INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not (torch.cuda.is_available() or INTERPRETED), reason="needs a GPU, or TRITON_INTERPRET=1"),
]
DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
KINDS = [torch.float32] if INTERPRETED else [torch.float32, torch.bfloat16]


def _near(ours: Tensor | None, theirs: Tensor | None) -> None:
    assert (ours is None) == (theirs is None)
    if ours is None or theirs is None:
        return
    tolerance = 1e-5 if ours.dtype == torch.float32 else 1e-2
    assert ours.shape == theirs.shape
    assert float((ours.float() - theirs.float()).norm() / theirs.float().norm().clamp(min=1e-9)) < tolerance


def _randn(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.randn(*shape, device=DEVICE).to(dtype)


@pytest.mark.parametrize("dtype", KINDS)
@pytest.mark.parametrize("width", [96, 896])
def test_norm(dtype: torch.dtype, width: int) -> None:
    from podium.models import layer_kernels, layer_plain

    rows = 40 if INTERPRETED else 1500
    x, delta, grad, residual = (_randn(rows, width, dtype=dtype) for _ in range(4))
    weight = _randn(width, dtype=dtype)
    for added in (None, delta):
        ours, theirs = (ops.add_norm(x, added, weight, 1e-6) for ops in (layer_kernels, layer_plain))
        for a, b in zip(ours, theirs, strict=True):
            _near(a, b)
        _near(layer_kernels.norm_again(theirs[0], weight, theirs[2]), theirs[1])
        for other in (None, residual):
            call = (grad, other, theirs[0], weight, theirs[2])
            for a, b in zip(layer_kernels.norm_backward(*call), layer_plain.norm_backward(*call), strict=True):
                _near(a, b)


@pytest.mark.parametrize("dtype", KINDS)
@pytest.mark.parametrize(("heads", "kv", "width"), [(4, 1, 16), (7, 1, 64), (6, 2, 128)])
def test_rotation(dtype: torch.dtype, heads: int, kv: int, width: int) -> None:
    from podium.models import layer_kernels, layer_plain

    qkv = _randn(37, heads + 2 * kv, width, dtype=dtype)
    angle = _randn(37, width // 2).repeat(1, 2)
    cosine, sine = angle.cos().to(dtype), angle.sin().to(dtype)
    ours, theirs = (ops.rotate(qkv, heads, cosine, sine) for ops in (layer_kernels, layer_plain))
    for a, b in zip(ours, theirs, strict=True):
        _near(a, b)
    back = (ops.rotate_back(*theirs, cosine, sine) for ops in (layer_kernels, layer_plain))
    _near(*back)


@pytest.mark.parametrize("dtype", KINDS)
def test_swiglu(dtype: torch.dtype) -> None:
    from podium.models import layer_kernels, layer_plain

    gate_up, grad = _randn(9, 2 * 2500, dtype=dtype), _randn(9, 2500, dtype=dtype)
    _near(layer_kernels.swiglu(gate_up), layer_plain.swiglu(gate_up))
    for a, b in zip(layer_kernels.swiglu_backward(gate_up, grad), layer_plain.swiglu_backward(gate_up, grad), strict=True):
        _near(a, b)


@pytest.mark.parametrize("with_bias", [False, True])
@pytest.mark.parametrize("softcap", [None, 5.0])
@pytest.mark.parametrize("with_entropy", [False, True])
def test_tiled_log_probs(with_bias: bool, softcap: float | None, with_entropy: bool) -> None:
    """In fp32, with some logits kept and with few, against the chunked form."""
    from podium.algorithms._chunked_log_probs import LogitTransform
    from podium.algorithms._tiled_log_probs import TiledLogProbs
    from podium.algorithms.log_probs import log_probs_from_hidden

    hidden, weight, bias = _randn(7, 16), _randn(1000, 16) * 0.5, _randn(1000) if with_bias else None
    targets = torch.randint(0, 1000, (7,), device=DEVICE)
    upstream = _randn(2, 7)

    def grads(keep: int | None, tiled: bool) -> list[Tensor]:
        leaves = [x.clone().requires_grad_() for x in (hidden, weight, bias) if x is not None]
        if tiled:
            b = leaves[2] if with_bias else None
            out = TiledLogProbs.apply(
                leaves[0], leaves[1], b, targets, LogitTransform(1.3, softcap, 0.7), with_entropy, 2000, keep
            )
        else:
            options = {"bias": leaves[2] if with_bias else None, "temperature": 0.7, "softcap": softcap, "scale": 1.3}
            both = log_probs_from_hidden(*leaves[:2], targets, with_entropy=with_entropy, chunk_tokens=3, **options)
            out = both if with_entropy else (both, None)
        loss = (out[0] * upstream[0]).sum() + ((out[1] * upstream[1]).sum() if with_entropy else 0.0)
        loss.backward()
        return [out[0].detach(), *([out[1].detach()] if with_entropy else []), *(x.grad for x in leaves if x.grad is not None)]

    want = grads(0, False)
    for keep in (0, 5000, None):
        for a, b in zip(grads(keep, True), want, strict=True):
            _near(a, b)


def test_merging_two_parts_of_attention() -> None:
    from podium.models.layer_kernels import merge_

    a, b, la, lb = _randn(5, 3, 8), _randn(5, 3, 8), _randn(3, 5), _randn(3, 5)
    lb[:, 1], lb[:, 2] = float("inf"), float("-inf")
    nothing = torch.full_like(lb, float("-inf"))
    known = torch.where(lb.isinf(), nothing, lb)
    normaliser = torch.logaddexp(la, known)
    want = a * (la - normaliser).exp().t()[..., None] + b * (known - normaliser).exp().t()[..., None]
    merge_(a, la, b, lb)
    _near(a, want)
    _near(la, normaliser)


def test_adamw_with_moments_in_8_bits() -> None:
    """The first update is equal; the codes after it differ by rounding at random, which is under 7% and 4.5% a value."""
    from podium.engines.train import adamw_8bit
    from podium.engines.train.adamw_kernel import update

    count, blocks = 1000, 4
    rates = (1e-2 / (1 - 0.9), 0.999, 0.9, 0.95, (1 - 0.95) ** -0.5, 1e-8)
    start, grad, results = _randn(count), _randn(count), []
    for step in (update, adamw_8bit.update_plain):
        parameter = start.clone()
        codes = [torch.zeros(count, dtype=torch.uint8, device=DEVICE) for _ in range(2)]
        scales = [torch.zeros(blocks, device=DEVICE) for _ in range(2)]
        step(parameter, grad, [codes[0], scales[0], codes[1], scales[1]], rates, 7)
        first = adamw_8bit.decode_first(codes[0], scales[0])
        results.append((parameter, first, adamw_8bit.decode_second(codes[1], scales[1])))
    (parameter, first, second), (theirs, *_) = results
    _near(parameter, theirs)
    assert float((first - 0.1 * grad).norm() / grad.norm()) < 0.1 * 0.07
    assert float((second - 0.05**0.5 * grad.abs()).norm() / grad.norm()) < 0.05**0.5 * 0.045
