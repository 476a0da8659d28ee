"""TRL's side of the benchmarks: its own update of given rows (`update.py`), and its own GRPO step (`grpo_step.py`).

As a program it makes GRPO steps with TRL, with vLLM in its process (`--vllm`) or with `generate` of transformers, and
prints one JSON object; `grpo_step.py --peer` starts it so.

TRL's settings are its defaults, but for what is said: weights in bf16 (its default is fp32 under autocast, which is also
measured in the update), AdamW of torch, fused. Its default recomputes the forward pass in the backward pass (gradient
checkpointing); both that and without are measured, and `grpo_step.py` compares with the fastest.
"""

from __future__ import annotations

import argparse
import gc
import importlib.util
import json
import os
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

os.environ.setdefault("HF_HUB_OFFLINE", "1")

import torch

sys.path.insert(0, str(Path(__file__).parent))
from models import SHAPES, add_step_arguments, make_model, make_prompts, make_tokenizer, reward

from podium.core.batch import Batch
from podium.core.jsonable import jsonable
from podium.profiling.machine import synchronize, timed

DEFAULT = "fp32 autocast, checkpointing"
"""How the settings' names begin that are TRL's own defaults."""


@dataclass(frozen=True)
class Setting:
    """How TRL makes an update. `rows`: of one forward pass (padded to the longest row of the update, as TRL does)."""

    rows: int
    checkpointing: bool = True
    dtype: torch.dtype = torch.bfloat16
    attention: str = "sdpa"

    @property
    def name(self) -> str:
        kind = "fp32 autocast" if self.dtype is torch.float32 else "bf16"
        how = "checkpointing" if self.checkpointing else "no checkpointing"
        return f"{kind}, {how}, {self.attention}, {self.rows} rows"


def updates(shape: Any, device: str, rows: Batch, stack: ExitStack) -> dict[str, dict[str, Any]]:
    """TRL's update of `rows` in several settings: seconds (NaN: memory did not suffice) and the most memory, by name."""
    folder = stack.enter_context(tempfile.TemporaryDirectory())
    inputs = padded_inputs(rows, device)
    table: dict[str, dict[str, Any]] = {}

    def best(settings: list[Setting]) -> Setting:
        """Tries all that differ in `rows` on one trainer."""
        with trainer_of(shape, device, settings[0], folder) as trainer:
            for setting in settings:
                table[setting.name] = one_update(trainer, inputs, setting.rows, device)
                print(f"   trl {setting.name}: {json.dumps(jsonable(table[setting.name]))}", flush=True)
        return min(settings, key=lambda s: _or_inf(table[s.name]["seconds"]))

    fastest = best([Setting(n) for n in (4, 8, 16)])
    without = best([Setting(n, checkpointing=False) for n in (2, 4, 8)])
    best([replace(fastest, dtype=torch.float32)])
    if importlib.util.find_spec("flash_attn") is not None and device == "cuda":
        best([replace(min(fastest, without, key=lambda s: _or_inf(table[s.name]["seconds"])), attention="flash_attention_2")])
    return table


def _or_inf(seconds: float) -> float:
    return seconds if seconds > 0 else float("inf")


@contextmanager
def trainer_of(shape: Any, device: str, setting: Setting, folder: str) -> Iterator[Any]:
    """TRL's GRPOTrainer as `train()` would prepare it, which takes its inputs as they are given."""
    from datasets import Dataset
    from trl import GRPOConfig, GRPOTrainer

    class Given(GRPOTrainer):
        def _prepare_inputs(self, generation_batch: Any) -> Any:
            return generation_batch

    model = make_model(shape, device, setting.dtype if device == "cuda" else torch.float32)
    model.set_attn_implementation(setting.attention)
    config = GRPOConfig(
        output_dir=folder,
        per_device_train_batch_size=2,
        num_generations=2,
        learning_rate=1e-6,
        max_grad_norm=1.0,
        optim="adamw_torch_fused",
        bf16=device == "cuda",
        gradient_checkpointing=setting.checkpointing,
        use_cpu=device == "cpu",
        report_to="none",
        save_strategy="no",
        logging_strategy="no",
        disable_tqdm=True,
    )
    trainer = Given(
        model=model,
        args=config,
        train_dataset=Dataset.from_list([{"prompt": "t3"}] * 8),
        processing_class=make_tokenizer(64),
        reward_funcs=reward,
    )
    if setting.checkpointing:
        model.gradient_checkpointing_enable(gradient_checkpointing_kwargs=config.gradient_checkpointing_kwargs)
    trainer.create_optimizer()
    trainer.model_wrapped, trainer.optimizer = trainer.accelerator.prepare(trainer.model, trainer.optimizer)
    try:
        yield trainer
    finally:
        trainer.accelerator.free_memory()
        vars(trainer).clear()  # its callbacks hold the model and the optimizer too
        del model
        _free(device)


def one_update(trainer: Any, inputs: dict[str, Any], rows: int, device: str) -> dict[str, Any]:
    """Mean seconds of an update: `training_step` for each micro-batch, the gradient's norm clipped, AdamW.

    `grad_norm` is that of the trainer's first update, and of a later one where it has made some.
    """
    parts = list(_parts(inputs, rows))
    trainer.current_gradient_accumulation_steps = trainer.args.steps_per_generation = len(parts)

    def update() -> torch.Tensor:
        for part in parts:
            trainer.training_step(trainer.model_wrapped, part, None)
        norm = trainer.accelerator.clip_grad_norm_(trainer.model.parameters(), trainer.args.max_grad_norm)
        trainer.optimizer.step()
        trainer.optimizer.zero_grad()
        return norm

    if device == "cuda":
        torch.cuda.reset_peak_memory_stats()
    try:
        norm = float(update())
        seconds = timed(update, 2, 0, device)
    except torch.cuda.OutOfMemoryError:
        trainer.optimizer.zero_grad()
        _free(device)
        return {"seconds": float("nan"), "peak_gb": float("inf")}
    peak = {"peak_gb": torch.cuda.max_memory_allocated() / 1e9} if device == "cuda" else {}
    return {"seconds": seconds, **peak, "grad_norm": norm}


def padded_inputs(rows: Batch, device: str) -> dict[str, Any]:
    """What TRL's rollout hands to its loss: prompts padded on the left, answers on the right, to the longest of all."""
    prompts, answers = list(rows["prompt_ids"]), list(rows["response_ids"])
    longest, width = max(map(len, prompts)), max(map(len, answers))
    ids = {"prompt": torch.ones(len(prompts), longest), "completion": torch.ones(len(answers), width)}
    masks = {name: torch.zeros_like(tensor) for name, tensor in ids.items()}
    for i, (prompt, answer) in enumerate(zip(prompts, answers, strict=True)):
        ids["prompt"][i, longest - len(prompt) :], masks["prompt"][i, longest - len(prompt) :] = prompt.float(), 1
        ids["completion"][i, : len(answer)], masks["completion"][i, : len(answer)] = answer.float(), 1
    return {
        **{f"{name}_ids": tensor.long().to(device) for name, tensor in ids.items()},
        **{f"{name}_mask": tensor.long().to(device) for name, tensor in masks.items()},
        "advantages": torch.stack([row[0] for row in rows["advantages"]]).to(device),
        "num_items_in_batch": masks["completion"].sum().to(device),
    }


def _parts(inputs: dict[str, Any], rows: int) -> Iterator[dict[str, Any]]:
    for start in range(0, len(inputs["prompt_ids"]), rows):
        yield {name: t[start : start + rows] if t.ndim else t for name, t in inputs.items()}


def _free(device: str) -> None:
    gc.collect()
    if device == "cuda":
        torch.cuda.empty_cache()


# ---------------------------------------------------------------------- a whole step


PHASES = ("default", "no checkpointing", "no checkpointing, no correction")
"""TRL's settings as they are; then without recomputation; then also without the importance correction between vLLM and the
trainer, which costs a forward pass (so TRL does no more than Podium does)."""


def steps(args: argparse.Namespace, folder: str) -> dict[str, Any]:
    """Seconds of a step in each phase: the mean of `args.steps`, after one step that is left out in each phase."""
    from datasets import Dataset
    from transformers import TrainerCallback
    from trl import GRPOConfig, GRPOTrainer

    phases = PHASES if args.vllm else PHASES[:2]
    marks: list[float] = []

    class Clock(TrainerCallback):
        def on_step_begin(self, *_: Any, **__: Any) -> None:
            phase, first = divmod(len(marks), args.steps + 1)
            if first == 0:
                _enter(trainer, phases[phase])
            synchronize(args.device)
            marks.append(time.perf_counter())

        def on_step_end(self, *_: Any, **__: Any) -> None:
            synchronize(args.device)
            marks[-1] = time.perf_counter() - marks[-1]
            print(f"trl step {len(marks) - 1}: {marks[-1]:.2f} s", flush=True)

    trainer = GRPOTrainer(
        model=_saved_model(args, folder),
        args=GRPOConfig(output_dir=f"{folder}/trl", max_steps=len(phases) * (args.steps + 1), **_settings(args)),
        train_dataset=Dataset.from_list(
            make_prompts(SHAPES[args.size], args.prompts * (len(phases) * (args.steps + 1) + 1), args.prompt_tokens)
        ),
        processing_class=make_tokenizer(SHAPES[args.size].vocabulary),
        reward_funcs=reward,
        callbacks=[Clock()],
    )
    note = None
    try:
        trainer.train()
    except torch.cuda.OutOfMemoryError:
        marks, note = marks[:-1], "memory did not suffice for the last phase"
    lengths = trainer._metrics["train"]["completions/mean_length"]
    if lengths and min(lengths) < 0.99 * args.new_tokens:
        raise SystemExit(f"TRL's answers are shorter than {args.new_tokens} tokens: {lengths}")
    each = args.steps + 1
    seconds = {p: marks[i * each + 1 : (i + 1) * each] for i, p in enumerate(phases)}
    return {"seconds": {p: sum(s) / len(s) for p, s in seconds.items() if s}, "all": marks, "note": note}


def _settings(args: argparse.Namespace) -> dict[str, Any]:
    """TRL's settings: the defaults, but for what the benchmark needs and the weights' dtype."""
    sequences = args.prompts * args.group
    vllm = {"use_vllm": True, "vllm_mode": "colocate", "vllm_max_model_length": args.prompt_tokens + args.new_tokens + 8}
    return {
        "model_init_kwargs": {"dtype": "bfloat16" if args.device == "cuda" else "float32"},
        "per_device_train_batch_size": min(args.microbatch, sequences),
        "gradient_accumulation_steps": max(1, sequences // args.microbatch),
        "num_generations": args.group,
        "max_completion_length": args.new_tokens,
        "generation_kwargs": {"ignore_eos": True} if args.vllm else {"min_new_tokens": args.new_tokens},
        "beta": 0.0,
        "num_iterations": 1,
        "max_grad_norm": 1.0,
        "learning_rate": 1e-6,
        "optim": "adamw_torch_fused",
        "use_cpu": args.device == "cpu",
        "bf16": args.device == "cuda",
        "report_to": "none",
        "save_strategy": "no",
        "logging_strategy": "no",
        "disable_tqdm": True,
        **(vllm if args.vllm else {}),
    }


def _enter(trainer: Any, phase: str) -> None:
    if "no checkpointing" in phase:
        trainer.model.gradient_checkpointing_disable()
    if "no correction" in phase:
        trainer.vllm_importance_sampling_correction = False


def _saved_model(args: argparse.Namespace, folder: str) -> str:
    """vLLM loads its model from a folder."""
    path, shape = f"{folder}/model", SHAPES[args.size]
    model = make_model(shape, args.device)
    model.save_pretrained(path)
    make_tokenizer(shape.vocabulary).save_pretrained(path)
    del model
    _free(args.device)
    return path


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add_step_arguments(parser)
    parser.add_argument("--microbatch", type=int, default=32, help="sequences in a forward pass of training")
    parser.add_argument("--steps", type=int, default=2, help="counted steps of each phase")
    parser.add_argument("--vllm", action="store_true", help="vLLM in TRL's process generates")
    args = parser.parse_args()
    import trl

    # TRL reaches into vLLM's engine, which must then be in this process.
    os.environ.setdefault("VLLM_ENABLE_V1_MULTIPROCESSING", "0")
    os.environ.setdefault("VLLM_NO_USAGE_STATS", "1")
    versions = {"trl": trl.__version__}
    if args.vllm:
        import vllm

        versions["vllm"] = vllm.__version__
    with tempfile.TemporaryDirectory() as folder:
        print(json.dumps(jsonable({**versions, **steps(args, folder)})))


if __name__ == "__main__":
    main()
