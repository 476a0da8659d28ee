"""Which convention a reward function follows, told by its parameters' names."""

from __future__ import annotations

import asyncio
import inspect
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from enum import Enum
from typing import Any

from podium.core.errors import ConfigError

VERL_ARGUMENTS = ("data_source", "solution_str", "ground_truth", "extra_info")
TRL_BATCH = ("prompts", "completions", "completion_ids")
TRL_CONTEXT = ("trainer_state", "log_extra", "log_metric", "environments")


class Convention(Enum):
    """Whose signature a function has."""

    TRL = "TRL's f(prompts, completions, **columns), once per batch"
    VERL = "verl's compute_score(data_source, solution_str, ground_truth, extra_info), once per sample"


@dataclass(frozen=True)
class Signature:
    """How to call a reward function."""

    convention: Convention
    accepts: frozenset[str]
    """Parameters that can be given by name."""
    takes_any: bool
    """It has **kwargs."""
    columns: tuple[str, ...]
    """Data columns without which it cannot be called."""
    is_async: bool

    def wants(self, name: str) -> bool:
        return self.takes_any or name in self.accepts


def read_signature(function: Callable[..., Any], name: str, options: Mapping[str, Any]) -> Signature:
    """The convention of a function, and the data columns that it requires.

    Raises ConfigError for a function that follows neither, one that cannot be called by keyword, and options that it
    does not take.
    """
    try:
        parameters = inspect.signature(function).parameters.values()
    except (TypeError, ValueError):
        raise ConfigError("its parameters cannot be read", where=f"reward '{name}'", remedy=_wrap_remedy()) from None
    named = [p for p in parameters if p.kind in (p.POSITIONAL_OR_KEYWORD, p.KEYWORD_ONLY)]
    accepts = frozenset(p.name for p in named)
    takes_any = any(p.kind is p.VAR_KEYWORD for p in parameters)
    required = [p.name for p in named if p.default is p.empty and p.name not in options]
    required += [p.name for p in parameters if p.kind is p.POSITIONAL_ONLY and p.default is p.empty]
    convention = _convention(accepts, name, parameters)
    _check_options(options, accepts, takes_any, name)
    if convention is Convention.VERL:
        odd = [p for p in required if p not in VERL_ARGUMENTS]
        if odd:
            raise ConfigError(
                f"it requires {', '.join(odd)}, which verl's convention does not give",
                where=f"reward '{name}'",
                remedy="give them a default, or set them in the reward's options",
            )
        columns = tuple(p for p in required if p in ("data_source", "ground_truth"))
    else:
        # A function that takes its columns as **columns may say which it needs in an attribute.
        required += getattr(function, "columns", ())
        columns = tuple(p for p in required if p not in (*TRL_BATCH, *TRL_CONTEXT))
    return Signature(convention, accepts, takes_any, columns, _is_async(function))


def _convention(accepts: Collection[str], name: str, parameters: Collection[inspect.Parameter]) -> Convention:
    if "solution_str" in accepts and "ground_truth" in accepts:
        return Convention.VERL
    if any(p in accepts for p in TRL_BATCH):
        return Convention.TRL
    raise ConfigError(
        f"the signature ({', '.join(map(str, parameters))}) fits neither {Convention.TRL.value}, nor {Convention.VERL.value}",
        where=f"reward '{name}'",
        remedy=_wrap_remedy(),
    )


def _wrap_remedy() -> str:
    return "name the parameters so (a decorator must use functools.wraps)"


def _check_options(options: Mapping[str, Any], accepts: Collection[str], takes_any: bool, name: str) -> None:
    odd = [] if takes_any else [o for o in options if o not in accepts]
    if odd:
        raise ConfigError(
            f"the function takes no option {', '.join(odd)}",
            where=f"reward '{name}'",
            remedy="its parameters: " + ", ".join(sorted(accepts)),
        )


def _is_async(function: Callable[..., Any]) -> bool:
    # A partial is seen through by iscoroutinefunction; an object with `async def __call__` is not.
    return inspect.iscoroutinefunction(function) or inspect.iscoroutinefunction(getattr(function, "__call__", None))  # noqa: B004


def run_async(coroutine: Any) -> Any:
    """The result of a coroutine, also where an event loop runs already (a notebook): then in a thread of its own."""
    try:
        asyncio.get_running_loop()
    except RuntimeError:
        return asyncio.run(coroutine)
    from concurrent.futures import ThreadPoolExecutor

    with ThreadPoolExecutor(1) as pool:
        return pool.submit(asyncio.run, coroutine).result()
