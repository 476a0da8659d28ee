"""Who waits, who runs in which row, and who holds which pages: the paged engine's decisions, all on the host."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

from podium.core.errors import RolloutError
from podium.engines.rollout.native.pages import PagePool
from podium.engines.rollout.native.scheduler import Sequence


@dataclass(eq=False)
class Row:
    """A running sequence: its pages, and how many of its tokens are under way (asked of the device, not yet read)."""

    sequence: Sequence
    pages: list[int] = field(default_factory=list)
    under_way: int = 0
    ended: bool = False

    @property
    def reach(self) -> int:
        """Tokens that it has once all is read, at most."""
        return min(self.sequence.length + self.under_way, self.sequence.most)


@dataclass
class Start:
    """Rows that begin from one text: the first computes it from token `known` on, the others share its full pages."""

    text: tuple[int, ...]
    known: int
    rows: list[Row]


class PagedScheduler:
    """The waiting in order of arrival, and the running rows.

    Args:
        max_concurrent: rows at once.
        ahead: tokens a row may grow by before the scheduler is asked again.
    """

    def __init__(self, max_concurrent: int, ahead: int) -> None:
        self.max_concurrent, self.ahead = max_concurrent, ahead
        self.waiting: dict[int, Sequence] = {}
        self.rows: list[Row] = []
        self.pool: PagePool | None = None
        self.preemptions = 0
        self._alike: dict[tuple[int, ...], dict[int, Sequence]] = {}

    # ------------------------------------------------------------------ waiting

    def add(self, sequence: Sequence) -> None:
        self.waiting[sequence.id] = sequence
        self._alike.setdefault(sequence.prefix, {})[sequence.id] = sequence

    def add_first(self, sequences: list[Sequence]) -> None:
        """They wait again, before all others, in this order."""
        others = list(self.waiting.values())
        self.waiting.clear()
        self._alike.clear()
        for sequence in (*sequences, *others):
            self.add(sequence)

    def drop(self, sequence_id: int) -> Sequence | None:
        """Takes a request out of the waiting; None where it does not wait."""
        sequence = self.waiting.pop(sequence_id, None)
        if sequence is not None:
            alike = self._alike[sequence.prefix]
            del alike[sequence_id]
            if not alike:
                del self._alike[sequence.prefix]
        return sequence

    # ------------------------------------------------------------------ starting

    def take(self, tokens: int) -> list[Start]:
        """Starts the oldest waiting requests, each with others of its text, until what is to compute comes to `tokens`.

        Empty where none waits, or there is no row or page for the next. Those that may write most come first: they will
        be last to end.

        Raises RolloutError where a request can never have the pages that it may need.
        """
        starts: list[Start] = []
        while self.waiting and tokens > 0:
            oldest = next(iter(self.waiting.values()))
            if starts and oldest.length > tokens:
                break  # it would make a second, nearly empty pass
            start = self._start(oldest)
            if start is None:
                break
            self.rows.extend(start.rows)
            starts.append(start)
            tokens -= len(start.text) - start.known
        if not any(start.known for start in starts):  # else one may need what another computes first
            starts.sort(key=lambda start: -max(row.sequence.most - row.sequence.length for row in start.rows))
            fresh = [row for start in starts for row in start.rows]
            self.rows[len(self.rows) - len(fresh) :] = fresh
        return starts

    def _start(self, oldest: Sequence) -> Start | None:
        assert self.pool is not None
        pool, size = self.pool, self.pool.size
        self.check_fits(oldest)
        text = oldest.prefix
        alike = list(self._alike[text].values())[: self.max_concurrent - len(self.rows)]
        known = pool.find(text[:-1])
        shared = len(text) // size
        rows: list[Row] = []
        for sequence in alike:
            have = len(known) if not rows else shared
            need = pool.needed(min(len(text) + self.ahead, sequence.most)) - have
            # Every running row will want a page before long: leave it one.
            if need + len(self.rows) + len(rows) > pool.free and (self.rows or rows):
                break
            if need > pool.free:
                break
            before = known if not rows else rows[0].pages[:shared]
            pool.share(before)
            rows.append(Row(sequence, [*before, *pool.take(need)]))
            self.drop(sequence.id)
        if not rows:
            return None
        pool.remember(text, rows[0].pages)
        return Start(text, len(known) * size, rows)

    def check_fits(self, sequence: Sequence) -> None:
        """Raises RolloutError where the whole cache is too small for this one request."""
        if self.pool is not None and self.pool.needed(sequence.most) > self.pool.pages:
            raise RolloutError(
                f"request {sequence.id} may come to {sequence.most} tokens = {self.pool.needed(sequence.most)} pages of "
                f"{self.pool.size}; the cache has {self.pool.pages}",
                remedy="lower rollout.max_new_tokens, shorten the prompt, or give the cache more memory",
            )

    # ------------------------------------------------------------------ running

    def settle(self) -> list[int] | None:
        """Drops rows that have ended, or that will have once what is under way is read; the slots that stay, None if all."""
        stay = [i for i, row in enumerate(self.rows) if not row.ended and row.reach < row.sequence.most]
        if len(stay) == len(self.rows):
            return None
        self.rows = [self.rows[i] for i in stay]
        return stay

    def lacking(self, steps: int) -> int:
        """Pages that the rows need for so many more tokens each, and that are not free."""
        assert self.pool is not None
        return sum(self._more(row, steps) for row in self.rows) - self.pool.free

    def grow(self, steps: int, on_page: Callable[[int, Row], None]) -> bool:
        """Gives each row the pages for so many more tokens; `on_page(slot, row)` where it got any. Whether any did."""
        assert self.pool is not None
        grown = False
        for slot, row in enumerate(self.rows):
            more = self._more(row, steps)
            if more > 0:
                row.pages.extend(self.pool.take(more))
                on_page(slot, row)
                grown = True
        return grown

    def _more(self, row: Row, steps: int) -> int:
        assert self.pool is not None
        return max(0, self.pool.needed(min(row.reach + steps, row.sequence.most)) - len(row.pages))

    def end(self, row: Row) -> None:
        """The row's pages are free for others; it goes with the next `settle`."""
        assert self.pool is not None
        row.ended = True
        self.pool.give(row.pages)
        row.pages = []

    def preempt(self, rows: list[Row]) -> None:
        """They give up their pages and wait again, first; what they have written stays written."""
        for row in rows:
            self.end(row)
        self.add_first([row.sequence for row in rows])

    def make_room(self, steps: int) -> None:
        """Preempts the rows that came last until the others can go on. Nothing may be under way."""
        gone: list[Row] = []
        while self.lacking(steps) > 0:
            gone.insert(0, self.rows.pop())
            self.end(gone[0])
        self.preemptions += len(gone)
        self.add_first([row.sequence for row in gone])
