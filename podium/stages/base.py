"""`Stage`: one step of the dataflow. It says what it reads and writes; the graph follows."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from typing import Any

from podium.core.batch import Batch
from podium.core.metrics import Metrics


@dataclass
class StepContext:
    """What a stage may use while it runs: the role handles, the step's number, where metrics go."""

    step: int
    roles: Mapping[str, Any]
    group_size: int = 1
    """Responses per prompt, where a stage does not say otherwise."""
    total_steps: int = 0
    """Steps of the whole run."""
    epoch: float = 0.0
    """Passes over the data made so far."""
    more_prompts: Callable[[int], Batch] | None = None
    """Takes so many further rows from the data, for a stage that replaces some of the step's."""
    rollout_round: int = 0
    """Rollouts that this step has made before: what is sampled again is sampled from other seeds."""
    metrics: Metrics = field(default_factory=Metrics)
    on_progress: Callable[[str, int, int], None] | None = None
    """Called as (stage, done, total) while a long stage works."""
    watch: Callable[[Stage, Batch], AbstractContextManager[None]] = lambda stage, batch: nullcontext()
    """Entered around a stage's run: it has a deadline."""
    concurrent: bool = False
    """Stages whose inputs are there may run at the same time."""

    def progress_of(self, stage: str) -> Callable[[int, int, int], None] | None:
        """A callback in the form that `generate` takes: responses finished, responses in all, tokens."""
        report = self.on_progress
        return None if report is None else lambda done, total, tokens: report(stage, done, total)


class Stage:
    """Base of every stage. A subclass sets what it declares and writes `run`.

    Attributes:
        name: unique in a graph; by default the class's name.
        reads: columns that must be there. A stage sees these and the optional ones only (all, if it changes rows).
        optional_reads: columns that are used where some stage writes them.
        writes: columns that this stage adds.
        changes_rows: the stage returns other rows than it got; it runs after all stages listed before it, and those
            listed after it wait for it.
        roles: role handles that it calls.
        updates: the role whose weights it changes, if any. It runs after every other stage that calls that role.
        after: names of stages that must have run before, where no column says so.
        wants_tokenizer: the run's tokenizer is put into `tokenizer`, where the stage was given none.
    """

    name: str = ""
    reads: tuple[str, ...] = ()
    optional_reads: tuple[str, ...] = ()
    writes: tuple[str, ...] = ()
    changes_rows: bool = False
    roles: tuple[str, ...] = ()
    updates: str | None = None
    after: tuple[str, ...] = ()
    wants_tokenizer: bool = False
    tokenizer: Any = None

    def expand(self) -> list[Stage]:
        """The stages that this one stands for: itself, or a composite's parts."""
        return [self]

    def models(self) -> dict[str, Any]:
        """Models that the user gave to this stage, by role (a path, a `transformers` model, a Podium model)."""
        return {}

    def settings(self) -> dict[str, Any]:
        """Dotted settings that this stage's own arguments decide (`rollout.max_new_tokens`)."""
        return {}

    def check_data(self, columns: Iterable[str]) -> None:
        """Called with the data set's extra columns before a model is loaded; raises where one is missing."""

    def run(self, batch: Batch, context: StepContext) -> Batch:
        """Does the work. Returns the written columns (same rows), or all rows and columns if `changes_rows`."""
        raise NotImplementedError

    def state_dict(self) -> dict[str, Any]:
        """Plain values that a resumed run needs."""
        return {}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        pass

    @property
    def label(self) -> str:
        return self.name or type(self).__name__

    def __repr__(self) -> str:
        return f"{self.label}(reads={list(self.reads)}, writes={list(self.writes)})"
