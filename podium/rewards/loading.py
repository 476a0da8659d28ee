"""Finds a reward by what a user writes: a function, `module:function`, `file.py:function`, a built-in's name, an address,
a file of rules."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable
from typing import Any

from podium.core.errors import ConfigError, did_you_mean
from podium.core.imports import load_module
from podium.core.settings import RewardSettings
from podium.rewards.adapters import adapt
from podium.rewards.base import Reward
from podium.rewards.functions import BUILT_IN
from podium.rewards.remote import HttpReward
from podium.rewards.rules import RuleReward

Spec = RewardSettings | Callable[..., Any] | str | Reward


def load_reward(spec: Spec, weight: float | None = None) -> Reward:
    """A reward from its settings, its name, or the function itself. `weight` overrides the settings' (default 1).

    A ready `Reward` is returned as it is. Raises ConfigError (file, function, nearest name) where it cannot be found,
    or where the function follows neither TRL's nor verl's signature.
    """
    if isinstance(spec, Reward):
        if weight is not None:
            spec.weight = weight
        return spec
    if isinstance(spec, str):
        return _from_settings(RewardSettings(function=spec), weight)
    if isinstance(spec, RewardSettings):
        return _from_settings(spec, weight)
    if not callable(spec):
        raise ConfigError(f"{spec!r} is not a reward", where="rewards", remedy="give a function, or the name of one")
    return adapt(spec, _name_of(spec), weight=1.0 if weight is None else weight)


def _from_settings(settings: RewardSettings, weight: float | None) -> Reward:
    if isinstance(settings.function, str) and settings.function.startswith(("http://", "https://")):
        return _remote(settings, weight)
    function, options = _find(settings.function, settings.options)
    own = settings.function if settings.function in BUILT_IN else _name_of(function)
    name = settings.name or str(own)
    factor = settings.weight if weight is None else weight
    reward = adapt(function, name, weight=factor, on_error=settings.on_error, options=options)
    reward.shaping = settings
    return reward


def _remote(settings: RewardSettings, weight: float | None) -> Reward:
    assert isinstance(settings.function, str)
    url, factor = settings.function, settings.weight if weight is None else weight
    known = [p for p in inspect.signature(HttpReward).parameters if p not in ("url", "name", "weight", "on_error")]
    _check_options(settings.options, known, url)
    reward = HttpReward(url, name=settings.name, weight=factor, on_error=settings.on_error, **settings.options)
    reward.shaping = settings
    return reward


def load_rewards(specs: Iterable[Spec]) -> list[Reward]:
    """Several rewards; their names must differ. Raises ConfigError as `load_reward`."""
    rewards = [load_reward(spec) for spec in specs]
    names = [reward.name for reward in rewards]
    for name in names:
        if names.count(name) > 1:
            raise ConfigError(
                f"{names.count(name)} rewards are called '{name}'",
                where="rewards",
                remedy="give each its own name (rewards.N.name)",
            )
    return rewards


def _name_of(function: Any) -> str:
    function = getattr(function, "func", function)  # a functools.partial
    return getattr(function, "__name__", None) or type(function).__name__


def _find(path: str | Callable[..., Any], options: dict[str, Any]) -> tuple[Callable[..., Any], dict[str, Any]]:
    """The function, and the options that are still to be passed at each call."""
    if not isinstance(path, str):
        return path, options
    if path in BUILT_IN:
        return _made(path, options), {}
    if path.endswith((".yaml", ".yml")):
        _check_options(options, ("deadline",), path)
        return RuleReward(path, **options), {}
    source, colon, name = path.rpartition(":")
    if not colon or not source or not name:
        raise ConfigError(
            f"no built-in reward is called '{path}'",
            where="rewards",
            remedy=did_you_mean(path, BUILT_IN) + " Your own: module:function, or path/file.py:function.",
        )
    module = load_module(source, "rewards")
    if not hasattr(module, name):
        own = [n for n, value in vars(module).items() if callable(value) and not n.startswith("_")]
        raise ConfigError(f"it has no function '{name}'", where=source, remedy=did_you_mean(name, own))
    function = getattr(module, name)
    if not callable(function):
        raise ConfigError(f"'{name}' is a {type(function).__name__}, not a function", where=source)
    return function, options


def _made(name: str, options: dict[str, Any]) -> Callable[..., Any]:
    factory = BUILT_IN.get(name)
    _check_options(options, list(inspect.signature(factory).parameters), name)
    return factory(**options)


def _check_options(options: Iterable[str], known: Iterable[str], name: str) -> None:
    for option in options:
        if option not in known:
            raise ConfigError(f"unknown option '{option}'", where=f"reward '{name}'", remedy=did_you_mean(option, known))
