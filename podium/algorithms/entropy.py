"""The entropy of a categorical distribution."""

from __future__ import annotations

import torch
from torch import Tensor


def entropy_from_logits(logits: Tensor) -> Tensor:
    """`-sum_v p_v log p_v` with `p = softmax(logits)`, in nats: [..., V] -> [...] in fp32 (fp64 for fp64).

    For logits that exist already. `log_probs_from_hidden(..., with_entropy=True)` gives it without holding them all.
    A logit of -inf is a token that can't be drawn, and adds 0.
    """
    log_p = torch.log_softmax(logits.to(torch.promote_types(logits.dtype, torch.float32)), dim=-1)
    p = log_p.exp()
    return -(p * log_p.masked_fill(p == 0, 0.0)).sum(dim=-1)
