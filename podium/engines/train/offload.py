"""AdamW whose masters and moments are in the CPU's memory: the device holds weights, gradients and activations.

Gradients are summed in fp32 on the device, as ever. The update goes through the parameters in buckets: while the CPU updates
one, the next one's gradients come and the last one's weights go back. The staging buffers are pinned, two of each kind.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

import torch
from torch import Tensor, nn

from podium.core.settings import OptimizerSettings
from podium.engines.train.gradient_sums import GradientSums
from podium.engines.train.optim import MasterAdamW

# Weights of a bucket: 128 MiB of gradients (a larger parameter is a bucket of its own).
_BUCKET = 1 << 25


class OffloadedAdamW(MasterAdamW):
    """`MasterAdamW` with its state on the CPU. The same numbers, where the CPU's kernels round as the device's do.

    On a CPU it does the same over a second copy of the weights: nothing is won there.
    """

    def __init__(
        self, parameters: Iterable[tuple[str, nn.Parameter]], settings: OptimizerSettings, total_updates: int | None = None
    ) -> None:
        self._sums = GradientSums()
        self._staging: list[_Staging] = []
        super().__init__(parameters, settings, total_updates)

    def _master(self, parameter: nn.Parameter) -> Tensor:
        if parameter.dtype != torch.float32:
            self._sums.follow(parameter)
        return parameter.detach().to("cpu", torch.float32, copy=True).requires_grad_()

    @property
    def moment_bytes(self) -> int:
        """Memory of the two moments on the device: none."""
        return 0

    def zero_grad(self) -> None:
        super().zero_grad()
        self._sums.forget(self._parameters.values())

    def _gradients(self) -> list[Tensor]:
        return [grad for parameter in self._parameters.values() if (grad := self._sums.of(parameter)) is not None]

    def _apply(self) -> None:
        self._align()  # moments from a file lie by rows, whatever their masters do
        buckets = list(self._buckets())
        if buckets and not self._staging:
            device = next(iter(self._parameters.values())).device
            sizes = [master.numel() for master in self._masters.values()]
            most = max(*sizes, min(_BUCKET, sum(sizes)))  # of any bucket: another update may have other gradients
            self._staging = [_Staging(most, device) for _ in range(2)]
        for number, bucket in enumerate(buckets):
            staging = self._staging[number % 2]
            if number == 0:
                self._fetch(bucket, staging)
            if number + 1 < len(buckets):
                self._fetch(buckets[number + 1], self._staging[1 - number % 2])
            staging.wait()
            for name in bucket:
                self._masters[name].grad = staging.gradients[name]
            self._adamw.step()  # of those that have a gradient now
            for name in bucket:
                self._masters[name].grad = None
            staging.send([(self._masters[name], self._parameters[name]) for name in bucket])

    def _buckets(self) -> Iterator[list[str]]:
        """The parameters that have a gradient, in order."""
        bucket: list[str] = []
        size = 0
        for name, master in self._masters.items():
            if self._sums.of(self._parameters[name]) is None:
                continue
            if bucket and size + master.numel() > _BUCKET:
                yield bucket
                bucket, size = [], 0
            bucket.append(name)
            size += master.numel()
        if bucket:
            yield bucket

    def _fetch(self, bucket: list[str], staging: _Staging) -> None:
        """Starts the way of a bucket's gradients to the CPU; the device's memory is free for what is queued after that."""
        gradients: dict[str, tuple[Tensor, Tensor]] = {}
        for name in bucket:
            grad = self._sums.of(self._parameters[name])
            assert grad is not None
            gradients[name] = (grad, self._masters[name].detach())
            self._sums.forget([self._parameters[name]])
        staging.fetch(gradients)

    @torch.no_grad()
    def load_state_dict(self, state: dict[str, Any]) -> None:
        """As `MasterAdamW`: a state of either kind will do. Masters that it lacks are the weights, which are loaded."""
        for name, master in self._masters.items():
            if name not in state["masters"]:
                master.copy_(self._parameters[name])
        super().load_state_dict(state)


class _Staging:
    """Memory that a bucket passes through: gradients in fp32 one way, weights in the parameters' dtypes the other.

    Args:
        size: numbers of the largest bucket.
        device: of the parameters.
    """

    def __init__(self, size: int, device: torch.device) -> None:
        self._cuda = device.type == "cuda"
        self._wide = torch.empty(size, dtype=torch.float32, pin_memory=self._cuda)
        self._low: dict[torch.dtype, Tensor] = {}
        self._arrived, self._returned = (torch.cuda.Event() if self._cuda else None for _ in range(2))
        self.gradients: dict[str, Tensor] = {}

    def fetch(self, gradients: dict[str, tuple[Tensor, Tensor]]) -> None:
        """Starts copying each (gradient, master) in, laid out as its master: the fused kernel goes through both as they lie."""
        at = 0
        self.gradients = {}
        for name, (grad, master) in gradients.items():
            place = torch.as_strided(self._wide, master.shape, master.stride(), at)
            self.gradients[name] = place.copy_(grad, non_blocking=True)
            at += master.numel()
        if self._arrived is not None:
            self._arrived.record()

    def wait(self) -> None:
        """Until the gradients are here."""
        if self._arrived is not None:
            self._arrived.synchronize()

    def send(self, pairs: list[tuple[Tensor, Tensor]]) -> None:
        """Starts copying each (master, parameter) back, rounded on this side."""
        if self._returned is None:
            for master, parameter in pairs:
                parameter.copy_(master)
            return
        self._returned.synchronize()  # what was sent from here before
        at = 0
        for master, parameter in pairs:
            if parameter.dtype not in self._low:
                self._low[parameter.dtype] = torch.empty(len(self._wide), dtype=parameter.dtype, pin_memory=True)
            place = torch.as_strided(self._low[parameter.dtype], master.shape, master.stride(), at)
            parameter.copy_(place.copy_(master), non_blocking=True)
            at += master.numel()
        self._returned.record()
