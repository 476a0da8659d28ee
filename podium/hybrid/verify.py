"""Checks of a hand-over from training to generation. On one device: that there is nothing to hand over.

`storage_fingerprint` lives in the models room, because the rollout engine itself uses it; it is offered here as well.
"""

from __future__ import annotations

from torch import nn

from podium.core.errors import RolloutError
from podium.models.storage import Place, moved_parameters, storage_fingerprint

__all__ = ["Place", "check_shared_storage", "moved_parameters", "storage_fingerprint"]


def check_shared_storage(trained: nn.Module, generating: nn.Module) -> None:
    """Raises RolloutError unless both modules' parameters are the same memory, name by name."""
    apart = moved_parameters(storage_fingerprint(trained), storage_fingerprint(generating))
    if apart:
        raise RolloutError(
            f"{len(apart)} parameters are not shared between training and generation, '{apart[0]}' first",
            where="hybrid.verify",
            remedy="give the rollout engine the very module that is trained",
        )
