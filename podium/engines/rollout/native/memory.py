"""How large the cache may be: from what is free on the device when it is taken."""

from __future__ import annotations

import torch

from podium.core.errors import RolloutError
from podium.engines.rollout.native.paged_cache import PagedCache

# Of the free memory; the rest is for activations of a forward pass, graphs and the allocator's gaps.
_SHARE = 0.85
_CPU_BYTES = 1 << 31


def cache_pages(cache: PagedCache, max_tokens: int | None, most: int) -> int:
    """Pages to take: as many as memory (or `max_tokens`) allows, but no more than `most`, what could be used at all.

    Raises RolloutError where not even one page fits.
    """
    free = free_bytes(cache.anchor.device)
    pages = min(most, int(_SHARE * free) // cache.page_bytes)
    if max_tokens is not None:
        pages = min(pages, -(-max_tokens // cache.page_size))
    if pages < 1:
        raise RolloutError(
            f"a page of the rollout cache takes {cache.page_bytes / 1e6:.1f} MB, and {free / 1e6:.1f} MB are free",
            remedy="free memory on the device (a smaller microbatch, offloading), or use a smaller model",
        )
    return pages


def free_bytes(device: torch.device) -> int:
    """Bytes that an allocation could have now; on a CPU a fixed bound."""
    if device.type != "cuda":
        return _CPU_BYTES
    torch.cuda.empty_cache()
    return torch.cuda.mem_get_info(device)[0]
