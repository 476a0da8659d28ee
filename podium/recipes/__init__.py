"""Recipes: one module per algorithm, and the ways to start one (`load`, `build`, `explain`, `train`)."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from podium.core.config import apply_overrides, load_yaml
from podium.core.settings import RecipeSettings
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
    rewards: Sequence[Callable[..., Any] | str] = (),
    algorithm: str = "grpo",
    *,
    eval_data: Any = None,
    tokenizer: Any = None,
    resume: bool | str = False,
    **settings: Any,
) -> TrainResult:
    """Trains a model in one call.

    Args:
        model: a folder, hub name or GGUF file, or a `transformers` model (then `tokenizer` too).
        data: a file, or rows.
        rewards: functions, `module:function`, or built-ins.
        algorithm: a recipe's name.
        eval_data: held-out rows or their path.
        settings: sections as mappings (`optimizer={"lr": 1e-5}`) or dotted keys with `__` (`optimizer__lr=1e-5`).

    Returns:
        what came out; `result.run_folder / "model"` is the trained Hugging Face folder.
    """
    overrides = {k: v for k, v in settings.items() if "__" in k}
    values: dict[str, Any] = {"algorithm": algorithm, **{k: v for k, v in settings.items() if "__" not in k}}
    for key, value in overrides.items():
        section, _, name = key.partition("__")
        values = _merge(values, {section: {name: value}})
    given: dict[str, Any] = {}
    if isinstance(model, str | Path):
        values = _merge(values, {"model": {"path": str(model)}})
    else:
        given["models"], given["tokenizer"] = {"actor": model}, tokenizer
    if isinstance(data, str | Path):
        values = _merge(values, {"data": {"path": str(data)}})
    else:
        given["data"] = list(data)
    if isinstance(eval_data, str | Path):
        values = _merge(values, {"data": {"eval_path": str(eval_data)}})
    elif eval_data is not None:
        given["eval_data"] = list(eval_data)
    if rewards:
        values["rewards"] = [{"function": r} for r in rewards]
    return build(read_settings(values), **given).train(resume=resume)


def _merge(base: Mapping[str, Any], over: Mapping[str, Any]) -> dict[str, Any]:
    out = dict(base)
    for key, value in over.items():
        both = isinstance(value, Mapping) and isinstance(out.get(key), Mapping)
        out[key] = _merge(out[key], value) if both else value
    return out
