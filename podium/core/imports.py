"""Modules that a user names: by their dotted name, or by the path of a python file."""

from __future__ import annotations

import contextlib
import hashlib
import importlib
import importlib.util
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

from podium.core.errors import ConfigError
from podium.core.files import nearest_file


def load_module(source: str, where: str) -> ModuleType:
    """The module called `source` (`package.module`, or a path that ends in `.py`). A file is run once, until it changes.

    The current folder is importable, and a file's own folder while it is run, as when python runs it. Raises ConfigError (at
    `where`): it is not there, or it cannot be imported.
    """
    return _from_file(Path(source), where) if source.endswith(".py") else _by_name(source, where)


def _from_file(path: Path, where: str) -> ModuleType:
    if not path.is_file():
        raise ConfigError(f"no such file: {path}", where=where, remedy=nearest_file(path, ".py"))
    place = path.resolve()
    stamp = f"{place}:{place.stat().st_mtime_ns}:{place.stat().st_size}"
    name = f"podium_user_{path.stem}_{hashlib.sha256(stamp.encode()).hexdigest()[:12]}"
    if name in sys.modules:
        return sys.modules[name]
    spec = importlib.util.spec_from_file_location(name, path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    with importable(place.parent):
        try:
            spec.loader.exec_module(module)
        except Exception as error:  # a user's file: anything
            del sys.modules[name]
            raise ConfigError(f"cannot be imported: {type(error).__name__}: {error}", where=str(path)) from error
    return module


def _by_name(name: str, where: str) -> ModuleType:
    with importable(Path.cwd()):
        try:
            return importlib.import_module(name)
        except Exception as error:  # a user's module: anything
            missing = isinstance(error, ModuleNotFoundError) and error.name is not None and name.startswith(error.name)
            what = f"no module '{name}'" if missing else f"cannot be imported: {type(error).__name__}: {error}"
            remedy = "run from its folder, install it, or give the file: path/file.py" if missing else None
            raise ConfigError(what, where=where if missing else name, remedy=remedy) from error


@contextlib.contextmanager
def importable(folder: Path) -> Iterator[None]:
    """Puts a folder at the front of the import path for a while (a command's own folder is there, not the user's)."""
    sys.path.insert(0, str(folder))
    try:
        yield
    finally:
        sys.path.remove(str(folder))
