"""Files that are not there, and what a full or broken disk says to the user."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from podium.core.errors import CheckpointError, did_you_mean


def nearest_file(path: Path, ending: str) -> str:
    """A remedy line where `path` is no file: the nearest name in its folder among the files that end so (`.py`)."""
    if not path.parent.is_dir():
        return f"no such folder: {path.parent}"
    names = [p.name for p in path.parent.glob(f"*{ending}")]
    return did_you_mean(path.name, names) if names else f"that folder has no {ending} file; give the file's path"


@contextmanager
def writing(
    path: str | Path, what: str, remedy: str = "free disk space, or check that the folder can be written to"
) -> Iterator[None]:
    """Turns what goes wrong while `path` is written (disk full, quota, no permission) into a CheckpointError."""
    from safetensors import SafetensorError  # its own error, no OSError, for the same disk

    try:
        yield
    except (OSError, SafetensorError) as error:
        reason = error.strerror if isinstance(error, OSError) and error.strerror else error
        raise CheckpointError(f"could not write {what}: {reason}", where=str(path), remedy=remedy) from error
