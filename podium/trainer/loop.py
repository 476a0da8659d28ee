"""Step after step of a prepared trainer: evaluating, logging, saving; and keeping the last border whatever happens."""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from podium.checkpoints.background import BackgroundSaver
from podium.checkpoints.store import CheckpointStore
from podium.controller.executors.local import LocalExecutor
from podium.core.errors import CheckpointError, DeadlineError, NumericsError, WorkerLost
from podium.core.files import writing
from podium.runs.folder import RunFolder
from podium.runs.plot import plot_metrics
from podium.runs.progress import Progress
from podium.runs.trackers import Tracker
from podium.stages.base import StepContext
from podium.stages.watch import alarms
from podium.trainer import state
from podium.trainer.interrupt import InterruptGuard, StopRequested
from podium.trainer.memory import MemoryWatch
from podium.trainer.samples import sampled_rows
from podium.trainer.waits import StageWatch, run_deadlines

if TYPE_CHECKING:
    from podium.trainer.trainer import Trainer


@dataclass
class TrainResult:
    """What a run came to, its earlier parts included. `run_folder` holds everything else."""

    run_folder: Path
    steps: int
    seconds: float
    evaluation_before: dict[str, float] | None
    """Before the first step; None where there was no held-out data. Likewise `evaluation_after`."""
    evaluation_after: dict[str, float] | None
    metrics: dict[str, float]
    """The last step's metrics."""
    interrupted: bool = False
    """Stopped by Ctrl-C, with all state saved."""


class Loop:
    """The steps that a trainer has left.

    A border lies between two steps; the state of the last one is kept aside (`state.Border`), so that what breaks off a
    step, an evaluation or the loop can be followed by saving it, as long as no weight has changed since.

    Args:
        trainer: prepared; after a resume, restored.
        resumed: the trainer stands where its newest checkpoint does.
    """

    def __init__(
        self,
        trainer: Trainer,
        run: RunFolder,
        store: CheckpointStore,
        progress: Progress,
        trackers: list[Tracker],
        *,
        resumed: bool,
    ) -> None:
        self.trainer, self.run, self.store, self.progress, self.trackers = trainer, run, store, progress, trackers
        self.settings = trainer.settings
        local = isinstance(trainer.executor, LocalExecutor)
        self.deadlines = run_deadlines(self.settings.deadlines, run.reports, progress.note, self._facts, local=local)
        self.memory = MemoryWatch()
        self.watch = StageWatch(self.deadlines, self.memory)
        self.guard = InterruptGuard(progress.note, alone=not trainer.replicated, waits_for=self.deadlines.current)
        self.saver = BackgroundSaver(store, background=self.settings.checkpoint.background)
        self._said_nothing_learned = False
        self._alarms: set[str] = set()
        self._started = time.perf_counter() - trainer.record.seconds
        trainer.border = state.Border.of(trainer)
        self._first = trainer.border
        self._saved = trainer.border if resumed else None

    def train(self) -> TrainResult:
        """Runs them. An error goes on to the caller after the last border was saved."""
        with self.guard, self.deadlines:
            try:
                interrupted = self._until_stopped()
                if self.trainer.border is not self._saved:
                    self._save()
                self._end_save()
            except BaseException as error:
                self.run.write_error(self.trainer.step, error)
                self._rescue(error)
                raise
        return self._finish(interrupted)

    # ------------------------------------------------------------------ steps

    def _until_stopped(self) -> bool:
        try:
            self._steps()
        except StopRequested:
            self.progress.note(f"stopping after step {self.trainer.step}")
            return True
        return False

    def _steps(self) -> None:
        trainer, every = self.trainer, self.settings.checkpoint.every_steps
        self._measure_first()
        while trainer.step < self.settings.run.steps:
            if trainer.executor.any(self.guard.requested):
                raise StopRequested
            self.saver.check()
            self._step()
            try:
                if self._evaluation_due():
                    self._measure()
            finally:  # the step is done, whatever becomes of its evaluation
                self._log(trainer.record.metrics)
            self.progress.step(trainer.record.metrics, _stage_seconds(trainer.record.metrics))
            self._hold_to_bounds()
            if every and trainer.step % every == 0:
                self._save()

    def _step(self) -> None:
        """One step; where a deadline passed before any weight changed, it is made again, if the settings say so."""
        limits, border = self.settings.deadlines, self.trainer.border
        again = limits.retries if limits.action == "retry" else 0
        while True:
            try:
                return self._one_step()
            except DeadlineError as error:
                if limits.action == "restart" and self.trainer.executor.concurrent:
                    raise WorkerLost(error.what, where=error.where, remedy=error.remedy) from error
                assert border is not None
                if not again or not border.holds(self.trainer):
                    raise
                self.progress.note(
                    f"{error.what}: making step {border.step + 1} again, {again} more times before the run stops"
                )
                again -= 1

    def _one_step(self) -> None:
        trainer, started = self.trainer, time.perf_counter()
        context = StepContext(
            trainer.step,
            trainer.roles,
            self.settings.batch.group_size,
            self.settings.run.steps,
            trainer.loader.epoch,
            more_prompts=trainer.loader.next_batch,
            on_progress=self._report,
            watch=self.watch,
            concurrent=trainer.executor.concurrent,
        )
        border = trainer.border
        assert border is not None
        try:
            with self.deadlines.waiting("data", "the data"):
                prompts = trainer.loader.next_batch()
            batch = trainer.graph.run(prompts, context)
        except BaseException as error:
            if _holds(border, trainer, error):
                border.return_to(trainer)
            raise
        seconds = time.perf_counter() - started
        tokens = float(batch.lengths("prompt").sum() + batch.lengths("response").sum())
        context.metrics.add("time/step", seconds)
        context.metrics.add("speed/tokens_per_second", tokens / seconds)
        context.metrics.add("data/epoch", trainer.loader.epoch)
        self.memory.step_done(context.metrics)
        trainer.step += 1
        trainer.record.metrics = context.metrics.means()
        if trainer.record.metrics.get("advantages/abs") == 0.0 and not self._said_nothing_learned:
            self._said_nothing_learned = True
            self.progress.note(f"step {trainer.step}: all rewards within each group are equal, so this step teaches nothing")
        self._mark()
        if self.settings.run.log_samples and "rewards" in batch:
            self.run.write_samples(trainer.step, sampled_rows(batch, self.settings.run.log_samples))
        if any(n.endswith("/skipped_updates") and v > 0 for n, v in trainer.record.metrics.items()):
            self.run.keep_nonfinite(trainer.step, sampled_rows(batch, len(batch), tokens=None))

    def _hold_to_bounds(self) -> None:
        """Says which watched numbers are newly beyond their bounds. Raises NumericsError where one is to stop the run."""
        step = self.trainer.step
        found = {alarm.metric: alarm for alarm in alarms(self.trainer.record.metrics, self.settings.watch)}
        for metric, alarm in found.items():
            if metric not in self._alarms:
                self.progress.note(f"step {step}: {alarm}")
                said = {"metric": metric, "value": alarm.value, "bound": alarm.bound}
                self.run.write_alarm({"step": step, **said, "over": False})
        # What a step did not measure is neither better nor worse.
        over = {metric for metric in self._alarms - set(found) if metric in self.trainer.record.metrics}
        for metric in sorted(over):
            self.run.write_alarm({"step": step, "metric": metric, "over": True})
        self._alarms = (self._alarms | set(found)) - over
        stopping = next((alarm for alarm in found.values() if alarm.stop), None)
        if stopping is not None:
            raise NumericsError(str(stopping), where=f"step {step}", remedy=f"podium doctor {self.run.path} says why")

    def _report(self, stage: str, done: int, total: int) -> None:
        border = self.trainer.border
        # A rollout can be given up: it changed nothing that a resumed step needs. After an update that is no longer so.
        if self.guard.requested and not self.trainer.replicated and border is not None and border.holds(self.trainer):
            self.guard.check()
        self.progress.stage(stage, done, total)
        self.watch.reported(stage, done, total)

    def _facts(self) -> dict[str, Any]:
        """For a report."""
        return {
            "step": self.trainer.step + 1,
            "last_stage": self.watch.last_stage,
            "progress": self.watch.progress,
            "last_checkpoint": self._saved.step if self._saved is not None else None,
            "action": self.settings.deadlines.action,
        }

    def _mark(self) -> None:
        """The trainer is at a border."""
        self.trainer.record.seconds = time.perf_counter() - self._started
        self.trainer.border = state.Border.of(self.trainer)

    # ------------------------------------------------------------------ evaluation, logging

    def _measure_first(self) -> None:
        """What is measured before the first step here: the start of a run, or what an interrupted part still owes."""
        trainer, record = self.trainer, self.trainer.record
        if trainer.step == 0:
            if self.settings.evaluation.at_start and trainer.has_held_out and record.before is None:
                record.before = trainer.measure(self.progress, self.guard, self.watch)
                self._mark()
                self._log(record.before)
        elif self._evaluation_due():
            self._measure()
            self.run.log(trainer.step, record.metrics)
            for tracker in self.trackers:
                tracker.log(trainer.step, record.after or {})

    def _evaluation_due(self) -> bool:
        trainer, every = self.trainer, self.settings.evaluation.every_steps
        now = trainer.step >= self.settings.run.steps or (every and trainer.step % every == 0)
        return bool(trainer.has_held_out and now and trainer.record.evaluated != trainer.step)

    def _measure(self) -> None:
        record = self.trainer.record
        record.after = self.trainer.measure(self.progress, self.guard, self.watch)
        record.metrics = {**record.metrics, **record.after}
        record.evaluated = self.trainer.step
        self._mark()

    def _log(self, metrics: Mapping[str, float]) -> None:
        self.run.log(self.trainer.step, metrics)
        for tracker in self.trackers:
            tracker.log(self.trainer.step, metrics)

    # ------------------------------------------------------------------ saving

    def _save(self) -> None:
        border = self.trainer.border
        assert border is not None
        with self.guard.saving():
            saved = state.capture(self.trainer, border)
            self._end_save()
            self.saver.save(border.step, saved)
            self._saved = border

    def _end_save(self) -> None:
        with self.guard.saving(), self.deadlines.waiting("save", "the checkpoint that is written"):
            self.saver.wait()

    def _rescue(self, error: BaseException) -> None:
        """Saves the last border after an error, and says how to go on. Nothing is kept where no step was done."""
        border = self.trainer.border
        try:
            self._end_save()
        except (CheckpointError, DeadlineError) as second:
            self.progress.note(str(second))
            self._saved = None
        if border is None or border.step == 0:
            return
        held = _holds(border, self.trainer, error)
        if held and border is not self._saved and not isinstance(error, CheckpointError):
            try:
                self._save()
                self._end_save()
            except (CheckpointError, DeadlineError) as second:
                self.progress.note(str(second))
        steps = self.store.steps()
        if steps:
            line = f"saved after step {steps[-1]}; continue with --resume {self.run.path}"
        else:
            why = f": step {border.step + 1} broke off after weights had changed (checkpoint.every_steps=N saves along the way)"
            line = "no checkpoint was saved" + ("" if held else why)
        self.progress.note(line)
        error.add_note(line)

    # ------------------------------------------------------------------ the end

    def _finish(self, interrupted: bool) -> TrainResult:
        trainer, record = self.trainer, self.trainer.record
        if not interrupted and self.settings.checkpoint.export:
            self._export()
        with writing(self.run.plot, "the plot"):
            plot_metrics(self.run.read_metrics(), self.run.plot, self.run.name)
        result = TrainResult(
            self.run.path, trainer.step, record.seconds, record.before, record.after, record.metrics, interrupted
        )
        self.run.write_summary(vars(result))
        if interrupted:
            self.progress.note(f"saved after step {trainer.step}; continue with --resume {self.run.path}")
        elif trainer.border is self._first:
            self.progress.note(f"nothing was left to do: all {trainer.step} steps were made before (run.steps=N makes more)")
        return result

    def _export(self) -> None:
        updated = self.trainer.graph.updated
        main = "actor" if "actor" in updated else next(iter(sorted(updated)), None)
        if main is not None:
            with writing(self.run.model, "the model"):
                self.trainer.roles[main].save_pretrained(str(self.run.model)).result()


def _holds(border: state.Border, trainer: Trainer, error: BaseException) -> bool:
    """The roles' weights are those of the border; not where a worker is gone with its own."""
    return not isinstance(error, WorkerLost) and border.holds(trainer)


def _stage_seconds(metrics: Mapping[str, float]) -> dict[str, float]:
    return {n.removeprefix("time/"): v for n, v in metrics.items() if n.startswith("time/") and n != "time/step"}
