"""A whole GRPO step on one device: generate, score, one AdamW update, no KL; beside the roofline of `roofline.py`.

    python benchmarks/grpo_step.py [--size 0.5b] [--prompts 32] [--group 8] [--prompt-tokens 256] [--new-tokens 512]
    python benchmarks/grpo_step.py --size 1.5b --prompts 128 --prompt-tokens 512

Random bf16 weights of Qwen2.5's shapes; all answers have the full length (no token ends them); the reward is any number that
differs within a group. The rates that the roofline needs are measured in the same run. The first step (compilation, graphs)
is left out. `--size tiny --device cpu` runs the script itself anywhere. The last line is one JSON object.
"""

from __future__ import annotations

import argparse
import json
import random
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import torch
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import AutoModelForCausalLM, PreTrainedTokenizerFast, Qwen2Config

sys.path.insert(0, str(Path(__file__).parent))
import roofline

SHAPES = {**roofline.SHAPES, "tiny": roofline.Shape(2, 64, 4, 2, 16, 128, 512, True)}
SPECIAL = ("<eos>", "<pad>", "<unk>")


def make_model(shape: roofline.Shape, device: str) -> Any:
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
        return AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16 if device == "cuda" else torch.float32)


def make_tokenizer(words: int) -> PreTrainedTokenizerFast:
    """One word, one token, so that texts have exactly as many tokens as asked for."""
    known = {name: i for i, name in enumerate(SPECIAL)} | {f"t{i}": i for i in range(len(SPECIAL), words)}
    tokenizer = Tokenizer(models.WordLevel(known, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="<eos>", pad_token="<pad>", unk_token="<unk>")


def reward(completions: list[str], **columns: Any) -> list[float]:
    return [float(sum(map(ord, text)) % 7) for text in completions]


def measured_machine(device: str) -> roofline.Machine:
    """The rate of an 8192-cubed bf16 product on random data, and the bandwidth of a 2 GiB copy."""
    if device != "cuda":
        return roofline.Machine(1e11, 1e10)
    a, b = (torch.randn(8192, 8192, device=device, dtype=torch.bfloat16) for _ in range(2))
    product = _seconds(lambda: a @ b)
    source = torch.empty(2**31, dtype=torch.uint8, device=device)
    to = torch.empty_like(source)
    copy = _seconds(lambda: to.copy_(source))
    return roofline.Machine(2 * 8192**3 / product, 2 * source.nbytes / copy)


def _seconds(call: Any, count: int = 20) -> float:
    for _ in range(3):
        call()
    torch.cuda.synchronize()
    started = time.perf_counter()
    for _ in range(count):
        call()
    torch.cuda.synchronize()
    return (time.perf_counter() - started) / count


def podium_steps(args: argparse.Namespace, shape: roofline.Shape, folder: str) -> tuple[list[float], dict[str, float]]:
    """Seconds of each step, and where the last one's time went."""
    from podium.recipes import build, load
    from podium.stages.base import StepContext

    settings = load(
        values={
            "algorithm": "grpo",
            "model": {"dtype": "bfloat16" if args.device == "cuda" else "float32"},
            "batch": {
                "prompts_per_step": args.prompts,
                "group_size": args.group,
                "microbatch_tokens": args.microbatch_tokens,
            },
            "rollout": {"max_new_tokens": args.new_tokens, "max_concurrent": args.prompts * args.group},
            "optimizer": {"states": "8bit" if args.size == "7b" else "fp32"},
            "rewards": [{"function": reward}],
            "run": {"folder": folder, "steps": args.steps, "trackers": [], "progress": False, "device": args.device},
        }
    )
    draw, words = random.Random(0), min(shape.vocabulary, 49_152)
    rows = [
        {"prompt": " ".join(f"t{draw.randrange(3, words)}" for _ in range(args.prompt_tokens))}
        for _ in range(args.prompts * (args.steps + 1))
    ]
    model = make_model(shape, args.device)
    trainer = build(settings, models={"actor": model}, tokenizer=make_tokenizer(shape.vocabulary), data=rows).prepare()
    seconds, shares = [], {}
    for number in range(args.steps):
        context = StepContext(number, trainer.roles, args.group)
        started = time.perf_counter()
        batch = trainer.run_step(trainer.loader.next_batch(), context)
        if args.device == "cuda":
            torch.cuda.synchronize()
        seconds.append(time.perf_counter() - started)
        shares = {n: v for n, v in context.metrics.means().items() if n.startswith("time/")}
        new = float(batch.lengths("response").float().mean())
        print(f"step {number}: {seconds[-1]:.2f} s, {new:.0f} new tokens a sequence, {shares}", flush=True)
    return seconds, shares


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--size", choices=SHAPES, default="0.5b")
    parser.add_argument("--prompts", type=int, default=32)
    parser.add_argument("--group", type=int, default=8)
    parser.add_argument("--prompt-tokens", type=int, default=256)
    parser.add_argument("--new-tokens", type=int, default=512)
    parser.add_argument("--microbatch-tokens", type=int, default=32_768)
    parser.add_argument("--steps", type=int, default=4)
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    args = parser.parse_args()
    shape, machine = SHAPES[args.size], measured_machine(args.device)
    floor = roofline.step(shape, machine, args.prompts, args.group, args.prompt_tokens, args.new_tokens)
    with tempfile.TemporaryDirectory() as folder:
        seconds, shares = podium_steps(args, shape, folder)
    best = sorted(seconds[1:] or seconds)[len(seconds[1:]) // 2]
    report = {"size": args.size, "seconds": best, "all": seconds, "of_roofline": floor["step"] / best, "roofline": floor}
    print(json.dumps({**report, "shares": shares}))


if __name__ == "__main__":
    main()
