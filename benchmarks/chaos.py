"""Chaos: runs are killed, starved, damaged and made to wait; each must end as the run that nothing happened to.

    python benchmarks/chaos.py                     100 faults, half on PPO, half on GRPO
    python benchmarks/chaos.py --faults 4 --seed 1  a small one
    python benchmarks/chaos.py --kills             SIGKILLs only
    python benchmarks/chaos.py --executor ray      roles are Ray actors, and are killed too

Every run is a process of its own, forked from one that has imported everything (a fork server: the imports take longer than a
tiny run). A run gets faults until it has made all its steps; a fault that comes after the last one is drawn, but does not count
among the 100. Then the run is compared with the one that nothing happened to:

  metrics   every logged number but times and memory, bit for bit (fp32, one thread)
  samples   every step's prompts and responses: no row is skipped or repeated
  state     the checksum of every file of the last checkpoint but the settings' (weights, moments, generators, data position)

Prints a table, and one JSON object as the last line. Ends with status 1 where anything differs.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import random
import resource
import shutil
import signal
import sys
import tempfile
import time
from collections import Counter, defaultdict
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

STEPS = 6
ROWS = [{"prompt": f"What is {a} plus {b}?", "answer": str(a + b)} for a in range(5) for b in range(4)]
ALGORITHMS: dict[str, list[str]] = {
    # Every kind of state: an adaptive KL controller, running reward statistics, decays, several updates a step, an
    # evaluation; dynamic sampling takes a varying number of rows.
    "ppo": ["kl.coef=0.1", "kl.controller=adaptive", "batch.minibatch_sequences=4", "optimizer.schedule=cosine"],
    "grpo": ["kl.coef=0.1", "sampling_rounds=2", "optimizer.schedule=linear", "rewards.0.normalize=running"],
}
DONE, FAILED = 0, 3
CHILD_SECONDS = 300


@dataclass(frozen=True)
class Fault:
    """What happens to a run: in its process (`inside`), from outside while it lives, or to its files after it has died."""

    name: str
    inside: Callable[[random.Random], None] | None = None
    outside: Callable[[int, Path, random.Random, float], None] | None = None
    after: Callable[[Path, random.Random], None] | None = None


# ---------------------------------------------------------------------- the faults


def kill_at_a_moment(pid: int, run: Path, chance: random.Random, step_seconds: float) -> None:
    _after_some_steps(pid, run, chance)
    _wait_for(pid, lambda: False, chance.uniform(0, 1.5 * step_seconds), every=0.001)
    _kill(pid, signal.SIGKILL)


def _after_some_steps(pid: int, run: Path, chance: random.Random) -> None:
    """Counted, not timed: a busy machine would move all moments to the start of runs."""
    wanted = _logged(run) + chance.randrange(0, 3)
    _wait_for(pid, lambda: _logged(run) >= wanted, 120)


def _logged(run: Path) -> int:
    """Steps in its metrics; none where there is no run (its process may be about to begin it anew)."""
    try:
        return (run / "metrics.jsonl").read_bytes().count(b"\n")
    except FileNotFoundError:
        return 0


def kill_in_a_save(pid: int, run: Path, chance: random.Random, step_seconds: float) -> None:
    _wait_for_a_save(pid, run, chance)
    _kill(pid, signal.SIGKILL)


def _wait_for_a_save(pid: int, run: Path, chance: random.Random) -> None:
    """Until one has begun, and a few files of it are written (or none)."""
    wanted, folder = chance.randrange(0, 9), run / "checkpoints"
    skip, seen = chance.randrange(0, 2), set[str]()

    def far_enough() -> bool:
        for path in folder.glob(".writing_*"):
            seen.add(path.name)
            if len(seen) > skip and len(list(path.glob("*"))) >= wanted:
                return True
        return False

    _wait_for(pid, far_enough, 120, every=0.0005)


def ask_to_stop(pid: int, run: Path, chance: random.Random, step_seconds: float) -> None:
    _after_some_steps(pid, run, chance)
    _wait_for(pid, lambda: False, chance.uniform(0, step_seconds))
    _kill(pid, chance.choice([signal.SIGTERM, signal.SIGINT]))


def disk_full(chance: random.Random) -> None:
    """After some saves, no file may be longer than a little: what `ENOSPC` does, without a disk of one's own."""
    from podium.checkpoints.store import CheckpointStore

    save, left = CheckpointStore.save, [chance.randrange(0, 3)]
    size = chance.choice([0, 40_000, 300_000])

    def full(self: CheckpointStore, step: int, state: dict[str, Any]) -> Path:
        if left[0]:
            left[0] -= 1
            return save(self, step, state)
        signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
        resource.setrlimit(resource.RLIMIT_FSIZE, (size, resource.getrlimit(resource.RLIMIT_FSIZE)[1]))
        return save(self, step, state)

    CheckpointStore.save = full  # type: ignore[method-assign]


def dead_scorer(chance: random.Random) -> None:
    _at_a_score(chance, lambda: (_ for _ in ()).throw(ConnectionError("the scorer is gone")))


def slow_scorer(chance: random.Random) -> None:
    """It never answers: the deadline ends the wait."""
    _at_a_score(chance, lambda: time.sleep(3600))


def clock_jumps(chance: random.Random) -> None:
    """Wall time goes a day back or forth, and the process is killed some time after."""
    wall, offset, since = time.time, chance.choice([-86_400.0, 86_400.0]), time.monotonic()
    turn = since + chance.uniform(0, 1.0)
    time.time = lambda: wall() + (offset if time.monotonic() > turn else 0.0)
    dead_scorer(chance)


def kill_a_worker(pid: int, run: Path, chance: random.Random, step_seconds: float) -> None:
    """One that plays a role: the run starts its workers again from the last checkpoint, in the same process."""
    _after_some_steps(pid, run, chance)
    _wait_for(pid, lambda: False, chance.uniform(0, 1.5 * step_seconds), every=0.001)
    _kill_one_worker(pid, chance)


def kill_a_worker_in_a_save(pid: int, run: Path, chance: random.Random, step_seconds: float) -> None:
    """While the process that conducts is writing a checkpoint."""
    _wait_for_a_save(pid, run, chance)
    _kill_one_worker(pid, chance)


def _kill_one_worker(pid: int, chance: random.Random) -> None:
    workers = [w for w in _descendants(pid) if b"ray::Process" in _command(w)]
    if workers:
        _kill(chance.choice(workers), signal.SIGKILL)


def _command(pid: int) -> bytes:
    try:
        return Path(f"/proc/{pid}/cmdline").read_bytes()
    except OSError:
        return b""


def _descendants(pid: int) -> list[int]:
    try:
        children = [int(c) for t in Path(f"/proc/{pid}/task").iterdir() for c in (t / "children").read_text().split()]
    except OSError:
        return []
    return [d for child in children for d in (child, *_descendants(child))]


def damage(run: Path, chance: random.Random) -> None:
    """The newest checkpoint is cut off, or one bit in it is another."""
    folders = sorted((run / "checkpoints").glob("step_*"))
    if len(folders) < 2:  # with a single one the run has to begin anew, which is another test
        return
    path = chance.choice(sorted(folders[-1].iterdir()))
    data = bytearray(path.read_bytes())
    if chance.random() < 0.5:
        path.write_bytes(bytes(data[: chance.randrange(len(data))]))
    else:
        data[chance.randrange(len(data))] ^= 1 << chance.randrange(8)
        path.write_bytes(bytes(data))


FAULTS = [
    Fault("killed at a moment", outside=kill_at_a_moment),
    Fault("killed in a save", outside=kill_in_a_save),
    Fault("killed, newest checkpoint damaged", outside=kill_at_a_moment, after=damage),
    Fault("disk full", inside=disk_full),
    Fault("scorer dead", inside=dead_scorer),
    Fault("scorer never answers", inside=slow_scorer),
    Fault("clock jumps a day", inside=clock_jumps),
    Fault("asked to stop", outside=ask_to_stop),
]
WEIGHTS = [30, 25, 15, 8, 6, 4, 4, 8]
WORKER_FAULTS = [
    Fault("worker killed", outside=kill_a_worker),
    Fault("worker killed in a save", outside=kill_a_worker_in_a_save),
]
RESTARTED = "starting the workers again"
"""What a run says when it has lost a worker."""


def _at_a_score(chance: random.Random, act: Callable[[], Any]) -> None:
    _ACT.update(at=chance.randrange(1, 4), act=act)


_EXECUTOR: dict[str, Any] = {}
_ACT: dict[str, Any] = {"at": 0, "calls": 0, "act": None}


def score(prompts: list[str], completions: list[str], answer: list[str], **columns: Any) -> list[float]:
    _ACT["calls"] += 1
    if _ACT["calls"] == _ACT["at"]:
        _ACT["act"]()
    return [float(len(c) % 7) / 6 + (a in c) for c, a in zip(completions, answer, strict=True)]


# ---------------------------------------------------------------------- processes


def _wait_for(pid: int, ready: Callable[[], bool], seconds: float, every: float = 0.005) -> bool:
    """Until it is so, the process has ended, or the time is over."""
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        if ready():
            return True
        if os.waitid(os.P_PID, pid, os.WEXITED | os.WNOHANG | os.WNOWAIT):
            return False
        time.sleep(every)
    return ready()


def _kill(pid: int, number: int) -> None:
    _LEFT.update({d: _command(d) for d in _descendants(pid)} if number == signal.SIGKILL else {})
    with contextlib.suppress(ProcessLookupError):
        os.kill(pid, number)


def _sweep() -> None:
    """Ends what a killed run has left behind: Ray's own processes would stay for minutes."""
    for pid, command in _LEFT.items():
        if command and _command(pid) == command:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
    _LEFT.clear()


_LEFT: dict[int, bytes] = {}


def child(work: Path, algorithm: str, model: Path, inside: Callable[[], None] | None) -> int:
    """A process that starts or goes on with the run."""
    sys.stdout.flush()
    pid = os.fork()
    if pid:
        return pid
    status = FAILED
    try:
        log = os.open(work / "log.txt", os.O_WRONLY | os.O_CREAT | os.O_APPEND)
        os.dup2(log, 1), os.dup2(log, 2)
        signal.alarm(CHILD_SECONDS)  # one that hangs is a fault of ours: it ends the whole
        if inside is not None:
            inside()
        result = make_trainer(work, algorithm, model).train(resume=_has_checkpoint(work / "run"))
        status = FAILED if result.interrupted else DONE
    except BaseException as error:
        print(f"ended by {type(error).__name__}: {str(error).splitlines()[:1]}", file=sys.stderr, flush=True)
    finally:
        if _EXECUTOR:
            import ray

            ray.shutdown()
        os._exit(status)


def _restarts(work: Path) -> int:
    log = work / "log.txt"
    return log.read_text(errors="replace").count(RESTARTED) if log.exists() else 0


def _has_checkpoint(run: Path) -> bool:
    """A run without one begins anew, under the same name."""
    if any((run / "checkpoints").glob("step_*/manifest.json")):
        return True
    shutil.rmtree(run, ignore_errors=True)
    return False


def make_trainer(work: Path, algorithm: str, model: Path) -> Any:
    from podium.recipes import build, load

    values = {
        "algorithm": algorithm,
        "model": {"path": str(model), "dtype": "float32"},
        "batch": {"prompts_per_step": 3, "group_size": 4},
        "data": {"eval_samples": 2},
        "evaluation": {"every_steps": 3},
        "optimizer": {"lr": 1e-3},
        "rollout": {"max_new_tokens": 8},
        "checkpoint": {"export": False, "every_steps": 1, "keep": 3},
        "deadlines": {"reward": 3.0},
        "executor": dict(_EXECUTOR),
        "rewards": [{"function": score}],
        "run": {"folder": str(work), "name": "run", "steps": STEPS, "trackers": [], "progress": False, "log_samples": 10_000},
    }
    return build(load(None, ALGORITHMS[algorithm], values), data=ROWS)


# ---------------------------------------------------------------------- what came out


def outcome(run: Path) -> dict[str, Any]:
    """What two runs are compared by."""
    lines = (run / "metrics.jsonl").read_text().splitlines()
    timed = ("time", "speed", "memory")
    metrics = [{k: v for k, v in json.loads(line).items() if not k.startswith(timed)} for line in lines]
    samples = {p.name: p.read_text() for p in sorted((run / "samples").glob("*.jsonl"))}
    last = sorted((run / "checkpoints").glob("step_*"))[-1]
    files = json.loads((last / "manifest.json").read_text())["files"]
    state = {name: entry["sha256"] for name, entry in files.items() if name not in ("settings.json", "trainer.json")}
    trainer = json.loads((last / "trainer.json").read_text())
    position = {"step": trainer["step"], "loader": trainer["loader"], "rng": trainer["rng"]}
    return {"metrics": metrics, "samples": samples, "state": {**state, "position": position}}


def _step_seconds(run: Path) -> float:
    """From one line of metrics to the next: what a process takes to start is many times that."""
    times = [json.loads(line)["time"] for line in (run / "metrics.jsonl").read_text().splitlines()]
    return (times[-1] - times[0]) / (len(times) - 1)


def differences(run: Path, expected: dict[str, Any]) -> list[str]:
    found = outcome(run)
    return [part for part in expected if found[part] != expected[part]]


@dataclass
class Tally:
    """What happened, by fault."""

    faults: Counter[str] = field(default_factory=Counter)
    ended: Counter[str] = field(default_factory=Counter)
    """Those that ended a run's process before its last step."""
    late: Counter[str] = field(default_factory=Counter)
    """Those that came after the last step, and changed nothing."""
    runs: Counter[str] = field(default_factory=Counter)
    wrong: dict[str, list[str]] = field(default_factory=lambda: defaultdict(list))
    said: int = 0
    """Damaged checkpoints that were passed over, and said."""


def torment(
    work: Path, algorithm: str, model: Path, chance: random.Random, left: int, step_seconds: float, tally: Tally
) -> int:
    """One run, with faults until it has made its steps. Returns how many came in time."""
    used = 0
    while True:
        fault = chance.choices(FAULTS, WEIGHTS)[0] if used < left else None
        inside = (lambda f=fault: f.inside(chance)) if fault and fault.inside else None
        restarts = _restarts(work)
        pid = child(work, algorithm, model, inside)
        if fault is not None and fault.outside is not None:
            fault.outside(pid, work / "run", chance, step_seconds)
        status = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
        _sweep()
        if fault is not None:
            in_time = status != DONE or _restarts(work) > restarts
            used += in_time
            (tally.faults if in_time else tally.late)[fault.name] += 1
            tally.ended[fault.name] += status != DONE
            if fault.after is not None and status != DONE:
                fault.after(work / "run", chance)
        if status == -signal.SIGALRM:
            raise SystemExit(f"a run hung ({fault.name if fault else 'no fault'}):\n{(work / 'log.txt').read_text()[-3000:]}")
        if status == DONE:
            return used
        if fault is None:
            raise SystemExit(f"a run ended by itself:\n{(work / 'log.txt').read_text()[-3000:]}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--faults", type=int, default=100, help="how many, over all algorithms")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--algorithms", nargs="+", default=list(ALGORITHMS), choices=list(ALGORITHMS))
    parser.add_argument("--executor", default="local", choices=["local", "ray"])
    parser.add_argument("--kills", action="store_true", help="SIGKILLs only: of the process, of a worker, in a save")
    parser.add_argument("--keep", type=Path, help="leave the runs' folders here")
    options = parser.parse_args()
    if options.executor == "ray":  # a worker is another process, and can be killed
        _EXECUTOR.update(kind="ray", workers=1, restarts=10)
        FAULTS.extend(WORKER_FAULTS)
        WEIGHTS.extend([30, 20])
    if options.kills:
        killing = [fault.outside is not None and "killed" in fault.name for fault in FAULTS]
        WEIGHTS[:] = [weight if kills else 0 for weight, kills in zip(WEIGHTS, killing, strict=True)]

    import torch

    import podium.trainer.loop
    from tests.tiny import tiny_model, tiny_tokenizer

    torch.set_num_threads(1)
    root = Path(tempfile.mkdtemp(prefix="podium-chaos-")) if options.keep is None else options.keep
    model = root / "model"
    tiny_model(hidden_size=32, intermediate_size=64).save_pretrained(model)
    tiny_tokenizer().save_pretrained(model)
    # What the children share: imports, and no plot at the end (it takes longer than the run).
    podium.trainer.loop.plot_metrics = lambda *given: None
    if options.executor == "local":
        make_trainer(root, "ppo", model).prepare()
    chance, tally, started = random.Random(options.seed), Tally(), time.monotonic()
    share = -(-options.faults // len(options.algorithms))
    for algorithm in options.algorithms:
        whole = root / f"{algorithm}-whole"
        whole.mkdir()
        if os.waitstatus_to_exitcode(os.waitpid(child(whole, algorithm, model, None), 0)[1]) != DONE:
            raise SystemExit((whole / "log.txt").read_text()[-3000:])
        step_seconds, expected = _step_seconds(whole / "run"), outcome(whole / "run")
        left, number = share, 0
        while left > 0:
            number += 1
            work = root / f"{algorithm}-{number}"
            work.mkdir()
            left -= torment(work, algorithm, model, chance, left, step_seconds, tally)
            tally.runs[algorithm] += 1
            tally.said += (work / "log.txt").read_text().count("is damaged")
            if odd := differences(work / "run", expected):
                tally.wrong[algorithm].append(f"{work.name}: {', '.join(odd)}")
            print(f"{work.name}: {odd or 'as the whole run'} ({share - left} of {share} faults)", file=sys.stderr)
            if options.keep is None and not odd:
                shutil.rmtree(work)
    report(tally, time.monotonic() - started, options.seed)
    if options.keep is None and not tally.wrong:
        shutil.rmtree(root)
    sys.exit(1 if tally.wrong else 0)


def report(tally: Tally, seconds: float, seed: int) -> None:
    """The table, then one JSON object."""
    print(f"{'fault':<36}{'in time':>9}{'ended the process':>20}{'came too late':>16}")
    for name in (fault.name for fault in FAULTS):
        if tally.faults[name] or tally.late[name]:
            print(f"{name:<36}{tally.faults[name]:>9}{tally.ended[name]:>20}{tally.late[name]:>16}")
    print(f"{'all':<36}{tally.faults.total():>9}{tally.ended.total():>20}{tally.late.total():>16}\n")
    print(f"{'algorithm':<36}{'runs':>7}{'equal to the whole run':>25}")
    for name, runs in tally.runs.items():
        print(f"{name:<36}{runs:>7}{runs - len(tally.wrong[name]) if name in tally.wrong else runs:>25}")
    wrong = [line for lines in tally.wrong.values() for line in lines]
    print(
        json.dumps(
            {
                "faults": dict(tally.faults),
                "ended_the_process": tally.ended.total(),
                "too_late": tally.late.total(),
                "runs": dict(tally.runs),
                "wrong": wrong,
                "damaged_and_said": tally.said,
                "seconds": round(seconds, 1),
                "seed": seed,
                "executor": _EXECUTOR.get("kind", "local"),
            }
        )
    )


if __name__ == "__main__":
    main()
