"""A few steps of a run, measured: seconds by stage, operations, kernels, memory."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field
from typing import Any

import torch

from podium.core.batch import Batch
from podium.core.errors import ConfigError
from podium.profiling.kernels import KernelTime, by_kind, kernel_times
from podium.profiling.machine import matrix_rate, synchronize
from podium.profiling.memory import Holding, Standing, largest_rise
from podium.profiling.meter import Count, Meter, counted
from podium.stages.base import Stage, StepContext
from podium.stages.update import UpdateStage

OUTSIDE = {"cuda": "idle", "cpu": "outside torch"}
"""What is left of a stage's time beside its kernels: the device waits; on a CPU it is Python, and what torch does not run."""


@dataclass
class StageTime:
    """One stage in the mean of the timed steps. `kernels`: milliseconds by kind, of the recorded step."""

    name: str
    seconds: float
    tokens: float = 0.0
    generated: float = 0.0
    flops: float = 0.0
    peak_bytes: int | None = None
    kernels: dict[str, float] = field(default_factory=dict)
    longest: list[KernelTime] = field(default_factory=list)


@dataclass
class Profile:
    """What was measured. `rate`: FLOP/s of a matrix product on this device, in `dtype`. `tokens`: of a step's rows, whole."""

    device: str
    dtype: str
    steps: int
    seconds: list[float]
    tokens: float
    rate: float
    stages: list[StageTime]
    memory: list[Holding]
    notes: list[str]

    @property
    def step_seconds(self) -> float:
        return sum(self.seconds) / len(self.seconds)

    @property
    def tokens_per_second(self) -> float:
        return self.tokens / self.step_seconds

    @property
    def mfu(self) -> float | None:
        """All operations of the step's models, the rollout's too, over what the device could have done in its time."""
        flops = sum(stage.flops for stage in self.stages)
        return flops / self.step_seconds / self.rate if flops else None

    def mfu_of(self, stage: StageTime) -> float | None:
        return stage.flops / stage.seconds / self.rate if stage.flops and stage.seconds else None


class _Steps:
    """Runs steps of a prepared trainer; `watch` is entered around each stage."""

    def __init__(self, trainer: Any) -> None:
        self.trainer, self.meter = trainer, Meter()
        self.device = _device_of(trainer)
        # A role that is left alone at first (a critic warms up) is measured when it no longer is.
        self.number = max((s.skip_steps for s in trainer.graph.stages if isinstance(s, UpdateStage)), default=0)
        self.peaks: dict[str, int] = {}

    def run(self, around: Callable[[Stage], Any] = lambda stage: nullcontext()) -> tuple[float, dict[str, float], Batch]:
        """Seconds of a step, of each of its stages, and its rows at the end."""
        trainer = self.trainer
        self.meter.clear()
        context = StepContext(
            self.number,
            trainer.roles,
            trainer.settings.batch.group_size,
            trainer.settings.run.steps,
            trainer.loader.epoch,
            more_prompts=trainer.loader.next_batch,
            watch=lambda stage, batch: self._watch(stage, around),
        )
        self.number += 1
        synchronize(self.device)
        started = time.perf_counter()
        batch = trainer.run_step(trainer.loader.next_batch(), context)
        synchronize(self.device)
        seconds = time.perf_counter() - started
        times = {n.removeprefix("time/"): v for n, v in context.metrics.means().items() if n.startswith("time/")}
        return seconds, times, batch

    @contextmanager
    def _watch(self, stage: Stage, around: Callable[[Stage], Any]) -> Iterator[None]:
        """Each stage ends when the device has done its work, so that its time and memory are its own. What a stage runs inside
        itself (dynamic sampling its rollout and reward) is part of it.
        """
        if self.meter.stage:
            yield
            return
        self.meter.stage = stage.label
        on_gpu = self.device.type == "cuda"
        if on_gpu:
            torch.cuda.reset_peak_memory_stats(self.device)
        try:
            with around(stage):
                yield
                synchronize(self.device)
        finally:
            self.meter.stage = ""
        if on_gpu:
            self.peaks[stage.label] = max(self.peaks.get(stage.label, 0), torch.cuda.max_memory_allocated(self.device))


def profile_run(trainer: Any, *, steps: int = 3, warmup: int = 1, note: Callable[[str], None] = lambda text: None) -> Profile:
    """Trains for `warmup` steps, for `steps` that are timed, and for one more that torch.profiler records.

    Args:
        trainer: a `Trainer` whose workers live in this process. Its weights are trained; nothing is saved.
        note: called with each line that a user should read while it works.

    Raises ConfigError where the workers live in other processes, or what `prepare` and a step raise.
    """
    if trainer.settings.executor.kind != "local":
        raise ConfigError(
            f"executor.kind is {trainer.settings.executor.kind}, and a profile is made in one process",
            where="executor.kind",
            remedy="executor.kind=local executor.workers=1",
        )
    trainer.prepare(note)
    run = _Steps(trainer)
    dtype = _dtype_of(trainer)
    rate = matrix_rate(run.device, dtype)
    with counted(trainer.roles, run.meter):
        for number in range(warmup):
            note(f"step {number + 1} of {warmup + steps + 1}: warms up")
            run.run()
        run.peaks.clear()
        seconds, tokens, times, counts = [], 0.0, [], []
        for number in range(steps):
            took, of_stages, batch = run.run()
            note(f"step {warmup + number + 1} of {warmup + steps + 1}: {took:.3g} s")
            seconds.append(took)
            times.append(of_stages)
            counts.append(run.meter.counts())
            tokens += float(batch.lengths("prompt").sum() + batch.lengths("response").sum()) / steps
        cache, peaks = run.meter.cache, dict(run.peaks)
        note(f"step {warmup + steps + 1} of {warmup + steps + 1}: recorded by torch.profiler")
        recorder = _Recorder(run.device)
        run.run(recorder.around)
    stages = _stages(trainer, times, counts, peaks, recorder)
    memory, unknown = _memory(trainer, run, cache, peaks, recorder)
    notes = [*_notes(trainer, run, recorder), *unknown]
    name = str(dtype).removeprefix("torch.")
    return Profile(str(run.device), name, steps, seconds, tokens, rate, stages, memory, notes)


class _Recorder:
    """A profile of its own for each stage."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.kernels: dict[str, list[KernelTime]] = {}
        self.wall: dict[str, float] = {}
        self.rises: dict[str, int] = {}

    @contextmanager
    def around(self, stage: Stage) -> Iterator[None]:
        from torch.profiler import ProfilerActivity, profile

        on_gpu = self.device.type == "cuda"
        activities = [ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if on_gpu else [])]
        memory = not on_gpu and stage.updates is not None
        with profile(activities=activities, profile_memory=memory) as recorded:
            started = time.perf_counter()
            yield
            self.wall[stage.label] = time.perf_counter() - started
        self.kernels[stage.label] = kernel_times(recorded, self.device)
        if memory:
            self.rises[stage.label] = largest_rise(recorded)


def _stages(
    trainer: Any, times: list[dict[str, float]], counts: list[dict[str, Count]], peaks: dict[str, int], recorder: _Recorder
) -> list[StageTime]:
    """In the order in which they run; each a mean over the timed steps."""
    out = []
    for stage in trainer.graph.order:
        name = stage.label
        seconds = sum(step.get(name, 0.0) for step in times) / len(times)
        mine = [step.get(name, Count()) for step in counts]
        tokens, flops, generated = (sum(getattr(c, n) for c in mine) / len(mine) for n in ("tokens", "flops", "generated"))
        kernels = recorder.kernels.get(name, [])
        kinds = by_kind(kernels)
        # The recorder slows a CPU's operators; a GPU's kernels take what they take, so they are held against the timed steps.
        wall = seconds if recorder.device.type == "cuda" else recorder.wall.get(name, 0.0)
        kinds[OUTSIDE[recorder.device.type]] = max(0.0, 1e3 * wall - sum(kinds.values()))
        out.append(StageTime(name, seconds, tokens, generated, flops, peaks.get(name), kinds, kernels[:20]))
    return out


def _memory(
    trainer: Any, run: _Steps, cache: int | None, peaks: dict[str, int], recorder: _Recorder
) -> tuple[list[Holding], list[str]]:
    """Memory by owner, and what of it is not known."""
    standing, unknown = Standing(run.device), []
    for role, handle in trainer.roles.items():
        for worker in handle.workers:
            standing.add_role(role, worker.engine)
    found, total = standing.holdings, standing.total
    for stage in trainer.graph.order:
        if stage.updates is None:
            continue
        role = stage.updates
        gradients, fresh = run.meter.gradients.get(role, (None, 0))
        found.append(Holding("gradients", role, gradients))
        if gradients is None:
            unknown.append(f"{role}: its optimizer does not show its gradients, so they are counted as activations")
        if run.device.type == "cuda":
            rest = peaks.get(stage.label, 0) - total - (gradients or 0)
        else:
            rest = recorder.rises.get(stage.label, 0) - fresh
        found.append(Holding("activations and scratch, at most", role, max(0, rest)))
    if any("rollout_log_probs" in stage.writes for stage in trainer.graph.stages):
        found.append(Holding("KV cache, at most", "actor", cache))
        if cache is None:
            unknown.append("KV cache: this rollout engine does not say how large its cache is")
    return found, unknown


def _notes(trainer: Any, run: _Steps, recorder: _Recorder) -> list[str]:
    """What the figures do not hold."""
    notes = [f"{role}: {cost.unknown}" for role, cost in run.meter.costs.items() if cost.unknown]
    uncounted = [role for role in trainer.roles if role not in run.meter.costs]
    notes += [f"{role}: its engine is not known, so it is not counted" for role in uncounted]
    if recorder.device.type != "cuda":
        notes.append("a CPU's allocator does not count: memory is that of tensors, without torch's libraries and Python")
        notes.append(
            "kernels are torch's operators, in one step that torch.profiler records: it makes small ones slower than "
            "they are, so read the shares"
        )
    if any(stage.label == "reward" for stage in trainer.graph.stages):
        notes.append("what a reward does outside torch (Python, other processes, servers) is in its stage's time alone")
    return notes


def _device_of(trainer: Any) -> torch.device:
    for handle in trainer.roles.values():
        for worker in handle.workers:
            parameters = getattr(getattr(worker.engine, "model", None), "parameters", None)
            if parameters is not None:
                return torch.device(next(parameters()).device)
    return torch.device("cpu")


def _dtype_of(trainer: Any) -> torch.dtype:
    """The dtype that the first role with a model computes in."""
    for handle in trainer.roles.values():
        for worker in handle.workers:
            model = getattr(worker.engine, "model", None)
            found = [p.dtype for p in model.parameters() if p.is_floating_point()] if model is not None else []
            if found:
                return max(found, key=found.count)
    return torch.float32
