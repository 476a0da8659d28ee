"""The native rollout engine: continuous batching in the trainer's own process, over the trainer's own parameters.

One step: decode a token for every running sequence in one forward pass `[B, 1]`, then prefill what waits into the slots
that are free (each distinct prompt once, packed in one row). There is no copy of a weight, so an update needs no
transfer; `update_weights` recomputes the caches of what is running. What is left out: a paged cache, chunked prefill,
speculation, prefixes shared beyond requests that wait together.

A sample depends on its seed, its prompt and the weights. Matrix products round differently for another number of rows
(about 1e-6 in fp32, 1e-2 in bf16), so in fp32 the sample is the same in any batch but for a draw that falls within that
of a border between two tokens; in bf16 such draws are not rare.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import count

import torch
from torch import Tensor
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from podium.core.errors import ModelError, RolloutError
from podium.engines.base import Request, Trajectory
from podium.engines.rollout.native import plain
from podium.engines.rollout.native.attention import DecodeAttention, PrefillAttention
from podium.engines.rollout.native.cpu_products import Products, products_for
from podium.engines.rollout.native.kv_cache import KVCache, Prefix
from podium.engines.rollout.native.passes import ModuleForward
from podium.engines.rollout.native.prepare import forward_for, own_tokens, texts_of
from podium.engines.rollout.native.sampler import Sampler
from podium.engines.rollout.native.scheduler import Group, Scheduler, Sequence, row_parts
from podium.engines.rollout.requests import Limits
from podium.engines.rollout.steering import Steering, steered
from podium.engines.rollout.stopping import StopRule, end_token_ids
from podium.models.attention import IMPLEMENTATION, use_podium_attention
from podium.models.divided import tensor_ranks_of
from podium.models.lm_head import base_of, lm_head_of, podium_attention, verify_head
from podium.models.packed import Packed
from podium.models.storage import Place, moved_parameters, storage_fingerprint, store_by_columns

# Logits in fp32 at a time: 64 MiB.
_LOGITS_AT_ONCE = 1 << 24


@dataclass
class Counters:
    """Work done so far: forward passes of decoding, tokens prefilled (a shared prompt once), tokens sampled."""

    decode_steps: int = 0
    prefill_tokens: int = 0
    sampled_tokens: int = 0


class NativeEngine:
    """A `RolloutEngine` over a `transformers` causal LM that someone else may be training.

    The model's attention is switched to Podium's (a setting of its config); its parameters are read, never written (on a
    CPU they are laid out for decoding, once: `store_by_columns`). It runs in evaluation mode during a step and is left in
    the mode it was in.

    Args:
        max_concurrent: sequences decoded at once.
        prefill_tokens: prompts are packed up to about this many tokens in one forward pass.
        max_cache_tokens: bound on the cache, in tokens (sequences at once x the longest they may become); None: no bound.

    Raises:
        ModelError: the model's head or attention cannot be used; `rollout.engine=hf` can.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        tokenizer: PreTrainedTokenizerBase,
        *,
        max_concurrent: int = 256,
        prefill_tokens: int = 8192,
        max_cache_tokens: int | None = None,
    ) -> None:
        if max_concurrent < 1 or prefill_tokens < 1:
            raise RolloutError(f"max_concurrent={max_concurrent}, prefill_tokens={prefill_tokens}: both must be at least 1")
        self.model, self.tokenizer = model, tokenizer
        self.base, self.head = base_of(model), lm_head_of(model)
        self.policy_version = 0
        self.prefill_tokens = prefill_tokens
        self.counters = Counters()
        self._scheduler = Scheduler(max_concurrent, max_cache_tokens)
        self._cache, self._sampler = KVCache(), Sampler()
        self._prefixes: dict[tuple[int, ...], Prefix] = {}
        self._stale = True  # what was written between now and the first step is seen
        self._ids = count()
        self._ends = end_token_ids(model, tokenizer)
        self._limits = Limits.within_one_rotation(model)
        self._ranks = tensor_ranks_of(model)
        self._forward = forward_for(model, plain, self._limits.positions or 1 << 20, fused=True)
        if isinstance(self._forward, ModuleForward) and self._ranks is None:
            store_by_columns(model)  # a divided model may be training's memory, which lies by rows
        self._storage = storage_fingerprint(model)
        self._products = products_for(model)
        try:
            with podium_attention(model), generating(self.model, self.base, self._products):
                verify_head(model, self._hidden_of)
        except ModelError as error:
            raise ModelError(
                f"the native rollout engine cannot run {type(model).__name__}: {error.what}", remedy="set rollout.engine=hf"
            ) from error
        self._products.clear()  # the model's own modules multiply by the weights one by one

    # ------------------------------------------------------------------ the interface

    def submit(self, request: Request) -> int:
        """Queues a request. Raises RolloutError where the prompt is empty or too long, or a setting is out of range."""
        self._limits.check(request)
        rule = StopRule(self.tokenizer, request.sampling, self._ends, request.prompt_ids, request.response_ids)
        steering = Steering.of(self.tokenizer, request.sampling, self._limits.vocabulary)
        sequence = Sequence(next(self._ids), request, rule, steering=steering)
        self._scheduler.add(sequence)
        return sequence.id

    def step(self) -> list[Trajectory]:
        """One token for every running request, the first token for those that a slot is free for; what finished.

        Raises RolloutError, naming request and position, where logits are not finite; nothing is advanced then.
        """
        with generating(self.model, self.base, self._products):
            if self._stale:
                self._recompute()
            finished = self._decode() if self._scheduler.running else []
            while groups := self._scheduler.take(self.prefill_tokens):
                finished += self._start(groups)
        return finished

    def abort(self, request_id: int) -> Trajectory | None:
        """Ends a request; `requests.resume` makes the request that continues it."""
        sequence = self._scheduler.drop_waiting(request_id)
        if sequence is None:
            slot = next((i for i, s in enumerate(self._scheduler.running) if s.id == request_id), None)
            if slot is None:
                return None
            sequence = self._scheduler.running[slot]
            self._retire([slot])
        self._drop_prefixes()
        return sequence.trajectory("aborted")

    @property
    def pending(self) -> int:
        return len(self._scheduler.waiting) + len(self._scheduler.running)

    def update_weights(self, version: int) -> None:
        """The parameters now hold this version. Running sequences go on under it, in a new segment.

        Raises RolloutError where a parameter is no longer where it was when the engine was made.
        """
        check_in_place(self.model, self._storage)
        self._products.clear()
        self.policy_version = version
        self._stale = True

    def release(self) -> None:
        """Frees the cache and packed weights. Running requests stay; the next step computes theirs again."""
        self._cache.release()
        self._products.clear()
        self._sampler.release()
        self._stale = True

    @property
    def cache_bytes(self) -> int:
        """Memory held by the cache and by packed weights now, in bytes."""
        return self._cache.bytes + self._products.bytes

    # ------------------------------------------------------------------ a step's parts

    def _decode(self) -> list[Trajectory]:
        """One token for each running sequence."""
        rows = self._scheduler.running
        order = self._scheduler.sorted_order()
        if order is not None:
            self._cache.permute(order, max(s.length for s in rows))
            rows[:] = [rows[slot] for slot in order]
        lengths = [sequence.length for sequence in rows]
        self._reserve(max(lengths), used=len(rows))
        last = [sequence.tokens[-1] for sequence in rows]
        step = DecodeAttention(self._cache, last, lengths, row_parts(lengths), self.model.device)
        tokens, log_probs = self._sample(rows, self._forward(step))
        self.counters.decode_steps += 1
        return self._advance(0, tokens, log_probs)

    def _start(self, groups: list[Group]) -> list[Trajectory]:
        """Prefills groups that just took their slots (the last ones), and samples their first tokens."""
        rows = [sequence for group in groups for sequence in group.sequences]
        first = len(self._scheduler.running) - len(rows)
        try:
            hidden = self._prefill(groups, first)
            tokens, log_probs = self._sample(rows, hidden)
        except BaseException:
            self._scheduler.put_back(groups)
            raise
        self._drop_prefixes()
        return self._advance(first, tokens, log_probs)

    def _prefill(self, groups: list[Group], first: int) -> Tensor:
        """The last hidden state of each group's prefix, once per sequence: `[rows, H]`. Fills the slots from `first` on."""
        self._reserve(max(len(group.prefix) for group in groups) + 1, used=first)
        slots: list[list[int]] = []
        for group in groups:
            slots.append(list(range(first, first + len(group.sequences))))
            first = slots[-1][-1] + 1
        new = [i for i, group in enumerate(groups) if group.prefix not in self._prefixes]
        fresh = self._run_packed([groups[i].prefix for i in new], [slots[i] for i in new]) if new else None
        last: dict[int, Tensor] = {} if fresh is None else dict(zip(new, fresh, strict=True))
        for i, group in enumerate(groups):
            if i not in last:
                saved = self._prefixes[group.prefix]
                self._cache.write_prefix(slots[i], saved)
                last[i] = saved.hidden
            elif group.more:
                self._prefixes[group.prefix] = self._cache.read_prefix(slots[i][0], len(group.prefix), last[i])
        sizes = torch.tensor([len(group.sequences) for group in groups], device=self.model.device)
        return torch.stack([last[i] for i in range(len(groups))]).repeat_interleave(sizes, 0)

    def _recompute(self) -> None:
        """Fills the cache again, under the weights as they are now: each running sequence but for its last token."""
        self._forward.refresh()
        self._prefixes.clear()
        rows = self._scheduler.running
        if rows:
            self._reserve(max(sequence.length for sequence in rows), used=0)
            at = 0
            while at < len(rows):
                end, tokens = at, 0
                while end < len(rows) and (end == at or tokens + rows[end].length <= self.prefill_tokens):
                    tokens += rows[end].length
                    end += 1
                self._run_packed([s.prefix[:-1] for s in rows[at:end]], [[slot] for slot in range(at, end)])
                at = end
        self._stale = False

    def _run_packed(self, prefixes: list[tuple[int, ...]], slots: list[list[int]]) -> Tensor:
        """Runs the prefixes in one row, files their keys and values in the slots; the last hidden states `[S, H]`."""
        step = PrefillAttention(self._cache, prefixes, slots, self.model.device)
        hidden = self._forward(step)
        self.counters.prefill_tokens += len(hidden)
        return hidden[step.last]

    def _sample(self, rows: list[Sequence], hidden: Tensor) -> tuple[list[int], list[float]]:
        """A token and its log-prob for each row, from its hidden state `[B, H]`."""
        tokens: list[int] = []
        log_probs: list[float] = []
        size = max(1, _LOGITS_AT_ONCE // self._limits.vocabulary)
        for at in range(0, len(rows), size):
            part = rows[at : at + size]
            seeds, positions = [s.request.seed for s in part], [len(s.tokens) for s in part]
            params = [s.request.sampling for s in part]
            logits = steered(self.head.logits(hidden[at : at + size]), [s.steering for s in part], [s.tokens for s in part])
            drawn, scores = self._sampler(logits, seeds, positions, params)
            if self._ranks is not None:
                self._ranks.agree(drawn, scores)
            tokens += drawn.tolist()
            log_probs += scores.tolist()
        self._check_finite(rows, log_probs)
        return tokens, log_probs

    def _check_finite(self, rows: list[Sequence], log_probs: list[float]) -> None:
        # The difference of a number with itself is 0 only where it is finite.
        bad = next((i for i, value in enumerate(log_probs) if value - value != 0), None)
        if bad is not None:
            raise not_finite(rows[bad])

    def _advance(self, first: int, tokens: list[int], log_probs: list[float]) -> list[Trajectory]:
        """Gives the running sequences from slot `first` on their tokens; takes out those that end."""
        rows = self._scheduler.running[first:]
        finished, slots = [], []
        for slot, (sequence, token, log_prob) in enumerate(zip(rows, tokens, log_probs, strict=True), start=first):
            reason = sequence.append(token, log_prob, self.policy_version)
            if reason is not None:
                finished.append(sequence.trajectory(reason))
                slots.append(slot)
        self.counters.sampled_tokens += len(rows)
        if slots:
            self._retire(slots)
        return finished

    # ------------------------------------------------------------------ housekeeping

    def _hidden_of(self, base: PreTrainedModel, packed: Packed) -> Tensor:
        """For `verify_head`: the packed tokens' last hidden states, by the pass that prefills."""
        texts, counts = texts_of(packed)
        self._cache.reserve(len(texts), max(map(len, texts)), most_rows=len(texts), most_length=max(map(len, texts)))
        step = PrefillAttention(self._cache, texts, [[slot] for slot in range(len(texts))], base.device)
        hidden = own_tokens(self._forward(step), texts, counts)
        self._cache.release()
        return hidden

    @torch.inference_mode()
    def _retire(self, slots: list[int]) -> None:
        moves = self._scheduler.retire(slots)
        if moves:
            self._cache.move(moves, max(self._scheduler.running[target].length for _, target in moves))

    def _reserve(self, length: int, *, used: int) -> None:
        rows = self._scheduler.running
        if len(rows) > self._cache.slots or length > self._cache.capacity:
            self._cache.reserve(
                len(rows),
                length,
                most_rows=self._scheduler.max_concurrent,
                most_length=max(sequence.most for sequence in rows),
                used=used,
            )

    def _drop_prefixes(self) -> None:
        """Prompts kept for siblings go when none waits any more."""
        for prefix in [p for p in self._prefixes if not self._scheduler.waits_for(p)]:
            del self._prefixes[prefix]


def not_finite(sequence: Sequence) -> RolloutError:
    """The error for a sequence whose next token has no finite log-prob."""
    return RolloutError(
        f"the model's logits for request {sequence.id} at response position {len(sequence.tokens)} are not finite "
        "(NaN, +inf, or all -inf)",
        remedy="look for NaN in the weights (a too high learning rate?), or use float32",
    )


def check_in_place(model: PreTrainedModel, before: dict[str, Place]) -> None:
    """Raises RolloutError where a parameter is no longer where `before` (`storage_fingerprint`) found it."""
    moved = moved_parameters(before, storage_fingerprint(model))
    if moved:
        raise RolloutError(
            f"{len(moved)} of the model's parameters moved since the engine was made, '{moved[0]}' first",
            where="update_weights",
            remedy="change parameters in place, or make a new engine after moving or casting the model",
        )


@contextmanager
def generating(model: PreTrainedModel, base: PreTrainedModel, products: Products) -> Iterator[None]:
    """Evaluation mode, no gradients, Podium's attention, these products; modes are put back as they were."""
    training = [module for module in model.modules() if module.training] if model.training else []
    for module in training:
        module.training = False
    for module in (model, base):
        if module.config._attn_implementation != IMPLEMENTATION:
            use_podium_attention(module)
    try:
        with torch.inference_mode(), products:
            yield
    finally:
        for module in training:
            module.training = True
