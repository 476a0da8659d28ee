"""From a model without numbers that is cut over ranks to one whose parts have been read: each rank reads its own."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import nn

from podium.engines.layout import box_of, local_of
from podium.models.parts import parts_in


@torch.no_grad()
def read_parts(model: nn.Module, device: str, dtypes: Mapping[str, torch.dtype]) -> None:
    """Gives every parameter that has no memory its own, and this rank's part of the weights, in place.

    Args:
        model: cut already.
        dtypes: of the parameters as the role has them (FSDP keeps in fp32 what trains): a file may have others.
    """
    sources = parts_in(model)
    if not sources:
        return
    tied = _tied(model)
    made: dict[int, torch.Tensor] = {}

    def with_memory(tensor: torch.Tensor) -> torch.Tensor:
        if not tensor.is_meta:
            return tensor
        if id(tensor) not in made:
            made[id(tensor)] = torch.empty_like(tensor, device=device)
        return made[id(tensor)]

    model._apply(with_memory)  # FSDP notices new parameters only by this way
    for first, *others in tied:
        parameter = model.get_parameter(first)
        for name in others:
            module, _, last = name.rpartition(".")
            model.get_submodule(module)._parameters[last] = parameter
    for prefix, parts in sources.items():
        for name in parts.places:
            full = f"{prefix}.{name}" if prefix else name
            parameter, box = model.get_parameter(full), box_of(model.get_parameter(full))
            if box is not None:
                whole = all(a == 0 and b == n for a, b, n in zip(box.start, box.stop, parameter.shape, strict=True))
                slices = None if whole else [slice(a, b) for a, b in zip(box.start, box.stop, strict=True)]
                local_of(parameter.detach()).copy_(parts.read(name, slices).to(dtypes[full]))


def _tied(model: nn.Module) -> list[list[str]]:
    names: dict[int, list[str]] = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        names.setdefault(id(parameter), []).append(name)
    return [same for same in names.values() if len(same) > 1]
