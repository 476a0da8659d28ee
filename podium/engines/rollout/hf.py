"""The oracle: `transformers`' own `generate`, on left-padded batches. Slow, and plain enough to trust."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import cached_property

import torch
from torch import Tensor
from transformers import GenerationConfig, LogitsProcessor, PreTrainedModel, PreTrainedTokenizerBase

from podium.core.errors import RolloutError
from podium.core.seeding import derive_seed
from podium.engines.base import Request, SamplingParams, Segment, Trajectory
from podium.engines.rollout.requests import Limits
from podium.engines.rollout.steering import Steering, steered
from podium.engines.rollout.stopping import StopRule, end_token_ids
from podium.engines.rollout.whole_batches import WholeBatches
from podium.models.attention import IMPLEMENTATION


class HFEngine(WholeBatches):
    """A `RolloutEngine` over `model.generate`. A step serves a whole batch of waiting requests to its end.

    Seeds are per batch: one generator draws for all rows, seeded by the seeds of all its requests. So a sample does
    depend on what else is in its batch (the native engine's does not); greedy ones do not.

    Args:
        max_concurrent: rows of one batch.
    """

    def __init__(self, model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, *, max_concurrent: int = 256) -> None:
        super().__init__(Limits.of(model), max_concurrent, tokenizer)
        self.model = model
        self._ends = end_token_ids(model, tokenizer)

    def step(self) -> list[Trajectory]:
        """Serves the oldest waiting request and those that can share its batch (same settings, as many tokens left)."""
        if not self._waiting:
            return []
        first = next(iter(self._waiting.values()))
        batch = {i: r for i, r in self._waiting.items() if _kind(r) == _kind(first)}
        with _as_library(self.model):
            if len({_length(r) for r in batch.values()}) > 1 and not self._takes_padding:
                batch = {i: r for i, r in batch.items() if _length(r) == _length(first)}
            batch = dict(list(batch.items())[: self.max_concurrent])
            finished = self._generate(batch)
        for request_id in batch:
            del self._waiting[request_id]
        return finished

    @cached_property
    @torch.no_grad()
    def _takes_padding(self) -> bool:
        """Whether padding before a prompt changes nothing. Else (RWKV takes no mask) a batch has prompts of one length."""
        settings = GenerationConfig(max_new_tokens=1, pad_token_id=0, output_logits=True, return_dict_in_generate=True)
        prefixes = [(1, 2), (1,) * 8]
        alone, padded = (
            self.model.generate(ids, attention_mask=mask, generation_config=settings).logits[0][0].float()
            for ids, mask in (_left_padded(rows, self.model.device) for rows in (prefixes[:1], prefixes))
        )
        return bool((alone - padded).abs().max() <= 0.05 * alone.abs().max())  # rounding in 16 bits stays below

    @torch.no_grad()
    def _generate(self, batch: dict[int, Request]) -> list[Trajectory]:
        requests = list(batch.values())
        sampling = requests[0].sampling
        ids, mask = _left_padded([(*r.prompt_ids, *r.response_ids) for r in requests], self.model.device)
        steering = Steering.of(self.tokenizer, sampling, self._limits.vocabulary)
        steer = None if steering is None else _Steer(steering, [r.response_ids for r in requests], ids.shape[1])
        device = self.model.device
        cuda = [device] if device.type == "cuda" else []
        with torch.random.fork_rng(devices=cuda):
            torch.manual_seed(derive_seed(*(r.seed for r in requests)))
            out = self.model.generate(
                ids,
                attention_mask=mask,
                generation_config=self._settings(sampling, sampling.max_new_tokens - len(requests[0].response_ids)),
                tokenizer=self.tokenizer if sampling.stop else None,
                logits_processor=[] if steer is None else [steer],
            )
        sampled = out.sequences[:, ids.shape[1] :]
        logits = torch.stack(out.logits if steer is None else steer.logits, 1)
        log_probs = _log_probs(logits, sampled, sampling.temperature or 1.0)
        return [
            self._trajectory(request_id, request, sampled[row].tolist(), log_probs[row].tolist())
            for row, (request_id, request) in enumerate(batch.items())
        ]

    def _settings(self, sampling: SamplingParams, left: int) -> GenerationConfig:
        drawn: dict[str, float | int | bool] = {"do_sample": False}
        if sampling.temperature:
            drawn = {"do_sample": True, "temperature": sampling.temperature, "top_k": sampling.top_k, "top_p": sampling.top_p}
            if sampling.min_p:
                drawn["min_p"] = sampling.min_p
        return GenerationConfig(
            max_new_tokens=left,
            eos_token_id=sorted(self._ends.union(sampling.stop_token_ids)) or None,
            pad_token_id=0,
            stop_strings=list(sampling.stop) or None,
            output_logits=True,
            return_dict_in_generate=True,
            **drawn,
        )

    def _trajectory(self, request_id: int, request: Request, tokens: list[int], log_probs: list[float]) -> Trajectory:
        """Cut at the first token that ends the response: what follows in the row is padding."""
        rule = StopRule(self.tokenizer, request.sampling, self._ends, request.prompt_ids, request.response_ids)
        for end, token in enumerate(tokens, start=1):
            reason = rule.push(token)
            if reason is not None:
                segment = Segment("policy", tokens[:end], log_probs[:end], self.policy_version)
                return Trajectory(request_id, request.prompt_ids, [segment], reason)
        raise RolloutError(f"transformers ended request {request_id} after {len(tokens)} tokens, before its rules say so")


class _Steer(LogitsProcessor):
    """Adds the biases to each step's logits, and keeps what comes out: `logits`, a list of `[B, V]`.

    Args:
        written: each row's response tokens that were there before.
        width: tokens of a row before the first new one.
    """

    def __init__(self, steering: Steering, written: Sequence[tuple[int, ...]], width: int) -> None:
        self.steering, self.written, self.width = steering, written, width
        self.logits: list[Tensor] = []

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        rows = [(*w, *new) for w, new in zip(self.written, input_ids[:, self.width :].tolist(), strict=True)]
        self.logits.append(steered(scores, [self.steering] * len(rows), rows))
        return self.logits[-1]


def _kind(request: Request) -> tuple[SamplingParams, int]:
    return request.sampling, len(request.response_ids)


def _length(request: Request) -> int:
    return len(request.prompt_ids) + len(request.response_ids)


def _left_padded(prefixes: Sequence[tuple[int, ...]], device: torch.device) -> tuple[Tensor, Tensor]:
    """Ids and attention mask `[B, T]` int64."""
    width = max(map(len, prefixes))
    ids = torch.zeros(len(prefixes), width, dtype=torch.int64)
    mask = torch.zeros_like(ids)
    for row, prefix in enumerate(prefixes):
        ids[row, width - len(prefix) :] = torch.tensor(prefix)
        mask[row, width - len(prefix) :] = 1
    return ids.to(device), mask.to(device)


def _log_probs(logits: Tensor, tokens: Tensor, temperature: float) -> Tensor:
    """`logits [B, T, V]`, `tokens [B, T]` -> log-probs `[B, T]` fp32, of the whole distribution at the temperature."""
    return (logits.float() / temperature).log_softmax(-1).gather(-1, tokens[..., None])[..., 0]


@contextmanager
def _as_library(model: PreTrainedModel) -> Iterator[None]:
    """The library's attention, evaluation mode and none of the model's own generation defaults; all put back afterwards."""
    # SDPA would silently leave out a soft cap on the scores (Gemma 2).
    capped = getattr(model.config.get_text_config(), "attn_logit_softcapping", None)
    before = [(m, m.config._attn_implementation) for m in (model, model.base_model)]
    # A model that cannot take Podium's attention has its own, and may know no other.
    before = [(m, name) for m, name in before if capped or name == IMPLEMENTATION]
    training = [module for module in model.modules() if module.training]
    defaults = model.generation_config
    for module in training:
        module.training = False
    for module, _ in before:
        module.set_attn_implementation("eager" if capped else "sdpa")
    model.generation_config = GenerationConfig()
    try:
        yield
    finally:
        model.generation_config = defaults
        for module, implementation in before:
            module.set_attn_implementation(implementation)
        for module in training:
            module.training = True
