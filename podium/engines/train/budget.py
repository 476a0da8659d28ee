"""How many tokens fit into one forward and backward pass (`microbatch_tokens: auto`), found by running one."""

from __future__ import annotations

from collections.abc import Callable

import torch

# Of the memory that is free, what a pass may take; the rest is for longer rows than those tried, and for fragments.
_SHARE = 0.8
# Tokens of the pass that is measured, and bounds of the answer.
TRIAL, LEAST, MOST = 4_096, 1_024, 131_072
# Before the trial, and where there is no memory to measure (a CPU).
UNMEASURED = 8_192


def measured_budget(run: Callable[[], None], tokens: int, device: torch.device, later_bytes: int = 0) -> int:
    """The tokens that fit, a multiple of 1,024, from one pass over `tokens` tokens.

    Args:
        run: a forward and backward pass, which leaves nothing behind but what stays for good (gradients).
        tokens: how many it goes over.
        later_bytes: what will be taken for good later (the optimizer's moments, where the first update makes them).
    """
    if device.type != "cuda":
        return UNMEASURED
    run()  # what stays for good is there after this; kernels are compiled
    torch.cuda.synchronize(device)
    torch.cuda.reset_peak_memory_stats(device)
    before = torch.cuda.memory_allocated(device)
    run()
    each = max(1.0, (torch.cuda.max_memory_allocated(device) - before) / tokens)
    free, _ = torch.cuda.mem_get_info(device)
    free += torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device) - later_bytes
    fits = int(_SHARE * free / each) // 1024 * 1024
    return min(MOST, max(LEAST, fits))
