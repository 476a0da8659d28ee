"""Does every algorithm learn? Each one on the quick start's small model and task, from the same SFT start, several seeds.

    python benchmarks/learning.py [--algorithms grpo,remax] [--seeds 0,1,2] [--jobs 2] [--folder runs/learning]

The figure is the share of 600 held-out problems answered right, greedily, before and after. The task, the data and the SFT
start are those of `podium quickstart` (docs/quickstart.md). DPO, IPO and KTO learn from pairs and marks: the right answer, and
a sloppy one. Distillation's teacher is the same seed's GRPO result. Runs that are there already are not made again. The last
line is one JSON object; `table.md` in the folder is the table of docs/algorithms/learning.md.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

os.environ.setdefault("OMP_NUM_THREADS", "1")

from podium.quickstart import task
from podium.quickstart.run import make_inputs, train_recipe
from podium.recipes import build, load

GROUP = {"prompts_per_step": 64, "group_size": 8, "minibatch_sequences": 128}
ALONE = {"prompts_per_step": 512, "group_size": 1, "minibatch_sequences": 128}
CRITIC = {"prompts_per_step": 128, "group_size": 4, "minibatch_sequences": 128}
VALUES = {"critic": {"lr": 1e-3, "betas": [0.9, 0.99]}, "gae_lambda": 1.0}
COMMON: dict[str, Any] = {
    "model": {"dtype": "float32"},
    "data": {"max_prompt_tokens": 32},
    "optimizer": {"lr": 1.5e-4, "warmup_updates": 12, "betas": [0.9, 0.99]},
    "evaluation": {"at_start": False},
    "run": {"steps": 60, "threads": 1, "trackers": [], "log_samples": 0, "progress": False},
}
ONLINE: dict[str, Any] = {"rollout": {"max_new_tokens": 8}, "rewards": [{"function": "podium.quickstart.task:correct"}]}
SETTINGS: dict[str, dict[str, Any]] = {
    "grpo": {"batch": GROUP},
    "dr_grpo": {"batch": GROUP},
    "dapo": {"batch": GROUP},
    "gspo": {"batch": GROUP},
    "cispo": {"batch": GROUP},
    "rloo": {"batch": GROUP, "kl": {"coef": 0.01}},
    "reinforce_plus_plus": {"batch": ALONE},
    "reinforce_plus_plus_baseline": {"batch": GROUP},
    "remax": {"batch": ALONE, "kl": {"coef": 0.01}},
    "opo": {"batch": GROUP},
    "ppo": {"batch": CRITIC, "kl": {"coef": 0.0}, **VALUES},
    "safe_rlhf": {
        "batch": CRITIC,
        "kl": {"coef": 0.0},
        "costs": [{"function": "benchmarks.learning:too_long"}],
        "lagrange": {"threshold": 0.02},
        **VALUES,
    },
    "online_dpo": {"batch": {"prompts_per_step": 64, "group_size": 8}, "beta": 0.1},
    "distillation": {"batch": ALONE},
    "dpo": {"batch": {"prompts_per_step": 64}, "beta": 0.1},
    "ipo": {"batch": {"prompts_per_step": 64}, "beta": 1.0},
    "kto": {"batch": {"prompts_per_step": 128}, "beta": 0.1},
}
OFFLINE = ("dpo", "ipo", "kto")


def too_long(prompts: list[str], completions: list[str], **columns: Any) -> list[float]:
    """A cost: 1 for an answer of more than four numbers."""
    return [float(len(c.split()) > task.LENGTH) for c in completions]


def prepare(home: Path, seed: int) -> float:
    """The quick start's inputs and SFT model, and the preference data; the accuracy after SFT. Made once."""
    done = home / "before.json"
    if not done.is_file():
        home.mkdir(parents=True, exist_ok=True)
        make_inputs(home, seed)
        write_preferences(home, seed)
        _, answers = train_recipe(home, "sft", seed, None, model=home / "base", data="demonstrations")
        done.write_text(json.dumps(answers.accuracy))
    return json.loads(done.read_text())


def write_preferences(home: Path, seed: int, count: int = 6000) -> None:
    """`pairs.jsonl` (the right answer over a sloppy one) and `marked.jsonl` (the same, not in pairs)."""
    draw = random.Random(seed + 100)
    pairs, marked = [], []
    for problem in task.problems(draw, held_out=False):
        numbers = problem.answer.split()
        dropped = f" {' '.join(sorted(set(numbers)))}"
        if dropped == problem.answer:  # no repeats: the sloppy answer is one with a number left out
            dropped = f" {' '.join(numbers[: draw.randrange(1, len(numbers))])}"
        pairs.append({"prompt": problem.prompt, "chosen": problem.answer, "rejected": dropped})
        good = draw.random() < 0.5
        marked.append({"prompt": problem.prompt, "completion": problem.answer if good else dropped, "label": good})
        if len(pairs) == count:
            break
    for name, rows in (("pairs", pairs), ("marked", marked)):
        (home / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))


def train(algorithm: str, seed: int, home: Path, steps: int | None) -> dict[str, Any]:
    """One run from the seed's SFT model; what it came to."""
    online = algorithm not in OFFLINE
    values = quickstart_values(home, algorithm)
    settings = load(None, [], _merge(COMMON, ONLINE if online else {}, SETTINGS[algorithm], values))
    settings.run.seed = seed
    if steps:
        settings.run.steps = steps
    started = time.perf_counter()
    result = build(settings).train()
    after = (
        (result.evaluation_after or {}).get("eval/accuracy") if online else answer_greedily(result.run_folder / "model", home)
    )
    return {
        "algorithm": algorithm,
        "seed": seed,
        "before": json.loads((home / "before.json").read_text()),
        "after": after,
        "steps": result.steps,
        "seconds": round(time.perf_counter() - started, 1),
    }


def quickstart_values(home: Path, algorithm: str) -> dict[str, Any]:
    """Paths of the seed's inputs."""
    data = {"dpo": "pairs", "ipo": "pairs", "kto": "marked"}.get(algorithm, "problems")
    values: dict[str, Any] = {
        "algorithm": algorithm,
        "model": {"path": str(home / "sft" / "model")},
        "data": {"path": str(home / f"{data}.jsonl")},
        "run": {"folder": str(home), "name": algorithm},
    }
    if algorithm not in OFFLINE:
        values["data"]["eval_path"] = str(home / "held_out.jsonl")
    if algorithm == "distillation":
        values["model"]["teacher_path"] = str(home / "grpo" / "model")
    return values


def answer_greedily(model: Path, home: Path) -> float:
    """Held-out accuracy of a saved model, measured as GRPO's evaluation does."""
    values = _merge(COMMON, ONLINE, {"batch": GROUP}, quickstart_values(home, "grpo"), {"model": {"path": str(model)}})
    return build(load(None, [], values)).evaluate()["eval/accuracy"]


def _merge(*parts: dict[str, Any]) -> dict[str, Any]:
    out: dict[str, Any] = {}
    for part in parts:
        for key, value in part.items():
            out[key] = _merge(out[key], value) if isinstance(out.get(key), dict) and isinstance(value, dict) else value
    return out


def run_all(algorithms: list[str], seeds: list[int], folder: Path, jobs: int, steps: int | None) -> list[dict[str, Any]]:
    """Every algorithm with every seed, each in a process of its own, `jobs` at a time."""

    def one(job: tuple[str, int]) -> dict[str, Any]:
        algorithm, seed = job
        out = folder / f"{algorithm}-{seed}.json"
        if not out.is_file():
            command = [
                sys.executable,
                "-m",
                "benchmarks.learning",
                "--one",
                algorithm,
                "--seeds",
                str(seed),
                "--folder",
                str(folder),
            ]
            done = subprocess.run([*command, *(["--steps", str(steps)] if steps else [])], capture_output=True, text=True)
            if done.returncode:
                raise RuntimeError(f"{algorithm}, seed {seed}: {done.stderr[-2000:]}")
            result = json.loads(out.read_text())
            print(
                f"{algorithm:30} seed {seed}  {result['before']:.1%} -> {result['after']:.1%}  {result['seconds']:.0f} s",
                flush=True,
            )
        return json.loads(out.read_text())

    with ThreadPoolExecutor(jobs) as pool:
        list(pool.map(lambda seed: prepare_apart(folder, seed), seeds))
        first = [(a, s) for a in algorithms for s in seeds if a != "distillation"]  # its teacher must be there
        results = list(pool.map(one, first))
        return results + list(pool.map(one, [("distillation", s) for s in seeds if "distillation" in algorithms]))


def prepare_apart(folder: Path, seed: int) -> None:
    command = [sys.executable, "-m", "benchmarks.learning", "--one", "sft", "--seeds", str(seed), "--folder", str(folder)]
    if not (folder / f"seed{seed}" / "before.json").is_file():
        subprocess.run(command, check=True, capture_output=True)


def table(results: list[dict[str, Any]], seeds: list[int]) -> str:
    """Markdown: a row an algorithm, before -> after for each seed."""
    head = (
        "| algorithm | steps | "
        + " | ".join(f"seed {s}" for s in seeds)
        + " | least gain |\n|---|---|"
        + "---|" * (len(seeds) + 1)
    )
    rows = [head]
    for name in dict.fromkeys(r["algorithm"] for r in results):
        mine = {r["seed"]: r for r in results if r["algorithm"] == name}
        cells = [f"{100 * mine[s]['before']:.1f} -> {100 * mine[s]['after']:.1f}%" for s in seeds]
        least = min(mine[s]["after"] - mine[s]["before"] for s in seeds)
        rows.append(f"| {name} | {mine[seeds[0]]['steps']} | " + " | ".join(cells) + f" | {100 * least:+.1f} |")
    return "\n".join(rows) + "\n"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--algorithms", default=",".join(SETTINGS), help="names, with commas between")
    parser.add_argument("--seeds", default="0,1,2")
    parser.add_argument("--jobs", type=int, default=2, help="runs at a time, one thread each")
    parser.add_argument("--steps", type=int, help="instead of each algorithm's own number of steps")
    parser.add_argument("--folder", type=Path, default=Path("runs/learning"))
    parser.add_argument("--one", help=argparse.SUPPRESS)
    args = parser.parse_args()
    seeds = [int(seed) for seed in args.seeds.split(",")]
    if args.one:
        home = args.folder / f"seed{seeds[0]}"
        if args.one == "sft":
            prepare(home, seeds[0])
        else:
            result = train(args.one, seeds[0], home, args.steps)
            (args.folder / f"{args.one}-{seeds[0]}.json").write_text(json.dumps(result))
        return
    args.folder.mkdir(parents=True, exist_ok=True)
    results = run_all(args.algorithms.split(","), seeds, args.folder, args.jobs, args.steps)
    (args.folder / "table.md").write_text(table(results, seeds))
    print(table(results, seeds))
    gains = {f"{r['algorithm']}/{r['seed']}": round(r["after"] - r["before"], 4) for r in results}
    print(json.dumps({"least_gain": min(gains.values()), "gains": gains, "seconds": sum(r["seconds"] for r in results)}))


if __name__ == "__main__":
    main()
