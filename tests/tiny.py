"""Tiny random models and a tiny tokenizer: what the tests train and sample in milliseconds."""

from __future__ import annotations

from functools import cache
from typing import Any

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel, PreTrainedTokenizerFast

VOCAB_SIZE = 512
PAD, BOS, EOS = "<pad>", "<s>", "</s>"
SPECIAL = (PAD, BOS, EOS, "<|user|>", "<|assistant|>")
PAD_ID, BOS_ID, EOS_ID = 0, 1, 2

CHAT_TEMPLATE = (
    "{% for message in messages %}<|{{ 'assistant' if message['role'] == 'assistant' else 'user' }}|>"
    "{{ message['content'] }}{% if message['role'] == 'assistant' %}</s>{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{% endif %}"
)

_CORPUS = [
    "The quick brown fox jumps over the lazy dog and runs away.",
    "What is two plus three? The answer is five. <answer>5</answer>",
    "Stop here, please. The end is near; stop, stop! END",
    "1 + 2 = 3, 10 - 4 = 6, 7 * 8 = 56, 100 / 4 = 25",
    "Zürich, naïve café, 日本語 and emoji 🙂 are several bytes a character.",
]

_COMMON: dict[str, Any] = {
    "vocab_size": VOCAB_SIZE,
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 256,
    "tie_word_embeddings": True,
    "pad_token_id": PAD_ID,
    "bos_token_id": BOS_ID,
    "eos_token_id": EOS_ID,
}

_FAMILIES: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("llama", {}),
    "qwen2": ("qwen2", {}),
    "qwen3": ("qwen3", {"head_dim": 16}),
    "mistral": ("mistral", {"sliding_window": 8}),
    "gemma2": ("gemma2", {"head_dim": 16, "sliding_window": 8, "query_pre_attn_scalar": 16}),
    "gemma3": (
        "gemma3_text",
        {
            "head_dim": 16,
            "sliding_window": 8,
            "query_pre_attn_scalar": 16,
            "layer_types": ["sliding_attention", "full_attention"],
        },
    ),
}

FAMILIES = tuple(_FAMILIES)


@cache
def _trained() -> str:
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCAB_SIZE,
        special_tokens=list(SPECIAL),
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(_CORPUS, trainer)
    return tokenizer.to_str()


def tiny_tokenizer() -> PreTrainedTokenizerFast:
    """A byte-level BPE tokenizer of at most 512 tokens, with pad, bos, eos and a chat template.

    Every text round-trips (all bytes are tokens); a character of several bytes may span tokens.
    """
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=Tokenizer.from_str(_trained()),
        pad_token=PAD,
        bos_token=BOS,
        eos_token=EOS,
        additional_special_tokens=list(SPECIAL[3:]),
        padding_side="left",
        clean_up_tokenization_spaces=False,
    )
    tokenizer.chat_template = CHAT_TEMPLATE
    return tokenizer


def tiny_model(
    family: str = "llama", *, seed: int = 0, dtype: torch.dtype = torch.float32, **overrides: Any
) -> PreTrainedModel:
    """A random causal LM of two layers, 64 wide, vocabulary 512: `family` is one of FAMILIES.

    Weights are drawn wide (0.2) so that its distributions are not flat. `overrides` are config fields.
    The caller's random state is left as it was.
    """
    name, extra = _FAMILIES[family]
    config = AutoConfig.for_model(name, **{**_COMMON, "initializer_range": 0.2, **extra, **overrides})
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        # SDPA knows no soft cap: transformers ignores it there (before 5.20) or refuses.
        attention = "eager" if getattr(config, "attn_logit_softcapping", None) else "sdpa"
        model = AutoModelForCausalLM.from_config(config, attn_implementation=attention)
    return model.to(dtype).eval()
