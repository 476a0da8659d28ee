"""State of users' own reward objects: found, checked, put back."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
import torch

from podium.core.errors import CheckpointError, ConfigError, RewardError
from podium.rewards.loading import load_reward
from podium.rewards.state import holder_of, load_states, states_of
from podium.rewards.stepwise import StepwiseRewardInjector
from podium.stages.reward import RewardStage
from podium.stages.stepwise import StepwiseRewardStage


class Counter:
    def __init__(self) -> None:
        self.count: Any = 0

    def __call__(self, completions: list[str], **columns: Any) -> list[float]:
        self.count += 1
        return [float(self.count)] * len(completions)

    def scored(self, completions: list[str], scale: float = 1.0, **columns: Any) -> list[float]:
        return [scale * x for x in self(completions)]

    def state_dict(self) -> dict[str, Any]:
        return {"count": self.count}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.count = state["count"]


def plain(completions: list[str], **columns: Any) -> list[float]:
    return [0.0] * len(completions)


@pytest.mark.parametrize("form", [lambda c: c, lambda c: c.scored, lambda c: partial(c.scored, scale=2.0)])
def test_the_object_is_found_behind_methods_and_partials(form: Any) -> None:
    counter = Counter()
    assert holder_of(load_reward(form(counter))) is counter


def test_functions_classes_and_torch_modules_have_none() -> None:
    class Module(torch.nn.Module):
        def __call__(self, completions: list[str], **columns: Any) -> list[float]:
            return plain(completions)

    assert holder_of(load_reward(plain)) is None and holder_of(load_reward(Module())) is None
    assert states_of([load_reward("exact_match")]) == {}


def test_a_stage_takes_and_gives_it_by_name() -> None:
    first, second = Counter(), Counter()
    first.count = 3
    state = RewardStage(functions=[first, plain]).state_dict()
    assert state["functions"] == {"Counter": {"count": 3}}
    RewardStage(functions=[plain, second]).load_state_dict(state)
    assert second.count == 3
    steps = StepwiseRewardStage(StepwiseRewardInjector(first))
    StepwiseRewardStage(StepwiseRewardInjector(second := Counter())).load_state_dict(steps.state_dict())
    assert second.count == 3


def test_a_new_reward_begins_anew_and_one_that_lost_its_state_is_an_error() -> None:
    load_states([load_reward(counter := Counter())], {})
    assert counter.count == 0
    with pytest.raises(CheckpointError, match="reward 'plain': it had state in the checkpoint"):
        load_states([load_reward(plain)], {"plain": {"count": 1}})


@pytest.mark.parametrize(
    ("count", "said"),
    [
        (object(), r"state\['count'\] is of type object"),
        ({1: 2}, r"state\['count'\] has the key 1"),
        ([{"a": {2.5}}], r"state\['count'\]\[0\]\['a'\] is of type set"),
    ],
)
def test_what_a_checkpoint_cannot_hold_is_named(count: Any, said: str) -> None:
    counter = Counter()
    counter.count = count
    with pytest.raises(ConfigError, match=said):
        states_of([load_reward(counter)])


def test_half_of_the_pair_is_an_error() -> None:
    class Half(Counter):
        load_state_dict = None  # type: ignore[assignment]

    with pytest.raises(ConfigError, match="Half has state_dict and no load_state_dict"):
        states_of([load_reward(Half())])


def test_an_error_in_the_object_s_own_methods_names_the_reward() -> None:
    class Broken(Counter):
        def state_dict(self) -> dict[str, Any]:
            raise KeyError("gone")

        def load_state_dict(self, state: dict[str, Any]) -> None:
            raise ValueError("of another version")

    with pytest.raises(RewardError, match="reward 'Broken': state_dict raised KeyError: 'gone'\n  -> correct state_dict"):
        states_of([load_reward(Broken())])
    with pytest.raises(RewardError, match="load_state_dict raised ValueError: of another version") as raised:
        load_states([load_reward(Broken())], {"Broken": {}})
    assert isinstance(raised.value.__cause__, ValueError)
