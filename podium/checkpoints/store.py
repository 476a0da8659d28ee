"""Checkpoints on disk: written beside, checksummed, then renamed; the newest whole one is found again."""

from __future__ import annotations

import hashlib
import json
import os
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, cast

import torch
from torch import Tensor

from podium.core.errors import CheckpointError
from podium.core.files import writing

FORMAT = 1
SHARD_BYTES = 4 * 2**30
"""A safetensors file is closed when it has so many bytes: a state of a large model is several files."""
_TENSOR, _SAME = "@tensor", "@same"
_ASIDE = ".replaced_"


class CheckpointStore:
    """The checkpoints of one run: `step_000100/` folders with a `manifest.json`.

    A state is a nested dict; its tensors go to safetensors files (one per top-level key, several where it is large), the
    rest to JSON; the manifest has each file's size and checksum. No pickle is written or read. Tensors are whole and go by
    the model's own names, so a checkpoint does not depend on how many workers wrote it.

    Args:
        folder: where the checkpoints are.
        keep: how many are kept; the newest good one is never removed.
        note: called with a line of text when something is skipped.
        writes: False for one of several controllers of a run that leaves the writing to another: it only reads.
    """

    def __init__(
        self, folder: str | Path, keep: int = 2, note: Callable[[str], None] = lambda text: None, *, writes: bool = True
    ) -> None:
        self.folder, self.keep, self.note, self.writes = Path(folder), keep, note, writes

    def save(self, step: int, state: dict[str, Any]) -> Path:
        """Writes the state after `step` steps. A crash at any point leaves the older checkpoints whole, and a checkpoint of
        the same step there until the new one is.

        Raises CheckpointError where it cannot be written.
        """
        final = self.folder / f"step_{step:06d}"
        if not self.writes:
            return final
        beside = self.folder / f".writing_{final.name}_{os.getpid()}"
        shutil.rmtree(beside, ignore_errors=True)
        try:
            with writing(final, f"the checkpoint of step {step}", "free disk space; the older checkpoints are untouched"):
                beside.mkdir(parents=True)
                files = [self._write(beside, key, value) for key, value in state.items()]
                manifest = {"format": FORMAT, "step": step, "files": {n: d for pair in files for n, d in pair.items()}}
                _write_text(beside / "manifest.json", json.dumps(manifest, indent=1))
                self._put(beside, final)
                _sync_folder(self.folder)
        except BaseException:
            shutil.rmtree(beside, ignore_errors=True)
            raise
        self._prune()
        return final

    def _put(self, beside: Path, final: Path) -> None:
        """Gives a whole new folder its name; a folder that has it is moved aside first, and back where that fails."""
        aside = self.folder / f"{_ASIDE}{final.name}"
        if final.exists():
            shutil.rmtree(aside, ignore_errors=True)
            os.replace(final, aside)
        try:
            os.replace(beside, final)
        except BaseException:
            self._recover()
            raise
        shutil.rmtree(aside, ignore_errors=True)

    def _recover(self) -> None:
        """Gives back its name to what a crash between two renames left aside."""
        for aside in self.folder.glob(f"{_ASIDE}step_*"):
            final = self.folder / aside.name.removeprefix(_ASIDE)
            if not final.exists():
                aside.rename(final)

    def load(self, path: Path | None = None) -> tuple[int, dict[str, Any]]:
        """(step, state) of the newest whole checkpoint, or of `path`. Raises CheckpointError when there is none.

        Damaged ones that were passed over are renamed to `damaged_step_...`, so that they count no more.
        """
        self._recover()
        candidates = [path] if path is not None else self._folders()[::-1]
        for candidate in candidates:
            problem = verify(candidate)
            if problem is None:
                manifest = json.loads((candidate / "manifest.json").read_text())
                keys = sorted({name.partition(".")[0] for name in manifest["files"]})
                state = {key: _read(candidate, key) for key in keys}
                if candidate != candidates[0]:
                    self.note(f"using {candidate.name}, the newest that is whole")
                return manifest["step"], state
            self.note(f"checkpoint {candidate.name} is damaged ({problem}); trying an older one")
            if path is None:
                self._set_aside(candidate)
        raise CheckpointError("no usable checkpoint", where=str(path or self.folder), remedy="start without --resume")

    def steps(self) -> list[int]:
        """Steps that have a whole checkpoint (its files are there, in their sizes), oldest first."""
        return [int(p.name.removeprefix("step_")) for p in self._whole()]

    def _whole(self) -> list[Path]:
        return [p for p in self._folders() if verify(p, checksums=False) is None]

    def _folders(self) -> list[Path]:
        found = [p for p in self.folder.glob("step_*") if p.name.removeprefix("step_").isdecimal()]
        return sorted(found, key=lambda p: int(p.name.removeprefix("step_")))

    def _set_aside(self, damaged: Path) -> None:
        target = damaged.with_name(f"damaged_{damaged.name}")
        shutil.rmtree(target, ignore_errors=True)
        try:
            damaged.rename(target)
        except OSError as error:
            self.note(f"could not rename {damaged.name}: {error.strerror}")

    def _write(self, folder: Path, key: str, value: Any) -> dict[str, dict[str, Any]]:
        from safetensors.torch import save_file

        tensors: dict[str, Tensor] = {}
        tree = _flatten(value, key, tensors, {})
        _write_text(folder / f"{key}.json", json.dumps(tree))
        names = [f"{key}.json"]
        for number, shard in enumerate(_shards(tensors)):
            name = f"{key}.safetensors" if number == 0 else f"{key}.{number:05d}.safetensors"
            save_file(shard, folder / name)
            _sync_file(folder / name)
            names.append(name)
        return {name: {"sha256": _digest(folder / name), "bytes": (folder / name).stat().st_size} for name in names}

    def _prune(self) -> None:
        """Removes whole checkpoints beyond the `keep` newest, and what broken saves left. One was written just now."""
        self._recover()
        for old in self._whole()[: -max(1, self.keep)]:
            shutil.rmtree(old, ignore_errors=True)
        for left in (*self.folder.glob(".writing_*"), *self.folder.glob(f"{_ASIDE}*")):
            shutil.rmtree(left, ignore_errors=True)


def verify(folder: Path, *, checksums: bool = True) -> str | None:
    """What is wrong with a checkpoint (missing manifest, file, size, or checksum), or None. Checksums read every byte."""
    try:
        manifest = json.loads((folder / "manifest.json").read_text())
        format, files = manifest["format"], manifest["files"]
    except (OSError, ValueError, KeyError, TypeError):
        return "no readable manifest"
    if format != FORMAT:
        return f"format {format}, this version reads {FORMAT}"
    for name, entry in files.items():
        if not (folder / name).is_file():
            return f"{name} is missing"
        if (folder / name).stat().st_size != entry["bytes"]:
            return f"{name} has another size"
        if checksums and _digest(folder / name) != entry["sha256"]:
            return f"{name} does not match its checksum"
    return None


def _flatten(value: Any, name: str, tensors: dict[str, Tensor], seen: dict[Any, str]) -> Any:
    """The value with each tensor replaced by its name in `tensors`; a tensor that is there twice is stored once."""
    if isinstance(value, Tensor):
        key = (value.data_ptr(), tuple(value.shape), value.dtype, tuple(value.stride()))
        if value.numel() and key in seen:
            return {_SAME: seen[key]}
        seen[key] = name
        tensors[name] = value.detach().cpu().contiguous()
        return {_TENSOR: name}
    if isinstance(value, dict):
        bad = [k for k in value if not isinstance(k, str)]
        if bad:
            raise CheckpointError(f"state keys must be strings, got {bad[0]!r}", where=name)
        return {k: _flatten(v, f"{name}/{k}", tensors, seen) for k, v in value.items()}
    if isinstance(value, list | tuple):
        return [_flatten(v, f"{name}/{i}", tensors, seen) for i, v in enumerate(value)]
    return value


def _shards(tensors: dict[str, Tensor]) -> list[dict[str, Tensor]]:
    """The tensors in order, cut where a file has reached its size."""
    shards: list[dict[str, Tensor]] = []
    size = SHARD_BYTES
    for name, tensor in tensors.items():
        if size >= SHARD_BYTES:
            shards.append({})
            size = 0
        shards[-1][name] = tensor
        size += tensor.nbytes
    return shards


def read_part(folder: Path, key: str, part: str) -> Any:
    """A part of a state that was saved under `key` (`engine/model`): only its own tensors are read.

    Raises CheckpointError where the checkpoint is damaged or has no such part.
    """
    if (problem := verify(folder)) is not None:
        raise CheckpointError(f"the checkpoint is damaged ({problem})", where=str(folder), remedy="take another step")
    try:
        tree = json.loads((folder / f"{key}.json").read_text())
        for name in part.split("/"):
            tree = tree[name]
    except (OSError, KeyError):
        there = [p.stem for p in folder.glob("*.json") if (p.stem.startswith("role_") == key.startswith("role_"))]
        raise CheckpointError(
            f"the checkpoint has no '{key}/{part}'", where=str(folder), remedy=f"it has: {', '.join(sorted(there))}"
        ) from None
    return _restore(tree, _tensors(folder, key, set(_names(tree))))


def _names(tree: Any) -> Iterator[str]:
    """The tensors that a saved tree refers to."""
    if isinstance(tree, dict):
        name = tree.get(_TENSOR) or tree.get(_SAME)
        if name is not None and len(tree) == 1:
            yield name
            return
    for value in tree.values() if isinstance(tree, dict) else tree if isinstance(tree, list) else ():
        yield from _names(value)


def _read(folder: Path, key: str) -> Any:
    return _restore(json.loads((folder / f"{key}.json").read_text()), _tensors(folder, key))


def _tensors(folder: Path, key: str, wanted: set[str] | None = None) -> dict[str, Tensor]:
    """The tensors of one key's files, by name; all, or those that are wanted."""
    from safetensors import safe_open

    tensors: dict[str, Tensor] = {}
    for path in sorted((*folder.glob(f"{key}.safetensors"), *folder.glob(f"{key}.[0-9]*.safetensors"))):
        with safe_open(path, framework="pt") as file:
            for name in file.keys():  # noqa: SIM118 (it is no mapping)
                if wanted is None or name in wanted:
                    tensors[name] = file.get_tensor(name)
    return tensors


def _restore(tree: Any, tensors: dict[str, Tensor]) -> Any:
    if isinstance(tree, dict):
        name = tree.get(_TENSOR) or tree.get(_SAME)
        if name is not None and len(tree) == 1:
            return tensors[name]
        return {k: _restore(v, tensors) for k, v in tree.items()}
    if isinstance(tree, list):
        return [_restore(v, tensors) for v in tree]
    return tree


def _digest(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _write_text(path: Path, text: str) -> None:
    with path.open("w") as file:
        file.write(text)
        file.flush()
        os.fsync(file.fileno())


def _sync_file(path: Path) -> None:
    with path.open("rb") as file:
        os.fsync(file.fileno())


def _sync_folder(folder: Path) -> None:
    handle = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def rng_state() -> dict[str, Any]:
    """Torch's, NumPy's and Python's generators as tensors and plain values."""
    import random

    import numpy as np

    name, keys, pos, has, cached = cast(tuple[str, Any, int, int, float], np.random.get_state())
    version, numbers, gauss = random.getstate()
    return {
        "torch": torch.get_rng_state(),
        "numpy": {"keys": torch.from_numpy(keys.astype("int64")), "pos": pos, "has": has, "cached": cached, "name": name},
        "python": {"version": version, "numbers": list(numbers), "gauss": gauss},
        # What has not been used in this process has no state; asking for it would take memory on the GPU.
        "cuda": torch.cuda.get_rng_state_all() if torch.cuda.is_available() and torch.cuda.is_initialized() else [],
    }


def set_rng_state(state: dict[str, Any]) -> None:
    """Puts back what `rng_state` gave."""
    import random

    import numpy as np

    torch.set_rng_state(state["torch"])
    n = state["numpy"]
    np.random.set_state((n["name"], n["keys"].numpy().astype("uint32"), n["pos"], n["has"], n["cached"]))
    p = state["python"]
    random.setstate((p["version"], tuple(p["numbers"]), p["gauss"]))
    if state.get("cuda") and torch.cuda.is_available() and len(state["cuda"]) == torch.cuda.device_count():
        torch.cuda.set_rng_state_all(state["cuda"])
