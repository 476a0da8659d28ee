"""GRPO as a loop of one's own: the whole algorithm on a screen.

    podium quickstart                                              # makes a small model that imitates (and its data)
    python examples/loop.py runs/quickstart-grpo --steps 20        # improves it, with the loop below

What `Trainer.train` adds, and this leaves out: evaluation, checkpoints and resuming, the run folder, Ctrl-C.
"""

import argparse

from podium import Trainer, estimate_advantages
from podium.quickstart.task import correct

parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
parser.add_argument("quickstart", help="the quick start's run folder")
parser.add_argument("--steps", type=int, default=20)
parser.add_argument("--group-size", type=int, default=8)
args = parser.parse_args()

# Settings give the roles: here an actor with its optimizer and its rollout engine. `prepare` loads them and the data.
trainer = Trainer(
    config={
        "algorithm": "grpo",
        "model": {"path": f"{args.quickstart}/sft/model", "dtype": "float32"},
        "data": {"path": f"{args.quickstart}/problems.jsonl"},
        "rewards": [{"function": correct}],
        "rollout": {"max_new_tokens": 8},
        "batch": {"prompts_per_step": 32},
        "optimizer": {"lr": 3e-4},
        "run": {"threads": 1},
    },
    evaluation=[],
).prepare()
actor = trainer.roles["actor"]

for step, prompts in zip(range(args.steps), trainer.loader, strict=False):
    batch = actor.generate_sequences(prompts, group_size=args.group_size)
    rewards = correct(batch["prompt"], batch["response"], batch["data.answer"])
    batch = batch.with_columns({"rewards": rewards})
    batch = estimate_advantages(batch, estimator="grpo")
    metrics = actor.update_policy(batch).result()
    print(f"step {step + 1:3}  right {sum(rewards) / len(rewards):.2f}  gradient norm {metrics.mean('grad_norm'):.2f}")

actor.save_pretrained(f"{args.quickstart}/loop-model").result()
