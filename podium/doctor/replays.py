"""Controlled replays: saved samples scored once more, by the training engine and the oracle, one thing changed at a time."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from podium.core.batch import Batch
from podium.doctor.decide import Evidence, Hypothesis, Rows, gap
from podium.engines.base import Request, SamplingParams
from podium.engines.train import SingleDeviceEngine
from podium.models.adapters import adapter_layers

Weights = Mapping[str, Tensor]
TEMPERATURES = tuple(round(0.1 * i, 1) for i in range(3, 21))
TOP_P, TOP_K, MIN_P = (0.8, 0.9, 0.95, 0.99), (10, 20, 50, 100), (0.02, 0.05, 0.1)
NOISE = {torch.float32: 2e-5, torch.bfloat16: 0.01, torch.float16: 0.003}
"""Mean difference in nats a token that two right engines may have, where it is not measured to be larger."""


@dataclass(frozen=True)
class Sample:
    """A saved rollout: its tokens, and what both sides recorded of them."""

    prompt_ids: tuple[int, ...]
    response_ids: tuple[int, ...]
    rollout_log_probs: Tensor
    train_log_probs: Tensor | None = None
    version: int = 0
    prompt: Any = None


class Replayer:
    """Scores samples with a `transformers` causal LM under changed conditions; the model is put back each time.

    Args:
        model: with the weights that the samples claim.
        tokenizer: the model's.
        sampling: as the run's settings say.
        policy: the role's model over `model` (`as_policy`), for the training engine.
        older: weights of other versions, by version: names as in `model.named_parameters()`.
    """

    def __init__(
        self, model: Any, tokenizer: Any, sampling: SamplingParams, policy: Any, older: Mapping[int, Weights] | None = None
    ) -> None:
        self.model, self.tokenizer, self.sampling, self.older = model, tokenizer, sampling, dict(older or {})
        self.engine = SingleDeviceEngine(policy, microbatch_tokens=4096)
        self.temperature = sampling.temperature or 1.0
        self.dtype = next(model.parameters()).dtype

    # ------------------------------------------------------------------ scoring

    def training(self, samples: Sequence[Sample]) -> Rows:
        """By the training engine."""
        batch = Batch(
            {
                "prompt_ids": [torch.tensor(s.prompt_ids) for s in samples],
                "response_ids": [torch.tensor(s.response_ids) for s in samples],
            }
        )
        return [row.float() for row in _rows(self.engine.compute(batch, ("log_probs",))["log_probs"])]

    @torch.no_grad()
    def logits(self, sample: Sample) -> Tensor:
        """`[T, V]` fp32: by the model's own forward pass, row by row, without a cache or padding."""
        from podium.engines.rollout.hf import _as_library

        ids = torch.tensor([[*sample.prompt_ids, *sample.response_ids]], device=self.model.device)
        with _as_library(self.model):
            out = self.model(input_ids=ids, use_cache=False).logits[0]
        return out[len(sample.prompt_ids) - 1 : -1].float()

    def oracle(self, samples: Sequence[Sample], temperature: float | None = None) -> Rows:
        """By the oracle, at the run's temperature unless another is given."""
        t = self.temperature if temperature is None else temperature
        return [_picked((self.logits(s) / t).log_softmax(-1), s) for s in samples]

    # ------------------------------------------------------------------ all of it

    def evidence(self, samples: Sequence[Sample], *, weights_there: bool = True, rollout_engine: Any = None) -> Evidence:
        """Everything that the decision looks at.

        Args:
            weights_there: the model has the weights that the samples claim.
            rollout_engine: the run's kind of rollout engine over the same model, for a fresh rollout.
        """
        replay, oracle = self.training(samples), self.oracle(samples)
        noise = max(NOISE.get(self.dtype, 1e-4), 2 * gap(replay, oracle) if self.dtype != torch.float32 else 0.0)
        measured = [i for i, s in enumerate(samples) if s.train_log_probs is not None]
        training = [s.train_log_probs for s in samples if s.train_log_probs is not None] or None
        live = self._live(samples, rollout_engine) if rollout_engine is not None else None
        if not weights_there:
            return Evidence([s.rollout_log_probs for s in samples], training, noise=noise, live_gap=live, measured=measured)
        hypotheses = [*self._of_sampling(samples), *self._of_prompts(samples), *self._of_weights(samples)]
        return Evidence(
            rollout=[s.rollout_log_probs for s in samples],
            training=training,
            replay=replay,
            oracle=oracle,
            hypotheses=hypotheses,
            noise=noise,
            low_precision=self._low_precision(samples, oracle),
            live_gap=live,
            reencoded=sum(self._changes_when_encoded(s) for s in samples),
            measured=measured,
        )

    def _live(self, samples: Sequence[Sample], engine: Any) -> float:
        """How far a fresh rollout's log-probs are from the oracle's of the same tokens."""
        longest = max(len(s.response_ids) for s in samples)
        sampling = replace(self.sampling, max_new_tokens=max(4, min(64, longest)))
        ids = {engine.submit(Request(s.prompt_ids, sampling, seed)): s for seed, s in enumerate(samples)}
        fresh: list[Sample] = []
        while engine.pending:
            for done in engine.step():
                log_probs = torch.tensor([v for segment in done.segments for v in segment.log_probs])
                fresh.append(replace(ids[done.request_id], response_ids=tuple(done.response_ids), rollout_log_probs=log_probs))
        engine.release()
        return gap([s.rollout_log_probs for s in fresh], self.oracle(fresh))

    def _changes_when_encoded(self, sample: Sample) -> bool:
        ids = list(sample.response_ids)
        text = self.tokenizer.decode(ids, skip_special_tokens=False, clean_up_tokenization_spaces=False)
        return self.tokenizer.encode(text, add_special_tokens=False) != ids

    # ------------------------------------------------------------------ hypotheses

    def _of_sampling(self, samples: Sequence[Sample]) -> Iterator[Hypothesis]:
        """Other temperatures; distributions that were cut before their log-probs were taken."""
        logits = [self.logits(s) for s in samples]
        for t in sorted({1.0, *TEMPERATURES} - {self.temperature}):
            values = [_picked((z / t).log_softmax(-1), s) for z, s in zip(logits, samples, strict=True)]
            yield Hypothesis("temperature", f"{t:g} instead of {self.temperature:g}", values, 1)
        own = {"top_p": self.sampling.top_p, "top_k": self.sampling.top_k, "min_p": self.sampling.min_p}
        for cut in _cuts(own):
            values = [_picked(_truncated(z / self.temperature, **cut), s) for z, s in zip(logits, samples, strict=True)]
            yield Hypothesis("truncation", ", ".join(f"{n}={v:g}" for n, v in cut.items()), values, 2)

    def _of_prompts(self, samples: Sequence[Sample]) -> Iterator[Hypothesis]:
        """Other prompts: without their first token, with the start token, encoded again, another end of the template."""
        for detail, change in (
            ("without the prompt's first token", lambda s: s.prompt_ids[1:]),
            ("with a start token before the prompt", lambda s: (self.tokenizer.bos_token_id, *s.prompt_ids)),
            ("without the prompt's last token", lambda s: s.prompt_ids[:-1]),
            ("with the prompt's text encoded as it is", lambda s: self._encoded(s, chat=None)),
            ("with the chat template applied", lambda s: self._encoded(s, chat=True)),
            ("with the chat template, without its opening of an answer", lambda s: self._encoded(s, chat=False)),
        ):
            prompts = [tuple(change(s) or ()) for s in samples]
            odd = any(not p or None in p for p in prompts)
            if odd or all(p == s.prompt_ids for p, s in zip(prompts, samples, strict=True)):
                continue
            other = [replace(s, prompt_ids=p) for p, s in zip(prompts, samples, strict=True)]
            yield Hypothesis("template", detail, self.oracle(other), 3)

    def _encoded(self, sample: Sample, chat: bool | None) -> tuple[int, ...] | None:
        """The prompt from its text; `chat`: with the template, and whether it opens an answer."""
        prompt = sample.prompt
        if prompt is None or (chat is not None and not getattr(self.tokenizer, "chat_template", None)):
            return None
        if chat is None:
            return tuple(self.tokenizer.encode(prompt)) if isinstance(prompt, str) else None
        turns = [{"role": "user", "content": prompt}] if isinstance(prompt, str) else prompt
        text = self.tokenizer.apply_chat_template(turns, tokenize=False, add_generation_prompt=chat)
        return tuple(self.tokenizer.encode(text, add_special_tokens=False))

    def _of_weights(self, samples: Sequence[Sample]) -> Iterator[Hypothesis]:
        """No adapter; an older version; of each older version one layer, then single tensors of the layer that fits best."""
        if adapter_layers(self.model):
            with _adapter_off(self.model):
                yield Hypothesis("adapter", "the base's weights alone", self.oracle(samples), 4)
        for version, weights in sorted(self.older.items(), reverse=True):
            changed = [n for n, p in self.model.named_parameters() if n in weights and not torch.equal(p, _like(p, weights[n]))]
            if not changed:
                continue
            with self._with(weights, changed):
                yield Hypothesis("stale weights", f"version {version}", self.oracle(samples), 7)
            yield from self._parts(samples, version, weights, changed)

    def _parts(self, samples: Sequence[Sample], version: int, weights: Weights, changed: list[str]) -> Iterator[Hypothesis]:
        recorded = [s.rollout_log_probs for s in samples]
        units: dict[str, list[str]] = {}
        for name in changed:
            units.setdefault(_layer_of(name), []).append(name)
        scored: list[tuple[float, str]] = []
        for unit, names in units.items():
            with self._with(weights, names):
                values = self.oracle(samples)
            scored.append((gap(recorded, values), unit))
            if len(units) > 1 and len(names) > 1:
                yield Hypothesis("partial weights", f"{unit} is of version {version}", values, 6)
        # A single tensor moves its layer's replay the right way: the best layers are looked into.
        for _, unit in sorted(scored)[:4]:
            for name in units[unit]:
                with self._with(weights, [name]):
                    yield Hypothesis("partial weights", f"{name} is of version {version}", self.oracle(samples), 5)

    # ------------------------------------------------------------------ the model, changed for a while

    @contextmanager
    def _with(self, weights: Weights, names: Iterable[str]) -> Iterator[None]:
        parameters = dict(self.model.named_parameters())
        kept = {name: parameters[name].detach().clone() for name in names}
        try:
            with torch.no_grad():
                for name in kept:
                    parameters[name].copy_(weights[name])
            yield
        finally:
            with torch.no_grad():
                for name, value in kept.items():
                    parameters[name].copy_(value)

    def _low_precision(self, samples: Sequence[Sample], oracle: Rows) -> float:
        """How far 16 bits are from fp32 on these samples: the same weights, cast."""
        other = torch.bfloat16 if self.dtype == torch.float32 else torch.float32
        kept = {name: p.data for name, p in self.model.named_parameters()}
        try:
            for p in self.model.parameters():
                p.data = p.data.to(other)
            return gap(self.oracle(samples), oracle)
        finally:
            for name, p in self.model.named_parameters():
                p.data = kept[name]


def _like(parameter: Tensor, value: Tensor) -> Tensor:
    return value.to(parameter.device, parameter.dtype)


def _rows(column: Any) -> list[Tensor]:
    return [column[i] for i in range(len(column))]


def _picked(log_probs: Tensor, sample: Sample) -> Tensor:
    """`[T, V]` -> `[T]`: of the response's tokens."""
    index = torch.tensor(sample.response_ids, device=log_probs.device)
    return log_probs.gather(-1, index[:, None])[:, 0].float().cpu()


def _cuts(own: Mapping[str, float]) -> Iterator[dict[str, float]]:
    """The run's own truncation first, then each usual one alone."""
    real = {n: v for n, v in own.items() if (n == "top_p" and v < 1) or (n != "top_p" and v > 0)}
    if real:
        yield real
    for name, values in (("top_p", TOP_P), ("top_k", TOP_K), ("min_p", MIN_P)):
        yield from ({name: v} for v in values if {name: v} != real)


def _truncated(scaled: Tensor, top_p: float = 1.0, top_k: float = 0, min_p: float = 0.0) -> Tensor:
    """Log-probs of the distribution that is left (-inf outside)."""
    from podium.engines.rollout.native.sampler import truncate

    rows = len(scaled)
    weights = (scaled - scaled.amax(-1, keepdim=True)).exp()
    kept = truncate(
        weights, torch.full((rows,), int(top_k)), torch.full((rows,), float(top_p)), torch.full((rows,), float(min_p))
    )
    return (kept / kept.sum(-1, keepdim=True)).log()


def _layer_of(name: str) -> str:
    """`model.layers.3.mlp.up_proj.weight` -> `model.layers.3`; what is in no layer stands alone."""
    parts = name.split(".")
    for i, part in enumerate(parts):
        if part.isdigit():
            return ".".join(parts[: i + 1])
    return name


@contextmanager
def _adapter_off(model: Any) -> Iterator[None]:
    layers = list(adapter_layers(model).values())
    before = [layer.disable_adapters for layer in layers]
    for layer in layers:
        layer.enable_adapters(False)
    try:
        yield
    finally:
        for layer, off in zip(layers, before, strict=True):
            layer.enable_adapters(not off)
