"""Attention on CUDA over runs that share prompts: each prompt's keys are read where they lie, once, by all its responses.

A response sees its prompt and itself. Both parts are variable-length calls over the row as it is: every run causally over
itself, and all responses of a prompt, as one sequence of queries, over the prompt's keys. The two are merged by their
normalisers. With the merged output and normaliser the backward pass of each part is exact on its own, and its parts add up.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable


@dataclass(frozen=True)
class SharedLayout:
    """Borders on the device, int32: of the runs `own [R + 1]`; of the second part's queries and keys, one pair of segments
    after another, `queries [S + 1]` and `keys [S + 1]`. And the longest of each.
    """

    own: Tensor
    queries: Tensor
    keys: Tensor
    longest: int
    most_queries: int
    most_keys: int


def make_layout(lengths: Tensor, parents: Tensor, device: torch.device) -> SharedLayout | None:
    """The layout of runs (`lengths`, `parents` `[R]`, on the CPU); None where a prompt's responses do not follow it."""
    segments: list[tuple[int, int]] = []  # (queries, keys): what has none of the other stands alone
    root, children = -1, 0
    for run, (length, parent) in enumerate(zip(lengths.tolist(), parents.tolist(), strict=True)):
        if parent < 0:
            segments += _segments(int(lengths[root]) if root >= 0 else 0, children)
            root, children = run, 0
        elif parent == root:
            children += length
        else:
            return None
    segments += _segments(int(lengths[root]) if root >= 0 else 0, children)
    queries, keys = (torch.tensor(column, dtype=torch.int64) for column in zip(*segments, strict=True))
    return SharedLayout(
        own=_borders(lengths, device),
        queries=_borders(queries, device),
        keys=_borders(keys, device),
        longest=int(lengths.max()),
        most_queries=int(queries.max()),
        most_keys=int(keys.max()),
    )


def _segments(prompt: int, responses: int) -> list[tuple[int, int]]:
    """A prompt's own queries see nothing here; its responses see it; their keys are seen by none."""
    if not prompt:
        return []
    return [(prompt, 0), (responses, prompt), (0, responses)] if responses else [(prompt, 0), (0, prompt)]


def _borders(lengths: Tensor, device: torch.device) -> Tensor:
    borders = torch.zeros(len(lengths) + 1, dtype=torch.int32)
    torch.cumsum(lengths, 0, out=borders[1:])
    return borders.to(device)


class SharedPromptAttention(torch.autograd.Function):
    """q `[N, H, D]`, k and v `[N, K, D]` -> `[N, H, D]`; 16 bits, on CUDA."""

    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor, layout: SharedLayout, scaling: float) -> Tensor:
        from podium.models.layer_kernels import merge_

        q = q.contiguous()  # the outputs get its layout
        out, normaliser, *state = torch.ops.aten._flash_attention_forward(
            q, k, v, layout.own, layout.own, layout.longest, layout.longest, 0.0, True, False, scale=scaling
        )
        to_prompt, its_normaliser, *_ = torch.ops.aten._flash_attention_forward(
            q, k, v, layout.queries, layout.keys, layout.most_queries, layout.most_keys, 0.0, False, False, scale=scaling
        )
        merge_(out, normaliser, to_prompt, its_normaliser)
        ctx.save_for_backward(q, k, v, out, normaliser, *state[:2])
        ctx.layout, ctx.scaling = layout, scaling
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        q, k, v, out, normaliser, *state = ctx.saved_tensors
        layout: SharedLayout = ctx.layout

        def part(queries: Tensor, keys: Tensor, most: int, most_keys: int, causal: bool) -> tuple[Tensor, Tensor, Tensor]:
            return torch.ops.aten._flash_attention_backward(
                grad, q, k, v, out, normaliser, queries, keys, most, most_keys, 0.0, causal, *state, scale=ctx.scaling
            )

        own = part(layout.own, layout.own, layout.longest, layout.longest, True)
        shared = part(layout.queries, layout.keys, layout.most_queries, layout.most_keys, False)
        return *(a.add_(b) for a, b in zip(own, shared, strict=True)), None, None
