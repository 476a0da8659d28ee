"""Token weights: hand-computed, and the same loss however the minibatch is split."""

from __future__ import annotations

import pytest
import torch
from torch.testing import assert_close

from podium.algorithms import REDUCTIONS, token_weights

MASK = torch.tensor([[1, 1, 1, 0], [0, 1, 0, 0], [0, 0, 0, 0]]).bool()
LENGTH = {"constant": 8}


@pytest.mark.parametrize(
    ("mode", "first", "second"),
    [
        ("token_mean", 1 / 4, 1 / 4),
        ("sequence_mean_token_mean", 1 / 6, 1 / 2),
        ("sequence_mean_token_sum", 1 / 2, 1 / 2),
        ("constant", 1 / 24, 1 / 24),
    ],
)
def test_weights_by_hand(mode: str, first: float, second: float):
    weights = token_weights(MASK, mode, constant_length=LENGTH.get(mode))
    expected = torch.tensor([[first, first, first, 0], [0, second, 0, 0], [0, 0, 0, 0]])
    assert_close(weights, expected)
    assert weights.dtype == torch.float32


@pytest.mark.parametrize("mode", REDUCTIONS)
@pytest.mark.parametrize("shape", [(3, 4), (3, 0), (0, 4), (3,), (0,)])
def test_nothing_selected_weighs_nothing(mode: str, shape: tuple[int, ...]):
    weights = token_weights(torch.zeros(shape, dtype=torch.bool), mode, constant_length=LENGTH.get(mode))
    assert_close(weights, torch.zeros(shape))


@pytest.mark.parametrize("mode", ["token_mean", "sequence_mean_token_mean", "sequence_mean_token_sum"])
def test_one_entry_a_row(mode: str):
    assert_close(token_weights(torch.tensor([True, False, True]), mode), torch.tensor([0.5, 0, 0.5]))


@pytest.mark.parametrize("mode", REDUCTIONS)
@pytest.mark.parametrize("rows", [1, 2, 3, 5, 7])
def test_the_gradient_does_not_depend_on_the_split(mode: str, rows: int):
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(7, 5, generator=generator, dtype=torch.float64)
    mask = torch.rand(7, 5, generator=generator) < 0.5
    mask[2] = False
    weights = token_weights(mask, mode, constant_length=LENGTH.get(mode))

    def gradient(size: int) -> torch.Tensor:
        parameter = torch.ones(5, dtype=torch.float64, requires_grad=True)
        for start in range(0, 7, size):
            part = slice(start, start + size)
            (weights[part] * (parameter * x[part]).square()).sum().backward()
        return parameter.grad

    assert_close(gradient(rows), gradient(7), rtol=1e-12, atol=1e-12)


def test_errors():
    with pytest.raises(ValueError, match=r"'tokenmean'. Did you mean 'token_mean'\? Known: constant, sequence_mean"):
        token_weights(MASK, "tokenmean")
    with pytest.raises(ValueError, match="needs constant_length"):
        token_weights(MASK, "constant")
    with pytest.raises(ValueError, match="only used by reduction 'constant'"):
        token_weights(MASK, "token_mean", constant_length=3)
    with pytest.raises(ValueError, match=r"\[B, T\] or \[B\]"):
        token_weights(MASK[None], "token_mean")
