"""Running a graph's stages: one after the other, or each as soon as what it needs is there."""

from __future__ import annotations

import time
from collections.abc import Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from dataclasses import replace
from typing import Any, Protocol

from podium.core.batch import Batch, resolve
from podium.core.errors import GraphError
from podium.core.metrics import Metrics
from podium.stages.base import Stage, StepContext


class Graph(Protocol):
    """Stages, and for each the numbers of those that must have run before it."""

    stages: list[Stage]
    needs: list[set[int]]
    levels: list[list[int]]


def run_stage(stage: Stage, batch: Batch, context: StepContext) -> Batch:
    """One stage over a step's rows: what it returned. Adds its seconds to the metrics."""
    started = time.perf_counter()
    with context.watch(stage, batch):
        result = resolve(stage.run(batch if stage.changes_rows else _visible(stage, batch), context))
    context.metrics.add(f"time/{stage.label}", time.perf_counter() - started)
    return result


def merged(stage: Stage, batch: Batch, result: Batch) -> Batch:
    """The step's rows after a stage."""
    return result if stage.changes_rows else batch.with_columns(_declared(stage, result))


def run_concurrently(graph: Graph, batch: Batch, context: StepContext) -> Batch:
    """Every stage once, each in a thread as soon as its needs are met; a stage that is alone runs in the caller's thread.

    Each stage has metrics of its own while others run; they are added up in the graph's order, not in that of their ends. The
    first error, in the graph's order, is raised when those that run have ended.
    """
    order = [i for level in graph.levels for i in level]
    done: set[int] = set()
    running: dict[Future[Batch], int] = {}
    metrics: dict[int, Metrics] = {}
    with ThreadPoolExecutor(max_workers=len(order), thread_name_prefix="stage") as threads:
        while len(done) < len(order):
            ready = [i for i in order if i not in done and i not in running.values() and graph.needs[i] <= done]
            if len(ready) == 1 and not running:
                stage = graph.stages[ready[0]]
                batch = merged(stage, batch, run_stage(stage, batch, context))
                done.add(ready[0])
                continue
            for i in ready:
                metrics[i] = Metrics()
                own = replace(context, metrics=metrics[i])
                running[threads.submit(run_stage, graph.stages[i], batch, own)] = i
            ended, _ = wait(running, return_when=FIRST_COMPLETED)
            _raise_first(ended, running)
            for i, future in sorted((running.pop(future), future) for future in ended):
                batch = merged(graph.stages[i], batch, future.result())
                done.add(i)
            if not running:
                for i in [i for i in order if i in metrics]:
                    context.metrics.merge(metrics.pop(i))
    return batch


def _raise_first(ended: set[Future[Batch]], running: dict[Future[Batch], int]) -> None:
    if not any(future.exception() for future in ended):
        return
    wait(running)
    failed: Sequence[Future[Batch]] = [f for f in sorted(running, key=lambda f: running[f]) if f.exception() is not None]
    raise failed[0].exception()  # type: ignore[misc]


def _visible(stage: Stage, batch: Batch) -> Batch:
    """The columns that a stage says it reads: what it does not declare it does not see, so the order cannot be wrong."""
    return batch.select(*dict.fromkeys((*stage.reads, *(c for c in stage.optional_reads if c in batch))))


def _declared(stage: Stage, result: Batch) -> dict[str, Any]:
    """The columns that a stage returned, which must be those it said it writes."""
    if set(result.names) != set(stage.writes):
        raise GraphError(
            f"stage '{stage.label}' returned the columns {result.names}, and says that it writes {sorted(stage.writes)}",
            remedy="return just those, or change `writes`",
        )
    return {name: result[name] for name in result.names}
