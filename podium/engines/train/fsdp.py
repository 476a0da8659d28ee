"""FSDP2 (`fully_shard`): each rank stores a piece of every tensor and gathers a layer while it runs."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import nn

from podium.core.errors import ModelError
from podium.engines.train.tensor_parallel import decoder_layers


def apply_fsdp(model: nn.Module, base: nn.Module, mesh: Any, method: str) -> None:
    """Shards a role's model over the mesh, in place: a unit for each decoder layer, one for the rest.

    A model of padded rows (or of the user's own) is one unit: it runs its layers as often as its rows need, and ranks that
    gathered a layer at each of these times would wait for each other for ever.

    What trains is stored in fp32 (its own master) and gathered in the dtype that it had; gradients are reduced in fp32.

    Args:
        base: the part of `model` that gives hidden states.
        method: the model's method that runs it (`compute`, `compute_batch`).
    """
    from torch.distributed.fsdp import FSDPModule, fully_shard, register_fsdp_forward_method

    _check(model)
    units: list[nn.Module] = list(decoder_layers(base) or []) if getattr(model, "packs", False) else []
    # A head that computes in another dtype than the base is a unit of its own.
    main = _dtypes(base.parameters())
    heads = [m for m in model.children() if base not in set(m.modules())]
    units += [m for m in heads if _dtypes(m.parameters()) - main]
    held = {id(p) for unit in units for p in unit.parameters()}
    policies = [_policy(_dtypes(unit.parameters())) for unit in units]
    policies.append(_policy(_dtypes(p for p in model.parameters() if id(p) not in held)))
    for parameter in model.parameters():
        if parameter.requires_grad:
            parameter.data = parameter.data.float()
        parameter.data = parameter.data.contiguous()
    for unit, policy in zip([*units, model], policies, strict=True):
        fully_shard(unit, mesh=mesh, mp_policy=policy)
    register_fsdp_forward_method(model, method)
    for module in model.modules():
        if isinstance(module, FSDPModule):
            # The loss has its denominators already: gradients are summed, not averaged.
            module.set_gradient_divide_factor(1.0)
            module.set_force_sum_reduction_for_comms(True)


def _check(model: nn.Module) -> None:
    odd = next((name for name, p in model.named_parameters() if not p.is_floating_point()), None)
    if odd is not None:
        raise ModelError(
            f"'{odd}' is quantised, and quantised weights are not sharded",
            where="parallel.shard",
            remedy="set shard=1 and use data, or quantization=none",
        )


def _dtypes(parameters: Iterable[nn.Parameter]) -> set[torch.dtype]:
    return {p.dtype for p in parameters if p.requires_grad}


def _policy(dtypes: set[torch.dtype]) -> Any:
    """16-bit weights are gathered as such; a unit in fp32 (or frozen) as it is stored."""
    from torch.distributed.fsdp import MixedPrecisionPolicy

    if len(dtypes) > 1:
        raise ModelError(f"weights of several dtypes train in one layer: {sorted(map(str, dtypes))}", where="parallel.shard")
    low = next((dtype for dtype in dtypes if dtype != torch.float32), None)
    return MixedPrecisionPolicy(param_dtype=low, reduce_dtype=torch.float32, cast_forward_inputs=False)
