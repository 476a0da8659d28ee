"""What stands between a causal LM's hidden states and its logits, found once for any architecture and verified."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from podium.core.errors import ModelError
from podium.models.attention import IMPLEMENTATION
from podium.models.packed import Packed
from podium.models.packed_attention import PackedAttention

# Config fields that multiply the logits (Cohere, Falcon-H1) or divide them (Granite).
_FACTORS = ("logit_scale", "lm_head_multiplier")
_DIVISORS = ("logits_scaling",)

# Largest difference, as a share of the largest number, that rounding explains.
_TOLERANCE = {torch.float32: 1e-4, torch.float64: 1e-8}
_TOLERANCE_16_BITS = 5e-2


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
    return LMHead(head.weight, getattr(head, "bias", None), getattr(config, "final_logit_softcapping", None), scale)


def hidden_states(base: PreTrainedModel, packed: Packed, index: Tensor) -> Tensor:
    """The last hidden states of the row's tokens at `index [K]`: `[K, D]`. `packed` and `index` may be on the CPU.

    Raises ModelError for a model whose attention does not take Podium's context.
    """
    # The lengths stay on the CPU: reading them back from a device would stop its queue.
    context = PackedAttention(packed.lengths, packed.parents)
    device = base.device
    hidden = run_base(base, packed.ids.to(device), packed.positions.to(device), context)
    return hidden.index_select(0, index.to(device))


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
        if "podium_context" not in str(error):
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


@torch.no_grad()
def verify_head(model: PreTrainedModel) -> None:
    """Compares on a few tokens what Podium computes with what the model itself does, by its own attention code.

    Two sequences packed in one row, hidden states through `lm_head_of`, against each sequence alone through `model(...)`.
    It finds heads that scale logits in an unknown way, attention with terms that Podium does not compute (sinks), and
    layers that carry one sequence into the next (Mamba).

    Raises ModelError where they differ.
    """
    head = lm_head_of(model)
    ids, positions, lengths = _probe(base_of(model))
    ours = head.logits(run_base(base_of(model), ids, positions, PackedAttention(lengths)))
    with own_attention(model):
        theirs = [
            model(input_ids=i[None], position_ids=p[None], use_cache=False).logits[0]
            for i, p in zip(ids.split(lengths.tolist()), positions.split(lengths.tolist()), strict=True)
        ]
    _compare(type(model).__name__, "logits", ours, torch.cat(theirs))


@torch.no_grad()
def verify_base(base: PreTrainedModel) -> None:
    """The same for hidden states alone, where there is no LM head. Raises ModelError where they differ."""
    ids, positions, lengths = _probe(base)
    ours = run_base(base, ids, positions, PackedAttention(lengths))
    with own_attention(base):
        theirs = [
            base(input_ids=i[None], position_ids=p[None], use_cache=False).last_hidden_state[0]
            for i, p in zip(ids.split(lengths.tolist()), positions.split(lengths.tolist()), strict=True)
        ]
    _compare(type(base).__name__, "hidden states", ours, torch.cat(theirs))


def _probe(base: PreTrainedModel) -> tuple[Tensor, Tensor, Tensor]:
    """Ids and positions `[7]` of two sequences, and their lengths."""
    lengths = torch.tensor([4, 3])
    vocabulary = base.get_input_embeddings().weight.shape[0]
    ids = (torch.arange(7, device=base.device) * 7919 + 11) % vocabulary
    return ids, torch.cat([torch.arange(int(n)) for n in lengths]).to(base.device), lengths


@contextmanager
def own_attention(model: PreTrainedModel, implementation: str = "eager") -> Iterator[None]:
    """An implementation of `transformers` for a while ("sdpa" is faster but leaves out what it cannot do: soft caps)."""
    use_attention(model, implementation)
    try:
        yield
    finally:
        use_attention(model, IMPLEMENTATION)


def use_attention(model: PreTrainedModel, implementation: str) -> None:
    """Switches the model's attention, and its base's: some classes give the base a config of its own."""
    for part in {id(m): m for m in (model, model.base_model)}.values():
        part.set_attn_implementation(implementation)


def _compare(name: str, what: str, ours: Tensor, theirs: Tensor) -> None:
    if ours.shape != theirs.shape:
        raise ModelError(f"{name} gives {what} of shape {list(theirs.shape)}, expected {list(ours.shape)}")
    off, size = float((ours.float() - theirs.float()).abs().max()), float(theirs.float().abs().max())
    if not off <= _TOLERANCE.get(theirs.dtype, _TOLERANCE_16_BITS) * max(size, 1e-6):
        raise ModelError(
            f"{name}: {what} over packed sequences differ by {off:.3g} from its own (the largest is {size:.3g})",
            remedy="its attention, its layers or its head do something that Podium does not know; report the architecture",
        )
