"""Gradients of parameters whose masters lie elsewhere, summed in fp32 over the backward passes of one update."""

from __future__ import annotations

from collections.abc import Iterable

from torch import Tensor, nn

from podium.engines.layout import local_of


class GradientSums:
    """Sums for 16-bit parameters, by what this rank holds of them; an fp32 parameter's `.grad` is its sum already."""

    def __init__(self) -> None:
        self._sums: dict[int, Tensor] = {}  # by the parameter's id

    def follow(self, parameter: nn.Parameter) -> None:
        """From now on a 16-bit parameter's gradient is added here as soon as a backward pass has it."""
        parameter.register_post_accumulate_grad_hook(self._take)

    def _take(self, low: Tensor) -> None:
        assert low.grad is not None
        grad = local_of(low.grad)
        kept = self._sums.get(id(low))
        if kept is None:
            self._sums[id(low)] = grad.float()
        else:
            kept += grad
        low.grad = None

    def of(self, parameter: nn.Parameter) -> Tensor | None:
        """The gradient's sum of this rank's part, fp32; None where no backward pass gave one."""
        return local_of(parameter.grad) if parameter.grad is not None else self._sums.get(id(parameter))

    def forget(self, parameters: Iterable[nn.Parameter]) -> None:
        for parameter in parameters:
            parameter.grad = None
            self._sums.pop(id(parameter), None)

    def __len__(self) -> int:
        return len(self._sums)
