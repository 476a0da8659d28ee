"""A Llama and a tokenizer of our own, made on the spot: nothing is downloaded."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import Any

END, PAD = "<eos>", "<pad>"


def make_tokenizer(texts: Iterable[str]) -> Any:
    """A byte-level BPE tokenizer trained on the texts."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
    from transformers import PreTrainedTokenizerFast

    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=384,
        special_tokens=[PAD, END],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts, trainer)
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, pad_token=PAD, eos_token=END, clean_up_tokenization_spaces=False)


def make_model(tokenizer: Any, seed: int) -> Any:
    """A random Llama of about a million parameters for this tokenizer."""
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        vocab_size=len(tokenizer),
        hidden_size=128,
        intermediate_size=512,
        num_hidden_layers=4,
        num_attention_heads=4,
        num_key_value_heads=4,
        max_position_embeddings=64,
        tie_word_embeddings=False,
        pad_token_id=tokenizer.pad_token_id,
        bos_token_id=None,
        eos_token_id=tokenizer.eos_token_id,
    )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        return LlamaForCausalLM(config)


def save(folder: Path, texts: Iterable[str], seed: int) -> int:
    """Writes model and tokenizer as a Hugging Face folder; returns the number of parameters."""
    tokenizer = make_tokenizer(texts)
    model = make_model(tokenizer, seed)
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return model.num_parameters()
