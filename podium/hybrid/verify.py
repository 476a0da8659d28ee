"""Checks of a hand-over from training to generation: that every element arrived, and that both sides compute the same.

`storage_fingerprint` lives in the models room, because the rollout engine itself uses it; it is offered here as well.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from podium.core.errors import RolloutError
from podium.engines.layout import Box
from podium.hybrid.fingerprints import Fingerprints, fingerprint
from podium.hybrid.plan import Plan
from podium.models.storage import Place, moved_parameters, storage_fingerprint

__all__ = [
    "Place",
    "check_canary",
    "check_shared_storage",
    "fingerprint",
    "mismatched_tensors",
    "moved_parameters",
    "storage_fingerprint",
]


def check_shared_storage(trained: nn.Module, generating: nn.Module) -> None:
    """Raises RolloutError unless both modules' parameters are the same memory, name by name."""
    apart = moved_parameters(storage_fingerprint(trained), storage_fingerprint(generating))
    if apart:
        raise RolloutError(
            f"{len(apart)} parameters are not shared between training and generation, '{apart[0]}' first",
            where="hybrid.verify",
            remedy="give the rollout engine the very module that is trained",
        )


@torch.no_grad()
def mismatched_tensors(
    plan: Plan,
    rank: int,
    source: Mapping[str, Tensor],
    target: Mapping[str, Tensor],
    group: Any = None,
    wait: Callable[[Any], None] = lambda work: work.wait(),
) -> list[tuple[str, int]]:
    """(name, rank) of the generation shards whose bits are not those of the training weights; on every rank the same list.

    What each rank keeps and sends is fingerprinted where training holds it, what each rank generates with where generation
    holds it; one small sum over ranks compares them. Collective where the plan has several ranks.

    Args:
        wait: how the sum over ranks is waited for.
    """
    row = {name: i for i, name in enumerate(plan.target.tensors)}
    device = next(iter({**source, **target}.values())).device
    pieces = _pieces(plan, rank)
    held = [name for name, shards in plan.target.tensors.items() if rank < plan.target.ranks and shards.boxes[rank]]
    found = Fingerprints(len(pieces) + len(held), device)
    # What is added to, and taken from, which shard: (shard, fingerprint, sign).
    terms: list[tuple[int, int, int]] = []
    for number, ((name, box), receivers) in enumerate(pieces.items()):
        whole = plan.source.tensors[name].boxes[rank]
        assert whole is not None
        found.add(number, source[name][box.within(whole)].to(plan.target.tensors[name].dtype), box)
        terms += [(receiver * len(row) + row[name], number, 1) for receiver in receivers]
    for number, name in enumerate(held, len(pieces)):
        own = plan.target.tensors[name].boxes[rank]
        assert own is not None
        found.add(number, target[name], own)
        terms.append((rank * len(row) + row[name], number, -1))
    shard, number_of, sign = torch.tensor(terms, dtype=torch.int64).reshape(-1, 3).to(device).unbind(1)
    difference = torch.zeros(plan.target.ranks * len(row), dtype=torch.int64, device=device)
    difference.index_add_(0, shard, found.sums[number_of] * sign)
    if max(plan.source.ranks, plan.target.ranks) > 1:
        import torch.distributed as dist

        if difference.is_cuda and "nccl" not in dist.get_backend(group):
            difference = difference.cpu()
        wait(dist.all_reduce(difference, group=group, async_op=True))
    names = list(row)
    return [(names[i % len(names)], i // len(names)) for i in difference.nonzero().flatten().tolist()]


def _pieces(plan: Plan, rank: int) -> dict[tuple[str, Box], list[int]]:
    """What a rank keeps or sends, and who generates with it: each piece once."""
    pieces: dict[tuple[str, Box], list[int]] = defaultdict(list)
    for transfer in (*plan.kept, *plan.sent):
        if transfer.sender == rank:
            pieces[transfer.name, transfer.box].append(transfer.receiver)
    return pieces


def check_canary(trained: Sequence[float] | Tensor, generating: Sequence[float] | Tensor, tolerance: float) -> None:
    """Raises RolloutError where log-probs of a few known tokens differ between the two sides by more than `tolerance` nats."""
    a, b = (torch.as_tensor(x, dtype=torch.float64).cpu() for x in (trained, generating))
    worst = float((a - b).abs().max()) if a.numel() else 0.0
    if not worst <= tolerance:
        raise RolloutError(
            f"after a hand-over, training and generation differ by {worst:.3g} nats on the canary tokens (at most {tolerance})",
            where="hybrid.verify",
            remedy="the weights are the same bits; look at dtype, attention and temperature: podium doctor numerics",
        )
