"""Who waits, who runs, and in which slot."""

from __future__ import annotations

from dataclasses import dataclass, field
from itertools import islice

from podium.engines.base import FinishReason, Request, Segment, Trajectory
from podium.engines.rollout.steering import Steering
from podium.engines.rollout.stopping import StopRule

# Rows attend together up to their longest length; one more group of rows costs about this many rows x tokens of work.
_PART_COST = 1024
_MOST_PARTS = 4
STOPS = 8
"""End tokens of a row that the device looks for itself."""


@dataclass(eq=False)
class Sequence:
    """A request on its way. While it runs, the cache holds all its tokens but the last."""

    id: int
    request: Request
    rule: StopRule
    tokens: list[int] = field(default_factory=list)
    """The response so far, with what the request brought."""
    segments: list[Segment] = field(default_factory=list)
    steering: Steering | None = None

    def __post_init__(self) -> None:
        self.tokens = list(self.request.response_ids)

    @property
    def prefix(self) -> tuple[int, ...]:
        """What is there before the next token: requests that wait with the same prefix share its prefill."""
        return (*self.request.prompt_ids, *self.tokens)

    @property
    def length(self) -> int:
        return len(self.request.prompt_ids) + len(self.tokens)

    @property
    def most(self) -> int:
        """The tokens it may come to."""
        return len(self.request.prompt_ids) + self.request.sampling.max_new_tokens

    @property
    def watched(self) -> bool:
        """The device cannot see by itself where it ends: a stop string, or too many end tokens."""
        return bool(self.request.sampling.stop) or len(self.rule.end_ids) > STOPS

    def extend(self, tokens: list[int], log_probs: list[float], version: int) -> FinishReason | None:
        """Takes several sampled tokens, up to the one that ends it."""
        if self.watched:
            for token, log_prob in zip(tokens, log_probs, strict=True):
                reason = self.append(token, log_prob, version)
                if reason is not None:
                    return reason
            return None
        if not tokens:
            return None
        self._segment(version).token_ids.extend(tokens)
        self.segments[-1].log_probs.extend(log_probs)
        self.tokens.extend(tokens)
        if tokens[-1] in self.rule.end_ids:
            return "stop"
        return "length" if self.length >= self.most else None

    def append(self, token: int, log_prob: float, version: int) -> FinishReason | None:
        """Takes a sampled token; a new policy version starts a new segment."""
        self._segment(version).token_ids.append(token)
        self.segments[-1].log_probs.append(log_prob)
        self.tokens.append(token)
        return self.rule.push(token)

    def _segment(self, version: int) -> Segment:
        if not self.segments or self.segments[-1].policy_version != version:
            self.segments.append(Segment("policy", policy_version=version))
        return self.segments[-1]

    def trajectory(self, reason: FinishReason) -> Trajectory:
        return Trajectory(self.id, self.request.prompt_ids, self.segments, reason)


@dataclass
class Group:
    """Requests with one prefix, started in consecutive slots. `more`: others with it wait on."""

    prefix: tuple[int, ...]
    sequences: list[Sequence]
    more: bool


class Scheduler:
    """The waiting, in order of arrival, and the running: `running[i]` is in slot i.

    Args:
        max_concurrent: slots.
        max_cache_tokens: slots x longest sequence may not exceed it (a single sequence always may); None: no bound.
    """

    def __init__(self, max_concurrent: int, max_cache_tokens: int | None = None) -> None:
        self.max_concurrent = max_concurrent
        self.max_cache_tokens = max_cache_tokens
        self.waiting: dict[int, Sequence] = {}
        self.running: list[Sequence] = []
        self._alike: dict[tuple[int, ...], dict[int, Sequence]] = {}

    def add(self, sequence: Sequence) -> None:
        self.waiting[sequence.id] = sequence
        self._alike.setdefault(sequence.prefix, {})[sequence.id] = sequence

    def waits_for(self, prefix: tuple[int, ...]) -> bool:
        return prefix in self._alike

    def take(self, tokens: int) -> list[Group]:
        """Starts the oldest waiting requests, each with others of its prefix, in the next free slots.

        Takes groups until their prefixes come to `tokens` (at least one group). Empty where none waits or has room.
        """
        groups: list[Group] = []
        while self.waiting and tokens > 0:
            oldest = next(iter(self.waiting.values()))
            alike = self._alike[oldest.prefix]
            count = self._room(alike)
            if not count:
                break
            group = Group(oldest.prefix, list(islice(alike.values(), count)), more=count < len(alike))
            for sequence in group.sequences:
                self._forget(sequence)
            self.running.extend(group.sequences)
            groups.append(group)
            tokens -= len(group.prefix)
        return groups

    def put_back(self, groups: list[Group]) -> None:
        """Undoes a `take` whose prefill failed: its requests wait again, before all others."""
        back = [sequence for group in groups for sequence in group.sequences]
        del self.running[len(self.running) - len(back) :]
        others = list(self.waiting.values())
        self.waiting.clear()
        self._alike.clear()
        for sequence in (*back, *others):
            self.add(sequence)

    def _room(self, alike: dict[int, Sequence]) -> int:
        """How many of these may start."""
        free = self.max_concurrent - len(self.running)
        if self.max_cache_tokens is None:
            return min(free, len(alike))
        most = max((s.most for s in self.running), default=0)
        count = 0
        for sequence in islice(alike.values(), free):
            most = max(most, sequence.most)
            if (len(self.running) + count + 1) * most > self.max_cache_tokens and (self.running or count):
                break
            count += 1
        return count

    def drop_waiting(self, sequence_id: int) -> Sequence | None:
        sequence = self.waiting.get(sequence_id)
        if sequence is not None:
            self._forget(sequence)
        return sequence

    def _forget(self, sequence: Sequence) -> None:
        del self.waiting[sequence.id]
        alike = self._alike[sequence.prefix]
        del alike[sequence.id]
        if not alike:
            del self._alike[sequence.prefix]

    def retire(self, slots: list[int]) -> list[tuple[int, int]]:
        """Empties these slots. The last running sequences take their places; returns the moves (source, target)."""
        gone = set(slots)
        left = len(self.running) - len(gone)
        sources = [slot for slot in range(left, len(self.running)) if slot not in gone]
        moves = list(zip(sources, sorted(slot for slot in gone if slot < left), strict=True))
        for source, target in moves:
            self.running[target] = self.running[source]
        del self.running[left:]
        return moves

    def sorted_order(self) -> list[int] | None:
        """Slots by falling length, where reading all rows up to the longest would waste more than a third; else None."""
        lengths = [sequence.length for sequence in self.running]
        if len(lengths) * max(lengths) < 1.5 * sum(lengths) or lengths == sorted(lengths, reverse=True):
            return None
        return sorted(range(len(lengths)), key=lambda slot: -lengths[slot])


def row_parts(lengths: list[int]) -> list[tuple[int, int]]:
    """Cuts the rows into at most 4 ranges (start, end), each read up to its own longest, where that saves work."""
    parts = [(0, len(lengths))]
    while len(parts) < _MOST_PARTS:
        best = max((_best_cut(lengths, start, end) for start, end in parts), default=(0, 0))
        if best[0] <= _PART_COST:
            break
        cut = best[1]
        parts = [piece for s, e in parts for piece in (((s, cut), (cut, e)) if s < cut < e else ((s, e),))]
    return parts


def _best_cut(lengths: list[int], start: int, end: int) -> tuple[int, int]:
    """(rows x tokens saved, where) of the best cut of one range."""
    rows = lengths[start:end]
    whole = len(rows) * max(rows)
    if whole - sum(rows) <= _PART_COST:
        return 0, start
    after = [0] * len(rows)
    longest = 0
    for i in range(len(rows) - 1, -1, -1):
        longest = max(longest, rows[i])
        after[i] = longest
    best, longest = (0, start), 0
    for i in range(1, len(rows)):
        longest = max(longest, rows[i - 1])
        best = max(best, (whole - i * longest - (len(rows) - i) * after[i], start + i))
    return best
