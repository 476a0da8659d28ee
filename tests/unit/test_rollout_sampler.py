"""The sampler: the distribution it draws from, truncation by hand, seeds, and log-probs."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch

from podium.engines.base import SamplingParams
from podium.engines.rollout.native.sampler import Sampler, truncate, uniforms


def _truncate(weights: list[float], top_k: int = 0, top_p: float = 1.0, min_p: float = 0.0) -> list[float]:
    out = truncate(torch.tensor([weights]), torch.tensor([top_k]), torch.tensor([top_p]), torch.tensor([min_p]))
    return [round(x, 6) for x in out[0].tolist()]


WEIGHTS = [0.1, 0.4, 0.2, 0.3]


@pytest.mark.parametrize(
    ("settings", "kept"),
    [
        ({}, [0.1, 0.4, 0.2, 0.3]),
        ({"top_k": 2}, [0.0, 0.4, 0.0, 0.3]),
        ({"top_k": 9}, [0.1, 0.4, 0.2, 0.3]),
        ({"top_p": 0.3}, [0.0, 0.4, 0.0, 0.0]),  # the heaviest alone has 0.4
        ({"top_p": 0.41}, [0.0, 0.4, 0.0, 0.3]),
        ({"top_p": 0.69}, [0.0, 0.4, 0.0, 0.3]),
        ({"top_p": 0.71}, [0.0, 0.4, 0.2, 0.3]),
        ({"top_k": 2, "top_p": 0.5}, [0.0, 0.4, 0.0, 0.0]),  # of the two left, the heavier has 4/7
        ({"top_k": 2, "top_p": 0.6}, [0.0, 0.4, 0.0, 0.3]),
        ({"min_p": 0.6}, [0.0, 0.4, 0.0, 0.3]),  # at least 0.24
        ({"min_p": 1.0}, [0.0, 0.4, 0.0, 0.0]),
    ],
)
def test_truncation_by_hand(settings: dict[str, float], kept: list[float]) -> None:
    assert _truncate(WEIGHTS, **settings) == kept  # type: ignore[arg-type]


def test_among_equals_the_lower_id_stays() -> None:
    assert _truncate([0.25, 0.25, 0.25, 0.25], top_k=2) == [0.25, 0.25, 0.0, 0.0]


def _by_sorting(weights: torch.Tensor, top_k: int, top_p: float, min_p: float) -> torch.Tensor:
    """The definition, on all tokens in order."""
    ordered, index = torch.sort(weights.double(), descending=True, stable=True)
    if top_k:
        ordered[top_k:] = 0
    before = ordered.cumsum(0) - ordered
    keep = (before < top_p * ordered.sum()) if top_p < 1 else torch.ones_like(before, dtype=torch.bool)
    keep &= ordered >= min_p * ordered[0]
    return torch.zeros_like(ordered).scatter_(0, index, ordered * keep).float()


@pytest.mark.parametrize("seed", range(12))
def test_truncation_equals_its_definition_with_ties_and_flat_tails(seed: int) -> None:
    """Rows decided by the heaviest few and rows that need all tokens, in one batch."""
    generator = torch.Generator().manual_seed(seed)
    logits = torch.randn(6, 1500, generator=generator) * torch.tensor([0.01, 0.5, 1.0, 3.0, 6.0, 6.0])[:, None]
    weights = logits.to(torch.bfloat16).float().exp()  # bf16 makes many equal
    top_k = torch.tensor([0, 7, 600, 0, 512, 1500])[torch.randperm(6, generator=generator)]
    top_p = torch.tensor([1.0, 0.95, 0.5, 0.999, 1.0, 0.9])[torch.randperm(6, generator=generator)]
    min_p = torch.tensor([0.0, 0.0, 0.01, 0.1, 0.0, 0.3])[torch.randperm(6, generator=generator)]
    out = truncate(weights, top_k, top_p, min_p)
    for row in range(6):
        expected = _by_sorting(weights[row], int(top_k[row]), float(top_p[row]), float(min_p[row]))
        assert torch.equal(out[row], expected)


def _draw(logits: torch.Tensor, params: SamplingParams, count: int) -> tuple[torch.Tensor, torch.Tensor]:
    rows = logits.expand(count, -1)
    return Sampler()(rows, list(range(count)), [3] * count, [params] * count)


def _chi_square(counts: np.ndarray, probabilities: np.ndarray) -> float:
    expected = probabilities * counts.sum()
    return float(((counts - expected) ** 2 / expected).sum())


@pytest.mark.parametrize("vocabulary", [8, 256, 700])  # less than, equal to, and not a multiple of a block
@pytest.mark.parametrize("temperature", [1.0, 0.7])
def test_draws_follow_the_distribution(vocabulary: int, temperature: float) -> None:
    logits = torch.randn(1, vocabulary, generator=torch.Generator().manual_seed(vocabulary))
    tokens, _ = _draw(logits, SamplingParams(temperature=temperature), 30_000)
    probabilities = (logits[0].double() / temperature).softmax(-1).numpy()
    statistic = _chi_square(np.bincount(tokens.numpy(), minlength=vocabulary), probabilities)
    # Mean v - 1, variance 2 (v - 1): five standard deviations.
    assert statistic < vocabulary - 1 + 5 * math.sqrt(2 * (vocabulary - 1))


def test_truncated_draws_follow_the_truncated_distribution() -> None:
    logits = torch.tensor([WEIGHTS]).log()
    tokens, log_probs = _draw(logits, SamplingParams(top_k=3, top_p=0.71 / 0.9), 20_000)
    counts = np.bincount(tokens.numpy(), minlength=4)
    assert counts[0] == 0
    assert _chi_square(counts[1:], np.array([4, 2, 3]) / 9) < 20
    # The log-prob is of the whole distribution.
    torch.testing.assert_close(log_probs, logits[0][tokens], atol=1e-6, rtol=0)


def test_log_probs_are_those_of_log_softmax_at_the_temperature() -> None:
    logits = torch.randn(5, 1000, generator=torch.Generator().manual_seed(0)) * 4
    temperatures = [1.0, 0.5, 2.0, 0.0, 1.0]
    params = [SamplingParams(temperature=t, min_p=0.1 * (i == 4)) for i, t in enumerate(temperatures)]
    tokens, log_probs = Sampler()(logits, [1, 2, 3, 4, 5], [0] * 5, params)
    scaled = logits / torch.tensor([t or 1.0 for t in temperatures])[:, None]
    expected = scaled.log_softmax(-1).gather(-1, tokens[:, None])[:, 0]
    torch.testing.assert_close(log_probs, expected, atol=2e-6, rtol=0)
    assert tokens[3] == logits[3].argmax()


def test_a_row_does_not_depend_on_the_others() -> None:
    logits = torch.randn(17, 5000, generator=torch.Generator().manual_seed(1))
    kinds = [
        SamplingParams(),
        SamplingParams(temperature=0),
        SamplingParams(top_k=5),
        SamplingParams(temperature=0.8, top_p=0.9),
        SamplingParams(min_p=0.05),
    ]
    params = [kinds[i % 5] for i in range(17)]
    seeds, positions = [i * 7 for i in range(17)], [i % 4 for i in range(17)]
    sampler = Sampler()
    tokens, log_probs = sampler(logits, seeds, positions, params)
    for i in range(17):
        one, score = sampler(logits[i : i + 1], seeds[i : i + 1], positions[i : i + 1], params[i : i + 1])
        assert one[0] == tokens[i]
        assert score[0] == log_probs[i]


def test_uniforms_are_uniform_and_unrelated() -> None:
    draws = uniforms([seed for seed in range(200) for _ in range(200)], list(range(200)) * 200).reshape(200, 200)
    assert draws.min() > 0
    assert draws.max() < 1
    assert abs(draws.mean() - 0.5) < 0.01
    assert _chi_square(np.histogram(draws, 20, (0, 1))[0], np.full(20, 1 / 20)) < 50
    for a, b in ((draws[:-1], draws[1:]), (draws[:, :-1], draws[:, 1:]), (draws[:-1, 1:], draws[1:, :-1])):
        assert abs(np.corrcoef(a.ravel(), b.ravel())[0, 1]) < 0.02
    # The same on every machine, also for negative and large seeds.
    assert uniforms([0], [0])[0] == pytest.approx(uniforms([0, 1], [0, 0])[0], abs=0)
    assert len({*uniforms([-1, 2**63 - 1, 2**64 - 2, 5], [0, 0, 0, 0])}) == 4


def test_tokens_without_weight_are_never_drawn() -> None:
    logits = torch.full((4000, 600), float("-inf"))
    logits[:, [3, 299, 511]] = 0.0
    tokens, _ = Sampler()(logits, list(range(4000)), [0] * 4000, [SamplingParams()] * 4000)
    assert set(tokens.tolist()) == {3, 299, 511}


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), "all"])
@pytest.mark.parametrize("params", [SamplingParams(), SamplingParams(temperature=0), SamplingParams(top_p=0.9)])
def test_log_prob_tells_logits_that_are_not_finite(bad: float | str, params: SamplingParams) -> None:
    logits = torch.zeros(2, 300)
    if bad == "all":
        logits[1] = float("-inf")
    else:
        logits[1, 7] = float(bad)
    _, log_probs = Sampler()(logits, [0, 1], [0, 0], [params, params])
    assert log_probs.isfinite().tolist() == [True, False]
