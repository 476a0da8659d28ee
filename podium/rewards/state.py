"""State of users' own reward objects: saved with the run, and put back when it goes on."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from typing import Any

from torch import Tensor, nn

from podium.core.errors import CheckpointError, ConfigError, RewardError


def holder_of(reward: Any) -> Any:
    """The user's object behind a reward that has state: with `state_dict` and `load_state_dict`; None where there is none.

    Looked at are the reward's function, what a `functools.partial` calls, and the object that a method belongs to. A torch
    module is no such object: its state would be all of its weights, copied at every step.

    Raises ConfigError where it has one of the two: what is saved and never put back looks like a run that goes on.
    """
    function = getattr(reward, "function", reward)
    while isinstance(function, partial):
        function = function.func
    function = getattr(function, "__self__", function)
    if isinstance(function, nn.Module | type):
        return None
    there = [callable(getattr(function, name, None)) for name in ("state_dict", "load_state_dict")]
    if any(there) and not all(there):
        has, lacks = ("state_dict", "load_state_dict") if there[0] else ("load_state_dict", "state_dict")
        raise ConfigError(
            f"{type(function).__name__} has {has} and no {lacks}, so a resumed run would not have its state",
            where=f"reward '{reward.name}'",
            remedy=f"write {lacks} too",
        )
    return function if all(there) else None


def states_of(rewards: Iterable[Any]) -> dict[str, Any]:
    """What each reward's object says its state is, by the reward's name.

    Raises ConfigError for what cannot be saved, RewardError where the object raises.
    """
    states = {}
    for reward in rewards:
        holder = holder_of(reward)
        if holder is not None:
            with _own(reward, "state_dict"):
                state = holder.state_dict()
            _check(state, f"reward '{reward.name}'", "state")
            states[reward.name] = state
    return states


def load_states(rewards: Iterable[Any], states: Mapping[str, Any]) -> None:
    """Puts back what `states_of` gave, by name. An object without saved state (a new reward) is left as it is.

    Raises CheckpointError where a reward that had state then takes none now, RewardError where it raises.
    """
    for reward in rewards:
        if reward.name not in states:
            continue
        holder = holder_of(reward)
        if holder is None:
            raise CheckpointError(
                "it had state in the checkpoint, and has no load_state_dict now",
                where=f"reward '{reward.name}'",
                remedy="resume with the object that the run had",
            )
        with _own(reward, "load_state_dict"):
            holder.load_state_dict(states[reward.name])


@contextmanager
def _own(reward: Any, method: str) -> Iterator[None]:
    """An error in the user's method names the reward; its traceback is chained."""
    try:
        yield
    except Exception as error:
        raise RewardError(
            f"{method} raised {type(error).__name__}: {error}",
            where=f"reward '{reward.name}'",
            remedy=f"correct {method}; --debug shows where it raised",
        ) from error


def _check(value: Any, where: str, path: str) -> None:
    """Only what JSON and safetensors hold: nothing is ever pickled."""
    if value is None or isinstance(value, bool | int | float | str | Tensor):
        return
    if isinstance(value, list | tuple):
        for i, item in enumerate(value):
            _check(item, where, f"{path}[{i}]")
        return
    if isinstance(value, dict):
        for key, item in value.items():
            if not isinstance(key, str):
                raise ConfigError(f"{path} has the key {key!r}, not a text", where=where, remedy="use str(key)")
            _check(item, where, f"{path}[{key!r}]")
        return
    raise ConfigError(
        f"{path} is of type {type(value).__name__}, which a checkpoint cannot hold",
        where=where,
        remedy="let state_dict give numbers, texts, lists, dicts with text keys, and torch tensors",
    )
