"""AdamW over fp32 master weights, whatever the parameters' dtype, and the learning-rate schedules."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from itertools import chain
from typing import Any

import torch
from torch import Tensor, nn

from podium.core.errors import CheckpointError, ConfigError
from podium.core.settings import OptimizerSettings
from podium.engines.train.adamw_8bit import AdamW8bit
from podium.engines.train.loss_scale import LossScale


def lr_at(settings: OptimizerSettings, update: int, total_updates: int | None) -> float:
    """The learning rate of update number `update` (from 0).

    Linear warm-up to `lr` over `warmup_updates`; then constant, or a decay (linear or cosine) that reaches
    `min_lr_ratio * lr` at the last of `total_updates`.
    """
    if update < settings.warmup_updates:
        return settings.lr * (update + 1) / settings.warmup_updates
    if settings.schedule == "constant":
        return settings.lr
    assert total_updates is not None
    steps = max(1, total_updates - 1 - settings.warmup_updates)
    done = min(1.0, (update - settings.warmup_updates) / steps)
    left = 1.0 - done if settings.schedule == "linear" else 0.5 * (1.0 + math.cos(math.pi * done))
    return settings.lr * (settings.min_lr_ratio + (1.0 - settings.min_lr_ratio) * left)


@dataclass(frozen=True)
class StepReport:
    """What one call of `step` did. `grad_norm` is before clipping; `applied` is False where it was not finite."""

    grad_norm: float
    lr: float
    applied: bool


class MasterAdamW:
    """AdamW (Loshchilov and Hutter 2019) on fp32 masters.

    A parameter in 16 bits has a master copy in fp32, so that updates smaller than its rounding step add up; gradients of
    several backward passes are summed in fp32. A parameter in fp32 is its own master.

    Args:
        parameters: (name, parameter) pairs; those without `requires_grad` are left alone.
        settings: the rates. Weight decay applies to matrices only.
        total_updates: the run's updates; needed for a schedule that decays.
    """

    def __init__(
        self, parameters: Iterable[tuple[str, nn.Parameter]], settings: OptimizerSettings, total_updates: int | None = None
    ) -> None:
        if settings.schedule != "constant" and not total_updates:
            raise ConfigError(
                f"the schedule '{settings.schedule}' needs the run's number of updates",
                where="optimizer.schedule",
                remedy="give total_updates, or use schedule: constant",
            )
        self.settings, self.total_updates = settings, total_updates
        self.updates = 0
        """Updates applied so far."""
        self.skipped = 0
        """Updates left out because the gradient was not finite."""
        every = dict(parameters)
        self._parameters = {name: p for name, p in every.items() if p.requires_grad}
        self.loss_scale = LossScale() if self._scales_loss(every) else None
        """The factor on the loss before its backward pass; None where it is 1."""
        self._masters = {name: self._master(p) for name, p in self._parameters.items()}
        matrices = [m for m in self._masters.values() if m.ndim >= 2]
        others = [m for m in self._masters.values() if m.ndim < 2]
        groups = [{"params": matrices, "weight_decay": settings.weight_decay}, {"params": others, "weight_decay": 0.0}]
        self._adamw = _adamw([group for group in groups if group["params"]], settings)

    def _scales_loss(self, every: Mapping[str, nn.Parameter]) -> bool:
        """Where gradients go through layers in fp16, whether or not these train (a frozen base under an adapter in fp32)."""
        return bool(self._parameters) and any(p.dtype == torch.float16 for p in every.values())

    def backward(self, loss: Tensor) -> None:
        """The loss's backward pass, scaled where the dtype needs it."""
        (loss if self.loss_scale is None else loss * self.loss_scale.value).backward()  # type: ignore[no-untyped-call]

    def _master(self, parameter: nn.Parameter) -> Tensor:
        if parameter.dtype == torch.float32:
            return parameter
        master = parameter.detach().float().requires_grad_()
        # On a CPU fresh memory costs more than the sum that goes into it, so the buffer is kept from update to update.
        kept = torch.empty_like(master, requires_grad=False) if master.device.type == "cpu" else None

        def collect(low: Tensor) -> None:
            # Called as soon as a backward pass has this parameter's gradient: the 16-bit one never outlives the pass.
            assert low.grad is not None
            if master.grad is not None:
                master.grad += low.grad
            else:
                master.grad = low.grad.float() if kept is None else kept.copy_(low.grad)
            low.grad = None

        parameter.register_post_accumulate_grad_hook(collect)
        return master

    @property
    def lr(self) -> float:
        """The learning rate of the next update."""
        return lr_at(self.settings, self.updates, self.total_updates)

    @property
    def moment_bytes(self) -> int:
        """Memory of the two moments."""
        each = 2 if self.settings.states == "8bit" else 8
        return each * sum(master.numel() for master in self._masters.values())

    def zero_grad(self) -> None:
        for master in self._masters.values():
            master.grad = None

    @torch.no_grad()
    def step(self) -> StepReport:
        """Clips the gradient to `max_grad_norm`, updates masters and parameters, and clears the gradient.

        With a gradient that is not finite nothing is changed and the step is counted in `skipped`.
        """
        lr = self.lr
        scale = 1.0 if self.loss_scale is None else self.loss_scale.value
        norm = self._collect() / scale
        applied = math.isfinite(norm)
        if applied:
            factor = 1.0 / scale
            if norm > self.settings.max_grad_norm:
                factor *= self.settings.max_grad_norm / (norm + 1e-6)
            grads = self._gradients()
            if factor != 1.0 and grads:
                torch._foreach_mul_(grads, factor)
            for group in self._adamw.param_groups:
                group["lr"] = lr
            self._apply()
            self.updates += 1
        else:
            self.skipped += 1
        if self.loss_scale is not None:
            self.loss_scale.update(applied)
        self.zero_grad()
        return StepReport(norm, lr, applied)

    def _collect(self) -> float:
        """Brings the masters' gradients together; returns their norm."""
        grads = self._gradients()
        return float(nn.utils.get_total_norm(grads)) if grads else 0.0

    def _gradients(self) -> list[Tensor]:
        return [master.grad for master in self._masters.values() if master.grad is not None]

    def _apply(self) -> None:
        """The update of masters and parameters, from gradients that are clipped."""
        self._align()
        self._adamw.step()
        self._write_parameters()

    def _align(self) -> None:
        """Gradients and moments in their master's memory order: the fused kernel goes through all of them as they lie, and
        would silently pair the wrong numbers (torch 2.13 on a CPU).
        """
        for master in self._masters.values():
            if master.grad is not None and master.grad.stride() != master.stride():
                master.grad = _like(master, master.grad)
            for name, value in self._adamw.state[master].items() if master in self._adamw.state else ():
                if value.shape == master.shape and value.stride() != master.stride():
                    self._adamw.state[master][name] = _like(master, value)

    def _write_parameters(self) -> None:
        pairs = [(p, self._masters[n]) for n, p in self._parameters.items() if self._masters[n] is not p]
        if pairs:
            torch._foreach_copy_([p for p, _ in pairs], [m for _, m in pairs])

    # ------------------------------------------------------------------ state

    def mark(self) -> list[int]:
        """Updates, and torch's own count of writes to each parameter, master and moment: an update that broke off shows too.

        The fused kernel's writes to fp32 parameters and moments are not counted; it counts up each one's `step` first.
        """
        moments = (t for state in self._adamw.state.values() for t in state.values() if isinstance(t, Tensor))
        tensors = chain(self._parameters.values(), self._masters.values(), moments)
        held = (getattr(t, "_local_tensor", t) for t in tensors)
        return [self.updates, *(0 if t.is_inference() else t._version for t in held)]

    def state_dict(self) -> dict[str, Any]:
        """Everything that the next update depends on, by parameter name. Tensors are the live ones: save or copy them."""
        return {
            "updates": self.updates,
            "skipped": self.skipped,
            # A parameter in fp32 is written beside them.
            "masters": {n: m.detach() for n, m in self._masters.items() if self._parameters[n].dtype != torch.float32},
            "moments": {n: dict(self._adamw.state[m]) for n, m in self._masters.items() if m in self._adamw.state},
            **({"loss_scale": self.loss_scale.state_dict()} if self.loss_scale else {}),
        }

    @torch.no_grad()
    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Takes what `state_dict` gave; the parameters follow their masters."""
        odd = set(state["moments"]) - set(self._masters)
        if odd:
            raise CheckpointError(
                f"the optimizer state names parameters that this model lacks: {', '.join(sorted(odd)[:3])}",
                remedy="resume with the model that the checkpoint was written for",
            )
        self.updates, self.skipped = state["updates"], state["skipped"]
        if self.loss_scale and "loss_scale" in state:
            self.loss_scale.load_state_dict(state["loss_scale"])
        for name, value in state["masters"].items():
            self._masters[name].copy_(value)
        self._adamw.state.clear()
        for name, moments in state["moments"].items():
            master = self._masters[name]
            self._adamw.state[master] = {k: torch.as_tensor(v).to(master.device, copy=True) for k, v in moments.items()}
        self._write_parameters()


def _adamw(groups: list[dict[str, Any]], settings: OptimizerSettings) -> torch.optim.Optimizer:
    """The update rule itself, with moments of the kind that the settings ask for."""
    rates: dict[str, Any] = {"lr": settings.lr, "betas": settings.betas, "eps": settings.eps}
    return AdamW8bit(groups, **rates) if settings.states == "8bit" else torch.optim.AdamW(groups, **rates, fused=True)


def _like(master: Tensor, value: Tensor) -> Tensor:
    """`value`, laid out in memory as `master` is."""
    return torch.empty_like(master, requires_grad=False).copy_(value)
