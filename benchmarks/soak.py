"""Soak: a tiny run of many steps, in one process. Does its memory grow, and how much does it write?

    python benchmarks/soak.py                  2,000 steps of GRPO: rollouts, rewards, updates, evaluations, checkpoints
    python benchmarks/soak.py --steps 300 --algorithm ppo
    python benchmarks/soak.py --day            24 hours' worth of a run's log, a step a second, written without training

Host memory is this process's resident set, measured after every step; growth is from the mean of the tenth after the first
(imports, caches and the allocator have settled by then) to the mean of the last tenth. Prints one JSON object; ends with
status 1 where growth is 20 MB or more.
"""

from __future__ import annotations

import argparse
import gc
import json
import os
import shutil
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

ROWS = [{"prompt": f"What is {a} plus {b}?", "answer": str(a + b)} for a in range(8) for b in range(8)]
GROWTH_MB = 20.0


def score(completions: list[str], answer: list[str], **columns: Any) -> list[float]:
    return [float(len(c) % 7) / 6 + (a in c) for c, a in zip(completions, answer, strict=True)]


def resident_mb() -> float:
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE") / 1e6


def volume(folder: Path) -> dict[str, dict[str, float]]:
    """Files and megabytes of a run folder, by its first level."""
    found: dict[str, dict[str, float]] = {}
    for path in folder.rglob("*"):
        if path.is_file():
            entry = found.setdefault(path.relative_to(folder).parts[0], {"files": 0, "mb": 0.0})
            entry["files"] += 1
            entry["mb"] = round(entry["mb"] + path.stat().st_size / 1e6, 4)
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=2000)
    parser.add_argument("--algorithm", default="grpo", choices=["grpo", "ppo"])
    parser.add_argument("--day", action="store_true", help="write 24 hours' worth of metrics, samples and alarms")
    options = parser.parse_args()
    if options.day:
        print(json.dumps(day()))
        return

    import torch

    from podium.recipes import build, load
    from podium.runs.folder import RunFolder
    from tests.tiny import tiny_model, tiny_tokenizer

    torch.set_num_threads(1)
    root = Path(tempfile.mkdtemp(prefix="podium-soak-"))
    small = {"hidden_size": 16, "intermediate_size": 32, "num_attention_heads": 2, "num_key_value_heads": 1}
    tiny_model(**small).save_pretrained(root / "model")
    tiny_tokenizer().save_pretrained(root / "model")
    values = {
        "algorithm": options.algorithm,
        "model": {"path": str(root / "model"), "dtype": "float32"},
        "data": {"eval_samples": 2},
        "batch": {"prompts_per_step": 2, "group_size": 2},
        "rollout": {"max_new_tokens": 4},
        "kl": {"coef": 0.05},
        "evaluation": {"every_steps": 50},
        "checkpoint": {"export": False, "every_steps": 20},
        "rewards": [{"function": score, "normalize": "running"}],
        "run": {"folder": str(root), "name": "soak", "steps": options.steps, "trackers": [], "progress": False},
    }
    memory: list[float] = []
    log = RunFolder.log

    def logged(self: RunFolder, step: int, metrics: Any) -> None:
        log(self, step, metrics)
        if step % 100 == 0:
            gc.collect()
            print(f"step {step}: {resident_mb():.1f} MB", file=sys.stderr, flush=True)
        memory.append(resident_mb())

    RunFolder.log = logged  # type: ignore[method-assign]
    started = time.monotonic()
    result = build(load(None, (), values), data=ROWS).train()
    seconds = time.monotonic() - started
    report = summary(memory, options.steps, seconds, result.run_folder)
    print(json.dumps(report))
    shutil.rmtree(root)
    sys.exit(0 if report["growth_mb"] < GROWTH_MB else 1)


def day(steps: int = 86_400) -> dict[str, Any]:
    """What a run folder holds after so many steps: 60 metrics, eight samples of 512 tokens each, an alarm in every second."""
    import torch

    from podium.core.resident import resident_mb
    from podium.runs.folder import RunFolder
    from podium.trainer.samples import encoded

    ids, numbers = list(range(512)), (-torch.rand(512)).tolist()
    row = {"prompt": "p" * 300, "response": "r" * 2000, "rewards": 0.5, "response_ids": encoded(ids)}
    row |= {name: encoded(numbers) for name in ("rollout_log_probs", "old_log_probs", "advantages")}
    metrics = {f"stage/a_metric_of_a_usual_name_{i}": 0.123456789 * i for i in range(60)}
    root = Path(tempfile.mkdtemp(prefix="podium-day-"))
    run, before, started = RunFolder.create(root, "day"), 0.0, time.monotonic()
    for step in range(1, steps + 1):
        run.log(step, metrics)
        run.write_samples(step, [row] * 8)
        if step % 2:
            run.write_alarm({"step": step, "metric": "watch/log_prob_gap", "value": 0.1, "bound": 0.05, "over": False})
        if step == steps // 10:
            before = resident_mb() or 0.0
    run.close()
    grown = (resident_mb() or 0.0) - before
    written = volume(run.path)
    shutil.rmtree(root)
    return {"steps": steps, "seconds": round(time.monotonic() - started), "growth_mb": round(grown, 1), "written": written}


def summary(memory: list[float], steps: int, seconds: float, folder: Path) -> dict[str, Any]:
    tenth = max(1, len(memory) // 10)
    first, last = memory[tenth : 2 * tenth], memory[-tenth:]
    written = volume(folder)
    return {
        "steps": steps,
        "seconds": round(seconds, 1),
        "resident_mb_after_first_tenth": round(sum(first) / len(first), 2),
        "resident_mb_last_tenth": round(sum(last) / len(last), 2),
        "growth_mb": round(sum(last) / len(last) - sum(first) / len(first), 2),
        "largest_mb": round(max(memory), 2),
        "metrics_bytes_a_step": round(written["metrics.jsonl"]["mb"] * 1e6 / steps),
        "written": written,
    }


if __name__ == "__main__":
    main()
