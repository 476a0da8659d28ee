"""Every registered advantage estimator, by hand and by what must hold for all of them.

A new estimator fails here until it has a case in `HAND`.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor
from torch.testing import assert_close

from podium.algorithms import ADVANTAGE_ESTIMATORS
from podium.algorithms.advantage_estimators import AdvantageEstimator
from podium.core.batch import Batch, Ragged
from podium.workers.advantages import estimate_advantages

# Those of the package itself: other tests register their own while they run.
NAMES = sorted(name for name, e in ADVANTAGE_ESTIMATORS.items() if e.function.__module__.startswith("podium."))
OVER_GROUPS = [name for name in NAMES if "group_id" in ADVANTAGE_ESTIMATORS[name].needs]
WHITENED = ["gae", "reinforce_plus_plus", "reinforce_plus_plus_baseline"]
ROOT2, NAN = 2**0.5, float("nan")


def table(*rows: list[float]) -> Tensor:
    return torch.tensor(rows, dtype=torch.float64)


# Three rows: 2, 1 and 3 trained tokens. The last has a token of the environment, whose entries are never read.
MASK = torch.tensor([[1, 1, 0, 0], [1, 0, 0, 0], [1, 0, 1, 1]]).bool()
GROUPED = {"rewards": torch.tensor([1.0, 3.0, 8.0]).double(), "group_id": torch.tensor([4, 4, -1]), "mask": MASK}
TRIPLE = {**GROUPED, "group_id": torch.tensor([4, 4, 4])}
PLACED = {"token_rewards": table([0, 1, 0, 0], [3, 0, 0, 0], [1, 0, 0, 2]), "mask": MASK}


def whitened(values: list[float]) -> list[float]:
    """Unbiased, as torch's own std is."""
    x = torch.tensor(values, dtype=torch.float64)
    return ((x - x.mean()) / x.std()).tolist()


_rpp = whitened([1, 1, 3, 3, 2, 2])
_rppb = whitened([-3, -3, -1, 4, 4, 4])
HAND: dict[str, list[tuple[dict[str, Tensor], dict[str, Any], Tensor]]] = {
    # Rewards 1 and 3: mean 2, unbiased deviation sqrt 2. The third row is a group of one.
    "grpo": [(GROUPED, {"epsilon": 0.0}, table([-1 / ROOT2, -1 / ROOT2, 0, 0], [1 / ROOT2, 0, 0, 0], [0, 0, 0, 0]))],
    "dr_grpo": [(GROUPED, {}, table([-1, -1, 0, 0], [1, 0, 0, 0], [0, 0, 0, 0]))],
    "rloo": [
        (GROUPED, {}, table([-2, -2, 0, 0], [2, 0, 0, 0], [0, 0, 0, 0])),
        (TRIPLE, {}, table([-4.5, -4.5, 0, 0], [-1.5, 0, 0, 0], [6, 0, 6, 6])),
    ],
    # (2 * 1 + 1 * 3) / 3 = 5/3; with the third row (2 + 3 + 3 * 8) / 6 = 29/6
    "opo": [
        (GROUPED, {}, table([-2 / 3, -2 / 3, 0, 0], [4 / 3, 0, 0, 0], [0, 0, 0, 0])),
        (TRIPLE, {}, table([-23 / 6, -23 / 6, 0, 0], [-11 / 6, 0, 0, 0], [19 / 6, 0, 19 / 6, 19 / 6])),
    ],
    "reinforce": [
        (PLACED, {}, table([1, 1, 0, 0], [3, 0, 0, 0], [3, 0, 2, 2])),
        (PLACED, {"gamma": 0.5}, table([0.5, 1, 0, 0], [3, 0, 0, 0], [1.5, 0, 1, 2])),
    ],
    "reinforce_plus_plus": [
        (
            {"token_rewards": table([0, 1, 0, 0], [3, 0, 0, 0], [1, 0, 0, 2]), "mask": MASK},
            {},
            table([*whitened([1, 1, 3, 3, 2, 2])[:2], 0, 0], [_rpp[2], 0, 0, 0], [_rpp[3], 0, _rpp[4], _rpp[5]]),
        )
    ],
    # Mean of 1, 3 and 8 is 4.
    "reinforce_plus_plus_baseline": [
        (TRIPLE, {}, table([_rppb[0], _rppb[1], 0, 0], [_rppb[2], 0, 0, 0], [_rppb[3], 0, _rppb[4], _rppb[5]]))
    ],
    "remax": [
        (
            {**PLACED, "baseline_rewards": torch.tensor([0.5, 1.0, 4.0]).double()},
            {},
            table([0.5, 0.5, 0, 0], [2, 0, 0, 0], [-1, 0, -2, -2]),
        )
    ],
    # Rows 1 and 2: 1 - 2 = -1 at the last token, 0 + .5 * 2 - 4 + .25 * -1 = -3.25 before it; 3 - 1 = 2.
    "gae": [
        (
            {
                "token_rewards": table([0, 1, 0, 0], [3, 0, 0, 0]),
                "values": table([4, 2, NAN, NAN], [1, NAN, NAN, NAN]),
                "mask": MASK[:2],
            },
            {"gamma": 0.5, "gae_lambda": 0.5, "whiten_advantages": False},
            table([-3.25, -1, 0, 0], [2, 0, 0, 0]),
        )
    ],
    "distillation": [
        (
            {
                "teacher_log_probs": table([-1, -9, NAN, NAN], [-2, NAN, NAN, NAN]),
                "policy_log_probs": table([-2, -1, NAN, NAN], [-2, NAN, NAN, NAN]),
                "mask": MASK[:2],
            },
            {"clip": clip},
            table([1, low, 0, 0], [0, 0, 0, 0]),
        )
        for clip, low in ((None, -8.0), (5.0, -5.0))
    ],
}


def estimator(name: str) -> AdvantageEstimator:
    return ADVANTAGE_ESTIMATORS[name]


def columns(seed: int = 0, dtype: torch.dtype = torch.float64) -> dict[str, Tensor]:
    """Six rows in three groups of 3, 2 and 1, with holes in the mask and one row with nothing in it."""
    generator = torch.Generator().manual_seed(seed)

    def normal(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator, dtype=torch.float64).to(dtype)

    mask = torch.arange(7) < torch.tensor([7, 3, 5, 0, 1, 6])[:, None]
    mask[0, 2:4] = False
    return {
        "rewards": normal(6),
        "group_id": torch.tensor([9, 2, 9, 9, 2, 5]),
        "baseline_rewards": normal(6),
        "token_rewards": normal(6, 7),
        "values": normal(6, 7),
        "teacher_log_probs": -normal(6, 7).abs(),
        "policy_log_probs": -normal(6, 7).abs(),
        "mask": mask,
    }


def run(name: str, given: dict[str, Tensor], **settings: Any) -> dict[str, Tensor]:
    return estimator(name)(**{column: given[column] for column in estimator(name).needs}, **settings)


def test_every_estimator_has_a_case_worked_out_by_hand():
    assert sorted(HAND) == NAMES


@pytest.mark.parametrize(("name", "number"), [(name, n) for name in HAND for n in range(len(HAND[name]))])
def test_by_hand(name: str, number: int):
    given, settings, want = HAND[name][number]
    got = run(name, given, **settings)
    assert_close(got["advantages"], want, rtol=0, atol=1e-7)
    assert tuple(got) == estimator(name).writes


@pytest.mark.parametrize("name", NAMES)
def test_padding_is_never_read_and_gives_zero(name: str):
    given = columns()
    want = run(name, given)
    outside = ~given["mask"]
    # A reward outside the mask counts for the token before it; all else there is noise.
    spoilt = {
        k: v.masked_fill(outside, NAN) if v.shape == outside.shape and k not in ("mask", "token_rewards") else v
        for k, v in given.items()
    }
    more = {k: _wider(k, v) for k, v in spoilt.items()}
    for got in (run(name, spoilt), run(name, more)):
        for column, value in want.items():
            assert_close(got[column][:, :7], value, rtol=1e-12, atol=1e-12)
            assert not got[column][:, 7:].any() and not value[outside].any()


def _wider(name: str, value: Tensor) -> Tensor:
    if value.dim() == 1:
        return value
    filling = {"mask": False, "token_rewards": 0.0}.get(name, NAN)
    return torch.cat([value, torch.full((len(value), 3), filling, dtype=value.dtype)], dim=1)


@pytest.mark.parametrize("name", NAMES)
def test_the_order_of_rows_does_not_matter(name: str):
    given, order = columns(), torch.tensor([3, 5, 0, 2, 4, 1])
    want = run(name, given)
    for column, value in run(name, {k: v[order] for k, v in given.items()}).items():
        assert_close(value, want[column][order], rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("name", [name for name in NAMES if name not in WHITENED])
def test_a_group_does_not_depend_on_the_others(name: str):
    given = columns()
    rows = given["group_id"] == 9
    alone = run(name, {k: v[rows] for k, v in given.items()})["advantages"]
    assert_close(alone, run(name, given)["advantages"][rows], rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("name", NAMES)
def test_a_batch_with_nothing_to_train_on(name: str):
    given = columns()
    given["mask"] = torch.zeros_like(given["mask"])
    for value in run(name, given).values():
        assert torch.equal(value, torch.zeros_like(value))
    for value in run(name, {k: v[:0] for k, v in given.items()}).values():
        assert value.shape == (0, 7)


@pytest.mark.parametrize("name", NAMES)
def test_an_empty_response_gives_zero_and_stays_finite(name: str):
    for value in run(name, columns()).values():
        assert torch.isfinite(value).all() and not value[3].any()


@pytest.mark.parametrize("name", OVER_GROUPS)
@pytest.mark.parametrize("groups", [[0, 1, 2, 3, 4, 5], [0, 0, 0, 0, 1, 1]])
def test_groups_of_one_and_groups_without_a_difference_give_exactly_zero(name: str, groups: list[int]):
    given = columns()
    given["group_id"] = torch.tensor(groups)
    if len(set(groups)) == 2:  # 0.1 is not exact in floating point: its mean is not 0.1
        given["rewards"] = torch.tensor([0.1, 0.1, 0.1, 0.1, 1 / 3, 1 / 3])
    assert torch.equal(run(name, given)["advantages"], torch.zeros(6, 7).to(given["rewards"].dtype))


@pytest.mark.parametrize("name", ["reinforce_plus_plus", "gae"])
def test_a_batch_without_a_difference_is_whitened_to_zero(name: str):
    given = columns()
    given |= {"token_rewards": torch.zeros(6, 7), "values": torch.ones(6, 7)}
    if name == "reinforce_plus_plus":
        assert not run(name, given)["advantages"].any()
    else:  # each last token expects 1 and gets 0
        assert torch.isfinite(run(name, given)["advantages"]).all()


@pytest.mark.parametrize("name", NAMES)
def test_results_are_fp32_at_least_and_without_gradient(name: str):
    given = columns(dtype=torch.bfloat16)
    tracked = {k: v.requires_grad_() if v.is_floating_point() else v for k, v in given.items()}
    for value in run(name, tracked).values():
        assert value.dtype == torch.float32 and not value.requires_grad


SIGNAL = {"rewards": 0, "token_rewards": (0, 6), "teacher_log_probs": (0, 6)}
"""What each estimator takes as good: the entry that is raised. Row 0, or its last token."""


@pytest.mark.parametrize("name", NAMES)
def test_a_better_response_gets_a_larger_advantage(name: str):
    """The slope of a row's own advantage in its own signal, by central differences, is above 0."""
    column = next(column for column in SIGNAL if column in estimator(name).needs)
    step, found = 1e-5, []
    for sign in (1, -1):
        given = columns()
        given[column] = given[column].clone()
        given[column][SIGNAL[column]] += sign * step
        found.append(run(name, given)["advantages"][0, 6])
    assert (found[0] - found[1]) / (2 * step) > 1e-3


@pytest.mark.parametrize("name", NAMES)
def test_a_missing_column_is_named(name: str):
    given = columns()
    first = estimator(name).needs[0]
    with pytest.raises(ValueError, match=f"needs the columns .*{first}"):
        estimator(name)(**{column: given[column] for column in estimator(name).needs[1:]})


@pytest.mark.parametrize("name", NAMES)
def test_ragged_rows_of_a_batch_give_the_same(name: str):
    """Through the one carrier, whose token columns have no padding at all: rows are laid end to end."""
    given = columns(dtype=torch.float32)
    lengths = torch.tensor([7, 3, 5, 0, 1, 6])
    names = {"mask": "response_mask", "policy_log_probs": "old_log_probs"}
    batch = Batch(
        {
            names.get(column, column): Ragged.from_padded(value, lengths) if value.dim() == 2 else value
            for column, value in given.items()
        }
    )
    got = estimate_advantages(batch, estimator=name)
    # What lies behind a row's end is not in the batch.
    inside = torch.arange(7) < lengths[:, None]
    given = {column: value * inside if value.dim() == 2 else value for column, value in given.items()}
    for column, value in run(name, given).items():
        assert_close(got.padded(column), value)
