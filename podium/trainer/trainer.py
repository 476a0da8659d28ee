"""`Trainer`: runs a graph of stages for a number of steps. Evaluation, logging, saving and resuming live here once."""

from __future__ import annotations

import shutil
import tempfile
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from podium.checkpoints.store import CheckpointStore
from podium.controller.executors import create_executor
from podium.controller.executors.local import LocalExecutor
from podium.controller.resource_pool import ResourcePool
from podium.controller.worker_group import Executor, RoleHandle
from podium.core.batch import Batch
from podium.core.config import apply_overrides, dump_yaml, load_yaml, parse
from podium.core.errors import CheckpointError, ConfigError, GraphError, WorkerLost, did_you_mean
from podium.core.metrics import Metrics
from podium.core.seeding import seed_everything
from podium.core.settings import RecipeSettings, StagesSettings
from podium.data.loader import Loader
from podium.data.sources import FILE_SUFFIXES, load_rows
from podium.engines.rollout import ROLLOUT_ENGINES
from podium.engines.train import TRAIN_ENGINES
from podium.models.loading import check_path, quiet
from podium.runs.folder import RunFolder, default_name, latest_run
from podium.runs.progress import Progress
from podium.runs.trackers import check_names, check_packages, open_trackers
from podium.stages.base import Stage, StepContext
from podium.stages.graph import StageGraph
from podium.stages.policy import OnPolicyStage
from podium.stages.watch import watch_stages
from podium.trainer import state
from podium.trainer.changes import described_stage, table
from podium.trainer.data import UNIT, load_data
from podium.trainer.evaluation import EVALUATION_STEP, evaluation_stages
from podium.trainer.interrupt import InterruptGuard
from podium.trainer.loop import Loop, TrainResult
from podium.trainer.recipe import SOURCES, DataKind, Recipe, find_recipe, read_settings
from podium.trainer.roles import RoleNeeds, Roles
from podium.trainer.waits import Watch
from podium.workers.base import parts_of


class Trainer:
    """Trains roles by running stages, step after step.

    Three ways in: `Trainer(settings)` or `Trainer(config_path=...)`, stages from the recipe that `algorithm` names;
    `Trainer(stages=[...], config=...)`, your own stages; and with roles placed by hand,
    `Trainer(model_names=[...], resource_pool={...}, config_path=...)`.

    Args:
        stages: the step's stages; by default the recipe's.
        config: settings: a settings object, a mapping, or a YAML file's path.
        model_names: roles that the run is to have; it is an error if the recipe's graph calls others.
        resource_pool: devices and backend of each role; by default the settings' `resource_pool`.
        config_path: the same as a path in `config`.
        models: models that are in memory already, by role ("actor": a `transformers` model); `tokenizer` goes with the actor.
        data: rows (a list of dicts) instead of `data.path`; `eval_data` likewise.
        evaluation: stages that measure held-out rows; by default the recipe's, or greedy rollout and reward.
        executor: where workers live; by default the settings' `executor`.

    Everything that can be checked without loading a model is checked here: settings, columns, backends, rewards.
    Raises ConfigError, GraphError, ResourceError.
    """

    def __init__(
        self,
        stages: Sequence[Stage] | RecipeSettings | None = None,
        config: RecipeSettings | Mapping[str, Any] | str | Path | None = None,
        *,
        model_names: Iterable[str] | None = None,
        resource_pool: Mapping[str, Any] | ResourcePool | None = None,
        config_path: str | Path | None = None,
        models: Mapping[str, Any] | None = None,
        tokenizer: Any = None,
        data: Any = None,
        eval_data: Any = None,
        evaluation: Sequence[Stage] | None = None,
        executor: Executor | None = None,
    ) -> None:
        given = stages if isinstance(stages, RecipeSettings) else None
        stages = None if isinstance(stages, RecipeSettings) else stages
        self.settings = _settings(one_source(given, config, config_path), stages)
        check_names(self.settings.run.trackers)
        recipe = None if stages is not None else find_recipe(self.settings.algorithm)
        self.stages = list(stages) if stages is not None else _stages_of(recipe, self.settings)
        self.stage_arguments = {stage.label: described_stage(stage) for stage in stages or ()}
        self.kind: DataKind = recipe.data if recipe else _data_kind(self.stages)
        self.graph = StageGraph([*self.stages, *watch_stages(self.stages, self.settings.watch)], SOURCES[self.kind])
        if evaluation is None:
            evaluation = (
                recipe.evaluation(self.settings) if recipe else evaluation_stages(self.graph.stages, self.settings.evaluation)
            )
        self.evaluation = StageGraph(evaluation, SOURCES[self.kind])
        self.pool = ResourcePool.of(resource_pool if resource_pool is not None else self.settings.resource_pool)
        self._check(model_names)
        self._executor = executor
        self._given_data, self._given_eval = data, eval_data
        self._given_models, self._given_tokenizer = dict(models or {}), tokenizer
        self.roles: dict[str, RoleHandle] = {}
        self.tokenizer: Any = None
        self.step = 0
        self.record = state.Record()
        self.border: state.Border | None = None
        self.last_evaluation: Batch | None = None
        self._held_out: Batch | None = None
        self._frozen: dict[str, str] | None = None

    # ------------------------------------------------------------------ public

    def train(self, resume: bool | str | Path = False, *, accept_changes: bool = False) -> TrainResult:
        """Runs the steps that are left.

        Args:
            resume: True continues the newest run of this name (`name`, `name-2`...; without a name, of this algorithm),
                a path that run.
            accept_changes: go on although what the run computes is other than in its checkpoint (settings, stage arguments,
                a data column); else that is a ChangedSettings error with the differences. What was accepted is noted.

        Ctrl-C stops at a border where state is whole, saves a checkpoint, and returns with `interrupted` set. After an
        error the last border is saved, where no weight has changed since; a note on the error says how to go on.
        """
        if "trackers" in self.settings.run.model_fields_set:
            check_packages(self.settings.run.trackers)
        writes = self.executor.writes
        old = self._find_run(resume) if resume else None
        shown = self.settings.run.progress and writes
        with Progress(self.settings.run.steps, self.settings.algorithm, enabled=shown) as progress, ExitStack() as held:
            note = progress.note if writes else _say_nothing
            self.prepare(note)
            # The folder is made only now: what could not be loaded leaves nothing behind.
            run = old if old is not None and writes else self._new_run()
            held.enter_context(run.locked())
            store = CheckpointStore((old or run).checkpoints, self.settings.checkpoint.keep, note, writes=writes)
            if old:
                self._restore(store, run, progress, accept_changes=accept_changes)
            else:
                run.write_settings(dump_yaml(self.settings))
            trackers = open_trackers(
                self.settings.run.trackers if writes else [],
                run,
                self.settings.model_dump(mode="json"),
                resume_step=self.step or None,
                required="trackers" in self.settings.run.model_fields_set,
                note=note,
            )
            try:
                result = self._until_done(run, store, progress, trackers, resumed=old is not None)
            finally:
                for tracker in trackers:
                    tracker.close()
                run.close()
                if not writes:
                    shutil.rmtree(run.path.parent, ignore_errors=True)
                elif old is None and not run.metrics.exists() and not run.reported:  # nothing was measured: there is no run
                    shutil.rmtree(run.path, ignore_errors=True)
            return replace(result, run_folder=self.executor.same(result.run_folder))

    def _until_done(
        self, run: RunFolder, store: CheckpointStore, progress: Progress, trackers: list[Any], *, resumed: bool
    ) -> TrainResult:
        """The steps that are left; where a worker is lost, its run goes on from the last checkpoint by itself."""
        start = state.Border.of(self)
        left = self.settings.executor.restarts
        while True:
            try:
                return Loop(self, run, store, progress, trackers, resumed=resumed).train()
            except WorkerLost as error:
                if left == 0 or not self.executor.concurrent:
                    raise
                left -= 1
                progress.note(f"{error}\nstarting the workers again; {left} more times before the run gives up")
                self.roles = self._launch()
                resumed = bool(store.steps())
                if resumed:
                    self._restore(store, run, progress, accept_changes=True)
                else:
                    start.return_to(self)
                    run.rewind(self.step)
                    progress.completed = self.step

    def close(self) -> None:
        """Ends the workers, where they are not this process. What the last evaluation left is fetched first."""
        if self.last_evaluation is not None:
            self.last_evaluation = self.last_evaluation.here()
        if self._executor is not None:
            self._executor.shutdown()
        self.roles = {}

    @property
    def executor(self) -> Executor:
        """Where the workers live: what the trainer was given, else what the settings name, made when it is first asked for."""
        if self._executor is None:
            self._executor = create_executor(
                self.settings.executor, self.pool, self.settings.run.device, deadline=self.settings.deadlines.call
            )
        return self._executor

    @property
    def replicated(self) -> bool:
        """Other processes run the same loop."""
        return not self.executor.writes or bool(getattr(self.executor, "world", 1) > 1)

    def check_files(self) -> None:
        """Raises where a local model, data or evaluation file that the settings name is not there. Loads nothing."""
        model, data = self.settings.model, self.settings.data
        for name, path in model:
            if name.endswith("path") and path is not None:
                check_path(path)
        for path in (data.path, data.eval_path):
            if path is not None and Path(path).suffix in FILE_SUFFIXES and not Path(path).is_file():
                load_rows(path)  # says what is wrong

    def prepare(self, note: Callable[[str], None] = lambda text: None) -> Trainer:
        """Loads data, tokenizer and models, once; after it `roles` and `loader` are there (for a loop of your own).

        Args:
            note: called with each line that a user should read.
        """
        if self.roles:
            return self
        settings = self.settings
        quiet()
        if settings.run.threads:
            torch.set_num_threads(settings.run.threads)
        seed_everything(settings.run.seed)
        local = isinstance(self.executor, LocalExecutor)
        device = _device(settings.run.device) if local else settings.run.device
        for line in self.pool.notes(device, torch.cuda.device_count() if device != "cpu" else 0) if local else ():
            note(line)
        for stage in self.graph.stages:
            self._given_models |= stage.models()
            self._given_tokenizer = self._given_tokenizer or stage.tokenizer
        if isinstance(self.executor, LocalExecutor):
            self.executor.device = device
        backends = {role: name for role, name in self.pool.backends().items() if name in TRAIN_ENGINES}
        roles = Roles(settings, self._given_models, self._given_tokenizer, backends, self.pool)
        self.tokenizer = roles.tokenizer
        for stage in self.graph.stages:
            if stage.wants_tokenizer and stage.tokenizer is None:
                stage.tokenizer = self.tokenizer
        data = load_data(settings, self.kind, self.tokenizer, self._given_data, self._given_eval)
        for line in data.lines:
            note(line)
        self._held_out = data.held_out
        graphs = [self.graph]
        self.graph.check_data(data.train.extras())
        if data.held_out is not None:
            graphs.append(self.evaluation)
            self.evaluation.check_data(data.held_out.extras())
        rows = settings.batch.prompts_per_step
        self.loader = Loader(
            data.train,
            rows * UNIT[self.kind],
            shuffle=settings.data.shuffle,
            seed=settings.run.seed,
            unit=UNIT[self.kind],
        )
        generates = any("rollout_log_probs" in stage.writes for g in graphs for stage in g.stages)
        evaluation = self.evaluation if self._held_out is not None else None
        needs = RoleNeeds.of(self.graph, evaluation, settings.run.steps, self._updates_per_step())
        self._launch = lambda: roles.build(needs, self.executor, generates=generates)
        self.roles = self._launch()
        if generates:
            _check_longest(self.roles["actor"], [b for b in (data.train, data.held_out) if b is not None])
        for label, column in self.graph.missing_optional():
            note(f"no stage writes '{column}': '{label}' goes without it")
        return self

    def evaluate(self) -> dict[str, float]:
        """Measures the held-out rows once, as the run would. Raises ConfigError where there are none."""
        self.prepare()
        if self._held_out is None:
            raise ConfigError("there is no held-out data", where="data", remedy="set data.eval_path or data.eval_samples")
        return self.measure()

    def run_step(self, batch: Batch, context: StepContext) -> Batch:
        """One step's stages over the rows given."""
        return self.graph.run(batch, context)

    def set_kl_controller(self, kind: str, **settings: Any) -> None:
        """Switches the KL controller at the step's border ("adaptive", "fixed", "none"), while a run goes on.

        Raises GraphError where the run has no controller (and so no reference model).
        """
        found = [s for s in self.stages if isinstance(s, OnPolicyStage) and s.controller is not None]
        if not found:
            raise GraphError("this run has no KL controller", remedy="start it with kl.coef > 0")
        for stage in found:
            stage.controller.switch(kind, **settings)  # type: ignore[union-attr]
        if self.border is not None:
            self.border.state["stages"] = state.stage_states(self)

    # ------------------------------------------------------------------ before the first step

    def _updates_per_step(self) -> int:
        """Optimizer updates that a trained role makes in a step."""
        batch = self.settings.batch
        rows = batch.prompts_per_step * (batch.group_size if self.kind == "prompts" else UNIT[self.kind])
        return batch.epochs * parts_of(rows, batch.minibatch_sequences, rows)

    def _check(self, model_names: Iterable[str] | None) -> None:
        engines = set(ROLLOUT_ENGINES)
        trains = set(TRAIN_ENGINES)
        backends = {role: trains | (engines if role in ("actor", "rollout") else set()) for role in self.pool.pools}
        self.pool.check(backends)
        named = set(model_names) if model_names is not None else None
        if named is not None:
            # A critic or reference that was not named would otherwise take memory that nobody planned for.
            called = [r for r in self.graph.roles if r not in named]
            if called:
                raise ConfigError(
                    f"the stages call the roles {called}, which model_names lacks",
                    where="model_names",
                    remedy="add them, or set what makes them needless (kl.coef=0 for the reference)",
                )
            unused = sorted(named - set(self.graph.roles))
            if unused:
                raise ConfigError(
                    f"no stage calls the roles {unused}",
                    where="model_names",
                    remedy="roles here: " + ", ".join(self.graph.roles),
                )
        if (rollout := getattr(self.settings, "rollout", None)) is not None and "actor" in self.graph.roles:
            ROLLOUT_ENGINES.get(rollout.engine)()

    def _new_run(self) -> RunFolder:
        settings = self.settings.run
        if not self.executor.writes:  # what this process would write is the other's
            return RunFolder.create(tempfile.mkdtemp(prefix="podium-"), "rank")
        return RunFolder.create(settings.folder, settings.name or default_name(self.settings.algorithm))

    def _find_run(self, resume: bool | str | Path) -> RunFolder:
        settings = self.settings.run
        if resume is True:
            found = latest_run(settings.folder, settings.name, algorithm=self.settings.algorithm)
            if found is None:
                named = f"called '{settings.name}'" if settings.name else f"of '{self.settings.algorithm}' without a name"
                raise CheckpointError(
                    f"no run {named} has a checkpoint in '{settings.folder}'",
                    where="resume",
                    remedy="give the run's folder, or start without --resume",
                )
            return found
        return RunFolder.open(str(resume))

    # ------------------------------------------------------------------ what the loop calls

    @property
    def has_held_out(self) -> bool:
        """There are rows to evaluate on (after `prepare`)."""
        return self._held_out is not None

    def measure(
        self, progress: Progress | None = None, guard: InterruptGuard | None = None, watch: Watch | None = None
    ) -> dict[str, float]:
        """The held-out rows' metrics under the present weights. A stop that `guard` knows of breaks it off.

        Args:
            watch: the stages' deadlines.
        """
        assert self._held_out is not None

        def report(stage: str, done: int, total: int) -> None:
            if guard is not None:
                guard.check()
            if progress is not None:
                progress.stage(f"evaluate {stage}", done, total)

        started = time.perf_counter()
        context = StepContext(EVALUATION_STEP, self.roles, on_progress=report, concurrent=self.executor.concurrent)
        context.watch = watch or context.watch
        self.last_evaluation = self.evaluation.run(self._held_out, context)
        kept = Metrics({n: v for n, v in context.metrics.items() if not n.startswith("time/")})
        out = Metrics().merge(kept, prefix="eval/")
        out.add("time/evaluate", time.perf_counter() - started)
        return out.means()

    # ------------------------------------------------------------------ state

    def trained_roles(self) -> dict[str, RoleHandle]:
        """Handles of the roles whose weights this run changes."""
        return {name: self.roles[name] for name in self.graph.roles if name in self.graph.updated}

    def frozen_weights(self) -> dict[str, str]:
        """A digest of each role's weights that this run reads and never changes."""
        if self._frozen is None:
            frozen = [name for name in self.graph.roles if name not in self.graph.updated]
            self._frozen = {name: self.roles[name].weights_digest().result() for name in frozen}
        return self._frozen

    def _restore(self, store: CheckpointStore, run: RunFolder, progress: Progress, *, accept_changes: bool) -> None:
        step, saved = store.load()
        changed = state.restore(self, saved, accept_changes=accept_changes)
        progress.completed = step
        run.rewind(step)
        if changed:
            progress.note(f"accepted what has changed since the checkpoint:\n{table(changed)}")
            if self.executor.writes:
                run.change_settings(dump_yaml(self.settings), step)
        progress.note(f"continuing {run.path} after step {step}")


def one_source(*sources: Any) -> Any:
    """The one of several places for settings that was used, or None. Raises ConfigError where there are two."""
    given = [source for source in sources if source is not None]
    if len(given) > 1:
        raise ConfigError("settings are given twice", where="config", remedy="give config or config_path, not both")
    return given[0] if given else None


def _settings(config: Any, stages: Sequence[Stage] | None) -> RecipeSettings:
    if isinstance(config, RecipeSettings):
        return config
    if isinstance(config, str | Path):
        values, where = load_yaml(config), str(config)
    elif config is None or isinstance(config, Mapping):
        values, where = dict(config or {}), "config"
    else:
        raise ConfigError(f"config must be settings, a mapping or a path, got {type(config).__name__}", where="Trainer")
    if stages is None:
        return read_settings(values, where=where)
    given = [f"{key}={value}" for stage in stages for key, value in stage.settings().items()]
    values = {"algorithm": "custom", **apply_overrides(values, given)}
    return parse(StagesSettings, values, where)


def _stages_of(recipe: Recipe | None, settings: RecipeSettings) -> list[Stage]:
    """A recipe's stages; what its algorithms refuse (they know no settings) becomes an error of the settings."""
    assert recipe is not None
    try:
        return recipe.stages(settings)
    except ValueError as error:
        raise ConfigError(str(error), where=settings.algorithm) from error


def _data_kind(stages: Sequence[Stage]) -> DataKind:
    parts = [part for stage in stages for part in stage.expand()]
    if any("response_ids" in part.writes for part in parts):
        return "prompts"
    read = {name for part in parts for name in part.reads}
    return "preferences" if "chosen" in read else "unpaired" if "label" in read else "supervised"


def _check_longest(actor: RoleHandle, batches: Sequence[Batch]) -> None:
    """The longest prompt is tried before the first step: what cannot fit fails now, not an hour later."""
    longest = max((batch["prompt_ids"] for batch in batches), key=lambda prompts: prompts.max_length)
    actor.check_prompt(longest[int(longest.lengths.argmax())].tolist()).result()


def _say_nothing(text: str) -> None:
    pass


def _device(name: str) -> str:
    if name == "auto":
        return "cuda" if torch.cuda.is_available() else "cpu"
    if name.startswith("cuda") and not torch.cuda.is_available():
        raise ConfigError(f"device '{name}' was asked for, but torch sees no GPU", where="run.device", remedy="run.device=auto")
    try:
        torch.empty(0, device=name)
    except (RuntimeError, AssertionError, NotImplementedError) as error:
        remedy = did_you_mean(name, ["cpu", "cuda", "auto"])
        raise ConfigError(f"torch has no device '{name}'", where="run.device", remedy=remedy) from error
    return name
