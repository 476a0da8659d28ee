"""What the trained roles share: one loss over a step's sequences, minibatch by minibatch."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch

from podium.algorithms.base import Loss
from podium.controller.dispatch import dispatch
from podium.core.batch import Batch
from podium.core.errors import ConfigError
from podium.core.metrics import Metrics
from podium.core.ranks import WorkerContext
from podium.core.seeding import derive_seed
from podium.core.shares import deal, restore, take
from podium.core.work import Work
from podium.engines.base import TrainEngine


def minibatches(batch: Batch, sequences: int, *, seed: int | None, unit: str | None = None) -> Iterator[Batch]:
    """Cuts a step's rows into minibatches of about `sequences` rows (0: one minibatch), even to one unit.

    Rows with equal values in the column `unit` stay together. With a seed the units are put in an order drawn from it.
    """
    if not len(batch):
        return
    ids = batch[unit] if unit else torch.arange(len(batch))
    _, unit_of_row = torch.unique(ids, return_inverse=True)
    units = int(unit_of_row.max()) + 1
    parts = parts_of(len(batch), sequences, units)
    if parts == 1:
        yield batch
        return
    order = torch.arange(units)
    if seed is not None:
        order = torch.randperm(units, generator=torch.Generator().manual_seed(seed))
    for part in torch.tensor_split(order, parts):
        yield batch.index(torch.isin(unit_of_row, part))


def parts_of(rows: int, sequences: int, units: int) -> int:
    """How many minibatches of about `sequences` rows (0: all) `rows` make, none without a unit."""
    return 1 if sequences == 0 else max(1, min(units, round(rows / sequences)))


def work_of_engine(engine: TrainEngine) -> Work:
    """What a row costs the engine's model; its tokens, for an engine that does not say."""
    work = getattr(engine, "work", None)
    return work if isinstance(work, Work) else Work()


def weights_digest(engine: TrainEngine) -> str:
    """A digest of the engine's weights: names, shapes, dtypes and every byte."""
    digest = hashlib.blake2b(digest_size=16)
    for name, tensor in sorted(engine.state_dict()["model"].items()):
        digest.update(f"{name} {tuple(tensor.shape)} {tensor.dtype}".encode())
        digest.update(tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy())
    return digest.hexdigest()


def weights_mark(state: Any) -> Any:
    """Update counts, and torch's own count of writes to each tensor: an update that broke off half-way shows too."""
    if isinstance(state, torch.Tensor):
        return 0 if state.is_inference() else state._version
    if isinstance(state, Mapping):
        # What an actor has generated and what was skipped say nothing of its weights.
        return {k: weights_mark(v) for k, v in state.items() if k not in ("calls", "skipped")}
    return state


class TrainedRole:
    """A train engine, and how a step's sequences are cut for it.

    With several workers a step's minibatches are cut from all its rows, the same on every rank, and each rank updates on
    its share of each minibatch: every rank makes the same number of optimizer steps, also where its share is empty.

    Args:
        engine: the model with its optimizer (or without one, for a role that is never updated).
        loss: what `update` minimises when it is given no other.
        minibatch_sequences: rows per optimizer update; 0: all.
        epochs: passes over the rows.
        seed: orders the minibatches of later epochs.
        context: this worker's place among those of its role.
    """

    def __init__(
        self,
        engine: TrainEngine,
        *,
        loss: Loss | None = None,
        minibatch_sequences: int = 0,
        epochs: int = 1,
        seed: int = 0,
        context: WorkerContext | None = None,
    ) -> None:
        self.engine, self.loss, self.context = engine, loss, context or WorkerContext()
        self.minibatch_sequences, self.epochs, self.seed = minibatch_sequences, epochs, seed

    @dispatch("broadcast")
    def update(self, batch: Batch, loss: Loss | None = None) -> Metrics:
        """Optimizer updates over all rows, `epochs` times.

        Args:
            batch: with `prompt_ids`, `response_ids` and the columns that the loss names.

        Returns:
            the loss's and the engine's metrics, summed over the updates.
        """
        loss = loss or self.loss
        if loss is None:
            raise ConfigError(f"{type(self).__name__}.update was given no loss", remedy="pass loss=...")
        metrics = Metrics()
        for _ in range(self.epochs):
            seed = derive_seed(self.seed, "minibatches", self.engine.policy_version)
            for part in minibatches(batch, self.minibatch_sequences, seed=seed, unit=loss.keep_together):
                metrics.merge(self.engine.update(self._share(part, loss.keep_together), loss))
        return metrics

    def _share(self, minibatch: Batch, unit: str | None) -> Batch:
        """This data rank's rows."""
        units = minibatch[unit] if unit else None
        return take(minibatch, deal(minibatch, self.context.data_size, self.row_work(), units)[self.context.data_rank])

    @dispatch("broadcast")
    def row_work(self) -> Work:
        """What a row costs this role's model."""
        return work_of_engine(self.engine)

    def over_all_rows(self, batch: Batch, compute: Callable[[Batch], Batch]) -> Batch:
        """What `compute` gives for every row, each rank having computed its share. All ranks call it with the same rows."""
        context = self.context
        if context.data_size == 1:
            return compute(batch)
        shares = deal(batch, context.data_size, self.row_work())
        results: list[Any] = [None] * context.world_size
        torch.distributed.all_gather_object(results, compute(take(batch, shares[context.data_rank])))
        return restore([r for rank, r in enumerate(results) if context.ranks.leads(rank)], shares)

    def updates_on(self, batch: Batch, loss: Loss) -> int:
        """How many optimizer updates `update` makes on these rows."""
        units = len(torch.unique(batch[loss.keep_together])) if loss.keep_together else len(batch)
        return self.epochs * parts_of(len(batch), self.minibatch_sequences, units)

    # What follows is called on all ranks: a sharded engine gathers in it. The first one's result is taken.

    @dispatch("broadcast")
    def weights_digest(self) -> str:
        """What tells these weights from others."""
        return weights_digest(self.engine)

    @dispatch("gather")
    def weights_mark(self) -> dict[str, Any]:
        """What changes with every write to the weights or the optimizer's state; small, and no weight is sent.

        Of every worker: an update can have broken off on one of them.
        """
        own = getattr(self.engine, "weights_mark", None)
        if own is not None:
            mark: dict[str, Any] = own()
            return mark
        model = getattr(self.engine, "model", None)
        if self.context.world_size == 1 or not isinstance(model, torch.nn.Module):
            return weights_mark(self.engine.state_dict())
        # The state of several ranks would be gathered; what each holds of the parameters says as much.
        held = {name: getattr(p, "_local_tensor", p) for name, p in model.named_parameters()}
        return {"policy_version": self.engine.policy_version, "model": weights_mark(held)}

    @dispatch("for_files")
    def state_dict(self) -> dict[str, Any]:
        """All state of the role, as tensors and plain values."""
        return self.engine.state_dict()

    @dispatch("broadcast")
    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.engine.load_state_dict(state)

    @dispatch("broadcast")
    def save_pretrained(self, folder: str) -> None:
        """Writes the model as a Hugging Face folder, with the role's tokenizer where it has one. Rank 0 writes."""
        self.engine.save_pretrained(folder, getattr(self, "tokenizer", None))  # type: ignore[attr-defined]
