"""Waiting for the ranks of one call: the first failure counts, nobody is waited for without end."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from podium.controller.process import Cancelled, Failure
from podium.core.errors import WorkerLost
from podium.core.ranks import names_of

POLL_SECONDS = 0.5


@dataclass(frozen=True)
class Answers:
    """How a library waits for references and reads them."""

    wait: Callable[..., tuple[list[Any], list[Any]]]
    get: Callable[[Any], Any]
    lost: type[Exception]
    """What `get` raises where the worker is gone."""
    failed: type[Exception]
    """A kind of it where the worker is there, and could not even read its arguments."""


class Stoppable(Protocol):
    """A pool whose ranks run a call."""

    def progress(self) -> tuple[int, int, int]: ...

    def cancel(self) -> None: ...

    def stack(self, rank: int) -> str: ...

    def stop(self) -> None: ...


class Waiter:
    """Waits for a call.

    Args:
        answers, pool: whom to ask.
        what: names the call in messages.
        deadline: seconds that the call may take, from now.
        grace: seconds for the other ranks after one has failed; then the pool is stopped.
        on_progress: called with the ranks' summed progress while the call runs. What it raises gives up the call.
    """

    def __init__(
        self, answers: Answers, pool: Stoppable, what: str, *, deadline: float, grace: float, on_progress: Any = None
    ) -> None:
        self.answers, self.pool, self.what, self.grace, self.on_progress = answers, pool, what, grace, on_progress
        self.deadline, self._until = deadline, time.monotonic() + deadline
        self._failure: BaseException | None = None
        self._given_up: BaseException | None = None

    def wait(self, refs: Sequence[Any], wanted: Iterable[int]) -> list[Any]:
        """The results of the wanted ranks. Raises what the first failed rank raised, or WorkerLost."""
        pending, results = dict(zip(refs, range(len(refs)), strict=True)), dict[int, Any]()
        while pending:
            try:
                done, _ = self.answers.wait(list(pending), num_returns=1, timeout=POLL_SECONDS)
            except KeyboardInterrupt:  # the call is given up where it next reports its progress
                self.pool.cancel()
                raise
            for ref in done:
                self._take(ref, pending.pop(ref), results)
            if pending and time.monotonic() > self._until:
                self._stop(sorted(pending.values()), sorted(results))
            if pending and not done:
                self._report()
        if self._given_up is not None:
            raise self._given_up
        if self._failure is not None:
            if isinstance(self._failure, WorkerLost):
                self.pool.stop()
            raise self._failure
        return [results[rank] for rank in wanted]

    def _take(self, ref: Any, rank: int, results: dict[int, Any]) -> None:
        try:
            result = self.answers.get(ref)
        except self.answers.failed as error:
            error.add_note(f"on rank {rank}, in {self.what}")
            self._failed(error)
            return
        except self.answers.lost as error:
            cause = (str(error).strip().splitlines() or [type(error).__name__])[0]
            lost = WorkerLost(
                f"rank {rank} is gone ({type(error).__name__}: {cause})",
                where=self.what,
                remedy="its node's log says why: out of memory, a crash, a kill",
            )
            self._failed(lost)
            return
        given_up = self._given_up is not None
        if isinstance(result, Failure) and not (given_up and isinstance(result.error, Cancelled)):
            self._failed(result.raised())
        results[rank] = result

    def _failed(self, error: BaseException) -> None:
        # A rank that is gone makes the others' collectives fail: its loss is the cause, whoever is heard of first.
        if self._failure is None or (isinstance(error, WorkerLost) and not isinstance(self._failure, WorkerLost)):
            if self._failure is not None:
                error.__context__ = self._failure
            self._failure = error
        self._until = min(self._until, time.monotonic() + self.grace)

    def _stop(self, waiting: list[int], done: list[int]) -> None:
        """Some ranks do not end: they are looked at, and the pool is stopped."""
        stacks = "".join(f"\nrank {rank} stands at\n{self.pool.stack(rank)}" for rank in waiting)
        self.pool.stop()
        if self._given_up is not None:
            raise self._given_up
        if self._failure is not None:
            self._failure.add_note(f"{names_of(waiting)} did not end within {self.grace:g} s after that and were stopped")
            raise self._failure
        others = f"; {names_of(done)} had ended: the ranks do not make the same collective calls" if done else ""
        lost = WorkerLost(
            f"{names_of(waiting)} did not answer within {self.deadline:g} s{others}",
            where=self.what,
            remedy="if the call may take longer: deadlines.call",
        )
        lost.add_note(f"where they were:{stacks}")
        raise lost

    def _report(self) -> None:
        if self.on_progress is None or self._given_up is not None:
            return
        try:
            self.on_progress(*self.pool.progress())
        except BaseException as error:
            self._given_up = error
            self.pool.cancel()
            self._until = min(self._until, time.monotonic() + self.grace)
