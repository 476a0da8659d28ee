"""The R1 path on a laptop CPU: SFT, a reward model with three heads, PPO, rejection sampling, and a second round.

    python examples/r1/run.py                 # five minutes of one CPU thread; --quick: a tenth of the work
    python examples/r1/run.py --folder DIR    # called again, it goes on where it stopped: finished stages are skipped

The model (about a million parameters), its tokenizer and all data are made on the spot; `task.py` is the task. After each
stage the model answers held-out questions, and rules that no training sees say how many answers are right.
The core is `ppo` below: four stages that say what a step is. What each part does, and the numbers: docs/examples/r1.md.
"""

from __future__ import annotations

import argparse
import json
import math
import shutil
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import task

from podium import PPOStage, RewardStage, RolloutStage, StepwiseRewardInjector, StepwiseRewardStage, Trainer, load_reward_model
from podium.models.loading import quiet
from podium.quickstart.model import save as save_base
from podium.stages.base import Stage

parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
parser.add_argument("--folder", type=Path, default=Path("runs/r1"), help="where everything goes")
parser.add_argument("--seed", type=int, default=0)
parser.add_argument("--quick", action="store_true", help="to see it run, not to see it learn")


class R1Path:
    """The path's stages over one folder; each takes what the earlier ones left there, and returns a finished run.

    Args:
        home: the folder. seed: all randomness follows from it.
        share: of the full length (steps, data), for a quick look.
        rows: prompts (or pairs) in a step.
    """

    def __init__(self, home: Path, seed: int, share: float = 1.0, rows: int = 32) -> None:
        self.home, self.seed, self.share, self.rows = home, seed, share, rows
        self.held_out = task.prompts(seed, self.count(600), held_out=True)
        self.problems = task.prompts(seed, self.count(2000), held_out=False)

    def count(self, full: int, least: int = 0) -> int:
        return max(least or self.rows, round(full * self.share))

    def config(self, name: str, *, steps: int, lr: float, **sections: Any) -> dict[str, Any]:
        """What all runs have in common; `sections` as in a recipe's YAML."""
        run = {"folder": str(self.home), "name": name, "seed": self.seed, "steps": self.count(steps, least=3)}
        return {
            "model": {"dtype": "float32", "path": str(self.home / "base")},
            "optimizer": {"lr": lr, "schedule": "linear", "warmup_updates": 10, "min_lr_ratio": 0.1, "betas": [0.9, 0.98]},
            "evaluation": {"at_start": False},
            "rollout": {"max_new_tokens": 40},
            "run": {**run, "threads": 1, "trackers": []},
            "checkpoint": {"every_steps": 50},
            **sections,
        }

    def truth(self) -> list[Stage]:
        """The evaluation: an answer to each held-out question, sampled as in training, and the rules that know the truth."""
        rules = [task.overall, task.helpful, task.honest, task.harmless]
        return [RolloutStage(group_size=1, temperature=1.0), RewardStage(functions=rules, weights=[1, 0, 0, 0])]

    # ------------------------------------------------------------------ the stages of the path

    def sft(self, name: str = "1-sft") -> Trainer:
        """Imitates sloppy demonstrations: form and arithmetic are learned, and the sloppiness."""
        rows = task.demonstrations(self.seed, self.count(16_000))
        save_base(self.home / "base", [row["prompt"] + row["completion"] for row in rows[:2000]], self.seed)
        config = self.config(name, steps=500, lr=1.5e-3, algorithm="sft", batch={"prompts_per_step": self.rows})
        return Trainer(config=config, data=rows, eval_data=self.held_out, evaluation=self.truth())

    def reward_model(self, name: str = "2-reward-model") -> Trainer:
        """Three scores over one body, from pairs that say which aspect they are about."""
        pairs = task.preference_pairs(self.seed, self.count(9600), held_out=False)
        held_out = task.preference_pairs(self.seed, self.count(600), held_out=True)
        config = self.config(name, steps=300, lr=5e-4, batch={"prompts_per_step": self.rows, "group_size": 2})
        config |= {"algorithm": "reward_model", "heads": list(task.ASPECTS)}
        config["model"]["path"] = str(self.home / "1-sft" / "model")
        del config["rollout"]
        return Trainer(config=config, data=pairs, eval_data=held_out)

    def ppo(self, name: str = "3-ppo", *, actor: str = "1-sft", steps: int = 60, lr: float = 3e-4) -> Trainer:
        """PPO: the three heads, scaled as they come and weighed; a calculator on each step; the KL held near its target."""
        rm = load_reward_model(self.home / "2-reward-model" / "model", dtype="float32")
        stages = [
            RolloutStage(model=str(self.home / actor / "model"), max_length=40, group_size=4),
            RewardStage(
                models=[rm.head("helpfulness"), rm.head("honesty"), rm.head("harmlessness")],
                weights=[0.4, 0.3, 0.3],
                scaling="dynamic",
            ),
            StepwiseRewardStage(StepwiseRewardInjector(task.check_steps)),
            PPOStage(kl_controller="adaptive", kl_target=2.0, kl_horizon=1000, use_stepwise_reward=True),
        ]
        batch = {"prompts_per_step": self.rows, "minibatch_sequences": 2 * self.rows}
        config = self.config(name, steps=steps, lr=lr, batch=batch, critic={"lr": 1e-3, "betas": [0.9, 0.98]})
        return Trainer(stages=stages, config=config, data=self.problems, eval_data=self.held_out, evaluation=self.truth())

    def rejection_sampling(self, name: str = "4-rejection-sampling") -> Trainer:
        """The policy answers training questions several times; SFT on the best, by reward model and calculator."""
        config = self.config(name, steps=60, lr=1e-4, algorithm="sft", batch={"prompts_per_step": self.rows})
        config["model"]["path"] = str(self.home / "3-ppo" / "model")
        rows = self.best_answers(self.home / "3-ppo" / "model", answers=8)
        return Trainer(config=config, data=rows, eval_data=self.held_out, evaluation=self.truth())

    def second_ppo(self, name: str = "5-ppo") -> Trainer:
        """PPO again, from there; its reference is the model that the second round starts with."""
        return self.ppo(name, actor="4-rejection-sampling", steps=24, lr=1e-4)

    def best_answers(self, model: Path, answers: int) -> list[dict[str, Any]]:
        """Of several answers to each question, the one that the heads like best among those with no wrong step."""
        rm = load_reward_model(self.home / "2-reward-model" / "model", dtype="float32")
        sample: list[Stage] = [
            RolloutStage(str(model), group_size=answers, temperature=1.0),
            RewardStage([rm.head(aspect) for aspect in task.ASPECTS], weights=[0.4, 0.3, 0.3]),
            StepwiseRewardStage(StepwiseRewardInjector(task.check_steps)),
        ]
        config = self.config("sampling", steps=1, lr=1e-4, batch={"prompts_per_step": self.rows})
        trainer = Trainer(sample, config, data=self.problems, eval_data=self.problems, evaluation=sample)
        trainer.evaluate()
        batch, best = trainer.last_evaluation, dict[int, tuple[float, str]]()
        columns = (batch[name] for name in ("group_id", "rewards", "response"))
        for group, reward, response, steps in zip(*columns, batch["step_rewards"].to_list(), strict=True):
            if min(steps) >= 0:
                best[int(group)] = max(best.get(int(group), (-math.inf, "")), (float(reward), response))
        return [{**self.problems[group], "completion": response} for group, (_, response) in best.items()]


def measured(path: R1Path, name: str, make: Callable[[], Trainer]) -> dict[str, Any]:
    """A stage's held-out numbers and answers: from its file, or by running it (on from its last checkpoint)."""
    file, folder = path.home / f"{name}.json", path.home / name
    if file.exists():
        return json.loads(file.read_text())
    print(f"\n{name}: {' '.join((make.__doc__ or '').split())}", flush=True)
    began = any(folder.glob("checkpoints/*"))
    if folder.exists() and not began:
        shutil.rmtree(folder)  # it broke off before its first checkpoint
    started = time.process_time()
    trainer = make()
    result = trainer.train(resume=folder if began else False)
    if result.interrupted:
        raise SystemExit("stopped; the same command goes on from here")
    if trainer.last_evaluation is None:  # nothing was left to do but to write down what came out
        trainer.evaluate()
    batch = trainer.last_evaluation
    answers = dict(zip(batch["prompt"], batch["response"], strict=True)) if "rewards" in batch else {}
    numbers = {key.removeprefix("eval/"): value for key, value in (result.evaluation_after or {}).items()}
    found = {"cpu_seconds": time.process_time() - started, "numbers": numbers, "answers": answers}
    file.write_text(json.dumps(found, ensure_ascii=False, indent=1))
    return found


def main(home: Path, seed: int = 0, share: float = 1.0, rows: int = 32) -> str:
    """Runs the whole path; prints and returns the table, which is also written as table.md and table.json."""
    quiet()
    path = R1Path(home, seed, share, rows)
    makers = {
        "1-sft": path.sft,
        "2-reward-model": path.reward_model,
        "3-ppo": path.ppo,
        "4-rejection-sampling": path.rejection_sampling,
        "5-ppo": path.second_ppo,
    }
    found = {name: measured(path, name, make) for name, make in makers.items()}
    table = as_table(found)
    (home / "table.md").write_text(table)
    numbers = {name: {**of["numbers"], "cpu_seconds": of["cpu_seconds"]} for name, of in found.items()}
    (home / "table.json").write_text(json.dumps(numbers, indent=1))
    print("\n" + table)
    first, last = found["1-sft"]["answers"], found["5-ppo"]["answers"]
    for kind in ("solvable", "unanswerable", "harmful"):
        for prompt in [row["prompt"] for row in path.held_out if row["kind"] == kind][:1]:
            print(f"{prompt}  after SFT:   {first[prompt]!r}\n  at the end:  {last[prompt]!r}")
    return table


def as_table(found: dict[str, dict[str, Any]]) -> str:
    """Stages by held-out numbers, in Markdown."""
    columns = ("helpful", "honest", "harmless", "overall")
    lines = ["| stage | " + " | ".join(columns) + " | CPU seconds |", "|---" + "|---:" * 5 + "|"]
    for name, of in found.items():
        n = of["numbers"]
        if "accuracy" in n:  # a reward model: pairs
            cells = [f"({n[key]:.1%})" for key in (*(f"accuracy/{aspect}" for aspect in task.ASPECTS), "accuracy")]
        else:
            cells = [f"{n.get(f'reward/{c}', math.nan):.1%}" for c in columns]
        lines.append(f"| {name} | " + " | ".join(cells) + f" | {of['cpu_seconds']:.0f} |")
    return "\n".join([*lines, "", "In brackets: the reward model's held-out pairs that it puts in the right order.", ""])


if __name__ == "__main__":
    args = parser.parse_args()
    main(args.folder, args.seed, 0.1 if args.quick else 1.0)
