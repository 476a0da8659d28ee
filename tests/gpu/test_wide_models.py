"""The shapes of a 7B model, few layers: widths, head counts and vocabulary that the tiny models of other tests don't have."""

from __future__ import annotations

import pytest
import torch

from podium.models.heads import ActorModel
from podium.models.lm_head import packed_hidden_states, verify_head

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU"),
]


@pytest.mark.parametrize("layers, dtype", [(2, torch.float32), (2, torch.bfloat16), (28, torch.bfloat16)])
def test_a_7b_shape_runs_packed_rows(layers: int, dtype: torch.dtype) -> None:
    from transformers import AutoModelForCausalLM, Qwen2Config

    config = Qwen2Config(
        vocab_size=152_064,
        hidden_size=3584,
        intermediate_size=18_944,
        num_hidden_layers=layers,
        num_attention_heads=28,
        num_key_value_heads=4,
        tie_word_embeddings=False,
    )
    torch.manual_seed(0)
    with torch.device("cuda"):
        model = AutoModelForCausalLM.from_config(config, dtype=dtype)
    assert ActorModel(model).packs
    verify_head(model, packed_hidden_states)
