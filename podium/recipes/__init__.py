"""Recipes: one module per algorithm, and the ways to start one (`load`, `build`, `explain`, `train`)."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from podium.core.config import apply_overrides, load_yaml
from podium.core.errors import ConfigError
from podium.core.settings import RecipeSettings, RewardSettings
from podium.recipes._explain import explain
from podium.trainer.recipe import known_recipes, read_settings
from podium.trainer.trainer import Trainer, TrainResult

__all__ = ["build", "explain", "known_recipes", "load", "train"]


def load(
    path: str | Path | None = None, overrides: Iterable[str] = (), values: Mapping[str, Any] | None = None
) -> RecipeSettings:
    """Settings from a YAML file (or none), plain values over it, and dotted overrides over both.

    Raises ConfigError for an unknown or wrong setting.
    """
    merged = load_yaml(path) if path is not None else {}
    merged = _merge(merged, values or {})
    return read_settings(apply_overrides(merged, overrides), where=str(path or "settings"))


def build(settings: RecipeSettings, **given: Any) -> Trainer:
    """The trainer of a recipe; `given` are `Trainer`'s own keywords (data, eval_data, executor, ...)."""
    return Trainer(settings, **given)


def train(
    model: Any,
    data: str | Sequence[Mapping[str, Any]],
    rewards: Any = (),
    algorithm: str = "grpo",
    *,
    eval_data: Any = None,
    tokenizer: Any = None,
    resume: bool | str = False,
    accept_changes: bool = False,
    **settings: Any,
) -> TrainResult:
    """Trains a model in one call.

    Args:
        model: a folder, hub name or GGUF file, or a `transformers` model (then `tokenizer` too).
        data: a file, or rows.
        rewards: one or several: functions, `module:function`, built-ins, or mappings with a weight and more
            (`{"function": f, "weight": 0.5}`).
        algorithm: a recipe's name.
        eval_data: held-out rows or their path.
        resume, accept_changes: as for `Trainer.train`.
        settings: sections as mappings (`optimizer={"lr": 1e-5}`) or dotted keys with `__` (`optimizer__lr=1e-5`).

    Returns:
        what came out; `result.run_folder / "model"` is the trained Hugging Face folder.
    """
    values: dict[str, Any] = {"algorithm": algorithm}
    for key, value in settings.items():
        values = _merge(values, _nested(key.split("__"), value))
    given: dict[str, Any] = {}
    if isinstance(model, str | Path):
        values = _merge(values, {"model": {"path": str(model)}})
    elif tokenizer is None:
        raise ConfigError("a model in memory comes with its tokenizer", where="train", remedy="pass tokenizer=...")
    else:
        given["models"], given["tokenizer"] = {"actor": model}, tokenizer
    for name, rows, path in (("data", data, "path"), ("eval_data", eval_data, "eval_path")):
        if isinstance(rows, str | Path):
            values = _merge(values, {"data": {path: str(rows)}})
        elif rows is not None:
            given[name] = list(rows)
        elif name == "data":
            raise ConfigError("there is no data", where="train", remedy="pass data=, a file or rows")
    one = callable(rewards) or isinstance(rewards, str | Mapping | RewardSettings)
    sources = [rewards] if one else list(rewards)
    if sources:
        values["rewards"] = [r if isinstance(r, Mapping | RewardSettings) else {"function": r} for r in sources]
    return build(read_settings(values), **given).train(resume=resume, accept_changes=accept_changes)


def _nested(keys: list[str], value: Any) -> dict[str, Any]:
    return {keys[0]: value if len(keys) == 1 else _nested(keys[1:], value)}


def _merge(base: Mapping[str, Any], over: Mapping[str, Any]) -> dict[str, Any]:
    out = dict(base)
    for key, value in over.items():
        both = isinstance(value, Mapping) and isinstance(out.get(key), Mapping)
        out[key] = _merge(out[key], value) if both else value
    return out
