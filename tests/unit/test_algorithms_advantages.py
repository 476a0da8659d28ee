"""Hand-computed values of the advantage functions and of their registry."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import torch
from torch.testing import assert_close

from podium.algorithms import (
    ADVANTAGE_ESTIMATORS,
    advantage_estimator,
    broadcast_to_tokens,
    find_advantage_estimator,
    gae,
    group_relative,
    leave_one_out,
    whiten,
)


def row(*values: float) -> torch.Tensor:
    return torch.tensor([values], dtype=torch.float32)


def test_gae_by_hand():
    # delta = (0 + .5*4 - 2, 0 + .5*6 - 4, 1 + 0 - 6) = (0, -1, -5); gamma * gae_lambda = 1/4
    advantages, returns = gae(row(0, 0, 1), row(2, 4, 6), row(1, 1, 1).bool(), gamma=0.5, gae_lambda=0.5)
    assert_close(advantages, row(0 + (-1 - 5 / 4) / 4, -1 - 5 / 4, -5))
    assert_close(returns, advantages + row(2, 4, 6))


def test_gae_with_lambda_one_is_the_discounted_return():
    _, returns = gae(row(1, 2, 4), row(9, -3, 5), row(1, 1, 1).bool(), gamma=0.5, gae_lambda=1.0)
    assert_close(returns, row(1 + 0.5 * 2 + 0.25 * 4, 2 + 0.5 * 4, 4))


def test_gae_skips_holes_and_padding():
    mask = row(1, 0, 0, 1, 1, 0).bool()
    rewards, values = row(0, 0, 0, 0, 1, 0), row(2, 99, float("nan"), 4, 6, -7)
    advantages, returns = gae(rewards, values, mask, gamma=0.5, gae_lambda=0.5)
    dense_advantages, dense_returns = gae(row(0, 0, 1), row(2, 4, 6), row(1, 1, 1).bool(), gamma=0.5, gae_lambda=0.5)
    assert_close(advantages[mask], dense_advantages[0])
    assert_close(returns[mask], dense_returns[0])
    assert not advantages[~mask].any() and not returns[~mask].any()


def test_gae_counts_a_reward_on_a_hole_for_the_token_before_it():
    mask = row(1, 0, 1, 0).bool()
    moved = gae(row(0, 3, 0, 5), row(1, 0, 2, 0), mask, gamma=0.9, gae_lambda=0.8)
    plain = gae(row(3, 0, 5, 0), row(1, 0, 2, 0), mask, gamma=0.9, gae_lambda=0.8)
    assert_close(moved, plain)
    first = gae(row(7, 1), row(0, 0), row(0, 1).bool(), gamma=1.0, gae_lambda=1.0)
    assert_close(first[0], row(0, 1))


def test_gae_of_an_all_masked_row_and_of_nothing():
    mask = torch.tensor([[False, False], [True, True]])
    advantages, returns = gae(torch.ones(2, 2), torch.ones(2, 2), mask, gamma=1.0, gae_lambda=1.0)
    assert_close(advantages, torch.tensor([[0.0, 0.0], [1.0, 0.0]]))
    assert_close(returns, torch.tensor([[0.0, 0.0], [2.0, 1.0]]))
    empty = torch.zeros(2, 0)
    assert gae(empty, empty, empty.bool(), gamma=1.0, gae_lambda=1.0)[0].shape == (2, 0)


def test_gae_is_fp32_and_without_gradient():
    values = torch.ones(1, 2, dtype=torch.bfloat16, requires_grad=True)
    advantages, returns = gae(torch.ones(1, 2), values, torch.ones(1, 2).bool(), gamma=1.0, gae_lambda=1.0)
    assert advantages.dtype == returns.dtype == torch.float32
    assert not advantages.requires_grad and not returns.requires_grad


def test_gae_names_shapes_that_differ():
    with pytest.raises(ValueError, match=r"'values': \[1, 3\]"):
        gae(torch.ones(1, 2), torch.ones(1, 3), torch.ones(1, 2), gamma=1.0, gae_lambda=1.0)


def test_whiten_by_hand():
    x, mask = row(1, 2, 3, 100), row(1, 1, 1, 0).bool()  # mean 2, unbiased variance 1
    assert_close(whiten(x, mask), row(-1, 0, 1, 0))
    assert_close(whiten(2 * x, mask, shift_mean=False), row(3, 4, 5, 0))


@pytest.mark.parametrize("selected", [0, 1])
def test_whiten_without_a_variance(selected: int):
    mask = row(*[float(i < selected) for i in range(2)]).bool()
    assert_close(whiten(row(5, float("nan")), mask), row(0, 0))
    assert_close(whiten(row(5, float("nan")), mask, shift_mean=False), row(5.0 * selected, 0))


def test_whiten_constant_values():
    assert_close(whiten(row(3, 3, 3), row(1, 1, 1).bool()), row(0, 0, 0))


def test_group_relative_by_hand():
    rewards = torch.tensor([1.0, 10.0, 3.0, 20.0])
    group_id = torch.tensor([7, -2, 7, -2])
    advantages = group_relative(rewards, group_id, epsilon=0.0)  # unbiased std: sqrt(2), sqrt(50)
    assert_close(advantages, torch.tensor([-1, -1, 1, 1]) / 2**0.5)
    assert_close(group_relative(rewards, group_id, normalize=False), torch.tensor([-1.0, -5.0, 1.0, 5.0]))
    assert_close(group_relative(rewards, group_id, epsilon=1.0)[0], torch.tensor(-1 / (2**0.5 + 1)))


def test_leave_one_out_by_hand():
    rewards = torch.tensor([1.0, 0.0, 2.0, 6.0])
    assert_close(leave_one_out(rewards, torch.tensor([4, 1, 4, 4])), torch.tensor([-3.0, 0.0, -1.5, 4.5]))


@pytest.mark.parametrize("function", [group_relative, lambda r, g: group_relative(r, g, normalize=False), leave_one_out])
def test_a_group_of_one_and_a_group_without_variance_give_exactly_zero(function):
    rewards = torch.tensor([0.1, 0.1, 0.1, 5.0, 1 / 3, 1 / 3, 1 / 3])  # 3 * 0.1 / 3 is not 0.1 in floating point
    advantages = function(rewards, torch.tensor([0, 0, 0, 1, 2, 2, 2]))
    assert torch.equal(advantages, torch.zeros(7))
    assert function(torch.zeros(0), torch.zeros(0).long()).shape == (0,)


def test_group_functions_want_one_reward_for_each_group_id():
    with pytest.raises(ValueError, match=r"must both be \[B\]"):
        group_relative(torch.zeros(3), torch.zeros(2).long())


def test_broadcast_to_tokens():
    mask = torch.tensor([[1, 0, 1], [0, 0, 0]]).bool()
    assert_close(broadcast_to_tokens(torch.tensor([2.0, 3.0]), mask), torch.tensor([[2.0, 0, 2], [0, 0, 0]]))
    with pytest.raises(ValueError, match=r"\[B, T\]"):
        broadcast_to_tokens(torch.zeros(3), mask)


def test_registered_estimators_return_their_columns():
    columns = {
        "rewards": torch.tensor([1.0, 3.0]),
        "group_id": torch.tensor([5, 5]),
        "token_rewards": torch.tensor([[0.0, 1.0], [3.0, 0.0]]),
        "values": torch.tensor([[0.5, 0.5], [1.0, 0.0]]),
        "baseline_rewards": torch.tensor([0.5, 1.0]),
        "teacher_log_probs": torch.tensor([[-1.0, -2.0], [-3.0, 0.0]]),
        "policy_log_probs": torch.tensor([[-2.0, -2.0], [-1.0, 0.0]]),
        "mask": torch.tensor([[1, 1], [1, 0]]).bool(),
    }
    assert {"grpo", "dr_grpo", "rloo", "gae"} <= set(ADVANTAGE_ESTIMATORS)
    for estimator in ADVANTAGE_ESTIMATORS.values():
        result = estimator(**{name: columns[name] for name in estimator.needs})
        assert tuple(result) == estimator.writes
        for column in result.values():
            assert column.shape == (2, 2) and column.dtype == torch.float32 and column[1, 1] == 0
    rloo = find_advantage_estimator("rloo")
    assert_close(rloo(**{k: columns[k] for k in rloo.needs})["advantages"], torch.tensor([[-2.0, -2.0], [2.0, 0.0]]))
    plain = find_advantage_estimator("gae")
    result = plain(**{k: columns[k] for k in plain.needs}, gamma=1.0, gae_lambda=1.0, whiten_advantages=False)
    assert_close(result["advantages"], torch.tensor([[0.5, 0.5], [2.0, 0.0]]))


def test_registry_errors_say_what_to_write():
    with pytest.raises(ValueError, match=r"'grpoo'. Did you mean 'grpo'\?"):
        find_advantage_estimator("grpoo")
    estimator = find_advantage_estimator("grpo")
    assert estimator.settings == {"epsilon": 1e-4}
    columns = {"rewards": torch.zeros(1), "mask": torch.ones(1, 1).bool()}
    with pytest.raises(ValueError, match=r"needs the columns \['group_id'\]"):
        estimator(**columns)
    with pytest.raises(ValueError, match=r"Unknown setting .*'epsilom'. Did you mean 'epsilon'\?"):
        estimator(**columns, group_id=torch.zeros(1).long(), epsilom=1.0)


def test_adding_an_estimator(monkeypatch):
    monkeypatch.setattr("podium.algorithms.advantage_estimators.ADVANTAGE_ESTIMATORS", {})

    @advantage_estimator("constant", needs=("rewards", "mask"))
    def constant(*, rewards, mask, scale=2.0):
        return {"advantages": broadcast_to_tokens(scale * rewards, mask)}

    found = find_advantage_estimator("constant")
    assert found.needs == ("rewards", "mask") and found.settings == {"scale": 2.0}
    result = found(rewards=torch.tensor([3.0]), mask=torch.ones(1, 2).bool(), scale=1.0)
    assert_close(result["advantages"], row(3, 3))
    with pytest.raises(ValueError, match="already"):
        advantage_estimator("constant", needs=("rewards", "mask"))(constant)
    with pytest.raises(ValueError, match=r"missing: \['values'\].*without: \['mask'\]"):
        advantage_estimator("broken", needs=("rewards", "values"))(lambda *, rewards, mask: {})


def test_the_example_in_the_docs_runs(monkeypatch):
    monkeypatch.setattr("podium.algorithms.advantage_estimators.ADVANTAGE_ESTIMATORS", {})
    page = Path(__file__).parents[2] / "docs/algorithms/add_an_algorithm.md"
    blocks = re.findall(r"```python\n(.*?)```", page.read_text(encoding="utf-8"), flags=re.DOTALL)
    scope: dict = {}
    for block in blocks:
        if "podium.train(" not in block:  # needs a model; tests/recipes runs such a call
            exec(block, scope)
    scope["test_best_other"]()
    loss = scope["reinforce_loss"]()
    value, _ = loss.function({"log_probs": row(-1.0)}, {"advantages": row(2.0)})
    assert_close(value, row(2.0))
