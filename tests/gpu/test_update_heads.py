"""Log-probs and entropy of whole models on a GPU, by tiles of the vocabulary: every kind of head, temperature and dtype."""

from __future__ import annotations

import pytest
import torch

from podium.algorithms import log_probs as module
from tests.unit.test_log_prob_heads import HEADS, check_in_16_bits, check_in_fp32

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU"),
]


@pytest.fixture(params=[None, 15 * 128], ids=["one tile", "four tiles"])
def tiles(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """The 512 tokens of the vocabulary at once, and 128 at a time."""
    if request.param is not None:
        monkeypatch.setattr(module, "TILE_ELEMENTS", request.param)


@pytest.mark.usefixtures("tiles")
@pytest.mark.parametrize("temperature", [1.0, 0.7])
@pytest.mark.parametrize("head", HEADS)
def test_in_fp32(head: str, temperature: float) -> None:
    check_in_fp32(head, temperature, "cuda", 5e-5)  # sums in other orders


@pytest.mark.usefixtures("tiles")
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("temperature", [1.0, 0.7])
@pytest.mark.parametrize("head", HEADS)
def test_in_16_bits(head: str, temperature: float, dtype: torch.dtype) -> None:
    check_in_16_bits(head, temperature, dtype, "cuda")
