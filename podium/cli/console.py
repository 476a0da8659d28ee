"""What commands share: reading their arguments, printing tables and numbers."""

from __future__ import annotations

import io
import json
import sys
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from podium.core.errors import ConfigError, did_you_mean
from podium.core.jsonable import jsonable

WIDTH_WITHOUT_TERMINAL = 140


@dataclass
class Given:
    """Positional arguments, told apart: a recipe file, a run folder, and overrides."""

    recipe: Path | None = None
    run: Path | None = None
    overrides: list[str] = field(default_factory=list)

    @property
    def settings_file(self) -> str | None:
        """The YAML file that the settings come from."""
        if self.recipe is not None:
            return str(self.recipe)
        return str(self.run / "settings.yaml") if self.run is not None else None


def sort_arguments(arguments: Sequence[str] | None) -> Given:
    """Tells a recipe, a run folder and `key=value` overrides apart.

    Raises ConfigError for an argument that is none of them, and for two of the same kind.
    """
    given = Given()
    for text in arguments or ():
        path = Path(text)
        if path.is_dir():
            given.run = _once(given.run, path, "run folders")
        elif "=" in text and not path.is_file():  # before the suffix: a value may end in .yaml
            given.overrides.append(text)
        elif path.is_file() or path.suffix in (".yaml", ".yml"):
            given.recipe = _once(given.recipe, path, "recipes")
        else:
            near = [p.name for p in (path.parent if path.parent.is_dir() else Path()).iterdir()]
            raise ConfigError(
                f"'{text}' is no recipe file, no run folder and no key=value",
                where="command line",
                remedy=did_you_mean(path.name, near) if _is_near(path.name, near) else "a recipe is a YAML file",
            )
    if given.run is not None and not (given.run / "settings.yaml").is_file():
        raise ConfigError(
            f"'{given.run}' is no run folder (there is no settings.yaml in it)",
            where="command line",
            remedy="give a recipe's YAML file or a run's folder",
        )
    return given


def _once(before: Path | None, path: Path, what: str) -> Path:
    if before is not None:
        raise ConfigError(f"two {what}: '{before}' and '{path}'", where="command line", remedy="give one")
    return path


def _is_near(name: str, known: Iterable[str]) -> bool:
    return did_you_mean(name, known).startswith("did you mean")


def print_json(value: Any) -> None:
    """One JSON object on a line of its own on stdout."""
    print(json.dumps(jsonable(value), ensure_ascii=False, default=str), flush=True)


def print_table(title: str, header: Sequence[str], rows: Iterable[Sequence[str]], *, fixed: int = 1) -> None:
    """A table on stdout. The first `fixed` columns keep their width, the others wrap."""
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    table = Table(title=title or None, title_justify="left", title_style="bold", box=None, pad_edge=False, padding=(0, 2, 0, 0))
    for i, name in enumerate(header):
        table.add_column(name, header_style="dim", no_wrap=i < fixed, overflow="fold")
    for row in rows:
        table.add_row(*(Text(cell) for cell in row))
    if sys.stdout.isatty():
        Console().print(table)
        return
    console = Console(file=io.StringIO(), width=WIDTH_WITHOUT_TERMINAL)
    with console.capture() as text:
        console.print(table)
    print("\n".join(line.rstrip() for line in text.get().splitlines()))


def number(value: Any) -> str:
    """A metric for reading: four significant figures."""
    return f"{value:.4g}" if isinstance(value, float) else str(value)


def print_change(before: Mapping[str, float] | None, after: Mapping[str, float] | None) -> None:
    """A before/after table of an evaluation's metrics; nothing when there was none."""
    before, after = before or {}, after or {}
    rows: list[tuple[str, ...]] = []
    for name in dict.fromkeys((*before, *after)):
        old, new = before.get(name), after.get(name)
        if name.startswith("time/") or name in _BEHIND_THE_SCENES or (name.endswith("/skipped") and not old and not new):
            continue
        change = f"{new - old:+.4g}" if old is not None and new is not None else ""
        rows.append((name.removeprefix("eval/"), *("-" if v is None else number(v) for v in (old, new)), change))
    header: tuple[str, ...] = ("metric", "before", "after", "change")
    if not before or not after:  # a resumed run measured its start earlier
        rows = [(row[0], row[1] if before else row[2]) for row in rows]
        header = ("metric", "before" if before else "after")
    if rows:
        print_table("Held out", header, rows)


_BEHIND_THE_SCENES = ("eval/rollout/tokens", "eval/rollout/log_prob")
"""Metrics that metrics.jsonl keeps and a summary leaves out."""
