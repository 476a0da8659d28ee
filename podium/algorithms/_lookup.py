"""Look a name up in a registry; an unknown name is an error that gives the nearest known one."""

from __future__ import annotations

import difflib
from collections.abc import Mapping
from typing import TypeVar

Entry = TypeVar("Entry")


def look_up(registry: Mapping[str, Entry], name: str, what: str) -> Entry:
    """`registry[name]`, or a `ValueError` that names the nearest entry and lists all of them."""
    if name in registry:
        return registry[name]
    near = difflib.get_close_matches(str(name), registry, n=1, cutoff=0.5)
    hint = f" Did you mean {near[0]!r}?" if near else ""
    raise ValueError(f"Unknown {what} {name!r}.{hint} Known: {', '.join(sorted(registry))}.")
