"""A run's folder: resolved settings, metrics, sampled rollouts, checkpoints, the exported model.

runs/<name>/
  settings.yaml              every setting, defaults written out
  metrics.jsonl              one JSON object a step: step, time (Unix seconds), and the metrics
  samples/step_000012.jsonl  some of that step's rollouts; nonfinite_step_*.jsonl: all rows of a step that gave no finite number
  error.json                 what ended the run, where an error did
  alarms.jsonl               watched numbers that went beyond their bounds
  checkpoints/  model/       all state at a step's border; the Hugging Face folder at the end
  plot.png  summary.json     curves; what came out
  reports/                   where a deadline passed: who waited for whom, and every stack
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import re
import socket
import time
import traceback
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any, TextIO

from podium.core.errors import ConfigError
from podium.core.files import writing
from podium.core.jsonable import jsonable

MOST_KEPT, MOST_ALARMS = 20, 1000
MOST_SAMPLES, NEWEST_SAMPLES = 1000, 200
"""Steps whose samples are kept: so many in all, the newest so many without a gap."""
_SAMPLES = re.compile(r"step_(\d+)\.jsonl")


class RunFolder:
    """Paths and files of one run. `create` makes a new one, `open` takes one that exists."""

    def __init__(self, path: str | Path) -> None:
        self.path = Path(path)
        self._metrics: TextIO | None = None
        self._last_step: int | None = None
        self._sampled: set[int] | None = None

    @classmethod
    def create(cls, root: str | Path, name: str) -> RunFolder:
        """A new folder `root/name`; where that is taken, `root/name-2`, `root/name-3`...: no run is overwritten.

        Raises ConfigError for a name that is no file name, or a root that cannot be written to.
        """
        if not name or name in (".", "..") or "/" in name or os.sep in name:
            raise ConfigError(f"'{name}' is not a name for a run", where="run.name", remedy="use a plain file name")
        root = Path(root)
        try:
            root.mkdir(parents=True, exist_ok=True)
            for candidate in _candidates(name):
                try:
                    (root / candidate).mkdir()
                except FileExistsError:
                    continue
                return cls(root / candidate)
        except OSError as error:
            raise ConfigError(
                f"cannot make a run folder in '{root}': {error.strerror}", where="run.folder", remedy="choose another folder"
            ) from None
        raise AssertionError("unreachable")

    @classmethod
    def open(cls, path: str | Path) -> RunFolder:
        """The run at `path`. Raises ConfigError when there is none."""
        path = Path(path)
        if not (path / "settings.yaml").is_file():
            raise ConfigError(
                f"no run at '{path}' (there is no settings.yaml in it)", where="run", remedy="give the path of a run folder"
            )
        return cls(path)

    @property
    def name(self) -> str:
        return self.path.name

    @property
    def settings(self) -> Path:
        return self.path / "settings.yaml"

    @property
    def metrics(self) -> Path:
        return self.path / "metrics.jsonl"

    @property
    def samples(self) -> Path:
        return self.path / "samples"

    @property
    def checkpoints(self) -> Path:
        return self.path / "checkpoints"

    @property
    def model(self) -> Path:
        return self.path / "model"

    @property
    def reported(self) -> bool:
        """A deadline has passed, and there is a report of it."""
        return any(p.stat().st_size for p in self.reports.glob("*"))

    @property
    def reports(self) -> Path:
        """Of deadlines that passed."""
        return self.path / "reports"

    @property
    def plot(self) -> Path:
        return self.path / "plot.png"

    @property
    def summary(self) -> Path:
        return self.path / "summary.json"

    @contextlib.contextmanager
    def locked(self) -> Iterator[None]:
        """While inside, this process alone writes the run. The lock goes with the process, however that ends.

        Raises ConfigError where another one has it: two would write into each other's metrics and checkpoints; CheckpointError
        where the folder cannot be written to.
        """
        path = self.path / ".lock"
        with contextlib.ExitStack() as stack:
            with writing(path, "into the run's folder"):  # without a buffer: nothing is left to write when the file is closed
                file = stack.enter_context(path.open("a+b", buffering=0))
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                file.seek(0)
                raise ConfigError(
                    f"the run is going on in another process ({file.read().decode().strip() or 'unknown'})",
                    where=str(self.path),
                    remedy="stop that one first, or start a run of another name",
                ) from None
            except OSError:  # a file system without locks
                pass
            with writing(path, "into the run's folder"):
                file.truncate(0)
                file.write(f"process {os.getpid()} on {socket.gethostname()}\n".encode())
            yield

    def write_settings(self, text: str) -> None:
        """The resolved settings, as YAML text."""
        _write(self.settings, text)

    def change_settings(self, text: str, step: int) -> None:
        """Other settings from `step` on; those before are kept as `settings.until_000012.yaml`."""
        with writing(self.settings, self.settings.name):
            os.replace(self.settings, self.settings.with_name(f"settings.until_{step:06d}.yaml"))
        self.write_settings(text)

    def write_summary(self, summary: Mapping[str, Any]) -> None:
        """What the run came to, as one JSON object."""
        _write(self.summary, json.dumps(jsonable(summary), indent=2, ensure_ascii=False) + "\n")

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        """Appends one step's metrics and hands them to the operating system at once. A number that is not finite is null.

        Logging the last step again replaces it (a run stopped and resumed at that border measures it anew).
        Raises ValueError where `step` is before the last one logged.
        """
        file = self._open_metrics()
        if self._last_step is not None and step < self._last_step:
            raise ValueError(f"step {step} is logged after step {self._last_step}: call rewind when a run goes back")
        if step == self._last_step:
            self._keep_metrics(step - 1)
            file = self._open_metrics()
        row = {"step": step, "time": round(time.time(), 3), **metrics}
        with writing(self.metrics, f"the metrics of step {step}"):
            file.write(json.dumps(jsonable(row), ensure_ascii=False) + "\n")
            file.flush()
        self._last_step = step

    def _open_metrics(self) -> TextIO:
        if self._metrics is None:
            self._last_step = _mend(self.metrics)
            self._metrics = self.metrics.open("a", encoding="utf-8")
        return self._metrics

    def read_metrics(self) -> list[dict[str, Any]]:
        """Every logged step, in order; a last line that was cut off is left out."""
        return list(read_jsonl(self.metrics))

    def rewind(self, step: int) -> None:
        """Drops what was logged and sampled after `step`: a run resumed from there writes it again."""
        self._keep_metrics(step)
        self._sampled = None
        for file in self.samples.glob("step_*.jsonl"):
            found = _SAMPLES.fullmatch(file.name)
            if found and int(found[1]) > step:
                file.unlink()

    def _keep_metrics(self, step: int) -> None:
        self.close()
        if self.metrics.exists():
            kept = [row for row in self.read_metrics() if row["step"] <= step]
            _write(self.metrics, "".join(json.dumps(row, ensure_ascii=False) + "\n" for row in kept))

    def write_samples(self, step: int, rows: Iterable[Mapping[str, Any]]) -> Path:
        """A step's rollouts, one JSON object a line: prompt, response, rewards, finish_reason, group_id as given.

        The first rows also have their tokens (`prompt_ids`, `response_ids`), the rollout's and (where measured) training's
        log-probs of them and the `policy_version` that sampled: what `podium doctor numerics` replays.
        """
        path = self.samples / f"step_{step:06d}.jsonl"
        self.samples.mkdir(exist_ok=True)
        _write(path, "".join(_line(row) for row in rows))
        self._thin_samples(step)
        return path

    def _thin_samples(self, step: int) -> None:
        """Holds the number of sample files below `MOST_SAMPLES`: the newest stay, of the older ones every 2nd, 4th, 8th ..."""
        if self._sampled is None:
            self._sampled = {int(m[1]) for p in self.samples.glob("step_*.jsonl") if (m := _SAMPLES.fullmatch(p.name))}
        self._sampled.add(step)
        if len(self._sampled) <= MOST_SAMPLES:
            return
        older = sorted(self._sampled)[:-NEWEST_SAMPLES]
        stride = 2
        while sum(s % stride == 0 for s in older) > (MOST_SAMPLES - NEWEST_SAMPLES) // 2:
            stride *= 2
        for gone in (s for s in older if s % stride):
            (self.samples / f"step_{gone:06d}.jsonl").unlink(missing_ok=True)
            self._sampled.discard(gone)

    def keep_nonfinite(self, step: int, rows: Iterable[Mapping[str, Any]]) -> Path | None:
        """All rows of a step whose loss or gradient was not finite; of the first `MOST_KEPT` such steps."""
        kept = {p.name for p in self.samples.glob("nonfinite_step_*.jsonl")}
        name = f"nonfinite_step_{step:06d}.jsonl"
        if len(kept | {name}) > MOST_KEPT:
            return None
        self.samples.mkdir(exist_ok=True)
        _write(self.samples / name, "".join(_line(row) for row in rows))
        return self.samples / name

    def write_error(self, step: int, error: BaseException) -> None:
        """`error.json`: what ended the run after `step` steps, for `podium doctor`. Never raises."""
        lines = traceback.format_exception(error)
        said = {"step": step, "time": round(time.time(), 3), "type": type(error).__name__, "message": str(error)}
        with contextlib.suppress(Exception):
            _write(self.path / "error.json", json.dumps({**said, "traceback": "".join(lines)[-20_000:]}, indent=1) + "\n")

    def write_alarm(self, alarm: Mapping[str, Any]) -> None:
        """One line of `alarms.jsonl`: a watched number went beyond its bound, or came back. At most `MOST_ALARMS` lines."""
        path = self.path / "alarms.jsonl"
        if sum(1 for _ in read_jsonl(path)) < MOST_ALARMS:
            with writing(path, path.name), path.open("a", encoding="utf-8") as file:
                file.write(json.dumps(jsonable(alarm), ensure_ascii=False) + "\n")

    def close(self) -> None:
        """Closes the metrics file; logging opens it again."""
        if self._metrics is not None:
            with contextlib.suppress(OSError):  # every line was flushed; what a full disk refused was said then
                self._metrics.close()
            self._metrics = None

    def __repr__(self) -> str:
        return f"RunFolder({str(self.path)!r})"


def default_name(algorithm: str) -> str:
    """The name of a run that was given none: `algorithm-20261130-141500`."""
    return f"{algorithm}-{time.strftime('%Y%m%d-%H%M%S')}"


def latest_run(root: str | Path, name: str | None = None, *, algorithm: str | None = None) -> RunFolder | None:
    """The run in `root` that was written to last, among those with a checkpoint to go on from.

    Args:
        name: only runs that were given this name: `name`, and `name-2`... where it was taken.
        algorithm: only runs that `default_name` named, for this algorithm.
    """
    pattern = ".*"
    if name is not None:
        pattern = rf"{re.escape(name)}(-\d+)?"
    elif algorithm is not None:
        pattern = rf"{re.escape(algorithm)}-\d{{8}}-\d{{6}}(-\d+)?"
    found = [p.parent for p in Path(root).glob("*/settings.yaml") if re.fullmatch(pattern, p.parent.name)]
    # `.replaced_...`: moved aside by a save that was killed just then; loading gives it its name back.
    kept = ("step_*/manifest.json", ".replaced_step_*/manifest.json")
    runs = [run for run in found if any(any((run / "checkpoints").glob(pattern)) for pattern in kept)]
    return RunFolder(max(runs, key=_touched)) if runs else None


def read_jsonl(path: str | Path) -> Iterator[dict[str, Any]]:
    """The objects in a JSON-lines file, up to the first line that is not whole; nothing when there is no file."""
    path = Path(path)
    if not path.exists():
        return
    with path.open(encoding="utf-8", errors="replace") as lines:
        for line in lines:
            try:
                yield json.loads(line)
            except json.JSONDecodeError:
                return


def _touched(run: Path) -> float:
    metrics = run / "metrics.jsonl"
    return (metrics if metrics.exists() else run / "settings.yaml").stat().st_mtime


def _candidates(name: str) -> Iterator[str]:
    yield name
    number = 2
    while True:
        yield f"{name}-{number}"
        number += 1


def _mend(path: Path) -> int | None:
    """Cuts off a last line that a killed run left half-written; returns the last whole step."""
    if not path.exists():
        return None
    data = path.read_bytes()
    whole = data[: data.rfind(b"\n") + 1]
    if len(whole) != len(data):
        os.truncate(path, len(whole))
    lines = whole.splitlines()
    return int(json.loads(lines[-1])["step"]) if lines else None


def _write(path: Path, text: str) -> None:
    """Whole or not at all: a reader never sees half a file."""
    temporary = path.with_name(path.name + ".tmp")
    with writing(path, path.name):
        try:
            temporary.write_text(text, encoding="utf-8")
            os.replace(temporary, path)
        except OSError:
            temporary.unlink(missing_ok=True)
            raise


class Encoded(str):
    """Text that is JSON already."""


def _line(row: Mapping[str, Any]) -> str:
    """One object on a line of its own; what is JSON already stands as it is, after the rest."""
    plain = json.dumps(jsonable({n: v for n, v in row.items() if not isinstance(v, Encoded)}), ensure_ascii=False)[1:-1]
    ready = [f"{json.dumps(n)}: {v}" for n, v in row.items() if isinstance(v, Encoded)]
    return "{" + ", ".join([*([plain] if plain else []), *ready]) + "}\n"
