"""The graph that stages imply: derived from what they read and write, checked before anything is loaded, then run."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from podium.core.batch import Batch
from podium.core.errors import GraphError, did_you_mean
from podium.stages.base import Stage, StepContext
from podium.stages.schedule import merged, run_concurrently, run_stage

# What gives a column that an algorithm may lack: the stage, and the settings that bring it.
_GIVEN_BY = {
    "values": "a critic gives it: PPOStage, or algorithm: ppo",
    "ref_log_probs": "a reference gives it: kl_coef (kl.coef) above 0, or LogProbStage('reference', 'ref_log_probs')",
    "old_log_probs": "the actor gives it: one_update=False, or LogProbStage('actor', 'old_log_probs')",
    "teacher_log_probs": "a teacher gives it: LogProbStage('teacher', 'teacher_log_probs'), or algorithm: distillation",
    "baseline_rewards": "the greedy response gives it: GreedyBaselineStage(reward_stage), or algorithm: remax",
    "rewards": "a RewardStage gives it",
    "costs": "a CostStage gives it, or algorithm: safe_rlhf with costs",
    "group_id": "a RolloutStage gives it",
    "step_rewards": "a StepwiseRewardStage gives it",
    "advantages": "an AdvantageStage gives it, or one of GRPOStage, PPOStage",
    "pair_id": "preference pairs have it: data columns prompt, chosen, rejected",
    "label": "marked answers have it: data columns prompt, completion, label",
}


class StageGraph:
    """Stages in an order in which every column is there when it is read.

    Args:
        stages: in the order written; composites are expanded. Independent stages keep this order.
        sources: columns that the data set brings.

    Raises GraphError: two stages of one name, two writers of one column, a column that nothing writes, a cycle.
    """

    def __init__(self, stages: Iterable[Stage], sources: Iterable[str]) -> None:
        self.stages = [part for stage in stages for part in stage.expand()]
        self.sources = set(sources)
        self._writer = self._writers()
        self.needs = [self._dependencies(i) for i in range(len(self.stages))]
        self.levels = self._levels()

    @property
    def order(self) -> list[Stage]:
        """The stages as they run."""
        return [self.stages[i] for level in self.levels for i in level]

    @property
    def roles(self) -> list[str]:
        """Roles that some stage calls, in order of first use."""
        return list(dict.fromkeys(role for stage in self.order for role in stage.roles))

    @property
    def updated(self) -> set[str]:
        """Roles that some stage trains."""
        return {stage.updates for stage in self.stages if stage.updates}

    def missing_optional(self) -> list[tuple[str, str]]:
        """(stage, column) for optional columns that nothing writes."""
        return [(s.label, c) for s in self.stages for c in s.optional_reads if not self._available(c)]

    def run(self, batch: Batch, context: StepContext) -> Batch:
        """Runs every stage once over a step's rows; adds `time/<stage>` (seconds) to the metrics.

        With `context.concurrent` a stage starts as soon as those that it needs are done, in a thread of its own.
        """
        if context.concurrent:
            return run_concurrently(self, batch, context)
        for stage in self.order:
            batch = merged(stage, batch, run_stage(stage, batch, context))
        return batch

    # ------------------------------------------------------------------ derivation

    def _available(self, column: str) -> bool:
        # A data set's own columns are known when it is read: `check_data`.
        return column in self.sources or column in self._writer or column.startswith("data.")

    def check_data(self, columns: Iterable[str]) -> None:
        """Raises where a stage needs a data column that is not there. `columns` are the data set's extra ones."""
        present = list(columns)
        for stage in self.stages:
            for column in stage.reads:
                if column.startswith("data.") and column.removeprefix("data.") not in present:
                    raise GraphError(
                        f"stage '{stage.label}' reads '{column}', which the data set lacks",
                        remedy="it has: " + (", ".join(f"data.{name}" for name in present) or "no extra columns"),
                    )
            stage.check_data(present)

    def _writers(self) -> dict[str, int]:
        writers: dict[str, int] = {}
        labels: set[str] = set()
        for i, stage in enumerate(self.stages):
            if stage.label in labels:
                raise GraphError(f"two stages are called '{stage.label}'", remedy="give one another name=")
            labels.add(stage.label)
            for column in stage.writes:
                if column in writers:
                    other = self.stages[writers[column]].label
                    raise GraphError(f"'{column}' is written by both '{other}' and '{stage.label}'", remedy="drop one of them")
                writers[column] = i
        return writers

    def _dependencies(self, at: int) -> set[int]:
        stage, needs = self.stages[at], set[int]()
        for column in stage.reads:
            if not self._available(column):
                known = set(self._writer) | self.sources
                raise GraphError(
                    f"stage '{stage.label}' reads '{column}', which nothing writes",
                    remedy=_GIVEN_BY.get(column) or f"add a stage or a data column for it; {did_you_mean(column, known)}",
                )
        for column in (*stage.reads, *stage.optional_reads):
            if column in self._writer and self._writer[column] != at:
                needs.add(self._writer[column])
        for name in stage.after:
            found = [i for i, other in enumerate(self.stages) if other.label == name]
            if not found:
                raise GraphError(
                    f"stage '{stage.label}' is to run after '{name}', which is no stage",
                    remedy=did_you_mean(name, [s.label for s in self.stages]),
                )
            needs.update(found)
        for i, other in enumerate(self.stages):
            barrier = other.changes_rows or stage.changes_rows
            if i < at and barrier:
                needs.add(i)
            # A role is updated only when nobody needs its old weights any more.
            if stage.updates and i != at and stage.updates in other.roles and not (other.updates == stage.updates and i > at):
                needs.add(i)
        return needs

    def _levels(self) -> list[list[int]]:
        """Stages that may run at the same time, level after level (Kahn's algorithm)."""
        done: set[int] = set()
        levels: list[list[int]] = []
        while len(done) < len(self.stages):
            ready = [i for i in range(len(self.stages)) if i not in done and self.needs[i] <= done]
            if not ready:
                stuck = [self.stages[i].label for i in range(len(self.stages)) if i not in done]
                raise GraphError("these stages wait for each other: " + ", ".join(stuck), remedy="check reads, writes, after")
            levels.append(ready)
            done.update(ready)
        return levels


def describe(graph: StageGraph) -> Sequence[tuple[str, str, str, str]]:
    """(stage, roles, reads, writes) in the order in which they run: what `podium explain` prints."""
    return [
        (
            s.label,
            ", ".join(s.roles) or "-",
            ", ".join(s.reads) or "-",
            ", ".join(s.writes) or (f"{s.updates} weights" if s.updates else "-"),
        )
        for s in graph.order
    ]
