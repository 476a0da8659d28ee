"""Training and scoring on one device."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cached_property, partial
from typing import Any, Literal, Protocol

import torch
from torch import Tensor, nn

from podium.algorithms.base import Loss
from podium.algorithms.reduce import Counts, token_weights
from podium.core.batch import Batch, Ragged
from podium.core.errors import BatchError, CheckpointError, ConfigError
from podium.core.metrics import Metrics
from podium.core.prompts import Prompts, distinct_prompts
from podium.core.settings import OptimizerSettings
from podium.engines.train.budget import TRIAL, UNMEASURED, measured_budget
from podium.engines.train.microbatch import plan
from podium.engines.train.offload import OffloadedAdamW
from podium.engines.train.optim import MasterAdamW
from podium.engines.train.running import RunningSums
from podium.models.packed import Packed, pack
from podium.models.storage import digest
from podium.models.work import work_of


class PackedModel(Protocol):
    """What the engine needs of a model (an `nn.Module`): ActorModel, CriticModel, RewardModel."""

    def compute(self, packed: Packed, outputs: Sequence[str]) -> dict[str, Tensor]:
        """Per response token `[M]`; per sequence for `scores`: `[S]`, or `[S, H]` with `head_names` for the H columns."""
        ...


SEQUENCE_OUTPUTS = ("scores",)


class SingleDeviceEngine:
    """A `TrainEngine` whose model is on one device.

    Args:
        model: an `nn.Module` with `compute` (see `PackedModel`), on its device.
        optimizer: the rates; None for a model that is never updated (reference, reward).
        microbatch_tokens: prompt and response tokens in one forward (and backward) pass; a prompt that rows share counts
            once, as it runs once (for each of them in a model of padded rows). It changes memory and speed, never the gradient.
            auto: the first update finds out how many fit (see `budget`).
        total_updates: the run's updates; needed for schedules that decay.
        offload_optimizer: master weights and moments live in the CPU's memory.
    """

    def __init__(
        self,
        model: nn.Module,
        *,
        optimizer: OptimizerSettings | None = None,
        microbatch_tokens: int | Literal["auto"] = 8192,
        total_updates: int | None = None,
        offload_optimizer: bool = False,
    ) -> None:
        self.model: Any = model
        self._offload = offload_optimizer
        self.microbatch_tokens = microbatch_tokens
        self.work = work_of(model)
        """What a row costs: micro-batches, and ranks' shares of the rows, get equal sums of it."""
        self.policy_version = 0
        """Updates applied so far."""
        self._optimizer = self._make_optimizer(optimizer, total_updates) if optimizer else None

    def _make_optimizer(self, settings: OptimizerSettings, total_updates: int | None) -> MasterAdamW:
        kind = OffloadedAdamW if self._offload else MasterAdamW
        return kind(self.model.named_parameters(), settings, total_updates)

    # ------------------------------------------------------------------ forward

    @torch.no_grad()
    def compute(self, batch: Batch, outputs: Sequence[str]) -> Batch:
        """Forward only: `log_probs`, `entropy`, `values` as token columns, `scores` as a sequence column, on the CPU, fp32.

        A reward model with several heads gives a column `scores.<head>` for each.

        Args:
            batch: with `prompt_ids` and `response_ids`.
            outputs: what the model shall compute, by name.
        """
        tokens = _tokens(batch)
        parts: list[dict[str, Tensor]] = []
        order = self._parts(batch, tokens)
        for rows in order:
            parts.append(self._run(batch.select("prompt_ids", "response_ids").index(rows), outputs))
        if not parts:  # no rows have the same columns, without entries
            return Batch({name: torch.zeros(0) if name in SEQUENCE_OUTPUTS else Ragged.from_rows([]) for name in outputs})
        back = torch.argsort(torch.cat(order))
        lengths = batch.lengths("response")[torch.cat(order)]
        columns: dict[str, Any] = {}
        for name in outputs:
            flat = torch.cat([part[name] for part in parts]).float().cpu()
            if name not in SEQUENCE_OUTPUTS:
                columns[name] = Ragged.of_lengths(flat, lengths).index(back)
            elif flat.ndim == 1:
                columns[name] = flat[back]
            else:
                columns |= {f"{name}.{head}": flat[back, i] for i, head in enumerate(self.model.head_names)}
        return Batch(columns)

    # ------------------------------------------------------------------ update

    def update(self, minibatch: Batch, loss: Loss) -> Metrics:
        """One optimizer step over the whole minibatch: the same gradient whatever micro-batches it takes.

        Args:
            minibatch: with `prompt_ids`, `response_ids`, the loss's mask and columns.
            loss: what is minimised.

        Returns:
            the loss's metrics, averaged over the mask; `loss`; `grad_norm` (before clipping), `lr`; `tokens` (prompt and
            response tokens of the minibatch's rows, a shared prompt once for each); `skipped_updates` (1 where the gradient
            was not finite or nothing was left to train on, so that nothing changed).

        Raises:
            ConfigError: the engine has no optimizer, or the loss returns another shape than its mask's.
            BatchError: a column is missing.
        """
        if self._optimizer is None:
            raise ConfigError(
                f"this {type(self.model).__name__} was built without an optimizer, so it cannot be updated",
                remedy="give the engine optimizer settings",
            )
        weighted, weights_name, counted = self._weighted(minibatch, loss)
        tokens = _tokens(minibatch)
        if self.microbatch_tokens == "auto" and counted:
            self.microbatch_tokens = self._measured_budget(weighted, loss, weights_name, tokens)
        sums = RunningSums()
        self._optimizer.zero_grad()
        for rows in self._parts(minibatch, tokens, loss.keep_together) if counted else []:
            self._backward(weighted.index(rows), loss, weights_name, sums)
        lr = self._optimizer.lr
        # The step comes before anything is read: each reading waits for the device.
        report = self._optimizer.step() if counted else None
        applied = report is not None and report.applied
        metrics = Metrics()
        for name, total in self._over_ranks({**sums.read(), "tokens": float(tokens.sum())}).items():
            metrics.add(name, total, 1 if name in ("loss", "tokens") else counted)
        metrics.add("lr", lr)
        if report is not None and applied:
            metrics.add("grad_norm", report.grad_norm)
        metrics.add("skipped_updates", float(not applied))
        self.policy_version = self._optimizer.updates
        return metrics

    # ------------------------------------------------------------------ what an engine of several ranks does otherwise

    def _counts(self, mask: Tensor) -> Counts:
        """What the loss's denominators are made of, for the whole minibatch."""
        return Counts.of(mask)

    def _over_ranks(self, sums: dict[str, float]) -> dict[str, float]:
        """Sums of this rank's rows as sums of the whole minibatch."""
        return sums

    def _parts(self, batch: Batch, tokens: Tensor, keep_together: str | None = None) -> list[Tensor]:
        """The rows of each forward pass."""
        units = batch[keep_together] if keep_together else None
        most = UNMEASURED if self.microbatch_tokens == "auto" else self.microbatch_tokens
        prompts, responses = self._shared_prompts(batch), batch.lengths("response")
        return plan(tokens, most, units, prompts, responses=responses, work=self.work)

    def _measured_budget(self, weighted: Batch, loss: Loss, weights_name: str, tokens: Tensor) -> int:
        """The tokens that fit into one pass, from a trial with the first rows; its gradient is thrown away."""
        optimizer, device = self._optimizer, next(self.model.parameters()).device
        assert optimizer is not None
        units = weighted[loss.keep_together] if loss.keep_together else None
        part = weighted.index(plan(tokens, TRIAL, units, self._shared_prompts(weighted))[0])
        later = 0 if optimizer.updates else optimizer.moment_bytes
        run = partial(self._backward, part, loss, weights_name, RunningSums())
        return measured_budget(run, len(packed_row(part).ids), device, later)

    # ------------------------------------------------------------------ one micro-batch

    def _run(self, part: Batch, outputs: Sequence[str]) -> dict[str, Tensor]:
        """The model over one micro-batch: from a packed row, or (a class of the user's own) from the rows as they are."""
        by_rows = getattr(self.model, "compute_batch", None)
        return by_rows(part, outputs) if by_rows is not None else self.model.compute(packed_row(part), outputs)

    def _loss_of(
        self, loss: Loss, columns: dict[str, Tensor], outputs: Callable[[], dict[str, Tensor]]
    ) -> tuple[Tensor, dict[str, Tensor]]:
        """The loss of each entry and its metrics; a class of the user's own may compute them its own way."""
        own = getattr(self.model, "compute_loss", None)
        return own(loss, columns, outputs) if own is not None else loss.function(outputs(), columns)

    def _shared_prompts(self, batch: Batch) -> Prompts | None:
        """Which rows share a prompt; None for a model of padded rows, where a shared prompt runs once for each."""
        return distinct_prompts(batch["prompt_ids"]) if getattr(self.model, "packs", True) else None

    def _weighted(self, minibatch: Batch, loss: Loss) -> tuple[Batch, str, int]:
        """What the loss needs of the minibatch, with each entry's weight as one more column; its name; entries that count."""
        mask = minibatch.padded(loss.mask).bool()
        counts = self._counts(mask)
        weights = token_weights(mask, loss.reduction, constant_length=loss.constant_length, counts=counts)
        needed = minibatch.select(*dict.fromkeys(("prompt_ids", "response_ids", loss.mask, *loss.columns)))
        if isinstance(minibatch[loss.mask], Ragged):
            return needed.with_padded("loss_weights", weights), "loss_weights", counts.tokens
        return needed.with_columns({"sequence_weights": weights}), "sequence_weights", counts.tokens

    def _backward(self, part: Batch, loss: Loss, weights_name: str, sums: RunningSums) -> None:
        """Adds one micro-batch's gradient, and its share of the metrics to `sums`."""
        device = next(self.model.parameters()).device
        columns = {name: part.padded(name).to(device) for name in (*loss.columns, loss.mask, weights_name)}
        mask = columns[loss.mask].bool()

        def outputs() -> dict[str, Tensor]:
            lengths = part.lengths("response")
            flat = self._run(part, loss.outputs)
            return {n: v if n in SEQUENCE_OUTPUTS else pad_rows(v, lengths) for n, v in flat.items()}

        per_entry, metrics = self._loss_of(loss, columns, outputs)
        if per_entry.shape != mask.shape:
            raise ConfigError(
                f"the loss '{loss.name}' returned the shape {list(per_entry.shape)}, its mask has {list(mask.shape)}",
                remedy="return one loss per entry of the mask; the engine reduces it",
            )
        # Entries outside the mask are left out, not multiplied by 0: they may hold anything.
        total = (columns[weights_name] * per_entry).masked_fill(~mask, 0.0).sum()
        assert self._optimizer is not None
        self._optimizer.backward(total)
        sums.add("loss", total.detach())
        for name, value in metrics.items():
            sums.add(name, value.detach().masked_fill(~mask, 0.0).sum())

    # ------------------------------------------------------------------ state

    def state_dict(self) -> dict[str, Any]:
        """Weights, masters, moments, schedule position, version. The tensors are the live ones: save or copy them.

        Of a model that trains in part (LoRA) the weights are those that train; for the others stands their digest.
        """
        return {
            "model": self._own_tensors(),
            "frozen": self._frozen_digest,
            "optimizer": self._optimizer.state_dict() if self._optimizer else None,
            "policy_version": self.policy_version,
        }

    def weights_mark(self) -> dict[str, Any]:
        """What changes with every write to what trains: small, and quick enough for every step."""
        return {"policy_version": self.policy_version, "written": self._optimizer.mark() if self._optimizer else []}

    @torch.no_grad()
    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Takes what `state_dict` gave; the next update is bit for bit what it would have been.

        Raises CheckpointError where the state is another model's, or belongs to other frozen weights.
        """
        mine, theirs = self._own_tensors(), state["model"]
        self._check_fits(mine, theirs, state.get("frozen"))
        for name, tensor in mine.items():
            tensor.copy_(theirs[name])
        self.policy_version = state["policy_version"]
        if self._optimizer and state["optimizer"]:
            self._optimizer.load_state_dict(state["optimizer"])

    def _check_fits(self, mine: dict[str, Tensor], theirs: dict[str, Tensor], frozen: str | None) -> None:
        odd = _misfit(mine, theirs)
        if odd:
            raise CheckpointError(
                f"the checkpoint's weights do not fit this model: {odd}",
                where="model",
                remedy="resume with the model that the checkpoint was written for (model.path, model.lora)",
            )
        if frozen != self._frozen_digest:
            raise CheckpointError(
                "the weights that do not train (the base under the adapter) are not those of the run that is resumed",
                remedy="resume with the base model that the checkpoint was written for",
            )

    def _own_tensors(self) -> dict[str, Tensor]:
        """What a checkpoint holds of the model."""
        tensors = own_tensors(self.model)
        trained = self._trained
        return tensors if trained is None else {name: tensor for name, tensor in tensors.items() if name in trained}

    @property
    def _trained(self) -> set[str] | None:
        """The names of the parameters that train, where others are frozen; None where there is nothing to tell apart."""
        if self._optimizer is None or all(p.requires_grad for p in self.model.parameters()):
            return None
        return {name for name, p in self.model.named_parameters() if p.requires_grad}

    @cached_property
    def _frozen_digest(self) -> str | None:
        """Read once: what is frozen never changes."""
        trained = self._trained
        if trained is None:
            return None
        return digest({name: tensor for name, tensor in own_tensors(self.model).items() if name not in trained})

    def save_pretrained(self, folder: str, tokenizer: Any = None) -> None:
        """Writes the model as a Hugging Face folder."""
        self.model.save_pretrained(folder, tokenizer)


def pad_rows(flat: Tensor, lengths: Tensor) -> Tensor:
    """Flat values `[M]` as `[b, T]`, right-padded with 0; differentiable. `lengths [b]` are on the CPU."""
    rows, longest = len(lengths), int(lengths.max()) if len(lengths) else 0
    valid = torch.arange(longest) < lengths[:, None]
    places = valid.flatten().nonzero()[:, 0].to(flat.device)
    return flat.new_zeros(rows * longest).index_copy(0, places, flat).view(rows, longest)


def _tokens(batch: Batch) -> Tensor:
    """Prompt and response tokens of each row, `[B]`. Raises BatchError for a row without a prompt."""
    prompts = batch.lengths("prompt")
    empty = (prompts == 0).nonzero()
    if len(empty):
        raise BatchError(
            f"row {int(empty[0])} has an empty prompt, so nothing predicts its first token",
            remedy="start prompts with the tokenizer's first token (bos), or leave such rows out",
        )
    return prompts + batch.lengths("response")


def packed_row(batch: Batch) -> Packed:
    return pack(batch.select("prompt_ids", "response_ids"))


def _misfit(mine: dict[str, Tensor], theirs: dict[str, Tensor]) -> str:
    """What is other about a checkpoint's tensors; empty where nothing is."""
    if mine.keys() == theirs.keys():
        name = next((n for n in mine if mine[n].shape != theirs[n].shape), None)
        return f"{name} has the shape {[*mine[name].shape]}, there {[*theirs[name].shape]}" if name is not None else ""
    alone = (sorted(a.keys() - b.keys()) for a, b in ((mine, theirs), (theirs, mine)))
    return "; ".join(
        f"{len(names)} are in the {side} alone ({names[0]}{', ...' if len(names) > 1 else ''})"
        for side, names in zip(("model", "checkpoint"), alone, strict=True)
        if names
    )


def own_tensors(model: nn.Module) -> dict[str, Tensor]:
    """Parameters (tied ones once) and persistent buffers, by name."""
    parameters = dict(model.named_parameters())
    every = {name for name, _ in model.named_parameters(remove_duplicate=False)}
    buffers = {name: tensor for name, tensor in model.state_dict().items() if name not in every}
    return {**{name: p.detach() for name, p in parameters.items()}, **buffers}
