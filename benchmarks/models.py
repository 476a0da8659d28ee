"""What the benchmarks run on: random models of Qwen2.5's shapes, a tokenizer, prompts and rows, a trainer of GRPO."""

from __future__ import annotations

import argparse
import math
import random
from typing import Any

import roofline
import torch
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import AutoModelForCausalLM, PreTrainedTokenizerFast, Qwen2Config

from podium.core.batch import Batch

SHAPES = {**roofline.SHAPES, "tiny": roofline.Shape(2, 64, 4, 2, 16, 128, 512, True)}
"""`tiny` runs a script itself anywhere; it measures nothing."""
SPECIAL = ("<eos>", "<pad>", "<unk>")
PROMPT_TOKENS = 8
"""Of rows whose whole lengths are what matters."""


def make_model(shape: roofline.Shape, device: str, dtype: torch.dtype | None = None) -> Any:
    """A causal LM with random weights, the same each time; bf16 on a GPU and fp32 elsewhere, unless `dtype` is given."""
    torch.manual_seed(0)
    config = Qwen2Config(
        vocab_size=shape.vocabulary,
        hidden_size=shape.hidden,
        intermediate_size=shape.mlp,
        num_hidden_layers=shape.layers,
        num_attention_heads=shape.heads,
        num_key_value_heads=shape.kv_heads,
        tie_word_embeddings=shape.tied,
        max_position_embeddings=32_768,
        eos_token_id=0,
        pad_token_id=1,
    )
    with torch.device(device):
        return AutoModelForCausalLM.from_config(config, dtype=dtype or (torch.bfloat16 if device == "cuda" else torch.float32))


def make_tokenizer(words: int) -> PreTrainedTokenizerFast:
    """One word, one token: `t3 t17` is [3, 17]."""
    known = {name: i for i, name in enumerate(SPECIAL)} | {f"t{i}": i for i in range(len(SPECIAL), words)}
    tokenizer = Tokenizer(models.WordLevel(known, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="<eos>", pad_token="<pad>", unk_token="<unk>")


def make_prompts(shape: roofline.Shape, count: int, tokens: int) -> list[dict[str, str]]:
    """Random prompts of so many tokens, as rows of a dataset."""
    draw, words = random.Random(0), min(shape.vocabulary, 49_152)
    return [{"prompt": " ".join(f"t{draw.randrange(3, words)}" for _ in range(tokens))} for _ in range(count)]


def reward(completions: list[str], **columns: Any) -> list[float]:
    """Any number that differs within a group."""
    return [float(sum(map(ord, text)) % 7) for text in completions]


def add_step_arguments(parser: argparse.ArgumentParser) -> None:
    """What a GRPO step is of: the same for Podium's and for a peer's."""
    parser.add_argument("--size", choices=SHAPES, default="0.5b")
    parser.add_argument("--prompts", type=int, default=32)
    parser.add_argument("--group", type=int, default=8)
    parser.add_argument("--prompt-tokens", type=int, default=256)
    parser.add_argument("--new-tokens", type=int, default=512)
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")


def grpo_trainer(shape: roofline.Shape, args: argparse.Namespace, folder: str, steps: int, microbatch_tokens: int) -> Any:
    """A trainer, prepared, for so many steps of `args.prompts` x `args.group`, `args.prompt_tokens` + `args.new_tokens`.

    Answers have the full length (no token ends them). 7B has 8-bit moments.
    """
    from podium.recipes import build, load

    settings = load(
        values={
            "algorithm": "grpo",
            "model": {"dtype": "bfloat16" if args.device == "cuda" else "float32"},
            "batch": {
                "prompts_per_step": args.prompts,
                "group_size": args.group,
                "microbatch_tokens": microbatch_tokens,
            },
            "rollout": {"max_new_tokens": args.new_tokens, "max_concurrent": args.prompts * args.group},
            "optimizer": {"states": "8bit" if args.size == "7b" else "fp32"},
            "rewards": [{"function": reward}],
            "run": {"folder": folder, "steps": steps, "trackers": [], "progress": False, "device": args.device},
        }
    )
    model, tokenizer = make_model(shape, args.device), make_tokenizer(shape.vocabulary)
    rows = make_prompts(shape, args.prompts * (steps + 1), args.prompt_tokens)
    return build(settings, models={"actor": model}, tokenizer=tokenizer, data=rows).prepare()


def make_rows(lengths: list[int], prompt_tokens: int, group: int = 1, shared: bool = True, vocabulary: int = 150_000) -> Batch:
    """Rows of the given whole lengths; `shared`: each `group` of neighbours has one prompt."""
    draw = torch.Generator().manual_seed(1)

    def ids(count: int) -> torch.Tensor:
        return torch.randint(10, vocabulary, (count,), generator=draw)

    prompts = [ids(prompt_tokens) for _ in lengths]
    prompts = [prompts[i // group * group] for i in range(len(lengths))] if shared else prompts
    responses = [ids(n - prompt_tokens) for n in lengths]
    return Batch(
        {
            "prompt_ids": prompts,
            "response_ids": responses,
            "loss_mask": [torch.ones(len(r), dtype=torch.bool) for r in responses],
            "advantages": [torch.randn(1, generator=draw).expand(len(r)).clone() for r in responses],
        }
    )


def lognormal_lengths(total: int) -> list[int]:
    draw, lengths = random.Random(0), []
    around = min(768, total // 8)
    while (left := total - sum(lengths)) > 0:
        n = max(2 * PROMPT_TOKENS, int(draw.lognormvariate(math.log(around), 0.5)))
        lengths.append(n if left - n >= 2 * PROMPT_TOKENS else left)
    return lengths
