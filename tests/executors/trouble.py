"""Trouble under torchrun: each function returns what its rank saw."""

from __future__ import annotations

import time

from tests.executors.players import Player, Unbuildable, batch


def _seen(work):
    started = time.monotonic()
    try:
        work()
    except BaseException as error:
        return {
            "type": type(error).__name__,
            "text": str(error),
            "notes": "\n".join(getattr(error, "__notes__", ())),
            "seconds": time.monotonic() - started,
        }
    return {"type": None}


def other_values(executor):
    """A reward that is another number on each rank."""
    role = executor.launch({"actor": Player})["actor"]
    rows = batch().with_columns({"scores": [float(executor.rank)] * 7})
    return _seen(lambda: role.lengths(rows))


def another_batch_size(executor):
    """One rank has a row less, as where a reward left a sample out on that rank alone."""
    role = executor.launch({"actor": Player})["actor"]
    return _seen(lambda: role.lengths(batch().index(range(7 - executor.rank))))


def another_batch_size_in_a_collective(executor):
    """The same, and the collectives of the method break off because of it."""
    role = executor.launch({"actor": Player})["actor"]
    return _seen(lambda: role.break_off(batch().index(range(7 - executor.rank))))


def another_call(executor):
    role = executor.launch({"actor": Player})["actor"]
    return _seen(lambda: role.where() if executor.rank else role.place())


def one_fails_while_the_other_waits(executor):
    role = executor.launch({"actor": Player})["actor"]
    return _seen(lambda: role.fail_on(0, then_wait=True))


def not_built(executor):
    return _seen(lambda: executor.launch({"actor": Unbuildable}))


SPMD = {
    f.__name__: f
    for f in (
        other_values,
        another_batch_size,
        another_batch_size_in_a_collective,
        another_call,
        one_fails_while_the_other_waits,
        not_built,
    )
}
