"""Importance corrections between rollout and training: by hand, and what holds for every one of them."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor
from torch.testing import assert_close

from podium.algorithms import CORRECTIONS, correction, find_correction, policy_loss

NAMES = sorted(name for name, c in CORRECTIONS.items() if c.function.__module__.startswith("podium."))
MASK = torch.tensor([[1, 1, 0], [1, 1, 1], [0, 0, 0]]).bool()
RATIOS = torch.tensor([[0.5, 3.0, 7.0], [1.0, 1.0, 1.0], [9.0, 9.0, 9.0]], dtype=torch.float64)


def rows(*values: list[float]) -> Tensor:
    return torch.tensor(values, dtype=torch.float64)


# name -> settings, weights, mask, what was touched: (sum, count), effective sample size of the 5 tokens
HAND: dict[str, tuple[dict[str, float], Tensor, list[list[int]], str, tuple[int, int], float]] = {
    "token_truncated": (
        {"cap": 2.0},
        rows([0.5, 2, 0], [1, 1, 1], [0, 0, 0]),
        [[1, 1, 0], [1, 1, 1], [0, 0, 0]],
        "truncated",
        (1, 5),
        5.5**2 / 7.25 / 5,
    ),
    # .5 * 3 = 1.5 for the first, 1 for the second
    "sequence_truncated": (
        {"cap": 1.25},
        rows([1.25, 1.25, 0], [1, 1, 1], [0, 0, 0]),
        [[1, 1, 0], [1, 1, 1], [0, 0, 0]],
        "truncated",
        (1, 2),
        5.5**2 / (2 * 1.25**2 + 3) / 5,
    ),
    "token_masked": (
        {"low": 0.4, "high": 2.0},
        rows([0.5, 0, 0], [1, 1, 1], [0, 0, 0]),
        [[1, 0, 0], [1, 1, 1], [0, 0, 0]],
        "masked",
        (1, 5),
        3.5**2 / 3.25 / 5,
    ),
    # Geometric mean sqrt(1.5) = 1.22 for the first.
    "sequence_rejected": (
        {"low": 0.8, "high": 1.2},
        rows([0, 0, 0], [1, 1, 1], [0, 0, 0]),
        [[0, 0, 0], [1, 1, 1], [0, 0, 0]],
        "rejected",
        (1, 2),
        9 / 3 / 5,
    ),
}


def test_every_correction_has_a_case_worked_out_by_hand():
    assert sorted(HAND) == NAMES


@pytest.mark.parametrize("name", NAMES)
def test_by_hand(name: str):
    settings, weights, kept, touched, share, size = HAND[name]
    rollout = torch.full((3, 3), -1.5, dtype=torch.float64)
    got = find_correction(name)(rollout + RATIOS.log(), rollout, MASK, **settings)
    assert_close(got.importance_weights, weights)
    assert got.corrected_mask.tolist() == [[bool(x) for x in row] for row in kept]
    means = {name: float(total) / float(count) for name, (total, count) in got.metrics.items()}
    assert tuple(int(x) for x in got.metrics[touched]) == share
    assert means["effective_sample_size"] == pytest.approx(size)
    assert means["importance_weight"] == pytest.approx(float(weights.sum()) / sum(map(sum, kept)))
    logs = RATIOS[MASK].log()
    assert means["rollout_kl"] == pytest.approx(float(-logs.mean()))
    assert means["rollout_kl_k3"] == pytest.approx(float((RATIOS[MASK] - 1 - logs).mean()))


@pytest.mark.parametrize("name", NAMES)
def test_the_same_policy_needs_no_correction(name: str):
    log_probs = -torch.rand(3, 3)
    got = find_correction(name)(log_probs, log_probs, MASK)
    assert torch.equal(got.corrected_mask, MASK) and torch.equal(got.importance_weights, MASK.float())
    means = {name: float(total) / float(count) for name, (total, count) in got.metrics.items()}
    assert means["importance_weight"] == means["effective_sample_size"] == 1.0
    assert means["rollout_kl"] == means["rollout_kl_k3"] == 0.0
    assert sum(means.get(name, 0.0) for name in ("truncated", "masked", "rejected")) == 0.0


@pytest.mark.parametrize("name", NAMES)
def test_entries_outside_the_mask_are_not_read_and_extremes_stay_finite(name: str):
    old = torch.tensor([[-900.0, -1.0, torch.nan], [-1.0, -900.0, torch.inf], [torch.nan] * 3]).requires_grad_()
    rollout = torch.tensor([[-1.0, -900.0, 0.0], [-1.0, -1.0, 0.0], [0.0] * 3])
    mask = torch.tensor([[1, 1, 0], [1, 1, 0], [0, 0, 0]]).bool()
    got = find_correction(name)(old, rollout, mask)
    assert torch.isfinite(got.importance_weights).all() and not got.importance_weights.requires_grad
    assert not got.importance_weights[~got.corrected_mask].any() and not (got.corrected_mask & ~mask).any()
    assert all(torch.isfinite(x) for pair in got.metrics.values() for x in pair)
    nothing = find_correction(name)(old, rollout, torch.zeros_like(mask))
    assert not nothing.importance_weights.any() and not nothing.corrected_mask.any()
    assert all(torch.isfinite(x) for pair in nothing.metrics.values() for x in pair)


@pytest.mark.parametrize(
    ("name", "settings", "message"),
    [
        ("token_truncated", {"cap": 0.0}, "cap must be above 0"),
        ("sequence_truncated", {"cap": -1.0}, "cap must be above 0"),
        ("token_masked", {"low": 1.5}, "low <= 1 <= high"),
        ("sequence_rejected", {"high": 0.9}, "low <= 1 <= high"),
        ("token_masked", {"hihg": 2.0}, r"Did you mean 'high'\?"),
    ],
)
def test_wrong_settings(name: str, settings: dict[str, float], message: str):
    with pytest.raises(ValueError, match=message):
        find_correction(name)(torch.zeros(1, 1), torch.zeros(1, 1), torch.ones(1, 1).bool(), **settings)


def test_errors_say_what_to_write():
    with pytest.raises(ValueError, match=r"Unknown correction 'token_trunkated'. Did you mean 'token_truncated'\?"):
        find_correction("token_trunkated")
    with pytest.raises(ValueError, match=r"must all be \[B, T\]"):
        find_correction("token_masked")(torch.zeros(1, 2), torch.zeros(1, 3), torch.ones(1, 2).bool())


def test_adding_a_correction(monkeypatch: Any):
    monkeypatch.setattr("podium.algorithms.corrections.CORRECTIONS", {})
    with pytest.raises(ValueError, match="takes 3 tensors by position"):
        correction("mine")(lambda old, rollout: None)
    with pytest.raises(ValueError, match=r"no default: \['cap'\]"):
        correction("mine")(lambda old, rollout, mask, *, cap: None)
    correction("mine")(CORRECTIONS["token_truncated"].function)
    with pytest.raises(ValueError, match="already"):
        correction("mine")(CORRECTIONS["token_truncated"].function)


def test_a_corrected_loss_weighs_the_policy_term_only():
    loss = policy_loss(corrected=True, kl_coef=0.5, kl_estimator="k1", entropy_coef=0.25)
    assert loss.mask == "corrected_mask" and "importance_weights" in loss.columns and "loss_mask" not in loss.columns
    outputs = {"log_probs": rows([-1.0, -1.0]), "entropy": rows([2.0, 2.0])}
    columns = {
        "old_log_probs": rows([-1.0, -1.0]),
        "advantages": rows([2.0, 2.0]),
        "ref_log_probs": rows([-2.0, -2.0]),
        "importance_weights": rows([1.5, 1.0]),
        "corrected_mask": torch.tensor([[True, False]]),
    }
    value, _ = loss.function(outputs, columns)
    assert_close(value, rows([-2 * 1.5 - 0.5 + 0.5, -2 - 0.5 + 0.5]))
