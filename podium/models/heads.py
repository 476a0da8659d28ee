"""The models of the roles: a policy, a critic, a reward model; each a `transformers` base under one kind of head.

All take a packed row and compute only what is asked for: `compute(packed, outputs)`. `packs` says whether the row goes
through the model as it is; where the architecture does not allow it, the row is unpacked into padded ones: slower, and the
same numbers.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from copy import deepcopy
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Self, overload

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from transformers import AutoModel, AutoModelForSequenceClassification, PreTrainedModel, PreTrainedTokenizerBase

from podium.algorithms.log_probs import log_probs_from_hidden
from podium.core.errors import ModelError, did_you_mean
from podium.models.adapters import ADAPTER_FOLDER, adapter_layers, merged, plain_of, save_adapter
from podium.models.fused import can_fuse
from podium.models.lm_head import (
    base_of,
    hidden_states,
    lm_head_of,
    packs,
    verify_base,
    verify_head,
    verify_score,
    warn_padded,
)
from podium.models.loading import (
    PathLike,
    load_causal_lm,
    load_pretrained,
    load_sequence_classifier,
    load_tokenizer,
    replaced_folder,
    save_pretrained,
    without_dropout,
)
from podium.models.packed import Packed
from podium.models.padded import padded_logits
from podium.models.recompute import Recompute
from podium.models.storage import store_by_columns

VALUE_HEAD_FILE = "value_head.safetensors"

Heads = int | Sequence[str] | None
"""The scores of a reward model: how many, or their names; None: those of the folder."""


def _check_outputs(name: str, outputs: Iterable[str], known: Sequence[str]) -> None:
    unknown = sorted(set(outputs) - set(known))
    if unknown:
        raise ModelError(f"{name} does not compute {', '.join(unknown)}", remedy="it computes: " + ", ".join(known))


class ActorModel(nn.Module):
    """The policy: a causal LM that gives the log-probs of given responses.

    Args:
        model: a `transformers` causal LM. Its attention is switched to Podium's contexts where it can be; on a CPU its
            weights may be laid out for decoding (`store_by_columns`), else they are not touched.
        temperature: divides the logits, as in sampling; 0 (greedy) counts as 1.

    Raises:
        ModelError: the architecture's head is of an unknown kind, or it is not causal (see `verify_head`).
    """

    OUTPUTS = ("log_probs", "entropy")

    def __init__(self, model: PreTrainedModel, *, temperature: float = 1.0) -> None:
        super().__init__()
        self.model = model = without_dropout(plain_of(model))
        self.temperature = temperature
        self.recompute: Recompute = "none"
        """What the backward pass computes again, to save memory."""
        if can_fuse(base_of(model), adapters=True) is not None:  # else the rollout engine lays them together
            store_by_columns(model)
        self.packs = packs(model, verify_head)

    @classmethod
    def from_pretrained(cls, path: PathLike, *, temperature: float = 1.0, **options: Any) -> Self:
        """From a folder, a hub name or a GGUF file. `options` are those of `load_causal_lm`."""
        return cls(load_causal_lm(path, **options), temperature=temperature)

    def compute(self, packed: Packed, outputs: Sequence[str]) -> dict[str, Tensor]:
        """`log_probs [M]` (nats, fp32) of the response tokens; `entropy [M]` of the distributions they were drawn from.

        The LM head runs only where a response token is predicted.
        """
        _check_outputs("ActorModel", outputs, self.OUTPUTS)
        hidden = hidden_states(base_of(self.model), packed, packed.predict_index, packs=self.packs, recompute=self.recompute)
        head = lm_head_of(self.model)
        log_probs_of = partial(
            log_probs_from_hidden,
            hidden,
            head.weight,
            packed.targets.to(hidden.device),
            bias=head.bias,
            softcap=head.softcap,
            scale=head.scale,
            temperature=self.temperature or 1.0,
        )
        if "entropy" not in outputs:
            return {"log_probs": log_probs_of()}
        log_probs, entropy = log_probs_of(with_entropy=True)
        both = {"log_probs": log_probs, "entropy": entropy}
        return {name: both[name] for name in outputs}

    forward = compute

    @property
    def device(self) -> torch.device:
        return self.model.device

    def save_pretrained(self, folder: PathLike, tokenizer: PreTrainedTokenizerBase | None = None) -> None:
        """Writes a causal LM folder; with LoRA, the merged model, and the adapter alone (peft's form) in `adapter/`."""
        with replaced_folder(folder) as fresh:
            with merged(self.model):
                self.model.save_pretrained(fresh)
            if adapter_layers(self.model):
                save_adapter(self.model, fresh / ADAPTER_FOLDER)
            if tokenizer is not None:
                tokenizer.save_pretrained(fresh)


class CriticModel(nn.Module):
    """The critic: a value before every response token.

    Args:
        base: the module that gives hidden states (`base_of` a causal LM).
        head: `Linear(hidden, 1)`; by default a new one, in fp32, with small values (values start near 0).
    """

    OUTPUTS = ("values",)

    def __init__(self, base: PreTrainedModel, head: nn.Linear | None = None) -> None:
        super().__init__()
        self.base = without_dropout(base)
        self.head = _new_value_head(base) if head is None else head
        self.recompute: Recompute = "none"
        """What the backward pass computes again, to save memory."""
        self.packs = packs(base, verify_base)

    @classmethod
    def from_pretrained(cls, path: PathLike, **options: Any) -> Self:
        """From a causal LM (folder, hub name, GGUF file), with a new head, or from a saved critic's folder."""
        saved_head = Path(path).expanduser() / VALUE_HEAD_FILE
        if not saved_head.is_file():
            return cls.from_causal_lm(load_causal_lm(path, **options))
        critic = cls(load_pretrained(AutoModel, path, **options))
        critic.head.load_state_dict(load_file(saved_head))
        return critic

    @classmethod
    def from_causal_lm(cls, model: PreTrainedModel) -> Self:
        """From a causal LM in memory: its base (shared, not copied) under a new value head."""
        return cls(base_of(model))

    def compute(self, packed: Packed, outputs: Sequence[str]) -> dict[str, Tensor]:
        """`values [M]`, fp32: what the state before each response token is worth (reward units)."""
        _check_outputs("CriticModel", outputs, self.OUTPUTS)
        hidden = hidden_states(self.base, packed, packed.predict_index, packs=self.packs, recompute=self.recompute)
        return {"values": self.head(hidden.to(self.head.weight.dtype)).squeeze(-1).float()}

    forward = compute

    @property
    def device(self) -> torch.device:
        return self.base.device

    def save_pretrained(self, folder: PathLike, tokenizer: PreTrainedTokenizerBase | None = None) -> None:
        """Writes the base (an adapter merged into it) as an `AutoModel` folder, with the value head in a file beside it."""
        with replaced_folder(folder) as fresh:
            with merged(self.base):
                self.base.save_pretrained(fresh)
            save_file({name: t.contiguous() for name, t in self.head.state_dict().items()}, fresh / VALUE_HEAD_FILE)
            if tokenizer is not None:
                tokenizer.save_pretrained(fresh)


class RewardModel(nn.Module):
    """A reward model: one score (or several) for a whole sequence.

    Args:
        model: an `AutoModelForSequenceClassification`. Where it scores otherwise than by `model.score` at the last token of
            a causal base (encoders), its own forward pass gives the scores, on padded rows.
    """

    OUTPUTS = ("scores",)

    def __init__(self, model: PreTrainedModel) -> None:
        super().__init__()
        self.tokenizer: PreTrainedTokenizerBase | None = None
        """The model's own tokenizer, where it is known; None: the policy's."""
        self.model = without_dropout(model)
        self.recompute: Recompute = "none"
        """What the backward pass computes again, to save memory."""
        self._whole = False
        try:
            self.packs = packs(model, verify_score)
        except ModelError as error:  # no head over hidden states that Podium can read: the model is asked whole
            self.packs, self._whole = False, True
            warn_padded(model, error.what)

    @classmethod
    def from_pretrained(cls, path: PathLike, *, heads: Heads = None, **options: Any) -> Self:
        """From a sequence-classification folder; with `heads`, from a language model's folder too.

        Args:
            heads: the number of scores, or their names. Weights without a head of that size get a new one, to be trained.
                None: the folder must have its head.
            options: dtype, device, trust_remote_code, as for `load_causal_lm`.

        Raises:
            ModelError: nothing can be loaded there; the folder has no score head and `heads` is None; or its head has
                names, and they are not those of `heads`.
        """
        model = cls(load_sequence_classifier(path, new_head=_number_of(heads), **options))
        model._take_names(heads, where=str(path))
        return model

    @classmethod
    def from_causal_lm(cls, model: PreTrainedModel, *, heads: int | Sequence[str] = 1) -> Self:
        """A copy of a language model's weights (from memory) under a new head of so many scores (or names), to be trained."""
        base = base_of(model)
        config = deepcopy(model.config)
        config.num_labels = _number_of(heads)
        classifier = AutoModelForSequenceClassification.from_config(config, dtype=base.dtype)
        base_of(classifier).load_state_dict(base.state_dict())
        reward = cls(classifier.to(base.device))
        reward._take_names(heads, where=type(model).__name__)
        return reward

    @property
    def heads(self) -> int:
        return self.model.config.num_labels

    @property
    def head_names(self) -> list[str]:
        """The scores' names, in order: the config's labels, so a saved folder keeps them; "0", "1", ... where it has none."""
        labels = self.model.config.id2label
        return [str(i) if labels[i] == f"LABEL_{i}" else labels[i] for i in range(self.heads)]

    def head(self, name: str) -> RewardHead:
        """One of the scores. Raises ModelError, with the nearest name, where there is none of that name."""
        if name not in self.head_names:
            raise ModelError(f"the reward model has no head '{name}'", remedy=did_you_mean(name, self.head_names))
        return RewardHead(self, name)

    def _take_names(self, heads: Heads, *, where: str) -> None:
        """Names the scores, where names were given. Raises ModelError where they have other names already."""
        if heads is None or isinstance(heads, int):
            return
        wanted, saved = list(heads), self.head_names
        if wanted != saved and saved != [str(i) for i in range(len(saved))]:
            raise ModelError(
                f"its scores are called {', '.join(saved)}, not {', '.join(wanted)}",
                where=where,
                remedy="give the heads the names they have, in that order, or start from a language model's folder",
            )
        config = self.model.config
        config.id2label, config.label2id = dict(enumerate(wanted)), {name: i for i, name in enumerate(wanted)}

    def compute(self, packed: Packed, outputs: Sequence[str]) -> dict[str, Tensor]:
        """`scores`, fp32: `[S]` with one head, `[S, heads]` with more."""
        _check_outputs("RewardModel", outputs, self.OUTPUTS)
        if self._whole:
            scores = padded_logits(self.model, packed, token_types=self._has_token_types()).float()
        else:
            hidden = hidden_states(base_of(self.model), packed, packed.last_index, packs=self.packs, recompute=self.recompute)
            scores = self.model.score(hidden.to(self.model.score.weight.dtype)).float()
        return {"scores": scores.squeeze(-1) if self.heads == 1 else scores}

    forward = compute

    def _has_token_types(self) -> bool:
        """Whether the model tells a pair's texts apart by types, and its tokenizer gives them (BERT; not RoBERTa)."""
        several = (getattr(self.model.config, "type_vocab_size", None) or 0) > 1
        return several and self.tokenizer is not None and "token_type_ids" in self.tokenizer("a", "b")

    @property
    def device(self) -> torch.device:
        return self.model.device

    def save_pretrained(self, folder: PathLike, tokenizer: PreTrainedTokenizerBase | None = None) -> None:
        """Writes a sequence-classification folder.

        Plain `transformers` finds a sequence's last token by the pad id, so that is written into the config.
        """
        if tokenizer is not None and self.model.config.pad_token_id is None:
            self.model.config.pad_token_id = tokenizer.pad_token_id
        with merged(self.model):
            save_pretrained(folder, self.model, tokenizer)


@dataclass(frozen=True)
class RewardHead:
    """One score of a reward model that has several: what it is called and the model that gives it."""

    model: RewardModel
    name: str


@overload
def load_reward_model(path: PathLike, head: None = None, **options: Any) -> RewardModel: ...
@overload
def load_reward_model(path: PathLike, head: str, **options: Any) -> RewardHead: ...
def load_reward_model(path: PathLike, head: str | None = None, **options: Any) -> RewardModel | RewardHead:
    """A reward model with its tokenizer (`.tokenizer`), from a sequence-classification folder or hub name.

    Responses of a policy with another tokenizer are scored through their text.

    Args:
        head: one score of a model that has several, by name; the result is then a `RewardHead`.
        options: those of `load_sequence_classifier`.

    Raises ModelError where nothing can be loaded, or there is no such head.
    """
    model = RewardModel.from_pretrained(path, **options)
    model.tokenizer = load_tokenizer(path, trust_remote_code=options.get("trust_remote_code", False), needs_end_token=False)
    return model if head is None else model.head(head)


def _number_of(heads: Heads) -> int:
    """How many; 0 for None. Raises ModelError for names that are no names."""
    if heads is None or isinstance(heads, int):
        if heads is not None and heads < 1:
            raise ModelError(f"heads={heads}: a reward model gives at least one score")
        return heads or 0
    names = [heads] if isinstance(heads, str) else list(heads)
    if isinstance(heads, str) or not names or len(set(names)) < len(names) or not all(names):
        raise ModelError(f"heads={heads!r}: a list of different names is needed", remedy='heads=["helpful", "honest"]')
    return len(names)


def _new_value_head(base: PreTrainedModel) -> nn.Linear:
    hidden = base.config.get_text_config().hidden_size
    place = "cpu" if base.device.type == "meta" else base.device
    head = nn.Linear(hidden, 1, device=place, dtype=torch.float32)
    with torch.no_grad():
        # Hidden states are of the order 1 in each dimension: values of the order 0.01.
        nn.init.normal_(head.weight, std=0.01 / hidden**0.5)
        nn.init.zeros_(head.bias)
    return head
