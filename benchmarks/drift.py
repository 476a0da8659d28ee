"""How far training in bf16 (with fp32 masters) drifts from training in fp32, over 200 updates on the same batches.

    python benchmarks/drift.py [--size small] [--updates 200] [--lr 1e-6] [--device cuda]
    OMP_NUM_THREADS=1 python benchmarks/drift.py --size tiny --device cpu

A model of random weights first learns a simple language (SFT in fp32), so that it has choices to make and to lose. Then
batches of answers are recorded (log-normal lengths, groups of 8 with shared prompts, a reward that prefers some tokens, group
advantages, old log-probs of that model in fp32), and copies of the model train on them, all in the same order: in fp32; in
bf16; in fp32 from weights that were rounded to bf16 first, which shows what the rounding of the start alone does; and in fp32
in smaller micro-batches, which is the smallest difference that there can be: that of the order of sums.

What is reported, each against fp32: the loss and the gradient's norm of every update (the norm's relative); log-probs of
held-out answers (mean and largest difference, nats a token) after the first update and ten times after; and the parameters'
moves, from where each copy began: their distance over the length of fp32's move, and the cosine between them. The last line
is one JSON object.
"""

from __future__ import annotations

import argparse
import copy
import gc
import json
import math
import random
import sys
import time
from pathlib import Path
from typing import Any

import torch

from podium.algorithms.losses import policy_loss, supervised_loss
from podium.core.batch import Batch
from podium.core.jsonable import jsonable
from podium.core.settings import OptimizerSettings
from podium.engines.train import SingleDeviceEngine
from podium.models.heads import ActorModel

sys.path.insert(0, str(Path(__file__).parent))
import roofline
from models import SHAPES as WHOLE
from models import make_model

SHAPES = {
    "tiny": roofline.Shape(2, 64, 4, 2, 16, 192, 512, True),
    "small": roofline.Shape(12, 768, 12, 4, 64, 2048, 32_000, True),
    "0.5b": WHOLE["0.5b"],
}
TOKENS = {"tiny": 512, "small": 4096, "0.5b": 8192}
GROUP, DISTINCT = 8, 16
"""Answers to a prompt; batches that are recorded: 200 updates go through them again and again."""


def make_batches(size: str, count: int, seed: int) -> list[Batch]:
    """Groups of answers of log-normal lengths, in a language where each token is one of four that may follow the last."""
    draw, vocabulary = random.Random(seed), 512  # words of the language; the model may have more
    around = 32 if size == "tiny" else 256
    return [_batch(draw, vocabulary, around, TOKENS[size]) for _ in range(count)]


def _batch(draw: random.Random, vocabulary: int, around: int, tokens: int) -> Batch:
    prompts: list[list[int]] = []
    responses: list[list[int]] = []
    advantages: list[list[float]] = []
    while sum(map(len, responses)) < tokens:
        prompt = _text(draw, vocabulary, draw.randrange(vocabulary), 16)
        group = [
            _text(draw, vocabulary, prompt[-1], max(4, int(draw.lognormvariate(math.log(around), 0.5)))) for _ in range(GROUP)
        ]
        rewards = torch.tensor([sum(token % 4 == 0 for token in text) / len(text) for text in group])
        prompts += [prompt] * GROUP
        responses += group
        each = ((rewards - rewards.mean()) / (rewards.std() + 1e-4)).tolist()
        advantages += [[value] * len(text) for value, text in zip(each, group, strict=True)]
    mask = [torch.ones(len(text), dtype=torch.bool) for text in responses]
    return Batch({"prompt_ids": prompts, "response_ids": responses, "loss_mask": mask, "advantages": advantages})


def _text(draw: random.Random, vocabulary: int, last: int, count: int) -> list[int]:
    text = []
    for _ in range(count):
        last = (7 * last + 13 * draw.randrange(4) + 1) % vocabulary
        text.append(last)
    return text


class Trained:
    """One copy that trains on the recorded batches, and what was seen of it."""

    def __init__(self, model: Any, args: argparse.Namespace, microbatch: int) -> None:
        settings = OptimizerSettings(lr=args.lr, schedule="constant", max_grad_norm=1.0)
        self.engine = SingleDeviceEngine(ActorModel(model), optimizer=settings, microbatch_tokens=microbatch)
        self.start = self.masters()
        self.losses: list[float] = []
        self.norms: list[float] = []
        self.log_probs: list[torch.Tensor] = []

    def run(self, batches: list[Batch], held_out: Batch, updates: int) -> None:
        loss, every = policy_loss(), max(1, updates // 10)
        for number in range(updates):
            means = self.engine.update(batches[number % len(batches)], loss).means()
            self.losses.append(means["loss"])
            self.norms.append(means.get("grad_norm", math.nan))
            if number == 0 or (number + 1) % every == 0:
                self.log_probs.append(self.engine.compute(held_out, ("log_probs",))["log_probs"].values)

    def masters(self) -> dict[str, torch.Tensor]:
        """The parameters as the optimizer has them, in fp64 on the CPU."""
        state = self.engine.state_dict()["optimizer"]["masters"]
        own = {name: p.detach() for name, p in self.engine.model.named_parameters()}
        return {name: state.get(name, own[name]).cpu().double() for name in own}

    def moves(self) -> dict[str, torch.Tensor]:
        """How far each parameter is from where it began."""
        return {name: now - self.start[name] for name, now in self.masters().items()}


Weights = dict[str, torch.Tensor]


def compared(one: Trained, with_fp32: Trained) -> dict[str, Any]:
    """`one` against fp32, in numbers."""
    gaps = [(a - b).abs() for a, b in zip(one.log_probs, with_fp32.log_probs, strict=True)]
    norms = [abs(a - b) / b for a, b in zip(one.norms, with_fp32.norms, strict=True)]
    losses = [abs(a - b) for a, b in zip(one.losses, with_fp32.losses, strict=True)]
    mine, theirs = one.moves(), with_fp32.moves()
    return {
        "loss_gap": _summary(losses),
        "grad_norm_gap": _summary(norms),
        "log_prob_gap_mean": [float(gap.mean()) for gap in gaps],
        "log_prob_gap_max": [float(gap.max()) for gap in gaps],
        "moves_gap": _length({n: mine[n] - theirs[n] for n in mine}) / _length(theirs),
        "moves_cosine": sum(float((mine[n] * theirs[n]).sum()) for n in mine) / (_length(mine) * _length(theirs)),
    }


def _summary(gaps: list[float]) -> dict[str, float]:
    return {"first": gaps[0], "mean": _mean(gaps), "last_tenth": _mean(gaps[-max(1, len(gaps) // 10) :]), "max": max(gaps)}


def _length(weights: Weights) -> float:
    return math.sqrt(sum(float(tensor.square().sum()) for tensor in weights.values()))


def _mean(values: list[float]) -> float:
    return sum(values) / len(values)


def learned_model(args: argparse.Namespace) -> Any:
    """The model that all copies start from: fp32, after SFT on the language."""
    model = make_model(SHAPES[args.size], args.device, torch.float32)
    settings = OptimizerSettings(lr=1e-3, warmup_updates=10)
    engine = SingleDeviceEngine(ActorModel(model), optimizer=settings, microbatch_tokens=args.microbatch_tokens)
    batches = make_batches(args.size, args.sft_updates, seed=2)
    losses = [engine.update(batch, supervised_loss()).means()["loss"] for batch in batches]
    print(f"SFT: loss {losses[0]:.3f} -> {losses[-1]:.3f} in {len(losses)} updates", file=sys.stderr, flush=True)
    return model


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--size", choices=SHAPES, default="small")
    parser.add_argument("--updates", type=int, default=200)
    parser.add_argument("--sft-updates", type=int, default=200)
    parser.add_argument("--lr", type=float, default=1e-6)
    parser.add_argument("--microbatch-tokens", type=int, default=8192)
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    args = parser.parse_args()
    report = run(args)
    print(json.dumps(jsonable(report)))


def run(args: argparse.Namespace) -> dict[str, Any]:
    """Trains every copy and compares it with fp32."""
    model = learned_model(args)
    recorder = SingleDeviceEngine(ActorModel(model), microbatch_tokens=args.microbatch_tokens)
    batches, held_out = make_batches(args.size, DISTINCT, seed=0), make_batches(args.size, 1, seed=1)[0]
    batches = [b.with_columns({"old_log_probs": recorder.compute(b, ("log_probs",))["log_probs"]}) for b in batches]
    budget, smaller = args.microbatch_tokens, TOKENS[args.size] // 3
    variants: dict[str, tuple[torch.dtype, torch.dtype, int]] = {  # rounded to, trained in, micro-batch
        "fp32": (torch.float32, torch.float32, budget),
        "bf16": (torch.bfloat16, torch.bfloat16, budget),
        "fp32 from rounded weights": (torch.bfloat16, torch.float32, budget),
        "fp32 in smaller micro-batches": (torch.float32, torch.float32, smaller),
    }
    report: dict[str, Any] = {"device": args.device, "torch": torch.__version__, "size": args.size, "updates": args.updates}
    fp32: Trained | None = None
    for name, (rounded, dtype, microbatch) in variants.items():
        started = time.perf_counter()
        one = Trained(copy.deepcopy(model).to(rounded).to(dtype), args, microbatch)
        one.run(batches, held_out, args.updates)
        seconds = time.perf_counter() - started
        if fp32 is None:
            fp32 = one
            moved = float((one.log_probs[-1] - one.log_probs[0]).abs().mean())
            found = {"grad_norm_mean": _mean(one.norms), "loss_mean": _mean(one.losses), "log_probs_moved_mean": moved}
        else:
            found = compared(one, fp32)
            one.engine.model = None
        report[name] = {"seconds": seconds, **found}
        print(name, json.dumps(jsonable(report[name]), indent=1), file=sys.stderr, flush=True)
        del one
        gc.collect()
    return report


if __name__ == "__main__":
    main()
