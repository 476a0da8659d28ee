"""How much does ReMax's baseline lower the variance of the policy's gradient?

    python benchmarks/remax_variance.py [--batches 40] [--steps 30] [--seed 0] [--folder runs/remax_variance]

One policy, always the same prompts, many independent batches of its samples. Each batch gives one gradient of the policy for
each estimator, all from the same samples: REINFORCE without a baseline, ReMax (less the greedy response's reward), and RLOO
(less the mean of the group's others; with the group's own mean it is that times (n - 1) / n). The variance is the trace of the
gradient's covariance: the mean squared distance from the mean gradient. It is measured for the quick start's small model after
SFT, and again after some steps of ReMax. No KL term; no weight changes while it is measured.

Two rewards are measured, as it depends on them: `share`, a graded one, the share of the right numbers that an answer has; and
`correct`, 1 for the right answer and 0 for all others. docs/algorithms/remax.md says why they differ.

The last line is one JSON object. `ratio_variance_remax_over_reinforce` is that of the graded reward, the larger of the two
places; `ratio_variance_remax_over_reinforce_right_or_wrong` that of the other.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import time
from collections import Counter, defaultdict
from pathlib import Path
from typing import Any

os.environ.setdefault("OMP_NUM_THREADS", "1")
sys.path.insert(0, str(Path(__file__).parent.parent))  # run as a file: the other benchmarks

PROMPTS, GROUP = 32, 4
ESTIMATORS = ("reinforce", "remax", "rloo")


def share(prompts: list[str], completions: list[str], answer: list[str], **columns: Any) -> list[float]:
    """A graded reward: the share of the right answer's numbers that the answer has, as often as it should."""
    pairs = [(Counter(given.split()), Counter(right.split())) for given, right in zip(completions, answer, strict=True)]
    return [(given & right).total() / right.total() for given, right in pairs]


def gradients(model: Any, batch: Any, loss: Any, rewards: dict[str, Any]) -> dict[tuple[str, str], Any]:
    """The loss's gradient for each reward and estimator, as flat vectors `[parameters]`: one forward pass for all."""
    import torch

    from podium.algorithms.reduce import token_weights
    from podium.engines.train.single import pad_rows
    from podium.models.packed import pack
    from podium.workers.advantages import estimate_advantages

    parameters = [p for p in model.parameters() if p.requires_grad]
    flat = model.compute(pack(batch.select("prompt_ids", "response_ids")), ("log_probs",))["log_probs"]
    log_probs = pad_rows(flat, batch.lengths("response"))
    mask = batch.padded("loss_mask").bool()
    weights = token_weights(mask, loss.reduction)
    out = {}
    for reward, columns in rewards.items():
        for estimator in ESTIMATORS:
            advantages = estimate_advantages(batch.with_columns(columns), estimator=estimator).padded("advantages")
            per_token, _ = loss.function({"log_probs": log_probs}, {"advantages": advantages, loss.mask: mask})
            parts = torch.autograd.grad((weights * per_token).sum(), parameters, retain_graph=True)
            out[reward, estimator] = torch.cat([part.flatten() for part in parts])
    return out


class Spread:
    """Mean and covariance trace of vectors that come one by one (Welford 1962)."""

    def __init__(self) -> None:
        self.count, self.squares = 0, 0.0
        self.mean: Any = 0.0

    def add(self, vector: Any) -> None:
        self.count += 1
        away = vector.double() - self.mean
        self.mean = self.mean + away / self.count
        self.squares += float(away @ (vector.double() - self.mean))

    @property
    def variance(self) -> float:
        return self.squares / (self.count - 1)

    @property
    def signal(self) -> float:
        """The mean gradient's squared length, less what the noise adds to it: the same for all estimators, up to noise."""
        return float(self.mean @ self.mean) - self.variance / self.count


def measure(trainer: Any, model: Any, prompts: Any, batches: int, first: int) -> dict[str, Any]:
    """The variance of each estimator's gradient, over so many batches of the present policy's samples, by reward."""
    from podium.algorithms.losses import policy_loss
    from podium.quickstart.task import correct
    from podium.stages.base import StepContext
    from podium.stages.reward import RewardStage
    from podium.stages.rollout import RolloutStage
    from podium.stages.sampling import GreedyBaselineStage

    stages = {function.__name__: RewardStage(functions=[function]) for function in (share, correct)}
    loss = policy_loss(objective="reinforce", one_update=True, reduction="sequence_mean_token_sum")
    spreads = {(reward, estimator): Spread() for reward in stages for estimator in ESTIMATORS}
    means: dict[str, float] = defaultdict(float)
    for i in range(batches):
        context = StepContext(first + i, trainer.roles, GROUP)
        batch = RolloutStage().run(prompts, context)
        rewards = {}
        for name, stage in stages.items():
            scored = GreedyBaselineStage(stage).run(stage.run(batch, context), context)
            rewards[name] = {column: scored[column] for column in ("rewards", "baseline_rewards")}
            means[name] += float(scored["rewards"].mean()) / batches
            means[f"{name}/greedy"] += float(scored["baseline_rewards"].mean()) / batches
        for key, gradient in gradients(model, batch, loss, rewards).items():
            spreads[key].add(gradient)
    return {name: summary({e: spreads[name, e] for e in ESTIMATORS}, means, name) for name in stages}


def summary(spreads: dict[str, Spread], means: dict[str, float], reward: str) -> dict[str, Any]:
    plain = spreads["reinforce"].variance
    return {
        "reward": round(means[reward], 4),
        "greedy_reward": round(means[f"{reward}/greedy"], 4),
        "variance": {name: float(f"{s.variance:.4g}") for name, s in spreads.items()},
        "ratio": {name: round(s.variance / plain, 4) for name, s in spreads.items()},
        "signal": {name: float(f"{s.signal:.4g}") for name, s in spreads.items()},
    }


def make_trainer(folder: Path, seed: int, steps: int) -> tuple[Any, Any]:
    """A ReMax run on the quick start's small model, prepared; and that model."""
    from benchmarks.learning import prepare
    from podium.models.heads import ActorModel
    from podium.models.loading import load_tokenizer
    from podium.recipes import build, load

    home = folder / f"seed{seed}"
    prepare(home, seed)
    run = {"folder": str(folder), "name": "remax", "seed": seed, "steps": steps, "threads": 1}
    values = {
        "algorithm": "remax",
        "model": {"path": str(home / "sft" / "model"), "dtype": "float32"},
        "data": {"path": str(home / "problems.jsonl"), "max_prompt_tokens": 32},
        "batch": {"prompts_per_step": 256, "group_size": 1, "minibatch_sequences": 64},
        "optimizer": {"lr": 1.5e-4, "warmup_updates": 12, "betas": [0.9, 0.99]},
        "kl": {"coef": 0.0},
        "rollout": {"max_new_tokens": 8},
        "rewards": [{"function": "podium.quickstart.task:correct"}],
        "checkpoint": {"export": False},
        "run": {**run, "trackers": [], "log_samples": 0, "progress": False},
    }
    actor = ActorModel.from_pretrained(home / "sft" / "model")
    tokenizer = load_tokenizer(home / "sft" / "model")
    return build(load(None, [], values), models={"actor": actor}, tokenizer=tokenizer).prepare(), actor


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--batches", type=int, default=40, help="gradients that the variance is taken over")
    parser.add_argument("--steps", type=int, default=30, help="steps of ReMax between the two places")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--folder", type=Path, default=Path("runs/remax_variance"))
    args = parser.parse_args()
    started = time.perf_counter()
    trainer, actor = make_trainer(args.folder, args.seed, args.steps)
    prompts = trainer.loader.batch.index(range(PROMPTS))
    places = {"after_sft": measure(trainer, actor, prompts, args.batches, first=10_000)}
    print(json.dumps(places), flush=True)
    trainer.train()
    places[f"after_{args.steps}_steps"] = measure(trainer, actor, prompts, args.batches, first=20_000)
    worst = {reward: max(place[reward]["ratio"]["remax"] for place in places.values()) for reward in ("share", "correct")}
    report = {
        "ratio_variance_remax_over_reinforce": worst["share"],
        "ratio_variance_remax_over_reinforce_right_or_wrong": worst["correct"],
        "batches": args.batches,
        "sequences": PROMPTS * GROUP,
        "places": places,
    }
    print(json.dumps(report | {"seconds": round(time.perf_counter() - started, 1)}))


if __name__ == "__main__":
    main()
