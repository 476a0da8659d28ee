"""Named things that a user can add to: one registry per kind."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Generic, TypeVar

from podium.core.errors import ConfigError, did_you_mean

T = TypeVar("T")


class Registry(Generic[T]):
    """A map from name to object whose unknown names are errors with the nearest name."""

    def __init__(self, kind: str) -> None:
        self.kind = kind
        self._items: dict[str, T] = {}

    def register(self, name: str) -> Callable[[T], T]:
        """Decorator: files the object under `name`; a name that is taken is an error."""

        def add(item: T) -> T:
            if name in self._items and self._items[name] is not item:
                raise ConfigError(f"{self.kind} '{name}' is registered already", remedy="choose another name")
            self._items[name] = item
            return item

        return add

    def get(self, name: str) -> T:
        """The object called `name`. Raises ConfigError with the nearest name."""
        if name not in self._items:
            raise ConfigError(f"unknown {self.kind} '{name}'", remedy=did_you_mean(name, self._items))
        return self._items[name]

    def __contains__(self, name: object) -> bool:
        return name in self._items

    def __iter__(self) -> Iterator[str]:
        return iter(sorted(self._items))
