"""What `models=` and `weights=` of a scoring stage mean: roles to load, and a source for every score."""

from __future__ import annotations

import inspect
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from numbers import Real
from pathlib import Path
from typing import Any

from torch import nn

from podium.core.errors import ConfigError, did_you_mean

Weights = Sequence[float] | Mapping[str, float] | None


@dataclass(frozen=True)
class ModelSource:
    """One score of a reward model: the role that gives it, the head (None: the only one), its name in the metrics."""

    role: str
    head: str | None
    name: str


def model_sources(
    models: Sequence[Any], family: str, where: str, weights: Weights = None, functions: Sequence[str] = ()
) -> tuple[dict[str, Any], list[ModelSource]]:
    """Roles (`reward`, `reward_2`, ...) with their models, and the sources in the order of `models`.

    Heads of one model (`model.head(name)`) share a role, and so one forward pass. A whole model with several heads stands
    for all of them where `weights` is a mapping; of a path, what `weights` names besides the `functions` are its heads.
    Raises ConfigError for an entry that is no model, and for several heads that nobody named.
    """
    roles: dict[str, Any] = {}
    found: list[tuple[str, str | None]] = []
    for entry in models:
        if inspect.isroutine(entry):
            remedy = f"functions go in {where}(functions=[...])"
            raise ConfigError(f"{entry!r} is no reward model", where=where, remedy=remedy)
        if is_head(entry):
            role = _role_of(entry.model, roles) or _new_role(roles, family)
            roles.setdefault(role, entry.model)
            found.append((role, entry.name))
        else:
            role = _new_role(roles, family)
            roles[role] = entry
            found += [(role, head) for head in _heads_meant(entry, role, len(models), weights, functions, where)]
    heads = [head for _, head in found if head is not None]
    sources = [
        # Two models may have heads of the same name.
        ModelSource(role, head, role if head is None else head if heads.count(head) == 1 else f"{role}.{head}")
        for role, head in found
    ]
    twice = [source.head or source.name for i, source in enumerate(sources) if source in sources[:i]]
    if twice:
        raise ConfigError(f"the head '{twice[0]}' is given twice", where=where, remedy="give it once, with one weight")
    return roles, sources


def is_head(entry: Any) -> bool:
    """A view of one head: it has the model and the head's name (`podium.models.heads.RewardHead`)."""
    return not isinstance(entry, nn.Module) and hasattr(entry, "model") and isinstance(getattr(entry, "name", None), str)


def match_weights(weights: Weights, models: Sequence[str], functions: Sequence[str], where: str) -> dict[str, float]:
    """Weight by source name, for those that `weights` decides (a mapping may leave functions to their own settings).

    Raises ConfigError where weights and sources do not match.
    """
    names = [*models, *functions]
    if weights is None:
        return dict.fromkeys(models, 1.0)
    for weight in weights.values() if isinstance(weights, Mapping) else weights:
        if not isinstance(weight, Real) or not math.isfinite(weight):
            raise ConfigError(f"{weight!r} is no weight", where=f"{where}(weights=...)", remedy="give finite numbers")
    if not isinstance(weights, Mapping):
        if len(weights) != len(names):
            raise ConfigError(
                f"{len(weights)} weights for {len(names)} reward sources ({', '.join(names)})",
                where=f"{where}(weights=...)",
                remedy="give one weight a source, models (or their heads) first",
            )
        return {name: float(weight) for name, weight in zip(names, weights, strict=True)}
    unknown = [name for name in weights if name not in names]
    if unknown:
        what = f"a weight is given for '{unknown[0]}', which is no source here"
        raise ConfigError(what, where=f"{where}(weights=...)", remedy=did_you_mean(unknown[0], names))
    missing = [name for name in models if name not in weights]
    if missing:
        what = f"no weight is given for {', '.join(missing)}"
        raise ConfigError(what, where=f"{where}(weights=...)", remedy="give one (0 for a head that is not to count)")
    return {name: float(weight) for name, weight in weights.items()}


def _new_role(roles: Mapping[str, Any], family: str) -> str:
    return family if not roles else f"{family}_{len(roles) + 1}"


def _role_of(model: Any, roles: Mapping[str, Any]) -> str | None:
    path = isinstance(model, str | Path)
    return next((role for role, known in roles.items() if known is model or (path and known == model)), None)


def _heads_meant(
    entry: Any, role: str, models: int, weights: Weights, functions: Sequence[str], where: str
) -> list[str | None]:
    """The heads that a whole model stands for: None for its only one."""
    heads = list(getattr(entry, "head_names", None) or ())
    if len(heads) > 1:
        if isinstance(weights, Mapping):
            return [*heads]
        raise ConfigError(
            f"the reward model has {len(heads)} heads: {', '.join(heads)}",
            where=f"{where}(models=...)",
            remedy=f"name those that count: models=[model.head('{heads[0]}'), ...], or weights={{'{heads[0]}': 1.0, ...}}",
        )
    if isinstance(entry, str | Path) and models == 1 and isinstance(weights, Mapping) and role not in weights:
        heads = [name for name in weights if name not in functions]  # whether the folder has them is seen when it scores
        return [*heads] or [None]
    return [None]
