"""The native rollout engine over a paged cache: what `rollout.engine=native` is on a GPU.

A step: start waiting requests while there are rows and pages for them (packed passes; a prompt of a group once; what runs
already is decoded along in the same pass), then
send the device off to decode every running row for a window of tokens (`steps_per_look`), and, while it does, read what
the window before brought: append tokens, take out what has ended, free its pages. The device needs no word from the host
within a window: it draws, checks stop tokens and lengths, and feeds itself. The host is the judge all the same: it cuts
at stop strings, and what a row drew beyond its end is not read.

There is no copy of a weight; an update needs no transfer. `update_weights` and `release` make the running requests wait
again, and the next step computes their caches anew, as it does for those that gave up their pages to others.

A sample depends on its seed, its prompt and the weights. Matrix products round differently for another number of rows, so
in fp32 it is the same in any batch but for a draw within 1e-6 of a border between two tokens; in bf16 such are not rare.
"""

from __future__ import annotations

import logging
from collections import deque
from itertools import count

import numpy as np
from torch import Tensor
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from podium.engines.base import Request, Trajectory
from podium.engines.rollout.native.cpu_products import products_for
from podium.engines.rollout.native.engine import Counters, check_in_place, generating, not_finite
from podium.engines.rollout.native.graphs import DecodeStep, Shape, bucket_of, splits_of
from podium.engines.rollout.native.looks import Draws, Look, draw
from podium.engines.rollout.native.memory import cache_pages
from podium.engines.rollout.native.paged_cache import RowState, to_device
from podium.engines.rollout.native.paged_scheduler import PagedScheduler, Row, Start
from podium.engines.rollout.native.pages import PagePool
from podium.engines.rollout.native.passes import DecodePass, FusedForward, MixedPass, PrefillPass, copies_of, passes_of
from podium.engines.rollout.native.prepare import cache_for, check, check_options, forward_for, operations, queries_of_a_key
from podium.engines.rollout.native.rows import follows, set_biases, set_row
from podium.engines.rollout.native.scheduler import Sequence
from podium.engines.rollout.native.sharing import SharingPlan, Tiles
from podium.engines.rollout.requests import Limits
from podium.engines.rollout.steering import Steering
from podium.engines.rollout.stopping import StopRule, end_token_ids
from podium.models.divided import tensor_ranks_of
from podium.models.lm_head import base_of, lm_head_of
from podium.models.storage import storage_fingerprint

_log = logging.getLogger(__name__)

# Prompt tokens that are started together: all that fits, but for the host's own lists.
_START_TOKENS = 1 << 20
# Rows of logits that a prefill computes at once.
_LOGITS_ROWS = 256


class PagedEngine:
    """A `RolloutEngine` over a `transformers` causal LM that someone else may be training.

    The model's attention is switched to Podium's; with `fused`, its q/k/v and gate/up weights are laid out together (see
    `models.fused`). Parameters are read, never written.

    Args:
        max_concurrent: sequences decoded at once.
        prefill_tokens: prompt tokens in one forward pass, at most; longer prompts take several.
        max_cache_tokens: bound on the cache, in tokens; None: 0.85 of the memory that is free when it is taken.
        page_size: tokens on a page (a power of two).
        steps_per_look: decode steps between two looks of the host. `step` advances a request by at most so many tokens.
        graphs: replay CUDA graphs; False runs each operation as it is written (the plain path).
        fused: use fused layers where the architecture has them; otherwise the model's own modules run.

    Raises:
        ModelError: the model's head or attention cannot be used.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        tokenizer: PreTrainedTokenizerBase,
        *,
        max_concurrent: int = 256,
        prefill_tokens: int = 16384,
        max_cache_tokens: int | None = None,
        page_size: int = 64,
        steps_per_look: int = 8,
        graphs: bool = True,
        fused: bool = True,
    ) -> None:
        check_options(page_size, max_concurrent=max_concurrent, prefill_tokens=prefill_tokens, steps_per_look=steps_per_look)
        self.model, self.tokenizer = model, tokenizer
        self.base, self.head = base_of(model), lm_head_of(model)
        self.device = self.base.device
        self.policy_version = 0
        self.prefill_tokens, self.max_cache_tokens, self.window = prefill_tokens, max_cache_tokens, steps_per_look
        self.counters = Counters()
        self._ranks = tensor_ranks_of(model)
        self._ops = operations(self.device, self._ranks)
        self._scheduler = PagedScheduler(max_concurrent, 2 * steps_per_look)
        self._looks: deque[Look] = deque()
        self._finished: list[Trajectory] = []
        self._stale = False
        self._sized_for: int | None = None  # tokens of the longest request that the cache was sized for; None: no more to have
        self._ids = count()
        self._ends = end_token_ids(model, tokenizer)
        self._limits = Limits.within_one_rotation(model)
        self._cache = cache_for(self.base, page_size)
        longest = self._limits.positions or 1 << 20
        self.state = RowState(max_concurrent, -(-longest // page_size), steps_per_look, self.device)
        self._sharing = SharingPlan(Tiles(max_concurrent, queries_of_a_key(self.base), self._cache.anchor.dtype, self.device))
        self._forward = forward_for(model, self._ops, longest, fused=fused)
        self._products = products_for(model)
        with generating(self.model, self.base, self._products):
            check(model, self._forward, self._ops, self._cache)
        self._products.clear()  # the model's own modules multiply by the weights one by one
        self._decode = DecodeStep(
            self._forward, self.head.logits, self._ops, self._cache, self.state, graphs=graphs and self.device.type == "cuda"
        )
        self._storage = storage_fingerprint(model)

    # ------------------------------------------------------------------ the interface

    def submit(self, request: Request) -> int:
        """Queues a request. Raises RolloutError where it can never be served (`Limits.check`; a cache too small for it)."""
        self._limits.check(request)
        rule = StopRule(self.tokenizer, request.sampling, self._ends, request.prompt_ids, request.response_ids)
        steering = Steering.of(self.tokenizer, request.sampling, self._limits.vocabulary)
        sequence = Sequence(next(self._ids), request, rule, steering=steering)
        self._resize_for(sequence)
        self._scheduler.check_fits(sequence)
        self._scheduler.add(sequence)
        return sequence.id

    def step(self) -> list[Trajectory]:
        """Starts what can start, sends off a window of decoding, and reads the one before; what finished.

        Raises RolloutError, naming request and position, where logits are not finite: the request waits again, with what
        it had before.
        """
        with generating(self.model, self.base, self._products):
            if self._stale:
                self._restart()
            self._wake()
            self._admit()
            sent = self._send()
            while len(self._looks) > (1 if sent else 0):
                self._read(self._looks.popleft())
            if all(row.ended for look in self._looks for row in look.rows):
                self._looks.clear()  # what they drew beyond their end: nobody asks for it
        finished, self._finished = self._finished, []
        return finished

    def abort(self, request_id: int) -> Trajectory | None:
        """Ends a request; `requests.resume` makes the request that continues it."""
        sequence = self._scheduler.drop(request_id)
        if sequence is None:
            self._read_all()
            row = next((r for r in self._scheduler.rows if r.sequence.id == request_id and not r.ended), None)
            if row is None:
                return None
            self._scheduler.end(row)
            sequence = row.sequence
        return sequence.trajectory("aborted")

    @property
    def pending(self) -> int:
        running = sum(not row.ended for row in self._scheduler.rows)
        # What has left its row but was not read yet, and what was read but not handed out.
        leaving = {id(row) for look in self._looks for row in look.rows if not row.ended} - {
            id(row) for row in self._scheduler.rows
        }
        return len(self._scheduler.waiting) + running + len(leaving) + len(self._finished)

    def update_weights(self, version: int) -> None:
        """The parameters now hold this version. Running sequences go on under it, in a new segment.

        Raises RolloutError where a parameter is no longer where it was when the engine was made.
        """
        check_in_place(self.model, self._storage)
        self._read_all()
        self._products.clear()
        self._forward.refresh()
        self.policy_version = version
        self._stale = True

    def release(self) -> None:
        """Frees the cache and packed weights. Running requests stay; the next step computes theirs again."""
        self._read_all()
        self._restart()
        self._scheduler.pool = None
        self._cache.release()
        self._products.clear()

    @property
    def cache_bytes(self) -> int:
        """Memory held by the cache and by packed weights now, in bytes."""
        return self._cache.bytes + self._products.bytes

    @property
    def preemptions(self) -> int:
        """Requests that gave up their pages to others so far."""
        return self._scheduler.preemptions

    # ------------------------------------------------------------------ starting

    def _wake(self) -> None:
        """Takes the cache's memory where it is not there."""
        if self._cache.pages is not None or not self._scheduler.waiting:
            return
        longest = max(sequence.most for sequence in self._scheduler.waiting.values())
        most = self._scheduler.max_concurrent * -(-longest // self._cache.page_size)
        pages = cache_pages(self._cache, self.max_cache_tokens, most)
        if self._ranks is not None:  # they must decide alike, and their devices' free memory differs
            pages = self._ranks.least(pages)
        self._cache.allocate(pages)
        self._scheduler.pool = PagePool(pages, self._cache.page_size)
        self._sized_for = longest if pages == most else None
        _log.info("rollout cache: %d pages of %d tokens, %.2f GB", pages, self._cache.page_size, self._cache.bytes / 1e9)

    def _resize_for(self, sequence: Sequence) -> None:
        """Gives back a cache that shorter requests sized, where it is idle or too small: the next step takes a larger one."""
        pool = self._scheduler.pool
        if pool is None or self._sized_for is None or sequence.most <= self._sized_for:
            return
        if not self._scheduler.rows or pool.needed(sequence.most) > pool.pages:
            self.release()

    def _restart(self) -> None:
        """All running requests wait again, first."""
        rows = [row for row in self._scheduler.rows if not row.ended]
        self._scheduler.preempt(rows)
        self._scheduler.rows = []
        self.state.keep([])
        self._stale = False

    def _admit(self) -> None:
        if not self._scheduler.waiting:
            return
        self._settle()
        while starts := self._scheduler.take(_START_TOKENS):
            self._prefill(starts)

    def _settle(self) -> None:
        stay = self._scheduler.settle()
        if stay is not None:
            self.state.keep(stay)
            self.state.upload(len(stay))
            self._show_pages()

    def _prefill(self, starts: list[Start]) -> None:
        """Fills the caches of rows that were just started, and draws their first tokens."""
        fresh = sum(len(start.rows) for start in starts)
        slot = len(self._scheduler.rows) - fresh
        slots: list[list[int]] = []
        for start in starts:
            slots.append(list(range(slot, slot + len(start.rows))))
            slot += len(start.rows)
            for at, row in zip(slots[-1], start.rows, strict=True):
                set_row(self.state, at, row)
                self._page_row(at, row)
        self.state.upload(slot)
        self._show_pages()
        running = slots[0][0]
        for pieces, final in passes_of(starts, self.prefill_tokens):
            step = PrefillPass(self._ops, self._cache, [piece for _, piece in pieces], self.device)
            hidden = self._forward_with(running, step)
            self.counters.prefill_tokens += len(step.ids)
            running += sum(len(starts[i].rows) for _, i in final)
            if final:
                last = hidden[step.last[to_device(np.array([at for at, _ in final]), self.device)]]
                self._first_tokens(last, [starts[i] for _, i in final], [slots[i] for _, i in final])

    def _forward_with(self, running: int, step: PrefillPass) -> Tensor:
        """The pass's last hidden states; where it pays, the first `running` rows are decoded by a token along with it."""
        rows = self._scheduler.rows[:running]
        going_on = any(row.reach < row.sequence.most for row in rows) and not any(follows(row) for row in rows)
        if not (isinstance(self._forward, FusedForward) and going_on and self._scheduler.lacking(1) <= 0):
            return self._forward(step)
        if self._scheduler.grow(1, self._page_row):
            self._show_pages()
        splits = splits_of(running, self._cache.kv_heads, [row.reach + 1 for row in rows])
        hidden = self._forward(MixedPass(DecodePass(self._ops, self._cache, self.state, running, splits), step))
        self._new_window()
        at = self.state.all_slots[:running]
        for start in range(0, running, _LOGITS_ROWS):
            end = min(running, start + _LOGITS_ROWS)
            logits = self.head.logits(hidden[start:end])
            which = self.state.all_slots[: end - start]
            draw(self._ops, logits, which, at[start:end], self.state, Draws.of(rows[start:end]))
        self.counters.decode_steps += 1
        self._looks.append(Look.at(self.state, rows, 1, at, self.policy_version))
        return hidden[running:]

    def _new_window(self) -> None:
        self.state.written.zero_()
        self.state.tokens_out.fill_(-1)

    def _first_tokens(self, hidden: Tensor, starts: list[Start], slots: list[list[int]]) -> None:
        """Draws the first token of every row of these starts from each start's last hidden state `[S, hidden]`."""
        self._cache.copy(*copies_of(starts, self._cache.page_size))
        for at in range(0, len(starts), _LOGITS_ROWS):
            part, places = starts[at : at + _LOGITS_ROWS], slots[at : at + _LOGITS_ROWS]
            rows = [row for start in part for row in start.rows]
            lengths = [len(start.text) for start in part for _ in start.rows]
            which = np.repeat(np.arange(len(part)), [len(start.rows) for start in part])
            on_device = self.state.start([slot for group in places for slot in group], lengths)
            logits = self.head.logits(hidden[at : at + _LOGITS_ROWS])
            draw(self._ops, logits, to_device(which, self.device), on_device, self.state, Draws.of(rows))
            self._looks.append(Look.at(self.state, rows, 1, on_device, self.policy_version))

    def _page_row(self, slot: int, row: Row) -> None:
        self.state.host_table[slot, : len(row.pages)] = row.pages

    def _show_pages(self) -> None:
        rows = self._scheduler.rows
        if rows:
            self.state.upload_pages(len(rows), max(len(row.pages) for row in rows))

    # ------------------------------------------------------------------ decoding

    def _send(self) -> bool:
        """Sends off a window for all rows that may need one; False where none does."""
        self._settle()
        follows = self._follow()
        if not self._scheduler.rows:
            return False
        steps = 1 if follows else min(self.window, max(row.sequence.most - row.reach for row in self._scheduler.rows))
        if self._scheduler.lacking(steps) > 0:
            self._read_all()
            self._settle()
            before = len(self._scheduler.rows)
            self._scheduler.make_room(steps)
            if len(self._scheduler.rows) < before:
                self.state.keep(list(range(len(self._scheduler.rows))))
            if not self._scheduler.rows:
                return False
        if self._scheduler.grow(steps, self._page_row):
            self._show_pages()
        rows, pool = list(self._scheduler.rows), self._scheduler.pool
        assert pool is not None
        bucket = bucket_of(len(rows), self._scheduler.max_concurrent)
        shared = self._sharing.of(rows, pool, self._cache.kv_heads)
        splits = splits_of(bucket, self._cache.kv_heads, self._sharing.own_lengths(steps))
        shape = Shape(bucket, splits, shared, Draws.of(rows))
        self._new_window()
        for _ in range(steps):
            self._decode(shape)
        self.counters.decode_steps += steps
        self._looks.append(Look.at(self.state, rows, steps, self.state.all_slots[: len(rows)], self.policy_version))
        return True

    def _follow(self) -> bool:
        """Brings biases up to date that depend on the tokens before; whether any row has such."""
        if not any(follows(row) for row in self._scheduler.rows):
            return False
        self._read_all()
        self._settle()
        set_biases(self.state, self._scheduler.rows)
        return True

    def _read_all(self) -> None:
        while self._looks:
            self._read(self._looks.popleft())

    def _read(self, look: Look) -> None:
        """Gives the rows their tokens; takes out those that end."""
        bad: list[Row] = []
        for row, tokens, log_probs, broke in look.read():
            if row.ended:
                continue
            before = len(row.sequence.tokens)
            reason = row.sequence.extend(tokens, log_probs, look.version)
            self.counters.sampled_tokens += len(row.sequence.tokens) - before
            if reason is not None:
                self._finished.append(row.sequence.trajectory(reason))
                self._scheduler.end(row)
            elif broke:
                bad.append(row)
        if bad:
            self._scheduler.preempt(bad)
            raise not_finite(bad[0].sequence)
