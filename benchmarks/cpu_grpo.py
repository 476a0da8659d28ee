"""A GRPO step on the CPU, Podium beside TRL, in one process on one thread.

Both train a Llama of 135M parameters (SmolLM2's shape, random weights) on 4 prompts x 4 samples, 64 prompt tokens and
64 new tokens: generate, score, one AdamW update, no KL. The figure is CPU seconds per step, so that a busy machine does not
change the ratio. Each side's first two steps are left out: the optimizer's states come at the end of the first, and the second
is the first that needs memory beside them (three seconds of page faults were seen there).

    OMP_NUM_THREADS=1 python benchmarks/cpu_grpo.py [--steps 5] [--without-trl] [--dtype auto]

Both sides run in the dtype that is fastest for both: bf16 where the CPU multiplies it in hardware (AMX, AVX512-BF16), else
fp32 (`model.dtype: auto` makes the same choice). The last line is one JSON object.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import tempfile
import time
from typing import Any

os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("HF_HUB_OFFLINE", "1")

import torch
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

PROMPTS, GROUP, PROMPT_TOKENS, NEW_TOKENS = 4, 4, 64, 64
VOCABULARY = 49_152
SPECIAL = ("<eos>", "<pad>", "<unk>")


def make_model(dtype: torch.dtype) -> LlamaForCausalLM:
    """SmolLM2-135M's shape with random weights."""
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=VOCABULARY,
        hidden_size=576,
        intermediate_size=1536,
        num_hidden_layers=30,
        num_attention_heads=9,
        num_key_value_heads=3,
        tie_word_embeddings=True,
        max_position_embeddings=2048,
        eos_token_id=0,
        pad_token_id=1,
        bos_token_id=None,
    )
    return LlamaForCausalLM(config).to(dtype)


def make_tokenizer() -> PreTrainedTokenizerFast:
    """One word, one token: texts have exactly as many tokens as asked for."""
    words = {name: i for i, name in enumerate(SPECIAL)} | {f"t{i}": i for i in range(len(SPECIAL), VOCABULARY)}
    tokenizer = Tokenizer(models.WordLevel(words, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="<eos>", pad_token="<pad>", unk_token="<unk>")


def make_rows(count: int) -> list[dict[str, str]]:
    draw = random.Random(0)
    return [{"prompt": " ".join(f"t{draw.randrange(3, VOCABULARY)}" for _ in range(PROMPT_TOKENS))} for _ in range(count)]


def reward(completions: list[str], **columns: Any) -> list[float]:
    """Any number that differs within a group."""
    return [float(sum(map(ord, text)) % 7) for text in completions]


def podium_steps(steps: int, dtype: torch.dtype, folder: str) -> tuple[list[float], dict[str, float]]:
    """CPU seconds of each step, and where the last one's wall time went."""
    from podium.recipes import build, load
    from podium.stages.base import StepContext

    settings = load(
        values={
            "algorithm": "grpo",
            "model": {"dtype": "bfloat16" if dtype is torch.bfloat16 else "float32"},
            "batch": {"prompts_per_step": PROMPTS, "group_size": GROUP},
            "rollout": {"max_new_tokens": NEW_TOKENS},
            "rewards": [{"function": reward}],
            "run": {"folder": folder, "steps": steps, "trackers": [], "progress": False, "threads": 1, "device": "cpu"},
        }
    )
    rows = make_rows(PROMPTS * (steps + 1))
    trainer = build(settings, models={"actor": make_model(dtype)}, tokenizer=make_tokenizer(), data=rows).prepare()
    seconds, shares = [], {}
    for step in range(steps):
        context = StepContext(step, trainer.roles, GROUP)
        started = time.process_time()
        batch = trainer.run_step(trainer.loader.next_batch(), context)
        seconds.append(time.process_time() - started)
        assert int(batch.lengths("prompt").min()) == PROMPT_TOKENS
        shares = {n: v for n, v in context.metrics.means().items() if n.startswith("time/")}
        print(f"podium step {step}: {seconds[-1]:.2f} CPU s", flush=True)
    return seconds, shares


def trl_steps(steps: int, dtype: torch.dtype, folder: str) -> list[float]:
    """CPU seconds of each of TRL's steps, with the same model, prompts, reward and optimizer."""
    from datasets import Dataset
    from transformers import TrainerCallback
    from trl import GRPOConfig, GRPOTrainer

    marks: list[float] = []

    class Clock(TrainerCallback):
        def on_step_begin(self, *args: Any, **kwargs: Any) -> None:
            marks.append(time.process_time())

        def on_step_end(self, *args: Any, **kwargs: Any) -> None:
            marks[-1] = time.process_time() - marks[-1]
            print(f"trl step {len(marks) - 1}: {marks[-1]:.2f} CPU s", flush=True)

    config = GRPOConfig(
        output_dir=folder,
        per_device_train_batch_size=PROMPTS * GROUP,
        num_generations=GROUP,
        max_completion_length=NEW_TOKENS,
        beta=0.0,
        num_iterations=1,
        max_grad_norm=1.0,
        learning_rate=1e-6,
        max_steps=steps,
        bf16=dtype is torch.bfloat16,
        gradient_checkpointing=False,  # recomputing would only slow TRL down here
        optim="adamw_torch",
        use_cpu=True,
        report_to="none",
        save_strategy="no",
        logging_strategy="no",
        disable_tqdm=True,
    )
    trainer = GRPOTrainer(
        model=make_model(dtype),
        args=config,
        train_dataset=Dataset.from_list(make_rows(64)),
        processing_class=make_tokenizer(),
        reward_funcs=reward,
        callbacks=[Clock()],
    )
    trainer.train()
    return marks


def main() -> None:
    from podium.models.loading import resolve_dtype

    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=5, help="steps of each side; the first two are left out")
    parser.add_argument("--dtype", choices=["auto", "bfloat16", "float32"], default="auto", help="of both sides' weights")
    parser.add_argument("--without-trl", action="store_true")
    args = parser.parse_args()
    torch.set_num_threads(1)
    dtype = resolve_dtype(args.dtype, "cpu")
    figures: dict[str, Any] = {"dtype": str(dtype).removeprefix("torch."), "threads": 1, "torch": torch.__version__}
    with tempfile.TemporaryDirectory() as folder:
        ours, shares = podium_steps(args.steps, dtype, folder)
        figures["podium_cpu_seconds_per_step"] = round(_mean(ours), 3)
        figures |= {f"podium_{name.replace('/', '_')}": round(value, 3) for name, value in shares.items()}
        if not args.without_trl:
            import trl

            theirs = trl_steps(args.steps, dtype, folder)
            figures["trl"] = trl.__version__
            figures["trl_cpu_seconds_per_step"] = round(_mean(theirs), 3)
            figures["ratio_steps_per_cpu_second_to_trl"] = round(_mean(theirs) / _mean(ours), 3)
    print(json.dumps(figures))


def _mean(seconds: list[float]) -> float:
    """Without the first two steps (warm-up), where there are more."""
    counted = seconds[2:] or seconds[-1:]
    return sum(counted) / len(counted)


if __name__ == "__main__":
    main()
