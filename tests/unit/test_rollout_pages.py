"""The page pool, and fused weights as the trainer sees them."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM

from podium.core.errors import ModelError
from podium.core.settings import LoraSettings, OptimizerSettings
from podium.engines.rollout.native.graphs import bucket_of, splits_of
from podium.engines.rollout.native.paged_engine import PagedEngine
from podium.engines.rollout.native.pages import PagePool
from podium.engines.train.optim import MasterAdamW
from podium.models.adapters import add_lora
from podium.models.fused import can_fuse, fuse
from podium.models.lm_head import base_of, use_attention
from tests.tiny import tiny_model, tiny_tokenizer


def test_pages_are_free_when_the_last_holder_gives_them_back() -> None:
    pool = PagePool(4, 8)
    assert pool.needed(0) == 0
    assert pool.needed(17) == 3
    taken = pool.take(3)
    pool.share(taken[:2])
    pool.give(taken)
    assert pool.free == 2
    pool.give(taken[:2])
    assert pool.free == 4


def test_full_pages_are_found_by_all_the_text_before_them() -> None:
    pool = PagePool(9, 2)
    pages = pool.take(3)
    pool.remember([1, 2, 3, 4, 5], pages)
    assert pool.find([1, 2, 3, 4, 5, 6]) == pages[:2]
    assert pool.find([1, 2, 9, 4]) == pages[:1]
    assert pool.find([3, 4]) == []
    other = pool.take(2)
    pool.remember([1, 2, 3, 4], other)  # known already: the first stays
    assert pool.find([1, 2, 3, 4]) == pages[:2]
    pool.give(pages)
    assert pool.find([1, 2, 3, 4]) == []
    pool.remember([1, 2, 3, 4], other)
    assert pool.find([1, 2, 3, 4]) == other


def test_batches_run_in_few_sizes() -> None:
    sizes = {bucket_of(rows, 1000) for rows in range(1, 1001)}
    assert len(sizes) < 32
    assert all(rows <= bucket_of(rows, 1000) <= max(8, 1.25 * rows) for rows in range(1, 1001))
    assert splits_of(8, 2, [100]) == 1
    assert splits_of(8, 2, [100_000]) == 32
    assert splits_of(1, 2, [100_000]) == 64
    assert splits_of(64, 2, [1000] * 64) == 4
    assert splits_of(1024, 2, [1000] * 1000) == 1
    assert splits_of(256, 2, [2000, *[200] * 200]) == 2


@pytest.mark.parametrize("family", ["llama", "qwen2", "qwen3", "mistral"])
def test_fused_parameters_are_the_models_own(family: str, tmp_path: Path) -> None:
    model, plain = tiny_model(family), tiny_model(family)
    optimizer = MasterAdamW(model.named_parameters(), OptimizerSettings(lr=0.1))
    objects = {name: id(p) for name, p in model.named_parameters()}
    use_attention(model, "podium")
    fused = fuse(model.model, 32)
    assert objects == {name: id(p) for name, p in model.named_parameters()}
    for name, value in plain.state_dict().items():
        assert torch.equal(model.state_dict()[name], value)
    assert fused.names["layers.0.self_attn.qkv"][1] == "layers.0.self_attn.k_proj.weight"
    own = dict(model.model.named_parameters())
    assert torch.equal(fused.layers[1].gate_up, torch.cat([own[n] for n in fused.names["layers.1.mlp.gate_up"]]))
    # An update is seen in the fused tensor; fusing again moves nothing.
    use_attention(model, "eager")
    model(torch.tensor([[5, 6, 7]]), labels=torch.tensor([[5, 6, 7]])).loss.backward()
    optimizer.step()
    rows = torch.cat([own[n] for n in fused.names["layers.0.self_attn.qkv"]])
    assert torch.equal(fused.layers[0].qkv, rows)
    assert not torch.equal(
        rows, torch.cat([dict(plain.model.named_parameters())[n] for n in fused.names["layers.0.self_attn.qkv"]])
    )
    use_attention(model, "podium")
    assert fuse(model.model, 32).layers[0].qkv.data_ptr() == fused.layers[0].qkv.data_ptr()
    # What is saved has the model's own names and loads as any other.
    model.save_pretrained(tmp_path)
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path)
    assert loaded.state_dict().keys() == plain.state_dict().keys()
    for name, value in model.state_dict().items():
        assert torch.equal(loaded.state_dict()[name], value)


def test_what_has_no_fused_form_says_why_and_runs_its_own_modules(caplog: pytest.LogCaptureFixture) -> None:
    assert can_fuse(tiny_model("gemma2").model) == "its layers are Gemma2DecoderLayer"
    rope = {"rope_type": "dynamic", "rope_theta": 1e4, "factor": 2.0}
    assert "rotary embedding is of type dynamic" in str(can_fuse(tiny_model(rope_parameters=rope).model))
    adapted = tiny_model()
    add_lora(adapted, LoraSettings(rank=2))
    assert "its linear layers are peft." in str(can_fuse(base_of(adapted)))
    PagedEngine(tiny_model("gemma2"), tiny_tokenizer())
    assert "Gemma2ForCausalLM runs its own modules in rollout, slower: its layers are Gemma2DecoderLayer" in caplog.text


def test_layers_that_differ_in_shape_have_no_pages(monkeypatch: pytest.MonkeyPatch) -> None:
    model = tiny_model("gemma2")
    monkeypatch.setattr(model.config, "num_key_value_heads", 4)  # what the config says is not what the layers have
    with pytest.raises(
        ModelError, match=r"(?s)layer 0 has 2 key heads of width 16 and 16; the cache has 2 layers of 4 heads.*hf"
    ):
        PagedEngine(model, tiny_tokenizer())
