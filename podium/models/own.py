"""A model class of the user's own: the small interface that it implements, and how it fills the actor's role."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from podium.algorithms.base import Loss
from podium.core.batch import Batch, Ragged
from podium.core.errors import ModelError
from podium.models.loading import PathLike, replaced_folder

Draw = Callable[[list[int], Tensor], tuple[Tensor, list[bool]]]
"""`draw(rows, logits [n, V])` -> the next token of each of these rows `[n]` (int64, on the logits' device), and whether the row
ends with it. Who calls `generate` decides by it how tokens are drawn and when a response ends; it keeps the log-probs."""


class BaseParallelModel(nn.Module):
    """A language model in plain torch that Podium can train: subclass it and write `forward`.

    `generate` and `compute_loss` work by `forward` alone; override them where the model can do better (a recurrent state, a
    cache; a term of its own in the loss).
    """

    max_positions: int | None = None
    """The longest sequence (prompt and response) in tokens; None: no limit."""

    def forward(self, input_ids: Tensor, attention_mask: Tensor) -> Tensor:
        """The logits of the next token at every position.

        Args:
            input_ids: `[B, T]` int64, padded on the right (with 0).
            attention_mask: `[B, T]` int64, 0 on padding. A causal model may ignore it: what stands after a token cannot
                change its logits.

        Returns:
            `[B, T, V]`, of any float dtype; on padding they may be anything.
        """
        raise NotImplementedError(f"{type(self).__name__} must define forward(input_ids, attention_mask) -> logits [B, T, V]")

    @torch.no_grad()
    def generate(self, prompts: Sequence[Sequence[int]], draw: Draw) -> None:
        """Writes a response to every prompt, all rows at once, until `draw` says that each has ended.

        Here the whole sequence runs again for every token. A model with a state overrides this; what must hold is that a
        row's logits are those of `forward` after its prompt and the tokens that `draw` gave it.

        Args:
            prompts: token ids, none empty. Row `i` is `prompts[i]`.
            draw: see `Draw`.
        """
        rows = [list(prompt) for prompt in prompts]
        running = list(range(len(rows)))
        while running:
            ids, mask = pad([rows[row] for row in running], self.device)
            last = mask.sum(1) - 1
            tokens, ended = draw(running, self(ids, mask)[torch.arange(len(running), device=ids.device), last])
            for row, token in zip(running, tokens.tolist(), strict=True):
                rows[row].append(token)
            running = [row for row, end in zip(running, ended, strict=True) if not end]

    def compute_loss(
        self, loss: Loss, columns: Mapping[str, Tensor], outputs: Callable[[], Mapping[str, Tensor]]
    ) -> tuple[Tensor, dict[str, Tensor]]:
        """The loss of each response token (or row), and metrics of that shape.

        Args:
            loss: what Podium minimises.
            columns: the batch's columns that it reads: `[b, T]` on the response's tokens, or `[b]`.
            outputs: runs the model and gives what the loss asks for: `log_probs` and `entropy`, `[b, T]`.

        Returns:
            the loss `[b, T]` with gradient, to be weighted and summed by the engine; and detached metrics.
        """
        return loss.function(outputs(), columns)

    def save_pretrained(self, folder: Path) -> None:
        """Writes what `load_state_dict(safetensors.torch.load_file(folder / "model.safetensors"))` reads back."""
        from safetensors.torch import save_model

        save_model(self, str(folder / "model.safetensors"))

    @property
    def device(self) -> torch.device:
        return next(self.parameters()).device


class OwnActor(nn.Module):
    """The policy over a `BaseParallelModel`: log-probs of given responses, from its logits on padded rows.

    Args:
        temperature: divides the logits, as in sampling; 0 (greedy) counts as 1.
    """

    OUTPUTS = ("log_probs", "entropy")
    packs = False

    def __init__(self, model: BaseParallelModel, *, temperature: float = 1.0) -> None:
        super().__init__()
        self.model, self.temperature = model, temperature or 1.0

    def compute_batch(self, batch: Batch, outputs: Sequence[str]) -> dict[str, Tensor]:
        """`log_probs [M]` (nats, fp32) of the response tokens; `entropy [M]` of the distributions they were drawn from.

        Args:
            batch: with `prompt_ids` and `response_ids`; padded to its longest row.

        Raises ModelError for another output, and where the model gives logits of another shape.
        """
        odd = sorted(set(outputs) - set(self.OUTPUTS))
        if odd:
            raise ModelError(
                f"{type(self.model).__name__} does not compute {', '.join(odd)}", remedy="it has: log_probs, entropy"
            )
        prompts, responses = batch["prompt_ids"], batch["response_ids"]
        rows = [p.tolist() + r.tolist() for p, r in zip(prompts, responses, strict=True)]
        ids, mask = pad(rows, self.model.device)
        logits = self.model(ids, mask)
        if logits.ndim != 3 or logits.shape[:2] != ids.shape:
            raise ModelError(
                f"{type(self.model).__name__}.forward returned the shape {list(logits.shape)} for {list(ids.shape)} tokens",
                remedy="return logits [B, T, V]",
            )
        row, column = _before_responses(prompts, responses)
        distributions = (logits[row.to(ids.device), column.to(ids.device)].float() / self.temperature).log_softmax(-1)
        log_probs = distributions.gather(1, responses.values.to(ids.device)[:, None])[:, 0]
        if "entropy" not in outputs:
            return {"log_probs": log_probs}
        both = {"log_probs": log_probs, "entropy": -(distributions.exp() * distributions).sum(-1)}
        return {name: both[name] for name in outputs}

    def compute_loss(
        self, loss: Loss, columns: Mapping[str, Tensor], outputs: Callable[[], Mapping[str, Tensor]]
    ) -> tuple[Tensor, dict[str, Tensor]]:
        """As the user's class says."""
        return self.model.compute_loss(loss, columns, outputs)

    def save_pretrained(self, folder: PathLike, tokenizer: Any = None) -> None:
        """The model's own files, and the tokenizer's."""
        with replaced_folder(folder) as fresh:
            self.model.save_pretrained(fresh)
            if tokenizer is not None:
                tokenizer.save_pretrained(fresh)


def pad(rows: Sequence[Sequence[int]], device: torch.device | str = "cpu") -> tuple[Tensor, Tensor]:
    """Ids `[B, T]` int64 padded on the right with 0, and the mask `[B, T]` int64 that is 0 there."""
    ragged = Ragged.from_rows(rows, torch.int64)
    return ragged.padded().to(device), ragged.valid().long().to(device)


def _before_responses(prompts: Ragged, responses: Ragged) -> tuple[Tensor, Tensor]:
    """Row and column `[M]` of the token before each response token, in padded rows of prompt and response."""
    lengths = responses.lengths
    row = torch.repeat_interleave(torch.arange(len(lengths)), lengths)
    within = torch.arange(len(row)) - torch.repeat_interleave(responses.offsets[:-1], lengths)
    return row, prompts.lengths[row] + within - 1
