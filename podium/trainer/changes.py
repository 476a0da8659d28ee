"""What is other at a resume than when the checkpoint was made, and whether it may be."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import fields, is_dataclass
from typing import Any

from pydantic import BaseModel

from podium.core.errors import CheckpointError

# How long a run goes on and what it shows may change at a resume; what it computes may not.
FREE = ("run.", "checkpoint.", "evaluation.", "watch.", "executor.", "resource_pool", "deadlines.")
FIXED = ("run.seed",)
_WIDTH = 60

Change = tuple[str, Any, Any]
"""(dotted name, value then, value now)."""


class ChangedSettings(CheckpointError):
    """A resume under other settings than the checkpoint's. `changes` are the differences that matter."""

    def __init__(self, changes: Sequence[Change], run: str) -> None:
        self.changes = list(changes)
        super().__init__(
            "settings changed since the checkpoint:\n" + table(changes),
            where=run,
            remedy="resume with the same settings, or say --accept-changes (train(accept_changes=True))",
        )


def table(changes: Sequence[Change]) -> str:
    """The differences as text, aligned."""
    rows = [("setting", "was", "is"), *((name, *_short(old, new)) for name, old, new in changes)]
    widths = [max(len(row[i]) for row in rows) for i in range(3)]
    return "\n".join("  " + "  ".join(cell.ljust(w) for cell, w in zip(row, widths, strict=True)).rstrip() for row in rows)


def _short(old: Any, new: Any) -> tuple[str, str]:
    """Both as text; of long ones the part where they begin to differ."""
    was, now = ("-" if value is None else str(value) for value in (old, new))
    alike = next((i for i, (a, b) in enumerate(zip(was, now, strict=False)) if a != b), min(len(was), len(now)))
    start = max(0, alike - _WIDTH // 3) if max(len(was), len(now)) > _WIDTH else 0
    return _cut(was, start), _cut(now, start)


def _cut(text: str, start: int) -> str:
    shown = ("..." if start else "") + text[start:]
    return shown if len(shown) <= _WIDTH else shown[: _WIDTH - 3] + "..."


def changes(saved: Mapping[str, Any], now: Mapping[str, Any]) -> list[Change]:
    """What matters to what the run computes.

    Args:
        saved, now: `settings` (nested), `stage_arguments` (by label, where stages were given), `data` (a digest of each
            extra column). A part that an older checkpoint lacks is not compared.
    """
    found = [c for c in differences(saved["settings"], now["settings"]) if not c[0].startswith(FREE) or c[0] in FIXED]
    found += _steps_of_a_schedule(saved["settings"], now["settings"])
    for part, name in (("stage_arguments", "stages"), ("data", "data rows")):
        if saved.get(part) is not None:
            found += differences(saved[part], now[part], name)
    return found


def _steps_of_a_schedule(old: Mapping[str, Any], new: Mapping[str, Any]) -> list[Change]:
    """Another number of steps is another learning rate at each of them, where it decays over the run."""
    was, now = old["run"]["steps"], new["run"]["steps"]
    decaying = [s for s in ("optimizer", "critic") if (new.get(s) or {}).get("schedule", "constant") != "constant"]
    if was == now or not decaying:
        return []
    return [(f"run.steps ({decaying[0]}.schedule={new[decaying[0]]['schedule']} decays over them)", was, now)]


def differences(old: Any, new: Any, key: str = "") -> list[Change]:
    """(dotted key, old value, new value) wherever two nested settings differ."""
    if isinstance(old, Mapping) and isinstance(new, Mapping):
        names = sorted(set(old) | set(new))
        return [d for n in names for d in differences(old.get(n), new.get(n), f"{key}.{n}" if key else n)]
    if isinstance(old, list) and isinstance(new, list):
        before, after = ({str(i): item for i, item in enumerate(items)} for items in (old, new))
        return differences(before, after, key)
    return [] if old == new else [(key, old, new)]


def described(value: Any) -> Any:
    """A stage's argument as plain values that JSON keeps: numbers, text, settings, functions by name, objects by class.

    What a model or a tokenizer holds is not looked into (frozen weights have digests of their own).
    """
    if value is None or isinstance(value, bool | int | float | str):
        return value
    if isinstance(value, BaseModel):
        return described(value.model_dump(mode="json"))
    if isinstance(value, Mapping):
        return {str(name): described(item) for name, item in value.items()}
    if isinstance(value, list | tuple | set | frozenset):
        items = sorted(value, key=str) if isinstance(value, set | frozenset) else value
        return {str(i): described(item) for i, item in enumerate(items)}
    if is_dataclass(value) and not isinstance(value, type):
        return {"class": type(value).__qualname__, **{f.name: described(getattr(value, f.name)) for f in fields(value)}}
    if hasattr(value, "__qualname__"):
        return f"{getattr(value, '__module__', '?')}:{value.__qualname__}"
    if type(value).__module__.startswith("podium.algorithms"):  # controllers, multipliers: what they start from
        return {"class": type(value).__qualname__, **{name: described(item) for name, item in vars(value).items()}}
    return type(value).__qualname__


def described_stage(stage: Any) -> dict[str, Any]:
    """A stage's class and what it was given; read when it is new, before a run has changed anything in it."""
    own = {name: described(value) for name, value in vars(stage).items() if not name.startswith("_")}
    parts = {name: described_stage(part) for name, part in vars(stage).items() if hasattr(part, "expand")}
    return {"class": type(stage).__qualname__, **own, **parts}
