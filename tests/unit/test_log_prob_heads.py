"""Log-probs and entropy of whole models: every kind of head, temperature and dtype; values and gradients against plain code."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from podium.core.batch import Batch
from podium.models.heads import ActorModel
from podium.models.lm_head import own_attention
from podium.models.packed import pack
from tests.tiny import FAMILIES, tiny_model
from tests.unit.test_models_padded import small

# The caps are low enough to bend most logits (Gemma 2's own is 30).
HEADS: dict[str, tuple[str, dict[str, Any]]] = {
    "tied": ("llama", {}),
    "own": ("qwen2", {"tie_word_embeddings": False}),
    "tied, capped": ("gemma2", {"final_logit_softcapping": 2.0}),
    "own, capped": ("gemma2", {"final_logit_softcapping": 2.0, "tie_word_embeddings": False}),
    "scaled": ("granite", {"logits_scaling": 0.25, "initializer_range": 0.2}),
}
ROWS = Batch({"prompt_ids": [[5, 6, 7], [5, 6, 7], [9, 8]], "response_ids": [[11, 12, 13, 14], [15, 16], [17, 18, 19] * 3]})


def plain(model: Any, temperature: float) -> tuple[Tensor, Tensor]:
    """Each row alone through the library's own code; log-softmax over whole logits."""
    log_probs, entropy = [], []
    with own_attention(model):
        for prompt, response in zip(ROWS["prompt_ids"], ROWS["response_ids"], strict=True):
            ids = torch.cat([prompt, response]).to(model.device)
            logits = model(ids[None], use_cache=False).logits[0, len(prompt) - 1 : -1].float() / temperature
            log_p = torch.log_softmax(logits, -1)
            log_probs.append(log_p.gather(1, ids[len(prompt) :, None])[:, 0])
            entropy.append(-(log_p.exp() * log_p).sum(-1))
    return torch.cat(log_probs), torch.cat(entropy)


def results(head: str, temperature: float, dtype: torch.dtype, device: str, ours: bool) -> list[Tensor]:
    """Log-probs, entropy, and the gradient of a weighted sum of both for every parameter, as one vector."""
    family, fields = HEADS[head]
    model = tiny_model(family, **fields) if family in FAMILIES else small(family, **fields)
    # The same weights in every dtype: rounded to bf16 first.
    actor = ActorModel(model.to(torch.bfloat16).to(dtype).to(device), temperature=temperature)
    if ours:
        made = actor.compute(pack(ROWS), ("log_probs", "entropy"))
        both = made["log_probs"], made["entropy"]
    else:
        both = plain(actor.model, temperature)
    weights = torch.linspace(-1, 2, len(both[0]), device=device)
    (both[0] * weights + 0.3 * both[1] * weights.flip(0)).sum().backward()
    grads = [p.grad.float().flatten() for p in actor.parameters() if p.grad is not None]
    return [both[0].detach(), both[1].detach(), torch.cat(grads)]


def check_in_fp32(head: str, temperature: float, device: str, tolerance: float = 1e-5) -> None:
    got, want = (results(head, temperature, torch.float32, device, ours) for ours in (True, False))
    for a, b in zip(got, want, strict=True):
        assert a.dtype == torch.float32 and float((a - b).norm() / b.norm()) < tolerance


def check_in_16_bits(head: str, temperature: float, dtype: torch.dtype, device: str) -> None:
    """As near to the fp32 run of the same weights as the library's own code in 16 bits comes.

    Below one and a half steps of fp16 (1.5e-3) it is chance whose 15 tokens were rounded the luckier way.
    """
    chance = 1.5 * torch.finfo(torch.float16).eps
    exact = results(head, temperature, torch.float32, device, False)
    plainly, got = (results(head, temperature, dtype, device, ours) for ours in (False, True))
    for mine, theirs, right in zip(got, plainly, exact, strict=True):
        assert mine.dtype == torch.float32
        error, their_error = (float((x - right).norm() / right.norm()) for x in (mine, theirs))
        assert error < max(1.5 * their_error, chance)


@pytest.mark.parametrize("temperature", [1.0, 0.7])
@pytest.mark.parametrize("head", HEADS)
def test_in_fp32(head: str, temperature: float) -> None:
    check_in_fp32(head, temperature, "cpu")


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("temperature", [1.0, 0.7])
@pytest.mark.parametrize("head", HEADS)
def test_in_16_bits(head: str, temperature: float, dtype: torch.dtype) -> None:
    check_in_16_bits(head, temperature, dtype, "cpu")


def test_the_caps_bend_the_logits() -> None:
    """Else the capped heads above would test nothing."""
    family, fields = HEADS["own, capped"]
    with torch.no_grad():
        capped, free = (
            ActorModel(tiny_model(family, **{**fields, "final_logit_softcapping": cap})).compute(pack(ROWS), ("log_probs",))
            for cap in (2.0, None)
        )
    assert float((capped["log_probs"] - free["log_probs"]).abs().max()) > 0.5
