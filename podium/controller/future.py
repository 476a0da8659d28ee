"""What a role's method returns: a result that may still be on its way."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any


class Future:
    """Stands for the result of a call; any use of it as the result waits for it.

    `batch = actor.generate_sequences(prompts)` gives a future that passes for the batch: `batch["rewards"]`,
    `batch.union(...)`, `len(batch)`.
    """

    __slots__ = ("_get",)

    def __init__(self, get: Callable[[], Any]) -> None:
        self._get = get

    @classmethod
    def of(cls, value: Any) -> Future:
        """One that is done."""
        return cls(lambda: value)

    def result(self) -> Any:
        """Waits, and gives the result or raises what the worker raised."""
        return self._get()

    def __getattr__(self, name: str) -> Any:
        return getattr(self.result(), name)

    def __getitem__(self, key: Any) -> Any:
        return self.result()[key]

    def __contains__(self, key: Any) -> bool:
        return key in self.result()

    def __len__(self) -> int:
        return len(self.result())

    def __repr__(self) -> str:
        return f"Future({self.result()!r})"
