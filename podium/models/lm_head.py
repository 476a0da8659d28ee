"""What stands between a causal LM's hidden states and its logits, found once for any architecture and verified."""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel
from transformers.utils import logging as library_logging

from podium.core.errors import ModelError
from podium.models.adapters import check_adapters, plain_of
from podium.models.attention import IMPLEMENTATION
from podium.models.fused_layers import fused_hidden_states, why_not_fused
from podium.models.packed import Packed
from podium.models.packed_attention import PackedAttention
from podium.models.padded import padded_hidden_states
from podium.models.quantization import is_quantised
from podium.models.recompute import Recompute, recomputing
from podium.models.small import has_no_numbers, small_of

_log = logging.getLogger(__name__)

HiddenStates = Callable[[PreTrainedModel, Packed], Tensor]
"""A way to run a base: every token's last hidden state `[N, D]`, in the row's order."""

# Config fields that multiply the logits (Cohere, Falcon-H1) or divide them (Granite).
_FACTORS = ("logit_scale", "lm_head_multiplier")
_DIVISORS = ("logits_scaling",)
# Those that cap them (Gemma 2; RecurrentGemma; xLSTM).
_CAPS = ("final_logit_softcapping", "logits_soft_cap", "output_logit_soft_cap")

# Largest difference, as a share of the largest number, that rounding explains. In 16 bits every layer rounds its own part of
# the residual stream, so what two orders of the same sums differ by grows as the root of the depth (random weights of
# Qwen2.5-7B's shape, 28 layers: 0.05).
_TOLERANCE = {torch.float32: 1e-4, torch.float64: 1e-8}
_TOLERANCE_16_BITS = 5e-2
_TOLERANCE_16_BITS_PER_ROOT_LAYER = 2e-2


@dataclass(frozen=True)
class LMHead:
    """`logits = softcap(scale * (hidden @ weight.T + bias))`: weight `[V, D]`, bias `[V]` or None.

    `weight` and `bias` are the model's own parameters: gradients flow into them, and an update changes them here too.
    """

    weight: Tensor
    bias: Tensor | None = None
    softcap: float | None = None
    scale: float = 1.0

    def logits(self, hidden: Tensor) -> Tensor:
        """`[..., D]` -> `[..., V]` in the weight's dtype. For few tokens; training uses chunked log-probs."""
        logits = nn.functional.linear(hidden, self.weight, self.bias)
        if self.scale != 1.0:
            logits = logits * self.scale
        return logits if self.softcap is None else torch.tanh(logits / self.softcap) * self.softcap


def base_of(model: PreTrainedModel) -> PreTrainedModel:
    """The module inside a model that gives hidden states (`model.model`, `model.transformer`, ...).

    Raises ModelError where the model has none of its own.
    """
    model = plain_of(model)
    base = model.base_model
    if base is model:
        raise ModelError(
            f"{type(model).__name__} has no base model to take hidden states from",
            remedy="use an architecture with an AutoModelForCausalLM class",
        )
    return base


def lm_head_of(model: PreTrainedModel) -> LMHead:
    """The head of a causal LM, from its output embeddings and config. `verify_head` says whether that is all it does.

    Raises ModelError where the model has no output embeddings.
    """
    model = plain_of(model)
    check_adapters(model)
    head = model.get_output_embeddings()
    if head is None or not isinstance(getattr(head, "weight", None), Tensor):
        raise ModelError(
            f"{type(model).__name__} has no output embeddings, so it gives no token probabilities",
            remedy="use a causal language model",
        )
    config = model.config.get_text_config()
    scale = 1.0
    for name in _FACTORS:
        scale *= getattr(config, name, None) or 1.0
    for name in _DIVISORS:
        scale /= getattr(config, name, None) or 1.0
    softcap = next((cap for name in _CAPS if (cap := getattr(config, name, None))), None)
    return LMHead(head.weight, getattr(head, "bias", None), softcap, scale)


def hidden_states(
    base: PreTrainedModel, packed: Packed, index: Tensor, *, packs: bool = True, recompute: Recompute = "none"
) -> Tensor:
    """The last hidden states of the row's tokens at `index [K]`: `[K, D]`. `packed` and `index` may be on the CPU.

    Args:
        packs: what `packs` said of the model; False runs padded rows.
        recompute: what the backward pass computes again, to save memory.

    Raises ModelError for a model that is said to pack and whose attention does not take Podium's context.
    """
    if packs:
        hidden = packed_hidden_states(base, packed, recompute)
    else:
        with recomputing(base, recompute):
            hidden = padded_hidden_states(base, packed)
    return hidden.index_select(0, index.to(base.device))


def packed_hidden_states(base: PreTrainedModel, packed: Packed, recompute: Recompute = "none") -> Tensor:
    """The last hidden states of all the row's tokens, `[N, D]`, from one packed row. Raises as `hidden_states`."""
    # The lengths stay on the CPU: reading them back from a device would stop its queue.
    context = PackedAttention(packed.lengths, packed.parents)
    ids, positions = packed.ids.to(base.device), packed.positions.to(base.device)
    if why_not_fused(base) is None:
        return fused_hidden_states(base, ids, positions, context, recompute)
    with recomputing(base, recompute):
        return run_base(base, ids, positions, context)


def run_base(base: PreTrainedModel, ids: Tensor, positions: Tensor, context: PackedAttention) -> Tensor:
    """Every token's last hidden state `[N, D]`, from ids and positions `[N]`, with a context of the caller's."""
    if base.config._attn_implementation != IMPLEMENTATION:
        raise ModelError(
            f"{type(base).__name__} does not run through transformers' attention interface",
            remedy="use an architecture that does (Llama, Qwen, Mistral, Gemma, ...)",
        )
    try:
        out = base(input_ids=ids[None], position_ids=positions[None], use_cache=False, podium_context=context)
    except TypeError as error:
        if "unexpected keyword argument" not in str(error):
            raise
        raise ModelError(
            f"{type(base).__name__}.forward takes no further keyword arguments, so its attention cannot be reached",
            remedy="use a model whose forward passes keyword arguments down",
        ) from error
    if not context.calls:
        raise ModelError(
            f"{type(base).__name__} ran without asking for Podium's attention; packed sequences would mix",
            remedy="use an architecture whose layers all use transformers' attention interface",
        )
    return out.last_hidden_state[0]


# ------------------------------------------------------------------ what an architecture can do, found by trying


def packs(model: PreTrainedModel, verify: Callable[[PreTrainedModel, HiddenStates], None]) -> bool:
    """Whether the model computes the same in packed rows as alone; decided once, when a role's model is made.

    True: its attention is now Podium's. False: it has its own attention as before, padded rows are right, and a warning
    says that they are slower.

    Args:
        verify: `verify_head`, `verify_base` or `verify_score`.

    A model whose weights are not there yet is judged by a small one of its class (`small_of`).

    Raises:
        ModelError: padded rows give other numbers too: an unknown head, or a model that is not causal.
    """
    if has_no_numbers(model):
        able = packs(small_of(model), verify)
        if able:
            use_attention(model, IMPLEMENTATION)
        return able
    before = _attention_of(model)
    try:
        use_attention(model, IMPLEMENTATION)
        verify(model, packed_hidden_states)
        return True
    except ModelError as error:
        reason = error.what
    # What another model or engine left switched is no attention of its own.
    _set_attention([(part, "eager" if name == IMPLEMENTATION else name) for part, name in before])
    verify(model, padded_hidden_states)
    warn_padded(model, reason)
    return False


def warn_padded(model: PreTrainedModel, reason: str) -> None:
    _log.warning("%s cannot run packed rows, so it runs padded rows, slower (%s)", type(model).__name__, reason)


@torch.no_grad()
def verify_head(model: PreTrainedModel, hidden_of: HiddenStates = packed_hidden_states) -> None:
    """Compares on a few tokens what Podium computes with what the model itself does, by its own attention code.

    Sequences in one row, two of them after one prompt, hidden states through `lm_head_of`, against each sequence alone
    through `model(...)`. It finds heads that scale logits in an unknown way, attention with terms that Podium does not
    compute (sinks), layers that carry one sequence into the next (Mamba), and models that are not causal.

    Args:
        hidden_of: how the base is run: `packed_hidden_states` or `padded_hidden_states`.

    Raises ModelError where they differ.
    """
    head, probe = lm_head_of(model), _probe(base_of(model))
    ours = head.logits(hidden_of(base_of(model), probe))
    with own_attention(model):
        theirs = _each_alone(probe, lambda ids: model(input_ids=ids, use_cache=False).logits[0])
    _compare(model, "logits", ours, torch.cat(theirs))


@torch.no_grad()
def verify_base(base: PreTrainedModel, hidden_of: HiddenStates = packed_hidden_states) -> None:
    """The same for hidden states alone, where there is no head. Raises ModelError where they differ."""
    probe = _probe(base)
    ours = hidden_of(base, probe)
    with own_attention(base):
        theirs = _each_alone(probe, lambda ids: base(input_ids=ids, use_cache=False).last_hidden_state[0])
    _compare(base, "hidden states", ours, torch.cat(theirs))


@torch.no_grad()
def verify_score(model: PreTrainedModel, hidden_of: HiddenStates = packed_hidden_states) -> None:
    """The same for a sequence classifier whose scores are `model.score` of each sequence's last hidden state.

    Raises ModelError where they differ, and where it has no such layer.
    """
    if not isinstance(getattr(model, "score", None), nn.Linear):
        raise ModelError(
            f"{type(model).__name__} has no linear score head over a causal model",
            remedy="use a reward model whose class has one (LlamaForSequenceClassification, Qwen2For..., ...)",
        )
    probe = _probe(base_of(model))
    ours = model.score(hidden_of(base_of(model), probe)[probe.last_index.to(model.device)])
    with own_attention(model):
        theirs = [model(input_ids=ids, use_cache=False).logits for ids in _sequences(probe)]
    _compare(model, "scores", ours, torch.cat(theirs))


def _probe(base: PreTrainedModel) -> Packed:
    """A prompt of 2 tokens with two responses of 3 and 1, then a sequence of 3; no pad ids."""
    lengths = torch.tensor([2, 3, 1, 3])
    vocabulary = base.get_input_embeddings().weight.shape[0]
    ids = (torch.arange(9) * 7919 + 11) % vocabulary
    pad = getattr(base.config.get_text_config(), "pad_token_id", None)
    ids = torch.where(ids == pad, (ids + 1) % vocabulary, ids) if pad is not None else ids
    return Packed(
        ids=ids.to(base.device),
        positions=torch.tensor([0, 1, 2, 3, 4, 2, 0, 1, 2]),
        lengths=lengths,
        parents=torch.tensor([-1, 0, 0, -1]),
        predict_index=torch.tensor([1, 2, 3, 1, 6, 7]),
        targets=ids[[2, 3, 4, 5, 7, 8]],
        last_index=torch.tensor([1, 4, 5, 8]),
    )


def _sequences(probe: Packed) -> list[Tensor]:
    """The probe's sequences, `[1, T]` each: one for every run, after its parent's tokens."""
    runs = probe.ids.split(probe.lengths.tolist())
    whole = [run if p < 0 else torch.cat([runs[p], run]) for run, p in zip(runs, probe.parents.tolist(), strict=True)]
    return [ids[None] for ids in whole]


def _each_alone(probe: Packed, run: Callable[[Tensor], Tensor]) -> list[Tensor]:
    """What `run` gives for each run's own tokens, `[l, D]` each."""
    return [run(ids)[-length:] for ids, length in zip(_sequences(probe), probe.lengths.tolist(), strict=True)]


# ------------------------------------------------------------------ whose attention code runs


@contextmanager
def own_attention(model: PreTrainedModel, implementation: str = "eager") -> Iterator[None]:
    """An implementation of `transformers` for a while ("sdpa" is faster but leaves out what it cannot do: soft caps).

    Afterwards the model has the one that it had before.
    """
    before = _attention_of(model)
    use_attention(model, implementation)
    try:
        yield
    finally:
        _set_attention(before)


@contextmanager
def podium_attention(model: PreTrainedModel) -> Iterator[None]:
    """Podium's attention; where the block raises ModelError, the model has the one that it had before."""
    before = _attention_of(model)
    use_attention(model, IMPLEMENTATION)
    try:
        yield
    except ModelError:
        _set_attention(before)
        raise


def use_attention(model: PreTrainedModel, implementation: str) -> None:
    """Switches the model's attention, and its base's: some classes give the base a config of its own.

    Where the architecture cannot switch, nothing changes; `run_base` finds that out.
    """
    _set_attention([(part, implementation) for part, _ in _attention_of(model)])


def _attention_of(model: PreTrainedModel) -> list[tuple[Any, str]]:
    model = plain_of(model)
    return [(m, m.config._attn_implementation) for m in {id(m): m for m in (model, model.base_model)}.values()]


def _set_attention(implementations: list[tuple[Any, str]]) -> None:
    verbosity = library_logging.get_verbosity()
    library_logging.set_verbosity_error()  # the library warns of architectures that cannot switch; `packs` says it once
    try:
        for part, implementation in implementations:
            part.set_attn_implementation(implementation)
    finally:
        library_logging.set_verbosity(verbosity)


def _compare(model: nn.Module, what: str, ours: Tensor, theirs: Tensor) -> None:
    name = type(model).__name__
    if ours.shape != theirs.shape:
        raise ModelError(f"{name} gives {what} of shape {list(theirs.shape)}, expected {list(ours.shape)}")
    off, size = float((ours.float() - theirs.float()).abs().max()), float(theirs.float().abs().max())
    if not off <= _tolerance(model, theirs.dtype) * max(size, 1e-6):
        raise ModelError(
            f"{name}: {what} as Podium computes them differ by {off:.3g} from its own (the largest is {size:.3g})",
            remedy="it is not causal, or its layers or head do something that Podium does not know; report the architecture",
        )


def _tolerance(model: nn.Module, dtype: torch.dtype) -> float:
    # In 8 bits the inputs of a layer are rounded too: a last bit that differs can move one by a whole step.
    coarse = any(is_quantised(module) for module in model.modules())
    if dtype in _TOLERANCE and not coarse:
        return _TOLERANCE[dtype]
    layers: int = getattr(model.config.get_text_config(), "num_hidden_layers", 1)  # type: ignore[union-attr, operator]
    return max(_TOLERANCE_16_BITS, _TOLERANCE_16_BITS_PER_ROOT_LAYER * math.sqrt(layers))
