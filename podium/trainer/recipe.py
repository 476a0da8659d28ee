"""What a recipe is, and how one is found by its name."""

from __future__ import annotations

import importlib
import pkgutil
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any, Literal

from podium.core.config import apply_overrides, load_yaml, parse
from podium.core.errors import ConfigError, did_you_mean
from podium.core.imports import load_module
from podium.core.registry import Registry
from podium.core.settings import RecipeSettings
from podium.stages.base import Stage

DataKind = Literal["prompts", "supervised", "preferences", "unpaired"]

_PROMPTS = ("prompt_ids", "prompt", "row_index")
_SUPERVISED = (*_PROMPTS, "response_ids", "response_mask", "loss_mask")

SOURCES: dict[str, tuple[str, ...]] = {
    "prompts": _PROMPTS,
    "supervised": _SUPERVISED,
    "preferences": (*_SUPERVISED, "pair_id", "chosen", "head"),
    "unpaired": (*_SUPERVISED, "label", "row_mask"),
}
"""The columns that each kind of data brings."""


@dataclass(frozen=True)
class Recipe:
    """An algorithm as settings and stages.

    Attributes:
        name: what `algorithm:` says.
        settings: its settings class.
        data: the kind of rows it trains on.
        stages: settings to the stages of a training step.
        evaluation: settings to the stages that measure held-out rows (empty: no evaluation).
        about: one line for `podium settings` and the docs.
    """

    name: str
    settings: type[RecipeSettings]
    data: DataKind
    stages: Callable[[Any], list[Stage]]
    evaluation: Callable[[Any], list[Stage]]
    about: str = ""


RECIPES: Registry[Recipe] = Registry("algorithm")
_ROOM = "podium.recipes"


def register_recipe(
    settings: type[RecipeSettings],
    data: DataKind,
    stages: Callable[[Any], list[Stage]],
    evaluation: Callable[[Any], list[Stage]],
    *,
    about: str = "",
) -> Recipe:
    """Files a recipe under the name that its settings have as the default of `algorithm`."""
    name = settings.model_fields["algorithm"].default
    return RECIPES.register(name)(Recipe(name, settings, data, stages, evaluation, about))


def known_recipes() -> list[str]:
    """Names of all recipes: Podium's modules, and those that a user registered."""
    room = importlib.import_module(_ROOM)
    names = {m.name for m in pkgutil.iter_modules(room.__path__) if not m.name.startswith("_")}
    return sorted(names | set(RECIPES))


def find_recipe(name: str) -> Recipe:
    """The recipe called `name`. Raises ConfigError with the nearest name.

    Podium's own recipes are modules of `podium.recipes` and are imported when asked for; a user's own is registered with
    `register_recipe(...)`.
    """
    if name == "custom":
        raise ConfigError(
            "these are the settings of a program with stages of its own",
            where="algorithm",
            remedy="run that program; to go on after a stop: Trainer(stages=..., config=...).train(resume=RUN)",
        )
    if name not in RECIPES:
        known = known_recipes()
        if name not in known:
            raise ConfigError(f"unknown algorithm '{name}'", where="algorithm", remedy=did_you_mean(name, known))
        importlib.import_module(f"{_ROOM}.{name}")
    return RECIPES.get(name)


def read_settings(
    values: Mapping[str, Any] | str | None, overrides: Iterable[str] = (), where: str = "settings"
) -> RecipeSettings:
    """Settings from a YAML file's path or plain values, with dotted overrides, in the class of their algorithm."""
    plain = load_yaml(values) if isinstance(values, str) else values or {}
    where = values if isinstance(values, str) else where
    merged = apply_overrides(plain, overrides)
    sources = merged.get("imports")
    for source in [sources] if isinstance(sources, str) else sources or ():
        load_module(str(source), "imports")
    if not merged.get("algorithm"):
        raise ConfigError("'algorithm' must be set", where=where, remedy="one of: " + ", ".join(known_recipes()))
    return parse(find_recipe(str(merged["algorithm"]).lower()).settings, merged, where)
