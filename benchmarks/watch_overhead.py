"""What all watching costs: GRPO steps of a run, watched as every run is, and the same stages alone, in turn, in one process.

    python benchmarks/watch_overhead.py --size 0.5b --device cuda          on a GPU: under 1% of a step
    OMP_NUM_THREADS=1 python benchmarks/watch_overhead.py --device cpu     on a CPU: under 3%

Watched: the run's own loop. Deadlines around each stage, training's log-probs beside the rollout's, bounds and alarms, the
state that is kept at each border, metrics and samples (with their tokens and log-probs) on disk. Alone: the stages, and nothing
else. All answers have the full length (no token ends them), so every step does the same work. Pairs of steps alternate in
their order. Two numbers come out:

  by parts   what a watched step spends outside the stages that both have, less what the other kind does. The stages' own noise
             is not in it, so it is exact to a small part of a percent.
  by whole   a watched step against the other kind, with its standard error. A GPU's steps are timed by the clock; a CPU's by
             the process's CPU time, which others on the machine change less.

The last line is one JSON object. Ends with status 1 where the first is above the bound, or the second by two errors.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from statistics import mean, median, stdev
from typing import Any

import torch

from podium.checkpoints.store import CheckpointStore
from podium.runs.folder import RunFolder
from podium.runs.progress import Progress
from podium.stages.base import StepContext
from podium.stages.graph import StageGraph
from podium.stages.watch import WatchStage
from podium.trainer import loop as loops
from podium.trainer.loop import Loop
from podium.trainer.memory import MemoryWatch
from podium.trainer.recipe import SOURCES

sys.path.insert(0, str(Path(__file__).parent))
import roofline
from models import SHAPES, grpo_trainer

SHAPES = {**SHAPES, "small": roofline.Shape(6, 256, 8, 4, 32, 688, 4096, True)}
BOUND = {"cuda": 0.01, "cpu": 0.03}
WARM_UP = 2


@contextmanager
def loop_of(trainer: Any, folder: str) -> Iterator[Loop]:
    """The loop that `Trainer.train` would run, between its start and its end."""
    run = RunFolder.create(folder, "watched")
    store = CheckpointStore(run.checkpoints)
    with Progress(trainer.settings.run.steps, enabled=False) as progress:
        loop = Loop(trainer, run, store, progress, [], resumed=False)
        with loop.guard, loop.deadlines:
            yield loop
    run.close()


Times = dict[str, float]


def watched(loop: Loop) -> Times:
    """One turn of the loop, without evaluation and saving; its metrics."""
    loop.saver.check()
    loop._step()
    loop._log(loop.trainer.record.metrics)
    loop.progress.step(loop.trainer.record.metrics)
    loop._hold_to_bounds()
    return loop.trainer.record.metrics


def alone(trainer: Any, graph: StageGraph) -> Times:
    """The same stages without anything around them; their metrics. The step's number stays: what the run does in one step of
    several, it is to do here.
    """
    context = StepContext(trainer.step, trainer.roles, trainer.settings.batch.group_size, trainer.settings.run.steps)
    graph.run(trainer.loader.next_batch(), context)
    return context.metrics.means()


PARTS = {
    "training's log-probs once more": (WatchStage, "_spot"),
    "numbers of the watch stage": (WatchStage, "run"),
    "state kept at the border": (loops.Loop, "_mark"),
    "rows as plain values": (loops, "sampled_rows"),
    "samples on disk": (RunFolder, "write_samples"),
    "metrics on disk": (loops.Loop, "_log"),
    "bounds": (loops.Loop, "_hold_to_bounds"),
    "memory held": (MemoryWatch, "step_done"),
}
"""What watching consists of (the rest: deadlines, memory by stage). The first is part of the second, and taken off it."""


@contextmanager
def counted() -> Iterator[dict[str, float]]:
    """Seconds in each part, while inside."""
    spent = dict.fromkeys(PARTS, 0.0)
    kept = {name: getattr(*place) for name, place in PARTS.items()}

    def timed(name: str, run: Any) -> Any:
        def call(*args: Any, **kwargs: Any) -> Any:
            started = time.perf_counter()
            try:
                return run(*args, **kwargs)
            finally:
                spent[name] += time.perf_counter() - started

        return call

    for name, (owner, method) in PARTS.items():
        setattr(owner, method, timed(name, kept[name]))
    try:
        yield spent
    finally:
        for name, (owner, method) in PARTS.items():
            setattr(owner, method, kept[name])
        first, second = list(PARTS)[:2]
        spent[second] -= spent[first]


@dataclass
class Steps:
    """Of one kind: seconds of each step by the chosen clock and by the wall's, and outside the stages that both kinds have."""

    seconds: list[float] = field(default_factory=list)
    wall: list[float] = field(default_factory=list)
    outside: list[float] = field(default_factory=list)

    def add(self, run: Callable[[], Times], stages: list[str], cuda: bool) -> None:
        wall, busy = time.perf_counter(), time.process_time()
        metrics = run()
        if cuda:
            torch.cuda.synchronize()
        wall, busy = time.perf_counter() - wall, time.process_time() - busy
        self.seconds.append(wall if cuda else busy)
        self.wall.append(wall)
        self.outside.append(wall - sum(metrics[f"time/{name}"] for name in stages))


def measure(args: argparse.Namespace) -> dict[str, Any]:
    kinds, spent = {"watched": Steps(), "alone": Steps()}, dict[str, float]()
    with tempfile.TemporaryDirectory() as folder:
        steps = 2 * (args.pairs + WARM_UP)
        trainer = grpo_trainer(SHAPES[args.size], args, folder, steps, 32_768 if args.device == "cuda" else 4096)
        graph = StageGraph(trainer.stages, SOURCES[trainer.kind])
        stages = [stage.label for stage in graph.stages]
        with loop_of(trainer, folder) as loop, ExitStack() as parts:
            runs: dict[str, Callable[[], Times]] = {"watched": lambda: watched(loop), "alone": lambda: alone(trainer, graph)}
            for pair in range(args.pairs + WARM_UP):
                if pair == WARM_UP:
                    kinds = {name: Steps() for name in kinds}
                    spent = parts.enter_context(counted())
                for name in list(kinds)[:: 1 if pair % 2 else -1]:
                    kinds[name].add(runs[name], stages, args.device == "cuda")
    shares = {name: seconds / sum(kinds["alone"].wall) for name, seconds in spent.items()}
    return {**overheads(kinds["watched"], kinds["alone"]), "shares": shares}


def overheads(watched: Steps, alone: Steps) -> dict[str, Any]:
    """By parts, and by whole steps with the standard error of the mean over pairs."""
    ratios = [a / b - 1 for a, b in zip(watched.seconds, alone.seconds, strict=True)]
    # Means: some things are done in one step of eight.
    parts = (mean(watched.outside) - mean(alone.outside)) / mean(alone.wall)
    whole = {"by_whole": mean(ratios), "error": stdev(ratios) / len(ratios) ** 0.5}
    return {"by_parts": parts, **whole, "step_watched": watched.seconds, "step_alone": alone.seconds}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--size", choices=SHAPES, default="small")
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cpu")
    parser.add_argument("--prompts", type=int, help="a step (GPU: 32, CPU: 8)")
    parser.add_argument("--group", type=int, default=8)
    parser.add_argument("--prompt-tokens", type=int, default=64)
    parser.add_argument("--new-tokens", type=int, help="of each answer (GPU: 256, CPU: 64)")
    parser.add_argument("--pairs", type=int, default=8, help="steps of each kind that count (a multiple of 8)")
    args = parser.parse_args()
    if args.pairs < 2:
        parser.error("--pairs: two at least, for a standard error")
    args.prompts = args.prompts or (32 if args.device == "cuda" else 8)
    args.new_tokens = args.new_tokens or (256 if args.device == "cuda" else 64)
    found, bound = measure(args), BOUND[args.device]
    steps = [median(found[f"step_{name}"]) for name in ("watched", "alone")]
    print(f"a step: {steps[0]:.4f} s watched, {steps[1]:.4f} s alone ({args.pairs} of each)")
    print(f"overhead by parts: {found['by_parts']:.2%} (bound {bound:.0%})")
    for name, share in found["shares"].items():
        print(f"    {name:<32} {share:.2%}")
    print(f"overhead by whole steps: {found['by_whole']:.2%}, standard error {found['error']:.2%}")
    print(json.dumps({"size": args.size, "device": args.device, **found}))
    sys.exit(1 if found["by_parts"] > bound or found["by_whole"] - 2 * found["error"] > bound else 0)


if __name__ == "__main__":
    main()
