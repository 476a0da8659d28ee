"""Ranks that get the same rows (tensor and sequence parallel): each computes a share of the tokens, and all get the result.

Sequence parallelism is Ulysses' (Jacobs et al. 2023, arXiv:2309.14509): a rank has a stretch of the packed row; for
attention, ranks exchange tokens for heads, so that each sees the whole row with some of the heads. So packed rows, shared
prompts and sliding windows need nothing special.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from podium.core.errors import ModelError
from podium.engines.train.collectives import all_to_all, gather
from podium.models.packed import Packed
from podium.models.packed_attention import PackedAttention


@dataclass(frozen=True)
class Share:
    """What one rank computes of a packed row, and which rank has what: `token_owner [M]`, `sequence_owner [S]`."""

    packed: Packed
    token_owner: Tensor
    sequence_owner: Tensor


class InnerRanks:
    """The tensor and sequence axes of a mesh as one group; rank in it = tensor rank * sequence size + sequence rank."""

    def __init__(self, mesh: Any) -> None:
        inner = mesh["tensor", "sequence"]
        self.tensor, self.sequence = inner.size(0), inner.size(1)
        self.tensor_rank, self.sequence_rank = inner.get_local_rank("tensor"), inner.get_local_rank("sequence")
        self.rank = self.tensor_rank * self.sequence + self.sequence_rank
        self.sequence_group = mesh.get_group("sequence")
        self.group = inner._flatten("inner").get_group() if min(self.tensor, self.sequence) > 1 else None
        if self.group is None:
            self.group = mesh.get_group("tensor" if self.tensor > 1 else "sequence")

    def share(self, packed: Packed) -> Share:
        """This rank's stretch of the row (padded to equal stretches), and its part of the predictions within that stretch."""
        stretch = -(-len(packed.ids) // self.sequence)
        start = self.sequence_rank * stretch
        token_owner, sequence_owner = (self._owner(index, stretch) for index in (packed.predict_index, packed.last_index))
        mine, whole = token_owner == self.rank, sequence_owner == self.rank
        share = Packed(
            ids=_stretch(packed.ids, start, stretch),
            positions=_stretch(packed.positions, start, stretch),
            lengths=packed.lengths,
            parents=packed.parents,
            predict_index=packed.predict_index[mine] - start,
            targets=packed.targets[mine],
            last_index=packed.last_index[whole] - start,
        )
        return Share(share, token_owner, sequence_owner)

    def gather(self, share: Share, value: Tensor, per_sequence: bool) -> Tensor:
        """An output of all tokens (or sequences) on every rank."""
        return gather(value, share.sequence_owner if per_sequence else share.token_owner, self.rank, self.group)

    def _owner(self, index: Tensor, stretch: int) -> Tensor:
        """A place's rank: the sequence rank whose stretch it is in; the tensor ranks take equal parts."""
        number = torch.arange(len(index)) * self.tensor // max(len(index), 1)
        return number * self.sequence + index // stretch

    def install(self, base: nn.Module) -> None:
        """From now on the base's packed attention exchanges tokens for heads."""
        if self.sequence == 1:
            return

        def exchange(_: nn.Module, args: Any, kwargs: dict[str, Any]) -> Any:
            context = kwargs.get("podium_context")
            if isinstance(context, PackedAttention):
                kwargs["podium_context"] = UlyssesAttention(context, self.sequence, self.sequence_group)
            return args, kwargs

        base.register_forward_pre_hook(exchange, with_kwargs=True)


class UlyssesAttention:
    """`AttentionContext` of a rank that has `1 / ranks` of the row: exchanges tokens for heads, and back."""

    def __init__(self, whole: PackedAttention, ranks: int, group: Any) -> None:
        self.whole, self.ranks, self.group = whole, ranks, group
        self.tokens = int(whole.lengths.sum())

    def attend(self, module: nn.Module, query: Tensor, key: Tensor, value: Tensor, **how: Any) -> Tensor:
        """query `[1, H, n, D]`, key and value `[1, K, n, D]` -> `[1, n, H, D]`, n tokens of this rank."""
        if not query.shape[-1] == key.shape[-1] == value.shape[-1]:
            raise ModelError("sequence parallelism needs queries, keys and values of one width", where="parallel.sequence")
        heads, stretch = query.shape[1], query.shape[2]
        if key.shape[1] % self.ranks:  # fewer key/value heads than ranks: each rank gets the one that its queries use
            key, value = (x.repeat_interleave(self.ranks // x.shape[1], 1) for x in (key, value))
        parts = [x[0].unflatten(0, (self.ranks, -1)) for x in (query, key, value)]
        sizes = [part.shape[1] for part in parts]
        mixed = all_to_all(torch.cat(parts, 1), self.group)  # [ranks, heads of all three, n, D]
        rows = mixed.permute(1, 0, 2, 3).flatten(1, 2)[:, : self.tokens]
        q, k, v = (x[None] for x in rows.split(sizes))
        out = self.whole.attend(module, q, k, v, **how)[0]  # [N, H / ranks, D]
        out = F.pad(out, (0, 0, 0, 0, 0, self.ranks * stretch - self.tokens)).unflatten(0, (self.ranks, stretch))
        back = all_to_all(out, self.group)  # [ranks: of the heads, n, H / ranks, D]
        return back.transpose(0, 1).reshape(1, stretch, heads, -1)


def _stretch(values: Tensor, start: int, length: int) -> Tensor:
    """`values[start : start + length]`, filled up with zeros."""
    part = values[start : start + length]
    return F.pad(part, (0, length - len(part)))
