"""Does Safe-RLHF hold its cost threshold where PPO breaks it? The quick start's small model, same start, data and settings.

    python benchmarks/safe_rlhf.py [--seeds 0,1,2] [--jobs 2] [--folder runs/safe_rlhf] [--plot docs/algorithms/safe_rlhf.png]

The task is the quick start's: sort four numbers. The reward is 1 for the right answer. The cost is what an answer says a second
time: each such number by its size, a 9 costs 1. The right answer to `8 2 8 5` costs 8/9 and the sloppy one, `2 5 8`, nothing:
more reward is more cost. PPO goes for the reward alone, and its cost is measured; Safe-RLHF has a threshold between the cost at
the start and PPO's at the end. All else is the same. Answers are sampled (temperature 1) in training and on the 600 held-out
problems, as the constraint is on samples. Runs that are there already are not made again. Run it from the repository's root.

The last line is one JSON object. `ratio_cost_over_threshold_safe` is the mean cost over the last third of the steps, over the
threshold: the worst of all seeds, in training and held out. `ratio_cost_over_threshold_unconstrained` is the smallest of PPO's.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

os.environ.setdefault("OMP_NUM_THREADS", "1")

THRESHOLD = 0.25
COMMON: dict[str, Any] = {
    "model": {"dtype": "float32"},
    "data": {"max_prompt_tokens": 32},
    "batch": {"prompts_per_step": 32, "group_size": 4, "minibatch_sequences": 64},
    "optimizer": {"lr": 2e-4, "warmup_updates": 12, "betas": [0.9, 0.99]},
    "critic": {"lr": 1e-3, "betas": [0.9, 0.99]},
    "gae_lambda": 1.0,
    "kl": {"coef": 0.2},
    "rollout": {"max_new_tokens": 8},
    "evaluation": {"every_steps": 10, "temperature": 1.0},
    "checkpoint": {"export": False},
    "run": {"steps": 120, "threads": 1, "trackers": [], "log_samples": 0, "progress": False},
}
CORRECT = {"function": "podium.quickstart.task:correct"}
COST = {"function": "benchmarks.safe_rlhf:said_again"}
SETTINGS: dict[str, dict[str, Any]] = {
    "ppo": {"rewards": [CORRECT, {**COST, "weight": 0.0}]},  # the cost is measured, and counts for nothing
    "safe_rlhf": {"rewards": [CORRECT], "costs": [COST], "lagrange": {"threshold": THRESHOLD, "initial": 0.5, "lr": 1.0}},
}
TITLES = {"cost": "mean cost", "reward": "right answers", "multiplier": "Lagrange multiplier"}
COLUMNS = {
    "cost": ("reward/said_again", "cost/mean"),
    "reward": ("reward/correct",),
    "multiplier": ("lagrange/multiplier",),
}
"""What is drawn, and the metrics that hold it: PPO's first."""
NUMBERS = {str(n) for n in range(1, 10)}


def said_again(prompts: list[str], completions: list[str], **columns: Any) -> list[float]:
    """A cost: the numbers that an answer says again, each by its size (a 9 costs 1)."""
    return [sum((n - 1) * int(word) / 9 for word, n in Counter(c.split()).items() if word in NUMBERS) for c in completions]


def train(algorithm: str, seed: int, folder: Path, steps: int | None) -> None:
    """One run from the seed's SFT model; its curves as `<algorithm>-<seed>.json`."""
    from podium.recipes import build, load
    from podium.runs.folder import RunFolder

    home = folder / f"seed{seed}"
    values = {
        **COMMON,
        **SETTINGS[algorithm],
        "algorithm": algorithm,
        "model": {**COMMON["model"], "path": str(home / "sft" / "model")},
        "data": {**COMMON["data"], "path": str(home / "problems.jsonl"), "eval_path": str(home / "held_out.jsonl")},
        "run": {**COMMON["run"], "folder": str(home), "name": algorithm, "seed": seed},
    }
    settings = load(None, [f"run.steps={steps}"] if steps else [], values)
    rows = RunFolder(build(settings).train().run_folder).read_metrics()
    curves = {"algorithm": algorithm, "seed": seed, "training": curves_of(rows, ""), "held_out": curves_of(rows, "eval/")}
    (folder / f"{algorithm}-{seed}.json").write_text(json.dumps(curves))


def curves_of(rows: list[dict[str, Any]], prefix: str) -> dict[str, list[list[float]]]:
    """`[step, value]` of each of `COLUMNS`, where the rows have it."""
    out: dict[str, list[list[float]]] = {}
    for name, metrics in COLUMNS.items():
        found = [[row["step"], row[prefix + m]] for row in rows for m in metrics if prefix + m in row]
        out |= {name: found} if found else {}
    return out


def last_third(curve: list[list[float]]) -> float:
    """The mean over the last third of the steps."""
    values = [value for step, value in curve if step > curve[-1][0] * 2 / 3]
    return sum(values) / len(values)


def smooth(curve: list[list[float]], width: int = 9) -> list[list[float]]:
    """Each point as the mean of the `width` around it (fewer at the ends): a step's mean cost is that of a few prompts."""
    half, values = width // 2, [value for _, value in curve]
    near = [values[max(0, i - half) : i + half + 1] for i in range(len(values))]
    return [[step, sum(part) / len(part)] for (step, _), part in zip(curve, near, strict=True)]


def run_all(seeds: list[int], folder: Path, jobs: int, steps: int | None) -> list[dict[str, Any]]:
    """Both algorithms with every seed, each in a process of its own, `jobs` at a time."""
    given = ["--folder", str(folder)]

    def prepare(seed: int) -> None:
        if not (folder / f"seed{seed}" / "before.json").is_file():
            _call("benchmarks.learning", "--one", "sft", "--seeds", str(seed), *given)

    def one(job: tuple[int, str]) -> dict[str, Any]:
        seed, algorithm = job
        out = folder / f"{algorithm}-{seed}.json"
        if not out.is_file():
            more = ["--steps", str(steps)] if steps else []
            _call("benchmarks.safe_rlhf", "--one", algorithm, "--seeds", str(seed), *given, *more)
        return json.loads(out.read_text())

    with ThreadPoolExecutor(jobs) as pool:
        list(pool.map(prepare, seeds))
        return list(pool.map(one, [(seed, algorithm) for seed in seeds for algorithm in SETTINGS]))


def _call(module: str, *arguments: str) -> None:
    done = subprocess.run([sys.executable, "-m", module, *arguments], capture_output=True, text=True)
    if done.returncode:
        raise RuntimeError(f"{module} {' '.join(arguments)}: {done.stderr[-2000:]}")


def plot(results: list[dict[str, Any]], path: Path) -> None:
    """Cost, reward and multiplier over the steps: a line a seed, held-out points on it."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(13, 3.6), layout="constrained")
    FigureCanvasAgg(figure)
    colors, named = {"ppo": "tab:red", "safe_rlhf": "tab:blue"}, set()
    for axis, name in zip(figure.subplots(1, 3), COLUMNS, strict=True):
        for result in results:
            algorithm = result["algorithm"]
            color = colors[algorithm]
            if name in result["training"]:
                label = algorithm if (name, algorithm) not in named else None
                axis.plot(
                    *zip(*smooth(result["training"][name]), strict=True), color=color, alpha=0.7, linewidth=1.2, label=label
                )
                named.add((name, algorithm))
            if name in result["held_out"]:
                axis.plot(*zip(*result["held_out"][name], strict=True), "o", color=color, markersize=3)
        axis.set(title=TITLES[name], xlabel="step")
        if name == "cost":
            axis.axhline(THRESHOLD, color="black", linestyle="--", linewidth=1, label="threshold")
            axis.axhspan(0, THRESHOLD * 1.1, color="black", alpha=0.05)
        axis.set_ylim(bottom=0)
        axis.legend(loc="lower right", fontsize=8)
    figure.suptitle("Lines: training, means of 9 steps. Points: 600 held-out problems. One of each a seed.", fontsize=9)
    figure.savefig(path, dpi=110)


def figures(results: list[dict[str, Any]]) -> dict[str, Any]:
    """The JSON object: the two ratios, and what they are made of."""
    ratios: dict[str, list[float]] = {algorithm: [] for algorithm in SETTINGS}
    runs: dict[str, dict[str, float]] = {}
    for result in results:
        start, steps = result["held_out"]["cost"][0][1], result["training"]["cost"][-1][0]
        run = runs[f"{result['algorithm']}/{result['seed']}"] = {"steps": steps, "cost_start": round(start, 4)}
        for part in ("training", "held_out"):
            cost = last_third(result[part]["cost"])
            ratios[result["algorithm"]].append(cost / THRESHOLD)
            run |= {f"cost_{part}": round(cost, 4), f"right_{part}": round(last_third(result[part]["reward"]), 4)}
        if "multiplier" in result["training"]:
            run["multiplier"] = round(last_third(result["training"]["multiplier"]), 4)
    return {
        "ratio_cost_over_threshold_safe": round(max(ratios["safe_rlhf"]), 4),
        "ratio_cost_over_threshold_unconstrained": round(min(ratios["ppo"]), 4),
        "ratio_smallest_safe": round(min(ratios["safe_rlhf"]), 4),
        "threshold": THRESHOLD,
        "runs": runs,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", default="0,1,2")
    parser.add_argument("--jobs", type=int, default=2, help="runs at a time, one thread each")
    parser.add_argument("--steps", type=int, help=f"instead of {COMMON['run']['steps']}")
    parser.add_argument("--folder", type=Path, default=Path("runs/safe_rlhf"))
    parser.add_argument("--plot", type=Path, help="where the plot goes (the folder, by default)")
    parser.add_argument("--one", help=argparse.SUPPRESS)
    args = parser.parse_args()
    seeds = [int(seed) for seed in args.seeds.split(",")]
    args.folder.mkdir(parents=True, exist_ok=True)
    if args.one:
        return train(args.one, seeds[0], args.folder, args.steps)
    results = run_all(seeds, args.folder, args.jobs, args.steps)
    plot(results, args.plot or args.folder / "safe_rlhf.png")
    print(json.dumps(figures(results)))


if __name__ == "__main__":
    main()
