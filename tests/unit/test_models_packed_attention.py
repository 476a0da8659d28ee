"""Packed attention against a loop over the sequences."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from podium.core.errors import ModelError
from podium.models.packed_attention import PackedAttention, make_buckets

LENGTHS = {
    "mixed": [5, 1, 40, 17, 3, 64, 2, 33],
    "equal": [12, 12, 12],
    "one": [9],
    "single tokens": [1, 1, 1],
}
HEADS, KV_HEADS, WIDTH = 4, 2, 8


def naive(
    query: Tensor, key: Tensor, value: Tensor, lengths: list[int], scaling: float, window: int | None, softcap: float | None
) -> Tensor:
    out, start = torch.empty(query.shape[2], HEADS, WIDTH), 0
    for length in lengths:
        part = slice(start, start + length)
        for head in range(HEADS):
            kv = head // (HEADS // KV_HEADS)
            scores = query[0, head, part] @ key[0, kv, part].T * scaling
            if softcap is not None:
                scores = softcap * torch.tanh(scores / softcap)
            ago = torch.arange(length)[:, None] - torch.arange(length)
            unseen = (ago < 0) | (ago >= (window or length))
            out[part, head] = scores.masked_fill(unseen, float("-inf")).softmax(-1) @ value[0, kv, part]
        start += length
    return out[None]


def inputs(total: int, seed: int = 0) -> list[Tensor]:
    generator = torch.Generator().manual_seed(seed)
    shapes = [(1, heads, total, WIDTH) for heads in (HEADS, KV_HEADS, KV_HEADS)]
    return [torch.randn(shape, generator=generator).requires_grad_() for shape in shapes]


@pytest.mark.parametrize("window", [None, 6, 1])
@pytest.mark.parametrize("softcap", [None, 3.0])
@pytest.mark.parametrize("case", LENGTHS)
def test_equals_a_loop_over_the_sequences(case: str, window: int | None, softcap: float | None) -> None:
    lengths = LENGTHS[case]
    ours, theirs = inputs(sum(lengths)), inputs(sum(lengths))
    context = PackedAttention(torch.tensor(lengths))
    got = context.attend(nn.Module(), *ours, scaling=0.3, sliding_window=window, softcap=softcap)
    want = naive(*theirs, lengths, 0.3, window, softcap)
    assert got.shape == (1, sum(lengths), HEADS, WIDTH)
    torch.testing.assert_close(got, want, rtol=1e-5, atol=1e-6)
    upstream = torch.randn(want.shape, generator=torch.Generator().manual_seed(1))
    (got * upstream).sum().backward()
    (want * upstream).sum().backward()
    for mine, other in zip(ours, theirs, strict=True):
        torch.testing.assert_close(mine.grad, other.grad, rtol=1e-4, atol=1e-5)


# Runs of a row, and the run that each goes on from.
SHARED = {
    "groups": ([9, 4, 4, 20, 11, 9, 30, 6], [-1, 0, 0, -1, 3, 3, -1, -1]),
    "one prompt": ([17, 5, 1, 40, 9], [-1, 0, 0, 0, 0]),
    "prompts of many lengths": ([3, 8, 8, 40, 8, 8, 19, 7, 9], [-1, 0, 0, -1, 3, 3, -1, 6, 6]),
}


@pytest.mark.parametrize("window", [None, 6, 1])
@pytest.mark.parametrize("softcap", [None, 3.0])
@pytest.mark.parametrize("case", SHARED)
def test_runs_after_a_shared_prompt_equal_whole_sequences(case: str, window: int | None, softcap: float | None) -> None:
    lengths, parents = SHARED[case]
    starts = [sum(lengths[:run]) for run in range(len(lengths))]
    ours, theirs = inputs(sum(lengths)), inputs(sum(lengths))
    context = PackedAttention(torch.tensor(lengths), torch.tensor(parents))
    got = context.attend(nn.Module(), *ours, scaling=0.3, sliding_window=window, softcap=softcap)
    want = torch.empty(sum(lengths), HEADS, WIDTH)
    for run, parent in enumerate(parents):
        own = torch.arange(starts[run], starts[run] + lengths[run])
        before = torch.arange(starts[parent], starts[parent] + lengths[parent]) if parent >= 0 else own[:0]
        whole = [x[:, :, torch.cat([before, own])] for x in theirs]
        want[own] = naive(*whole, [len(before) + len(own)], 0.3, window, softcap)[0, len(before) :]
    torch.testing.assert_close(got[0], want, rtol=1e-5, atol=1e-6)
    upstream = torch.randn(want.shape, generator=torch.Generator().manual_seed(1))
    (got[0] * upstream).sum().backward()
    (want * upstream).sum().backward()
    for mine, other in zip(ours, theirs, strict=True):
        torch.testing.assert_close(mine.grad, other.grad, rtol=1e-4, atol=1e-5)


def test_buckets_waste_less_than_half_and_cover_every_token_once() -> None:
    lengths = torch.randint(1, 400, (200,), generator=torch.Generator().manual_seed(0))
    buckets = make_buckets(lengths)
    cost = sum(rows * longest**2 for rows, longest in buckets.shapes)
    # Up to 16 tokens of padding are free; beyond that the quadratic work stays under twice what is needed.
    assert cost < 2 * int(((lengths + 16) ** 2).sum())
    assert torch.equal(buckets.places[buckets.back], torch.arange(int(lengths.sum())))
    assert sum(rows for rows, _ in buckets.shapes) == 200


def test_padding_cannot_reach_a_gradient() -> None:
    """The padded places repeat a real token; what they hold must not count twice."""
    query, key, value = inputs(7)
    context = PackedAttention(torch.tensor([5, 2]))
    context.attend(nn.Module(), query, key, value, scaling=1.0).sum().backward()
    assert value.grad is not None
    # Weights of a softmax sum to 1, so the value gradients of each sequence sum to its number of queries.
    per_head = value.grad[0].sum(-1) / WIDTH * KV_HEADS / HEADS
    torch.testing.assert_close(per_head[:, :5].sum(-1), torch.full((KV_HEADS,), 5.0))
    torch.testing.assert_close(per_head[:, 5:].sum(-1), torch.full((KV_HEADS,), 2.0))


def test_refuses_attention_that_is_not_causal() -> None:
    module = nn.Module()
    module.is_causal = False
    with pytest.raises(ModelError, match="not causal"):
        PackedAttention(torch.tensor([4])).attend(module, *inputs(4), scaling=1.0)
