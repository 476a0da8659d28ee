"""AdamW over the shards that a rank holds: gradients summed, normed and clipped as those of the whole model."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from podium.core.errors import ConfigError
from podium.core.ranks import WorkerContext
from podium.core.settings import OptimizerSettings
from podium.engines.layout import box_of, local_of
from podium.engines.train.gradient_sums import GradientSums
from podium.engines.train.optim import MasterAdamW

# Gradients are summed in pieces of so many elements (fp32: 128 MiB).
_BUCKET = 1 << 25


class ShardedAdamW(MasterAdamW):
    """`MasterAdamW` whose masters are the local shards of (possibly distributed) parameters.

    Args:
        context: the rank's place on the axes.
        partial: by a parameter's name, whether its gradient is a share on each tensor rank (so that it must be summed).
        dtypes: of the parameters in the model's folder (FSDP keeps in fp32 what trains).
        offload: masters and moments are in the CPU's memory; gradients go there, updated weights come back.
    """

    def __init__(
        self,
        parameters: Iterable[tuple[str, nn.Parameter]],
        settings: OptimizerSettings,
        total_updates: int | None,
        *,
        context: WorkerContext,
        partial: Callable[[str], bool],
        dtypes: Mapping[str, torch.dtype],
        offload: bool = False,
    ) -> None:
        self._context, self._partial, self._dtypes, self._offload = context, partial, dtypes, offload
        if settings.states == "8bit" and context.ranks.shard * context.ranks.tensor > 1:
            raise ConfigError(
                "moments in 8 bits are scaled by blocks of whole tensors, which these workers do not have",
                where="optimizer.states",
                remedy="use 32-bit states with shard or tensor (each worker has its part of them)",
            )
        self._sums = GradientSums()
        super().__init__(parameters, settings, total_updates)

    def _scales_loss(self, every: Mapping[str, nn.Parameter]) -> bool:
        return bool(self._parameters) and any(self._dtypes[name] == torch.float16 for name in every)

    def _master(self, parameter: nn.Parameter) -> Tensor:
        local = local_of(parameter.detach())
        if local.dtype != torch.float32:
            self._sums.follow(parameter)
        elif not self._offload:
            return local.requires_grad_()  # the same memory
        place = "cpu" if self._offload else local.device
        return local.to(place, torch.float32, copy=True).requires_grad_()

    def zero_grad(self) -> None:
        super().zero_grad()
        self._sums.forget(self._parameters.values())

    # ------------------------------------------------------------------ gradients

    def _collect(self) -> float:
        grads = {name: grad for name, p in self._parameters.items() if (grad := self._sums.of(p)) is not None}
        self._sum_over_ranks(grads)
        norm = self._norm(grads)
        for name, grad in grads.items():
            self._masters[name].grad = grad.to("cpu") if self._offload else grad
        self._sums.forget(self._parameters.values())
        return norm

    def _sum_over_ranks(self, grads: dict[str, Tensor]) -> None:
        """FSDP has summed over `shard` in the backward pass; the other axes once, here."""
        ranks, mesh = self._context.ranks, self._context.mesh
        for axis in ("data", "sequence", "tensor"):
            if ranks.sizes[axis] > 1:
                summed = [grad for name, grad in grads.items() if axis != "tensor" or self._partial(name)]
                for bucket in _buckets(summed):
                    _all_reduce(bucket, mesh.get_group(axis))

    def _norm(self, grads: dict[str, Tensor]) -> float:
        """Of the whole gradient: squares of the shards, each counted once, summed over all ranks."""
        device = next(iter(self._parameters.values())).device
        total = torch.zeros((), dtype=torch.float64, device=device)
        if grads:
            norms = torch.stack(torch._foreach_norm(list(grads.values()))).double()
            copies = torch.tensor([self._copies(name) for name in grads], dtype=torch.float64, device=device)
            total = (norms.square() / copies).sum()
        dist.all_reduce(total)
        return float(total.sqrt())

    def _copies(self, name: str) -> int:
        """How many ranks hold the same shard of a parameter."""
        parameter, ranks = self._parameters[name], self._context.ranks
        axes = getattr(parameter, "device_mesh", None)
        cut = 1
        if axes is not None:
            cut = _product(axes.size(i) for i, place in enumerate(parameter.placements) if not place.is_replicate())  # type: ignore[attr-defined]
        return ranks.workers // cut

    def _write_parameters(self) -> None:
        for name, parameter in self._parameters.items():
            local = local_of(parameter.detach())
            if local.data_ptr() != self._masters[name].data_ptr() or local.device != self._masters[name].device:
                local.copy_(self._masters[name])

    def follow(self, name: str, place: Tensor) -> None:
        """A parameter's local part will be at `place`, with the same values: a master that is the same memory goes too."""
        local, master = local_of(self._parameters[name].detach()), self._masters[name]
        if master.device == local.device and master.data_ptr() == local.data_ptr():
            master.data = place

    # ------------------------------------------------------------------ state, in whole tensors

    def state_dict(self) -> dict[str, Any]:
        """As `MasterAdamW`, in whole tensors on the CPU. Collective; only the first rank gets tensors."""
        state = super().state_dict()
        own = self._own_masters()
        masters = {name: full_tensor(self._parameters[name], self._masters[name].detach(), self._keep) for name in own}
        moments = {
            name: {key: self._full_moment(name, value) for key, value in state["moments"][name].items()}
            for name in self._masters
            if name in state["moments"]
        }
        state["masters"] = masters if self._keep else {}
        state["moments"] = moments if self._keep else {}
        return state

    @property
    def _keep(self) -> bool:
        return self._context.is_first

    def _own_masters(self) -> list[str]:
        """Those whose values the model's own (16-bit) weights do not have."""
        return [name for name in self._masters if self._dtypes[name] != torch.float32]

    def _full_moment(self, name: str, value: Tensor) -> Tensor | None:
        if value.ndim == 0:
            return value.cpu()
        return full_tensor(self._parameters[name], value, self._keep)

    @torch.no_grad()
    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Takes whole tensors; each rank keeps its shards. Masters that are missing are the weights themselves."""
        masters = {name: local_part(self._parameters[name], value) for name, value in state["masters"].items()}
        moments = {
            name: {key: local_part(self._parameters[name], v) if v.ndim else v for key, v in values.items()}
            for name, values in state["moments"].items()
            if name in self._parameters
        }
        for name, master in self._masters.items():  # the engine has loaded the weights
            if name not in masters:
                master.copy_(local_of(self._parameters[name].detach()))
        unknown = {name: value for name, value in state["moments"].items() if name not in self._parameters}
        super().load_state_dict({**state, "masters": masters, "moments": {**moments, **unknown}})


def full_tensor(parameter: Tensor, local: Tensor, keep: bool) -> Tensor | None:
    """The whole of what `local` is this rank's shard of, laid out as `parameter`: on the CPU, or None where not kept.

    Collective.
    """
    if not hasattr(parameter, "placements"):
        return local.detach().cpu() if keep else None
    from torch.distributed.tensor import DTensor

    assert isinstance(parameter, DTensor)
    whole: Tensor = DTensor.from_local(
        local.to(parameter.device),
        parameter.device_mesh,
        parameter.placements,
        run_check=False,
        shape=parameter.shape,
        stride=parameter.stride(),
    ).full_tensor()
    return whole.cpu() if keep else None


def local_part(parameter: Tensor, whole: Tensor) -> Tensor:
    """This rank's shard of a whole tensor."""
    box = box_of(parameter)
    local = local_of(parameter.detach())
    if box is None:
        return whole.new_empty(local.shape)
    return whole[tuple(slice(a, b) for a, b in zip(box.start, box.stop, strict=True))].reshape(local.shape)


def _product(sizes: Iterable[int]) -> int:
    total = 1
    for size in sizes:
        total *= size
    return total


def _buckets(tensors: list[Tensor]) -> Iterator[list[Tensor]]:
    bucket: list[Tensor] = []
    for tensor in tensors:
        if bucket and sum(t.numel() for t in bucket) + tensor.numel() > _BUCKET:
            yield bucket
            bucket = []
        bucket.append(tensor)
    if bucket:
        yield bucket


def _all_reduce(tensors: list[Tensor], group: Any) -> None:
    flat = torch.cat([tensor.reshape(-1) for tensor in tensors])
    dist.all_reduce(flat, group=group)
    for tensor, part in zip(tensors, flat.split([t.numel() for t in tensors]), strict=True):
        tensor.copy_(part.view_as(tensor))
