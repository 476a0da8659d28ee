"""How much memory this process holds now."""

from __future__ import annotations

import os
import sys


def resident_mb() -> float | None:
    """The resident set in MB (1e6 bytes), about 10 microseconds; None where the system does not say (not Linux)."""
    if not sys.platform.startswith("linux"):
        return None
    try:
        with open("/proc/self/statm", "rb") as file:
            return int(file.read().split()[1]) * os.sysconf("SC_PAGE_SIZE") / 1e6
    except (OSError, ValueError, IndexError):
        return None
