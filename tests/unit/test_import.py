from __future__ import annotations

import subprocess
import sys
import time

import pytest

import podium


def python(code: str) -> str:
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=True)
    return done.stdout.strip()


def test_import_is_light() -> None:
    heavy = python("import sys, podium; print([m for m in ('torch', 'transformers', 'numpy', 'pydantic') if m in sys.modules])")
    assert heavy == "[]"


def test_import_is_fast() -> None:
    """The best of three: other work on the machine can only slow it down."""
    seconds = []
    for _ in range(3):
        started = time.perf_counter()
        python("import podium")
        seconds.append(time.perf_counter() - started)
    assert min(seconds) < 1.0


@pytest.mark.parametrize("name", podium.__all__)
def test_every_public_name_is_there(name: str) -> None:
    assert getattr(podium, name) is not None
    assert name in dir(podium)


def test_unknown_name() -> None:
    with pytest.raises(AttributeError, match="has no attribute 'trian'"):
        podium.trian  # noqa: B018


def test_version_is_the_packages() -> None:
    from importlib.metadata import version

    assert version("podium") == podium.__version__
