"""What a pass of a model takes in operations, by the field's convention: 2 for every parameter and token, and attention.

A training pass is three forward passes (6 N a token); of parameters that are frozen it is two, as they get no gradient.
Every parameter counts once, the embedding too. What is computed again to save memory does not count: it is no progress.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn

from podium.core.batch import Batch
from podium.models.packed import distinct_prompts
from podium.models.work import trunk_of, work_of


@dataclass(frozen=True)
class Rows:
    """What a pass goes through: `tokens` (a prompt that rows share once, where it runs once), `responses` of them.

    `prompts [P]`, `wholes [B]`, `of_row [B]`: lengths of the distinct prompts and of whole rows, and each row's prompt;
    `shared`: a shared prompt runs once.
    """

    prompts: Tensor
    wholes: Tensor
    of_row: Tensor
    shared: bool

    @classmethod
    def of(cls, batch: Batch, *, shared: bool = True) -> Rows:
        """`shared` False: each row runs whole, its prompt included."""
        found = distinct_prompts(batch["prompt_ids"])
        wholes = batch.lengths("prompt") + batch.lengths("response")
        return cls(found.lengths, wholes, found.of_row, shared)

    @property
    def tokens(self) -> int:
        before = int(self.prompts[self.of_row].sum())
        return int(self.wholes.sum()) - (before - int(self.prompts.sum()) if self.shared else 0)


class ModelCost:
    """Operations of a role's model. `unknown`: what of it is not counted, in words."""

    def __init__(self, model: nn.Module) -> None:
        parameters = {id(p): p for p in model.parameters()}.values()
        self.parameters = sum(p.numel() for p in parameters)
        self.trained = sum(p.numel() for p in parameters if p.requires_grad)
        self.quantised = any(p.dtype in (torch.uint8, torch.int8) for p in parameters)
        self.packs = bool(getattr(model, "packs", True))
        # One layer's pair of query and key costs 4 operations for each number of all heads; `work_of` counts in halves.
        self._attention = replace(work_of(model), token=0, predicted=0)
        self._unit = 2 * _width(trunk_of(model))

    @property
    def unknown(self) -> str | None:
        if self.quantised:
            return "operations of quantised weights are not counted (their number of parameters is not their shape)"
        return None if self._unit else "attention's operations are not counted (the model's shape is not known)"

    def forward(self, rows: Rows) -> float:
        """A forward pass over the rows."""
        return 0.0 if self.quantised else 2.0 * self.parameters * rows.tokens + self.attention(rows)

    def update(self, rows: Rows) -> float:
        """A forward and a backward pass over the rows."""
        if self.quantised:
            return 0.0
        return (4.0 * self.parameters + 2.0 * self.trained) * rows.tokens + 3.0 * self.attention(rows)

    def attention(self, rows: Rows) -> float:
        """Causal attention, forward."""
        whole = self._attention.of(rows.wholes)
        if rows.shared:
            prompts = self._attention.of(rows.prompts)
            pairs = int((whole - prompts[rows.of_row]).sum()) + int(prompts.sum())
        else:
            pairs = int(whole.sum())
        return float(self._unit * pairs)


def _width(trunk: Any) -> int:
    """Numbers of all query heads of a layer; 0 where they are not known."""
    if trunk is None:
        return 0
    config = trunk.config.get_text_config()
    heads, hidden = getattr(config, "num_attention_heads", None), getattr(config, "hidden_size", None)
    return heads * (getattr(config, "head_dim", None) or hidden // heads) if heads and hidden else 0
