"""The rollout kernels against the same functions in torch. Runs on a GPU, or anywhere under Triton's interpreter."""

from __future__ import annotations

import os

import numpy as np
import pytest
import torch

from podium.engines.rollout.native import plain
from podium.engines.rollout.native.paged_cache import PagedCache, RowState
from podium.engines.rollout.native.sampler import uniforms
from podium.engines.rollout.native.sharing import Shared, Tiles

pytest.importorskip("triton")
INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not (torch.cuda.is_available() or INTERPRETED), reason="needs a GPU, or TRITON_INTERPRET=1"),
]
DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
KINDS = [torch.float32] if INTERPRETED else [torch.float32, torch.bfloat16]


def _kernels():  # type: ignore[no-untyped-def]
    from podium.engines.rollout.native import kernels

    return kernels


def _near(ours: torch.Tensor, theirs: torch.Tensor) -> None:
    tolerance = 1e-5 if ours.dtype == torch.float32 else 1e-2
    assert float((ours.float() - theirs.float()).norm() / theirs.float().norm().clamp(min=1e-9)) < tolerance


def _randn(*shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.randn(*shape, device=DEVICE).to(dtype)


def _cache(width: int = 64, kv: int = 2, page: int = 16, dtype: torch.dtype = torch.float32, pages: int = 40) -> PagedCache:
    cache = PagedCache(3, kv, width, page, dtype, DEVICE)
    cache.allocate(pages)
    assert cache.pages is not None
    cache.pages.copy_(_randn(*cache.pages.shape, dtype=dtype))
    return cache


@pytest.mark.parametrize("dtype", KINDS)
@pytest.mark.parametrize("width", [64, 896, 3584])
def test_norm(dtype: torch.dtype, width: int) -> None:
    x, residual, weight = _randn(5, width, dtype=dtype), _randn(5, width, dtype=dtype), _randn(width, dtype=dtype)
    for added in (None, residual):
        want = plain.add_rms_norm(x, added, weight, 1e-6)
        got = _kernels().add_rms_norm(x, None if added is None else added.clone(), weight, 1e-6)
        for a, b in zip(got, want, strict=True):
            _near(a, b)


@pytest.mark.parametrize("dtype", KINDS)
def test_silu(dtype: torch.dtype) -> None:
    x = _randn(3, 2 * 1500, dtype=dtype)
    _near(_kernels().silu_mul(x), plain.silu_mul(x))


@pytest.mark.parametrize("dtype", KINDS)
@pytest.mark.parametrize("normed", [False, True])
@pytest.mark.parametrize("count", [3, 600])
def test_rotation_and_filing(dtype: torch.dtype, normed: bool, count: int) -> None:
    if INTERPRETED and count > 100:
        pytest.skip("slow in the interpreter")
    heads, kv, width = 6, 2, 64
    qkv, rotary = _randn(count, (heads + 2 * kv) * width, dtype=dtype), _randn(700, width)
    norms = (_randn(width, dtype=dtype), _randn(width, dtype=dtype)) if normed else None
    positions = torch.randint(0, 700, (count,), device=DEVICE)
    places = torch.randperm(40 * 16, device=DEVICE)[:count]
    places[1] = -1
    results = []
    start = _cache(dtype=dtype)
    for ops in (_kernels(), plain):
        cache = _cache(dtype=dtype)
        assert cache.pages is not None
        assert start.pages is not None
        cache.pages.copy_(start.pages)
        q, k = ops.rotate_and_store(qkv, rotary, positions, places, cache, 1, norms, 1e-6, heads, keep=True)
        results.append((q, k, cache.pages))
    for a, b in zip(*results, strict=True):
        _near(a, b)


@pytest.mark.parametrize("dtype", KINDS)
@pytest.mark.parametrize("splits", [1, 2, 4, 16])  # merged by the last program where few, by a kernel of their own where many
@pytest.mark.parametrize("options", [{}, {"window": 20}, {"softcap": 5.0}])
@pytest.mark.parametrize(("width", "group", "page"), [(64, 7, 16), (128, 4, 64)])
def test_decode_attention(
    dtype: torch.dtype, splits: int, options: dict[str, float], width: int, group: int, page: int
) -> None:
    cache = _cache(width=width, page=page, dtype=dtype)
    most = 320 // page
    counts = torch.tensor([1, 0, 17, 64, 129, 300], dtype=torch.int32, device=DEVICE)
    table = torch.stack([torch.randperm(40, device=DEVICE)[:most] for _ in counts]).to(torch.int32)
    query = _randn(len(counts), 2 * group, width, dtype=dtype)
    call = {"scaling": 0.11, "splits": splits, **options}
    want = plain.decode_attention(query, cache, 2, table, counts, **call)
    for _ in range(2):  # the count of parts that arrived is zero again for the next layer
        _near(_kernels().decode_attention(query, cache, 2, table, counts, **call), want)
    assert not cache.arrived.any()


@pytest.mark.parametrize("dtype", KINDS)
@pytest.mark.parametrize("splits", [(1, 1), (2, 2), (4, 2)])
@pytest.mark.parametrize(("width", "group", "page", "softcap"), [(64, 7, 16, None), (128, 4, 64, None), (64, 1, 16, 5.0)])
def test_a_shared_start_read_once_is_the_same_attention(
    dtype: torch.dtype, splits: tuple[int, int], width: int, group: int, page: int, softcap: float | None
) -> None:
    """Groups of 2 to 10 rows (one of several tiles), rows without a group, and rows of either kind that see nothing."""
    cache = _cache(width=width, page=page, dtype=dtype)
    tiles = Tiles(20, group, dtype, DEVICE)
    groups = [(256, [0, 1, 2, 3, 4, 5, 6, 7, 8, 12]), (2 * page, [9, 13])]
    count = tiles.set(groups)
    assert count == -(-10 // tiles.height) + 1
    counts = torch.tensor([300, 257, 256 + page, 0, 270, 299, 301, 258, 290, 2 * page + 1, 7, 0, 260, 300], device=DEVICE)
    table = torch.stack([torch.randperm(40, device=DEVICE)[: 320 // page] for _ in counts]).to(torch.int32)
    for keys, rows in groups:
        table[rows, : keys // page] = table[rows[0], : keys // page].clone()
    query = _randn(len(counts), 2 * group, width, dtype=dtype)
    call = {"scaling": 0.11, "splits": splits[0], "softcap": softcap}
    want = plain.decode_attention(query, cache, 2, table, counts.int(), **call)
    got = _kernels().decode_attention(
        query, cache, 2, table, counts.int(), **call, shared=Shared(tiles, 8, splits[1])
    )  # the last tiles are empty
    _near(got, want)
    assert not got[3].any()
    assert not got[11].any()


def test_the_cache_is_found_after_it_was_taken_again() -> None:
    cache = _cache()
    keys, values = _randn(2, 2, 64), _randn(2, 2, 64)
    places = torch.tensor([5, 16 * 7 + 3], device=DEVICE)
    kept = cache.pages  # so that the memory cannot be the same
    cache.allocate(50)
    assert kept is not None
    assert cache.pages is not None
    assert cache.pages.data_ptr() != kept.data_ptr()
    _kernels().store(keys, values, places, cache, 2)
    assert torch.equal(cache.pages[7, 2, 1, :, 3], values[1])
    assert torch.equal(cache.pages[0, 2, 0, :, 5], keys[0])


def test_places() -> None:
    length = torch.tensor([0, 15, 16, 40], device=DEVICE)
    active = torch.tensor([1, 1, 0, 1], device=DEVICE)
    table = torch.arange(12, device=DEVICE, dtype=torch.int32).view(4, 3)
    for got, want in zip(
        _kernels().decode_places(length, active, table, 16), plain.decode_places(length, active, table, 16), strict=True
    ):
        assert torch.equal(got, want)


WHOLE = [(0, 1.0, 0.0)]
TRUNCATIONS = [
    (0, 1.0, 0.0), (5, 1.0, 0.0), (0, 0.9, 0.0), (0, 1.0, 0.1), (40, 0.7, 0.0), (7, 0.5, 0.2), (0, 0.999, 0.0), (1, 1.0, 0.0),
    (10**6, 0.95, 0.0), (300, 0.9999, 0.0), (0, 1e-6, 0.0),
]  # fmt: skip
"""top-k, top-p, min-p: each alone, several together, k beyond the vocabulary, p that keeps one token."""


def _state(rows: int, rng: np.random.Generator, truncations: list[tuple[int, float, float]] = WHOLE) -> RowState:
    state = RowState(rows, 4, 3, DEVICE)
    temperatures = [1.0, 0.7, 0.0, 1.5]
    for slot in range(rows):
        seed = int(rng.integers(0, 2**63)) - 2**62 * (slot % 3)
        state.set_row(slot, 20 + slot % 3, 5, seed, (temperatures[slot % 4], *truncations[slot % len(truncations)]), (3, 77))
    state.upload(rows)
    state.start(list(range(rows)), [6 + slot % 15 for slot in range(rows)])
    state.active[1] = 0
    return state


@pytest.mark.parametrize("dtype", KINDS)
@pytest.mark.parametrize("vocabulary", [500, 2048, 9000])
def test_samples_equal_the_plain_samplers(dtype: torch.dtype, vocabulary: int) -> None:
    rows = 24
    logits = (_randn(8, vocabulary) * 3).to(dtype)
    logits[:, 11] = float("-inf")
    which = torch.arange(rows, device=DEVICE) % 8
    slots = torch.randperm(rows, device=DEVICE)
    states = []
    for ops in (_kernels(), plain):
        state = _state(rows, np.random.default_rng(0))
        for _ in range(3):
            ops.sample(logits, which, slots, state)
        states.append(state)
    ours, theirs = states
    assert torch.equal(ours.tokens_out, theirs.tokens_out)
    torch.testing.assert_close(ours.scores_out, theirs.scores_out, atol=3e-5, rtol=0)
    assert torch.equal(ours.live, theirs.live)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("vocabulary", [500, 2048, 9000])
def test_truncated_samples_equal_the_plain_samplers(dtype: torch.dtype, vocabulary: int) -> None:
    """In bf16 many logits are equal: which of them stay is decided by their ids."""
    if INTERPRETED and vocabulary == 2048:
        pytest.skip("slow in the interpreter")
    torch.manual_seed(vocabulary)  # a draw on the border between two tokens may fall either way
    rows = 22 if INTERPRETED else 44
    logits = (_randn(8, vocabulary) * torch.tensor([0.3, 0.5, 1, 1, 2, 3, 5, 8], device=DEVICE)[:, None]).to(dtype)
    logits[:, 11] = float("-inf")
    logits[0, :40] = logits[0].max()
    which, slots = torch.arange(rows, device=DEVICE) % 8, torch.randperm(rows, device=DEVICE)
    states = []
    for ops in (_kernels(), plain):
        state = _state(rows, np.random.default_rng(0), TRUNCATIONS)
        for _ in range(2):
            ops.sample(logits, which, slots, state, truncated=True)
        states.append(state)
    ours, theirs = states
    assert torch.equal(ours.tokens_out, theirs.tokens_out)
    torch.testing.assert_close(ours.scores_out, theirs.scores_out, atol=3e-5, rtol=0)
    assert torch.equal(ours.live, theirs.live)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_what_truncation_keeps_is_its_definition(dtype: torch.dtype) -> None:
    """The kept tokens themselves, read off the floors, against the torch function."""
    from podium.engines.rollout.native.sampler import truncate
    from podium.engines.rollout.native.truncate_kernels import find_floors

    count, vocabulary = len(TRUNCATIONS), 3000
    logits = (_randn(count, vocabulary) * 2).to(dtype)
    state = _state(count, np.random.default_rng(0), TRUNCATIONS)
    state.temperature.fill_(1.0)
    state.top_k[:], state.top_p[:], state.min_p[:] = torch.tensor(TRUNCATIONS, device=DEVICE).T
    at = torch.arange(count, device=DEVICE)
    x = logits.float()
    top = x.amax(-1, keepdim=True)
    floor, last = find_floors(logits, at, at, state, top)
    weights = (x - top).exp()
    ids = torch.arange(vocabulary, device=DEVICE)
    keep = (x > floor[:, None]) | ((x == floor[:, None]) & (ids <= last[:, None]))
    keep &= weights >= state.min_p[:, None]
    want = truncate(weights, state.top_k.long().clamp(max=vocabulary), state.top_p, state.min_p) > 0
    assert torch.equal(keep, want)


@pytest.mark.parametrize("truncated", [False, True])
def test_logits_that_are_not_finite_end_a_row(truncated: bool) -> None:
    logits = torch.zeros(4, 3000, device=DEVICE)
    logits[0, 5] = float("nan")
    logits[1, 2500] = float("inf")
    logits[2] = float("-inf")
    state = _state(4, np.random.default_rng(0), [(0, 0.9, 0.0)] if truncated else WHOLE)
    state.active.fill_(1)
    at = torch.arange(4, device=DEVICE)
    _kernels().sample(logits, at, at, state, truncated=truncated)
    assert state.scores_out[0].isfinite().tolist() == [False, False, False, True]
    assert state.active.tolist() == [0, 0, 0, 1]
    assert int(state.tokens_out[0].min()) >= 0


def test_the_devices_uniforms_are_the_hosts() -> None:
    from podium.engines.rollout.native.sampler import device_uniforms

    seeds = [0, 1, -1, 2**63 - 1, -(2**63), 12345]
    got = device_uniforms(torch.tensor(seeds, device=DEVICE), torch.arange(6, device=DEVICE))
    assert got.tolist() == uniforms(seeds, list(range(6))).tolist()
