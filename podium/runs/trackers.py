"""Where metrics go besides metrics.jsonl: TensorBoard, Weights & Biases, MLflow. Each is imported only when it is used."""

from __future__ import annotations

import json
import math
import sys
from collections.abc import Callable, Iterable, Mapping
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Protocol

from podium.core.errors import ResourceError
from podium.core.registry import Registry
from podium.runs.folder import RunFolder


class Tracker(Protocol):
    """A place that keeps a run's curves."""

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        """One step's metrics."""
        ...

    def close(self) -> None:
        """Writes what is left."""
        ...


Opener = Callable[[RunFolder, Mapping[str, Any], int | None], Tracker]
"""Makes a tracker from the run, its resolved settings, and the step it resumes from (None: it starts)."""

trackers: Registry[Opener] = Registry("tracker")


def check_names(names: Iterable[str]) -> None:
    """Raises ConfigError for a name that is no tracker."""
    for name in names:
        trackers.get(name)


def check_packages(names: Iterable[str]) -> None:
    """Raises ResourceError where the package of a tracker is not installed; nothing is imported."""
    for name in names:
        needs = getattr(trackers.get(name), "needs", None)
        if needs is not None and not _installed(needs[0]):
            raise _missing(*needs[1:])


def _installed(module: str) -> bool:
    return sys.modules[module] is not None if module in sys.modules else find_spec(module) is not None


def open_trackers(
    names: Iterable[str],
    run: RunFolder,
    settings: Mapping[str, Any],
    *,
    resume_step: int | None = None,
    required: bool = True,
    note: Callable[[str], None] = print,
) -> list[Tracker]:
    """The trackers called `names`.

    Where a package is missing: an error if the user asked for the tracker (`required`), else a note.
    Raises ConfigError for an unknown name, ResourceError for a missing package.
    """
    opened: list[Tracker] = []
    for name in names:
        try:
            opened.append(trackers.get(name)(run, settings, resume_step))
        except ResourceError as error:
            if required:
                for tracker in opened:
                    tracker.close()
                raise
            note(f"no {name} log: {error.what} ({error.remedy}); metrics.jsonl has every number")
    return opened


def _load(module: str, package: str, install: str) -> Any:
    try:
        return import_module(module)
    except ImportError as error:
        raise _missing(package, install, f" ({error})") from None


def _missing(package: str, install: str, why: str = "") -> ResourceError:
    what = f"the package '{package}' is not installed{why}"
    return ResourceError(what, where="run.trackers", remedy=f"pip install {install}")


@trackers.register("tensorboard")
class TensorBoardTracker:
    """Event files in the run folder's `tensorboard/`. On resume, what came after `resume_step` is purged."""

    needs = ("tensorboardX", "tensorboardX", "tensorboardX")

    def __init__(self, run: RunFolder, settings: Mapping[str, Any], resume_step: int | None = None) -> None:
        module = _load(*self.needs)
        # Without the suffix, a run resumed within the second would write into the first one's file.
        suffix, purge = ("", None) if resume_step is None else (f".from{resume_step}", resume_step + 1)
        self._writer = module.SummaryWriter(str(run.path / "tensorboard"), purge_step=purge, filename_suffix=suffix)

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        for name, value in metrics.items():
            self._writer.add_scalar(name, value, step)
        self._writer.flush()

    def close(self) -> None:
        self._writer.close()


@trackers.register("wandb")
class WandbTracker:
    """A Weights & Biases run with the run folder's name, in the project that WANDB_PROJECT names (else `podium`)."""

    needs = ("wandb", "wandb", "'podium[tracking]'")

    def __init__(self, run: RunFolder, settings: Mapping[str, Any], resume_step: int | None = None) -> None:
        wandb = _load(*self.needs)
        known = _recall(run, "wandb") if resume_step is not None else None
        self._run = wandb.init(
            project=_environment("WANDB_PROJECT", "podium"),
            name=run.name,
            dir=str(run.path),
            config=dict(settings),
            id=known,
            resume="allow" if known else None,
        )
        _remember(run, "wandb", self._run.id)

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        self._run.log(dict(metrics), step=step)

    def close(self) -> None:
        self._run.finish()


@trackers.register("mlflow")
class MLflowTracker:
    """An MLflow run with the run folder's name, on the server that MLFLOW_TRACKING_URI names (else MLflow's default)."""

    needs = ("mlflow", "mlflow", "'podium[tracking]'")

    def __init__(self, run: RunFolder, settings: Mapping[str, Any], resume_step: int | None = None) -> None:
        self._mlflow = _load(*self.needs)
        known = _recall(run, "mlflow") if resume_step is not None else None
        self._mlflow.set_experiment(_environment("MLFLOW_EXPERIMENT_NAME", "podium"))
        started = self._mlflow.start_run(run_id=known, run_name=None if known else run.name)
        if known is None:
            self._mlflow.log_params({key: str(value)[:500] for key, value in _flat(settings).items()})
        _remember(run, "mlflow", started.info.run_id)

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        self._mlflow.log_metrics({name: value for name, value in metrics.items() if math.isfinite(value)}, step=step)

    def close(self) -> None:
        self._mlflow.end_run()


def _environment(name: str, default: str) -> str:
    import os

    return os.environ.get(name) or default


def _ids(run: RunFolder) -> Path:
    return run.path / "trackers.json"


def _recall(run: RunFolder, tracker: str) -> str | None:
    """The tracker's own id of this run, so that a resumed run goes on in the same curves."""
    path = _ids(run)
    return json.loads(path.read_text()).get(tracker) if path.exists() else None


def _remember(run: RunFolder, tracker: str, id: str) -> None:
    path = _ids(run)
    known = json.loads(path.read_text()) if path.exists() else {}
    path.write_text(json.dumps({**known, tracker: id}))


def _flat(settings: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    flat: dict[str, Any] = {}
    for key, value in settings.items():
        if isinstance(value, Mapping):
            flat |= _flat(value, f"{prefix}{key}.")
        else:
            flat[prefix + key] = value
    return flat
