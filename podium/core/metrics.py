"""Metrics as (sum, count): the only form that adds up right over micro-batches, ranks and steps."""

from __future__ import annotations

from collections.abc import Iterator, Mapping


class Metrics:
    """Named means kept as sums and counts, so that merging never takes a mean of means."""

    def __init__(self, items: Mapping[str, tuple[float, float]] | None = None) -> None:
        self._items: dict[str, tuple[float, float]] = dict(items or {})

    def add(self, name: str, total: float, count: float = 1.0) -> None:
        """Adds `total` over `count` observations to `name`."""
        s, c = self._items.get(name, (0.0, 0.0))
        self._items[name] = (s + float(total), c + float(count))

    def merge(self, other: Metrics, prefix: str = "") -> Metrics:
        """Adds every item of `other` (its names prefixed) to this one; returns self."""
        for name, (s, c) in other.items():
            self.add(prefix + name, s, c)
        return self

    def items(self) -> Iterator[tuple[str, tuple[float, float]]]:
        return iter(self._items.items())

    def mean(self, name: str) -> float:
        """The mean of `name`; NaN where nothing was counted."""
        s, c = self._items[name]
        return s / c if c else float("nan")

    def means(self) -> dict[str, float]:
        return {name: self.mean(name) for name in sorted(self._items)}

    def __contains__(self, name: object) -> bool:
        return name in self._items

    def __len__(self) -> int:
        return len(self._items)
