"""Training over several ranks: copies (data), FSDP2 (shard), tensor and sequence parallel, and their products."""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Iterator, Mapping, Sequence
from functools import cached_property
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from podium.algorithms.base import Loss
from podium.algorithms.reduce import Counts
from podium.core.batch import Batch
from podium.core.errors import CheckpointError, ConfigError, ModelError
from podium.core.ranks import AXES, WorkerContext
from podium.core.settings import OptimizerSettings
from podium.engines.layout import Layout, gathered_layout, local_of
from podium.engines.train.fsdp import apply_fsdp
from podium.engines.train.inner_ranks import InnerRanks
from podium.engines.train.materialize import read_parts
from podium.engines.train.optim import MasterAdamW
from podium.engines.train.running import RunningSums
from podium.engines.train.sharded_optim import ShardedAdamW, full_tensor, local_part
from podium.engines.train.single import SEQUENCE_OUTPUTS, SingleDeviceEngine, own_tensors, packed_row
from podium.engines.train.tensor_parallel import PER_HEAD, apply_tensor_parallel, check_divides
from podium.models.adapters import adapter_layers
from podium.models.storage import digest
from podium.models.work import trunk_of, work_of


class ShardedEngine(SingleDeviceEngine):
    """A `TrainEngine` of many ranks: each runs this with its share of the rows, and all do the same collectives.

    The axes are those of `context.ranks`. Along `data` and `shard` ranks get different rows (maybe none), along `tensor` and
    `sequence` the same rows. The update is that of one process over all rows, up to rounding: denominators, metrics, the
    gradient and its norm are those of the whole minibatch. Everything public but the constructor's checks is collective.

    Args:
        model: a role's model; the first rank's weights are taken on all. It is sharded in place. What has no numbers yet
            (`causal_lm_in_parts`) is read after it was cut, by each rank its own part.
        context: the rank's place; its mesh is made here where it has none.
        offload_optimizer: master weights and moments live in the CPU's memory.
        others: see `SingleDeviceEngine`.

    Raises:
        ConfigError: the axes do not multiply to the process group's size; heads do not divide.
        ModelError: the model cannot be cut that way.
    """

    def __init__(
        self,
        model: nn.Module,
        *,
        context: WorkerContext,
        optimizer: OptimizerSettings | None = None,
        microbatch_tokens: int = 8192,
        total_updates: int | None = None,
        offload_optimizer: bool = False,
    ) -> None:
        self.context = context = with_mesh(context)
        ranks, mesh = context.ranks, context.mesh
        self._base = trunk_of(model)
        self._base_name = next((name for name, m in model.named_modules() if m is self._base), "")
        self._inner: InnerRanks | None = None
        self._skeleton = _skeleton(model)
        self._dtypes = {name: tensor.dtype for name, tensor in own_tensors(model).items()}
        work = work_of(model)  # before its widths are cut
        _same_weights(model)
        if ranks.tensor * ranks.sequence > 1:
            _check_inner(model, self._base, context)
            self._inner = InnerRanks(mesh)
            self._inner.install(self._base)  # type: ignore[arg-type]
        if ranks.tensor > 1:
            apply_tensor_parallel(self._base, mesh["tensor"])
        if ranks.shard > 1:
            by_rows = hasattr(model, "compute_batch")
            apply_fsdp(model, self._base or model, mesh["shard"], "compute_batch" if by_rows else "compute")
        read_parts(model, context.device, self._dtypes)
        super().__init__(
            model,
            optimizer=optimizer,
            microbatch_tokens=microbatch_tokens,
            total_updates=total_updates,
            offload_optimizer=offload_optimizer,
        )
        self.work = work

    def _make_optimizer(self, settings: OptimizerSettings, total_updates: int | None) -> MasterAdamW:
        return ShardedAdamW(
            self.model.named_parameters(),
            settings,
            total_updates,
            context=self.context,
            partial=self._is_partial,
            dtypes=self._dtypes,
            offload=self._offload,
        )

    def _is_partial(self, name: str) -> bool:
        """Whether each tensor rank has a share of this parameter's gradient: the embedding, heads, norms of single heads."""
        embedding = {id(p) for p in self._base.get_input_embeddings().parameters()} if self._base is not None else set()
        outside = not name.startswith(self._base_name + ".")
        return outside or name.split(".")[-2] in PER_HEAD or id(self.model.get_parameter(name)) in embedding

    # ------------------------------------------------------------------ the whole minibatch

    def _counts(self, mask: Tensor) -> Counts:
        own = Counts.of(mask)
        numbers = torch.tensor([own.tokens, own.sequences, own.rows], device=self.context.device)
        if not self.context.ranks.leads(self.context.rank):
            numbers.zero_()
        dist.all_reduce(numbers)
        return Counts(*numbers.tolist())

    def _over_ranks(self, sums: dict[str, float]) -> dict[str, float]:
        everyone: list[Any] = [None] * self.context.world_size
        dist.all_gather_object(everyone, sums)
        total: dict[str, float] = {}
        for rank, theirs in enumerate(everyone):
            if self.context.ranks.leads(rank):
                for name, value in theirs.items():
                    total[name] = total.get(name, 0.0) + value
        return total

    def _parts(self, batch: Batch, tokens: Tensor, keep_together: str | None = None) -> list[Tensor]:
        """At least one on every rank, and as many where each forward pass gathers weights: the rest are empty ones."""
        parts = super()._parts(batch, tokens, keep_together)
        # A rank without rows takes part in every sum of gradients, so it must have some.
        count = max(len(parts), 1)
        if self.context.ranks.shard > 1:
            most = torch.tensor(count, device=self.context.device)
            dist.all_reduce(most, dist.ReduceOp.MAX)
            count = int(most)
        return parts + [torch.empty(0, dtype=torch.int64)] * (count - len(parts))

    # ------------------------------------------------------------------ one micro-batch

    def compute(self, batch: Batch, outputs: Sequence[str]) -> Batch:
        """As `SingleDeviceEngine.compute`, for this rank's rows. Collective where weights are sharded."""
        out = super().compute(batch, outputs)
        if self.context.ranks.shard > 1:
            self.model.reshard()  # a forward pass without a backward leaves the outermost unit gathered
        return out

    def _run(self, part: Batch, outputs: Sequence[str]) -> dict[str, Tensor]:
        if not len(part):
            idle = super()._run(Batch({"prompt_ids": [[0]], "response_ids": [[0]]}), outputs)
            return {name: value[:0] for name, value in idle.items()}
        if self._inner is None:
            return super()._run(part, outputs)
        share = self._inner.share(packed_row(part))
        out = self.model.compute(share.packed, outputs)
        return {name: self._inner.gather(share, value, name in SEQUENCE_OUTPUTS) for name, value in out.items()}

    def _backward(self, part: Batch, loss: Loss, weights_name: str, sums: RunningSums) -> None:
        if len(part):
            return super()._backward(part, loss, weights_name, sums)
        assert self._optimizer is not None
        nothing = [value.sum() for value in self._run(part, loss.outputs).values()]
        self._optimizer.backward(torch.stack(nothing).sum())

    # ------------------------------------------------------------------ layout and state

    def layout(self) -> Layout:
        """Where the model's tensors live. Collective."""
        return gathered_layout(self.tensors())

    def tensors(self) -> dict[str, Tensor]:
        """The model's live tensors by its own names (tied ones once): parameters, maybe distributed, and buffers."""
        return own_tensors(self.model)

    @torch.no_grad()
    def follow(self, name: str, place: Tensor) -> None:
        """This rank's part of a parameter is at `place` from now on, with its values (a rollout engine laid it out anew)."""
        if self._optimizer is not None and self.model.get_parameter(name).requires_grad:
            self._optimizer.follow(name, place)  # type: ignore[attr-defined]
        parameter = self.model.get_parameter(name)
        getattr(parameter, "_local_tensor", parameter).data = place

    def state_dict(self) -> dict[str, Any]:
        """Whole tensors by the model's own names, on the CPU of the first rank: any number of ranks can load them.

        Collective; on the other ranks the tensors are left out.
        """
        keep = self.context.is_first
        whole = dict(self._whole(self._own_tensors(), keep).items())
        return {
            "model": whole if keep else {},
            "frozen": self._frozen_digest,
            "optimizer": self._optimizer.state_dict() if self._optimizer else None,
            "policy_version": self.policy_version,
        }

    @torch.no_grad()
    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Takes what `state_dict` gave on the first rank (or one process's), given to every rank."""
        mine, theirs = self._own_tensors(), state["model"]
        self._check_fits(mine, theirs, state.get("frozen"))
        for name, tensor in mine.items():
            local_of(tensor).copy_(local_part(tensor, theirs[name]))
        self.policy_version = state["policy_version"]
        if self._optimizer and state["optimizer"]:
            self._optimizer.load_state_dict(state["optimizer"])

    @cached_property
    def _frozen_digest(self) -> str | None:
        trained = self._trained
        if trained is None:
            return None
        return digest(self._whole({name: t for name, t in self.tensors().items() if name not in trained}, True))

    def _whole(self, tensors: dict[str, Tensor], keep: bool) -> _Whole:
        return _Whole(tensors, self._dtypes, keep)

    def save_pretrained(self, folder: str, tokenizer: Any = None) -> None:
        """Writes the model as a Hugging Face folder: the first rank, from whole tensors. Collective."""
        whole = dict(self._whole(self.tensors(), self.context.is_first).items())
        if self.context.is_first:
            _filled(self._skeleton, whole).save_pretrained(folder, tokenizer)
        dist.barrier()


class _Whole(Mapping[str, Tensor]):
    """Tensors gathered one at a time, when they are read (collective); in the dtypes of the model's folder."""

    def __init__(self, tensors: dict[str, Tensor], dtypes: Mapping[str, torch.dtype], keep: bool) -> None:
        self._tensors, self._dtypes, self._keep = tensors, dtypes, keep

    def __getitem__(self, name: str) -> Any:
        tensor = self._tensors[name]
        return full_tensor(tensor, local_of(tensor).to(self._dtypes[name]), self._keep)

    def __iter__(self) -> Iterator[str]:
        return iter(self._tensors)

    def __len__(self) -> int:
        return len(self._tensors)


def with_mesh(context: WorkerContext) -> WorkerContext:
    """The context with its device mesh. Raises ConfigError where its axes do not make up the process group."""
    from torch.distributed.device_mesh import init_device_mesh

    world = dist.get_world_size() if dist.is_initialized() else 0
    if world != context.world_size:
        shown = ", ".join(f"{axis}={size}" for axis, size in context.ranks.sizes.items())
        raise ConfigError(
            f"{shown} makes {context.world_size} ranks; the process group has {world}",
            where="parallel",
            remedy="let them multiply to the number of processes, and initialise torch.distributed first",
        )
    if context.mesh is not None:
        return context
    kind = torch.device(context.device).type
    mesh = init_device_mesh(kind, tuple(context.ranks.sizes.values()), mesh_dim_names=AXES)
    return dataclasses.replace(context, mesh=mesh)


def _check_inner(model: Any, base: Any, context: WorkerContext) -> None:
    """Raises where the model cannot be divided along `tensor` or `sequence`."""
    if base is None or not getattr(model, "packs", False):
        raise ModelError(
            f"{type(model).__name__} runs padded rows, which tensor and sequence parallelism do not divide",
            where="parallel",
            remedy="use data and shard",
        )
    check_divides(base.config, context.ranks)
    if context.ranks.tensor > 1 and adapter_layers(model):
        raise ModelError(
            "a model with a LoRA adapter is not cut by tensor parallelism", where="parallel.tensor", remedy="use shard"
        )


@torch.no_grad()
def _same_weights(model: nn.Module) -> None:
    """The first rank's weights and buffers on every rank, but for those that are still to be read."""
    for tensor in own_tensors(model).values():
        if tensor.is_meta:
            continue
        whole = tensor.detach().contiguous()
        dist.broadcast(whole, 0)
        tensor.detach().copy_(whole)


def _skeleton(model: nn.Module) -> nn.Module:
    """The model without its numbers, to be filled when it is saved."""
    with torch.no_grad():
        memo: dict[int, Any] = {id(p): nn.Parameter(p.detach().to("meta"), p.requires_grad) for p in model.parameters()}
    return copy.deepcopy(model, memo)


def _filled(skeleton: nn.Module, whole: Mapping[str, Tensor]) -> Any:
    """The skeleton with these tensors, on the CPU."""
    made = copy.deepcopy(skeleton)
    names: dict[int, list[str]] = {}
    for name, parameter in made.named_parameters(remove_duplicate=False):
        names.setdefault(id(parameter), []).append(name)
    for same in names.values():
        first = next((name for name in same if name in whole), None)
        if first is None:
            raise CheckpointError(f"'{same[0]}' was not gathered")
        parameter = nn.Parameter(whole[first], made.get_parameter(first).requires_grad)
        for name in same:
            module, _, last = name.rpartition(".")
            setattr(made.get_submodule(module), last, parameter)
    return made
