"""Values as JSON can hold them."""

from __future__ import annotations

import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any


def jsonable(value: Any) -> Any:
    """The same with NaN and infinities as None, keys and paths as strings, NumPy and torch scalars as numbers.

    JSON (RFC 8259) has no NaN and no infinity; Python's `json` writes them all the same, and other readers refuse that.
    """
    if isinstance(value, Mapping):
        return {str(key): jsonable(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [jsonable(item) for item in value]
    if isinstance(value, Path):
        return str(value)
    if hasattr(value, "item") and not isinstance(value, str):
        value = value.item()
    if isinstance(value, float) and not math.isfinite(value):
        return None
    return value
