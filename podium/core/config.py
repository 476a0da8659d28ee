"""Settings: pydantic models in which an unknown key is an error with the nearest name.

A field's default and docstring stand once, in its class. YAML comes in, dotted overrides change it, the resolved YAML
goes out into the run folder.
"""

from __future__ import annotations

import types
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, TypeVar, Union, get_args, get_origin

import yaml
from pydantic import BaseModel, ConfigDict, ValidationError, model_validator

from podium.core.errors import ConfigError, did_you_mean


class Settings(BaseModel):
    """Base of every settings class: unknown keys are refused, field docstrings are kept."""

    model_config = ConfigDict(extra="forbid", use_attribute_docstrings=True, validate_assignment=True)

    @model_validator(mode="before")
    @classmethod
    def _keep_section_defaults(cls, values: Any) -> Any:
        """A section given in part keeps this class's own defaults for the rest (`kl.coef=0.1` leaves PPO's `kl.place`).

        A list may be given by its indices (`rewards.0.function=...`, where the recipe has no `rewards`).
        """
        if not isinstance(values, Mapping):
            return values
        out = dict(values)
        for name, field in cls.model_fields.items():
            if _is_sequence(field.annotation) and _is_indexed(out.get(name)):
                out[name] = list(out[name].values())
            default = field.get_default(call_default_factory=True) if isinstance(out.get(name), Mapping) else None
            if isinstance(default, Settings):
                out[name] = {**default.model_dump(exclude_defaults=True), **out[name]}
        return out


S = TypeVar("S", bound=Settings)


def parse(kind: type[S], values: Mapping[str, Any], where: str = "settings") -> S:
    """A settings object from plain values. Raises ConfigError that names the key, the value and the nearest name."""
    try:
        return kind.model_validate(dict(values))
    except ValidationError as error:
        raise _explain(kind, error, where) from None


def load_yaml(path: str | Path, what: str = "recipe") -> dict[str, Any]:
    """The mapping in a YAML file (safe-loaded). Raises ConfigError: missing, no mapping, or a key that is there twice."""
    path = Path(path)
    if not path.is_file():
        raise ConfigError(f"no such file: {path}", where=what, remedy=f"give the path of a YAML {what.removeprefix('--')}")
    try:
        values = _load(path.read_text(encoding="utf-8"), str(path))
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        raise ConfigError(f"not valid YAML: {error}", where=str(path)) from None
    if values is None:
        return {}
    if not isinstance(values, dict):
        raise ConfigError(f"expected a mapping of settings, found {type(values).__name__}", where=str(path))
    return values


def apply_overrides(values: Mapping[str, Any], overrides: Iterable[str]) -> dict[str, Any]:
    """Sets dotted keys: `optimizer.lr=1e-5`, `rewards.0.weight=2`. Values are read as YAML (so `[1, 2]`, `true`, `null` work).

    Raises ConfigError for an override without `=` or one that goes through a value that is no mapping.
    """
    out = _copy(values)
    for text in overrides:
        key, equals, raw = text.partition("=")
        if not equals or not key:
            raise ConfigError(f"'{text}' is not an override", remedy="write key=value, for example optimizer.lr=1e-5")
        _put(out, key.strip().split("."), _scalar(raw), text)
    return out


def dump_yaml(settings: Settings) -> str:
    """The resolved settings as YAML, every default written out."""
    return yaml.safe_dump(settings.model_dump(mode="json"), sort_keys=False, allow_unicode=True)


def describe(kind: type[Settings], prefix: str = "") -> list[tuple[str, str, str, str]]:
    """(dotted key, type, default, docstring) of every setting, sections flattened."""
    rows: list[tuple[str, str, str, str]] = []
    for name, field in kind.model_fields.items():
        section = _section(field.annotation)
        if section is not None and not _is_sequence(field.annotation):
            rows += describe(section, f"{prefix}{name}.")
            continue
        default = "required" if field.is_required() else repr(field.get_default(call_default_factory=True))
        shown = getattr(field.annotation, "__name__", None) or str(field.annotation)
        shown = str(field.annotation) if get_origin(field.annotation) else shown
        rows.append((prefix + name, shown.replace("typing.", ""), default, (field.description or "").strip()))
    return rows


def _load(text: str, name: str) -> Any:
    """Safe-loaded YAML, in which a key that stands twice in a mapping is an error: YAML would let the last one win."""
    loader = yaml.SafeLoader(text)
    try:
        root = loader.get_single_node()
        if root is None:
            return None
        _refuse_twice(root, name, set())
        return loader.construct_document(root)
    finally:
        loader.dispose()


def _refuse_twice(node: yaml.Node, name: str, seen: set[int]) -> None:
    if id(node) in seen:  # an anchor's node is met at each of its aliases
        return
    seen.add(id(node))
    if isinstance(node, yaml.SequenceNode):
        for item in node.value:
            _refuse_twice(item, name, seen)
    if not isinstance(node, yaml.MappingNode):
        return
    lines: dict[str, int] = {}
    for key, value in node.value:
        line = key.start_mark.line + 1
        if isinstance(key, yaml.ScalarNode):
            if key.value in lines:
                raise ConfigError(
                    f"'{key.value}' is set twice, in line {lines[key.value]} and in line {line}",
                    where=f"{name}, line {line}",
                    remedy="keep one of them",
                )
            lines[key.value] = line
        _refuse_twice(value, name, seen)


def _scalar(raw: str) -> Any:
    """YAML's reading of a value, and what YAML 1.1 reads as text though everyone means a number (1e-5)."""
    try:
        value = _load(raw, raw)
    except yaml.YAMLError:
        return raw
    if isinstance(value, str):
        try:
            return float(value)
        except ValueError:
            return value
    return value


def _copy(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {k: _copy(v) for k, v in value.items()}
    if isinstance(value, list):
        return [_copy(v) for v in value]
    return value


def _put(target: Any, keys: list[str], value: Any, text: str) -> None:
    for i, key in enumerate(keys):
        last = i == len(keys) - 1
        if isinstance(target, list):
            if not key.isdigit() or int(key) >= len(target):
                raise ConfigError(f"'{text}': '{key}' is no index of a list of {len(target)}", where=".".join(keys[:i]))
            index: Any = int(key)
        elif isinstance(target, dict):
            index = key
            if not last and target.get(key) is None:
                target[key] = {}
        else:
            raise ConfigError(f"'{text}': '{'.'.join(keys[:i])}' has no settings below it", where=".".join(keys[:i]))
        if last:
            target[index] = value
        else:
            target = target[index]


def _explain(kind: type[Settings], error: ValidationError, where: str) -> ConfigError:
    problems: list[str] = []
    remedy: str | None = None
    for item in error.errors():
        loc = [str(part) for part in item["loc"]]
        key = ".".join(loc) or where
        if item["type"] == "extra_forbidden":
            names = _fields_at(kind, loc[:-1])
            problems.append(f"unknown setting '{key}'")
            elsewhere = [dotted for dotted, *_ in describe(kind) if dotted.rpartition(".")[2] == loc[-1]]
            remedy = remedy or (f"did you mean '{elsewhere[0]}'?" if elsewhere else did_you_mean(loc[-1], names))
        elif item["type"] == "missing":
            problems.append(f"'{key}' must be set")
        else:
            message = item["msg"].removeprefix("Value error, ")
            shown = "" if isinstance(item["input"], Mapping) else f", got {item['input']!r}"
            problems.append(f"'{key}': {message}{shown}")
    return ConfigError("; ".join(problems), where=where, remedy=remedy)


def _fields_at(kind: type[Settings], loc: list[str]) -> list[str]:
    current: type[Settings] | None = kind
    for part in loc:
        if current is None or part.isdigit():
            continue
        field = current.model_fields.get(part)
        current = _section(field.annotation) if field else None
    return list(current.model_fields) if current else []


def _section(annotation: Any) -> type[Settings] | None:
    """The settings class inside an annotation (`X`, `X | None`, `list[X]`), if there is one."""
    if isinstance(annotation, type) and issubclass(annotation, Settings):
        return annotation
    if get_origin(annotation) in (Union, types.UnionType, list, tuple):
        for inner in get_args(annotation):
            found = _section(inner)
            if found is not None:
                return found
    return None


def _is_indexed(value: Any) -> bool:
    return isinstance(value, Mapping) and bool(value) and list(value) == [str(i) for i in range(len(value))]


def _is_sequence(annotation: Any) -> bool:
    return get_origin(annotation) in (list, tuple) or any(get_origin(a) in (list, tuple) for a in get_args(annotation))
