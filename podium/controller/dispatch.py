"""How a method's arguments reach the workers of a role, and how their results come back.

A worker's method says its protocol with `@dispatch("rows")`; the worker does not know who calls it. Users add their own
with `@PROTOCOLS.register("name")` on a `Protocol`.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, TypeVar

from podium.core.batch import Batch, resolve
from podium.core.metrics import Metrics
from podium.core.registry import Registry

F = TypeVar("F", bound=Callable[..., Any])
Call = tuple[tuple[Any, ...], dict[str, Any]]


@dataclass(frozen=True)
class Protocol:
    """`split(args, kwargs, workers)` gives one call per worker; `collect(results)` makes them one."""

    split: Callable[[tuple[Any, ...], dict[str, Any], int], list[Call]]
    collect: Callable[[list[Any]], Any]


PROTOCOLS: Registry[Protocol] = Registry("dispatch protocol")


def dispatch(protocol: str) -> Callable[[F], F]:
    """Marks a worker's method as callable from its role's handle, by this protocol."""

    def mark(method: F) -> F:
        method.__podium_dispatch__ = protocol  # type: ignore[attr-defined]
        return method

    return mark


def protocol_of(method: Any) -> str | None:
    """The protocol's name, or None for a method that handles cannot call."""
    return getattr(method, "__podium_dispatch__", None)


def _to_all(args: tuple[Any, ...], kwargs: dict[str, Any], workers: int) -> list[Call]:
    return [(args, kwargs)] * workers


def _to_first(args: tuple[Any, ...], kwargs: dict[str, Any], workers: int) -> list[Call]:
    return [(args, kwargs)]


def _rows(args: tuple[Any, ...], kwargs: dict[str, Any], workers: int) -> list[Call]:
    """Every batch among the arguments is cut into consecutive parts, one a worker; the rest goes to all."""

    def share(value: Any, rank: int) -> Any:
        if not isinstance(value, Batch) or workers == 1:
            return value
        base, extra = divmod(len(value), workers)
        return value.split([base + (r < extra) for r in range(workers)])[rank]

    return [(tuple(share(a, r) for a in args), {k: share(v, r) for k, v in kwargs.items()}) for r in range(workers)]


def _first(results: list[Any]) -> Any:
    return results[0]


def merge_results(results: list[Any]) -> Any:
    """Batches are concatenated in rank order, metrics added up; anything else comes as a list, one entry a worker."""
    if isinstance(results[0], Batch):
        return results[0] if len(results) == 1 else Batch.concatenate(results)
    if isinstance(results[0], Metrics):
        total = Metrics()
        for result in results:
            total.merge(result)
        return total
    return results


PROTOCOLS.register("broadcast")(Protocol(_to_all, _first))
PROTOCOLS.register("gather")(Protocol(_to_all, list))
PROTOCOLS.register("first")(Protocol(_to_first, _first))
PROTOCOLS.register("rows")(Protocol(_rows, merge_results))


def resolve_arguments(args: tuple[Any, ...], kwargs: dict[str, Any]) -> Call:
    """Arguments that are futures of other roles' calls become what they hold."""
    return tuple(resolve(a) for a in args), {k: resolve(v) for k, v in kwargs.items()}
