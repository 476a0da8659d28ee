"""The embedded first run: `podium quickstart`."""

from podium.quickstart.run import Report, run

__all__ = ["Report", "run"]
