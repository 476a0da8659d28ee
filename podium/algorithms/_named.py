"""Functions under a name: tensors by position, settings by keyword, each setting with a default."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

from podium.algorithms._lookup import look_up

Result = TypeVar("Result")


@dataclass(frozen=True)
class NamedFunction(Generic[Result]):
    """A registered function. Call it like the function; a setting that it doesn't have is a `ValueError`."""

    name: str
    what: str
    function: Callable[..., Result]

    @property
    def settings(self) -> dict[str, Any]:
        """Its settings and their defaults."""
        parameters = inspect.signature(self.function).parameters
        return {name: p.default for name, p in parameters.items() if p.kind is p.KEYWORD_ONLY}

    def check(self, names: Iterable[str]) -> None:
        """Raise `ValueError`, with the nearest one, for a name that is not one of the settings."""
        for name in names:
            look_up(self.settings, name, f"setting of {self.what} {self.name!r}:")

    def __call__(self, *tensors: Any, **settings: Any) -> Result:
        self.check(settings)
        return self.function(*tensors, **settings)


def register(
    registry: dict[str, NamedFunction[Result]], name: str, what: str, tensors: int
) -> Callable[[Callable[..., Result]], Callable[..., Result]]:
    """A decorator that puts a function into `registry`; the function itself stays as it is.

    The function takes `tensors` arguments by position. Raises `ValueError` for a name that is taken or another signature.
    """

    def enter(function: Callable[..., Result]) -> Callable[..., Result]:
        if name in registry:
            raise ValueError(f"There is already a {what} {name!r}.")
        parameters = inspect.signature(function).parameters.values()
        by_position = [p.name for p in parameters if p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD)]
        unset = [p.name for p in parameters if p.kind is p.KEYWORD_ONLY and p.default is p.empty]
        if len(by_position) != tensors or unset:
            raise ValueError(
                f"A {what} takes {tensors} tensors by position and its settings by keyword, each with a default; "
                f"{name!r} takes {by_position} by position, and these have no default: {unset}."
            )
        registry[name] = NamedFunction(name, what, function)
        return function

    return enter
