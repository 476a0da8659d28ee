"""Reads rows: JSONL, JSON, parquet, `datasets` folders and hub names, Python lists, reasoning-gym tasks."""

from __future__ import annotations

import difflib
import json
import re
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from podium.core.errors import DataError, did_you_mean

FILE_SUFFIXES = (".jsonl", ".ndjson", ".json", ".parquet")

GENERATED = "reasoning_gym:"
_INSTALL_DATA = "install it with: pip install 'podium[data]'"


class Rows(list[dict[str, Any]]):
    """The rows of a data set, which know where they came from, for error messages.

    `source` is the file or name; `lines` the line number of each row, for files that have lines.
    """

    def __init__(self, rows: Iterable[dict[str, Any]], source: str, lines: Sequence[int] | None = None) -> None:
        super().__init__(rows)
        self.source, self.lines = source, lines


def place_of(rows: Sequence[Any], row: int) -> str:
    """Where a row stands: `file.jsonl, line 3`, or `name, row 3` (rows are counted from 1)."""
    source, lines = source_of(rows), getattr(rows, "lines", None)
    return f"{source}, line {lines[row]}" if lines else f"{source}, row {row + 1}"


def source_of(rows: Any) -> str:
    """The name of the data set for messages."""
    return getattr(rows, "source", "data")


def load_rows(path: Any, options: Mapping[str, Any] | None = None, problems: list[DataError] | None = None) -> Rows:
    """All rows of a data set.

    Args:
        path: a file (`.jsonl`, `.json`, `.parquet`), a folder that `datasets` saved, a hub name (`owner/name`),
            `reasoning_gym:TASK` (or `reasoning_gym:TASK?seed=1&size=100`), a list of dicts, or a `datasets.Dataset`.
        options: for reasoning-gym `size`, `seed` and the task's own settings; for `datasets` `split` and `subset`.
        problems: where given, what is wrong with single lines and rows is put here, not raised: lines that cannot be read
            are left out, and rows that are no objects stay.

    Raises DataError (file, line or row, remedy) for a data set that is missing, empty, or cannot be read.
    """
    options = dict(options or {})
    if path is None:
        raise DataError("no data set is given", where="data.path", remedy="set it to a file, a hub name or reasoning_gym:TASK")
    if not isinstance(path, str | Path):
        rows = _from_object(path, options)
    elif str(path).startswith(GENERATED):
        rows = _from_reasoning_gym(str(path), options)
    elif Path(path).is_file():
        rows = _from_file(Path(path), problems)
    elif Path(path).is_dir():
        rows = _from_folder(Path(path), options)
    else:
        rows = _from_hub(str(path), options)
    if not rows and not problems:
        raise DataError("the data set has no rows", where=rows.source, remedy="give a file with at least one row")
    for i, row in enumerate(rows):
        if not isinstance(row, dict):
            error = DataError(
                f"expected an object with columns, found {_kind(row)}",
                where=place_of(rows, i),
                remedy='write each row as an object, for example {"prompt": "2 + 2 ="}',
            )
            _raise_or_keep(error, problems)
    return rows


def _raise_or_keep(error: DataError, problems: list[DataError] | None) -> None:
    if problems is None:
        raise error
    problems.append(error)


# ---------------------------------------------------------------------- files


def _from_file(path: Path, problems: list[DataError] | None) -> Rows:
    suffix = path.suffix.lower()
    if suffix not in FILE_SUFFIXES:
        raise DataError(
            f"cannot tell the format of '{path.name}' from its ending",
            where=str(path),
            remedy="known endings: " + ", ".join(FILE_SUFFIXES),
        )
    try:
        return _from_parquet(path) if suffix == ".parquet" else _from_json_text(path, suffix, problems)
    except OSError as error:
        raise DataError(f"cannot be read: {error.strerror or error}", where=str(path)) from error


def _from_json_text(path: Path, suffix: str, problems: list[DataError] | None) -> Rows:
    raw = path.read_bytes().removeprefix(b"\xef\xbb\xbf")
    if suffix == ".json" and raw.lstrip()[:1] == b"[":
        return _from_json_array(path, raw)
    rows: list[Any] = []
    lines: list[int] = []
    start = 0
    for number, line in enumerate(raw.split(b"\n"), 1):
        try:
            value = _read_line(line, path, number, start)
        except DataError as error:
            _raise_or_keep(error, problems)
            value = None
        start += len(line) + 1
        if value is None:
            continue
        rows.append(value[0])
        lines.append(number)
    return Rows(rows, str(path), lines)


def _read_line(line: bytes, path: Path, number: int, start: int) -> tuple[Any] | None:
    """A line's JSON value (in a tuple: it may be null), or None where the line is blank. Raises DataError."""
    text = _decode(line, path, number, start)
    if not text.strip():
        return None
    try:
        return (json.loads(text),)
    except json.JSONDecodeError as error:
        raise DataError(
            f"not valid JSON: {error.msg} at column {error.colno}: {_short(text)}",
            where=f"{path}, line {number}",
            remedy="write one JSON object per line",
        ) from None
    except RecursionError:
        raise DataError(
            f"nested too deeply to be read: {_short(text)}",
            where=f"{path}, line {number}",
            remedy="write one JSON object per line",
        ) from None


def _from_json_array(path: Path, raw: bytes) -> Rows:
    start = 0
    texts = []
    for number, line in enumerate(raw.split(b"\n"), 1):
        texts.append(_decode(line, path, number, start))
        start += len(line) + 1
    try:
        return Rows(json.loads("\n".join(texts)), str(path))
    except json.JSONDecodeError as error:
        raise DataError(
            f"not valid JSON: {error.msg} at column {error.colno}",
            where=f"{path}, line {error.lineno}",
            remedy="write a list of objects, or one object per line in a .jsonl file",
        ) from None
    except RecursionError:
        raise DataError("nested too deep to be read", where=str(path), remedy="write a flat list of objects") from None


def _decode(line: bytes, path: Path, number: int, start: int) -> str:
    try:
        return line.decode("utf-8")
    except UnicodeDecodeError as error:
        raise DataError(
            f"invalid UTF-8: byte 0x{line[error.start]:02x} at byte {start + error.start} of the file",
            where=f"{path}, line {number}",
            remedy="save the file as UTF-8 (for example: iconv -f latin1 -t utf-8)",
        ) from None


def _from_parquet(path: Path) -> Rows:
    try:
        import pyarrow
        import pyarrow.parquet as parquet
    except ImportError:
        raise DataError("reading parquet needs pyarrow", where=str(path), remedy=_INSTALL_DATA) from None
    try:
        return Rows(parquet.read_table(path).to_pylist(), str(path))
    except UnicodeDecodeError as error:
        raise DataError(f"a text column holds invalid UTF-8: {error}", where=str(path)) from None
    except pyarrow.ArrowException as error:
        raise DataError(f"not a readable parquet file: {error}", where=str(path)) from None


# ---------------------------------------------------------------------- datasets


def _import_datasets(where: str) -> Any:
    try:
        import datasets
    except ImportError:
        raise DataError("this kind of data set needs the package datasets", where=where, remedy=_INSTALL_DATA) from None
    return datasets


def _from_folder(path: Path, options: Mapping[str, Any]) -> Rows:
    marks = ("dataset_info.json", "state.json", "dataset_dict.json")
    if not any((path / mark).is_file() for mark in marks):
        raise DataError(
            "the folder is not one that `datasets` saved (Dataset.save_to_disk)",
            where=str(path),
            remedy="give a file: " + (", ".join(sorted(p.name for p in path.iterdir())[:8]) or "the folder is empty"),
        )
    datasets = _import_datasets(str(path))
    try:
        loaded = datasets.load_from_disk(str(path))
    except Exception as error:
        raise DataError(f"datasets cannot load the folder: {error}", where=str(path)) from error
    return _from_dataset(loaded, str(path), options)


def _from_hub(name: str, options: Mapping[str, Any]) -> Rows:
    path = Path(name)
    looks_like_hub = re.fullmatch(r"[\w.-]+(/[\w.-]+)?", name) and path.suffix.lower() not in FILE_SUFFIXES
    if not looks_like_hub or name.startswith("."):
        raise DataError("no such file or folder", where=name, remedy=_near_files(path))
    datasets = _import_datasets(name)
    try:
        loaded = datasets.load_dataset(name, options.get("subset"))
    except Exception as error:
        raise DataError(
            f"neither a file nor a data set that can be loaded from the hub: {type(error).__name__}: {_short(str(error))}",
            where=name,
            remedy=_near_files(path),
        ) from error
    return _from_dataset(loaded, name, options)


def _from_dataset(loaded: Any, source: str, options: Mapping[str, Any]) -> Rows:
    """A `datasets.Dataset`, or one split of a `DatasetDict`."""
    if isinstance(loaded, Mapping):
        split = options.get("split", "train")
        if split not in loaded:
            raise DataError(
                f"no split '{split}'", where=source, remedy=f"set data.options.split; {did_you_mean(split, loaded)}"
            )
        loaded = loaded[split]
    return Rows(loaded.to_list(), source)


def _from_object(value: Any, options: Mapping[str, Any]) -> Rows:
    if isinstance(value, Rows):
        return value
    if hasattr(value, "to_list") or (isinstance(value, Mapping) and all(hasattr(v, "to_list") for v in value.values())):
        return _from_dataset(value, "data", options) if value else Rows([], "data")
    if isinstance(value, Iterable) and not isinstance(value, Mapping | bytes):
        return Rows(value, "data")
    raise DataError(f"cannot read rows from {_kind(value)}", where="data", remedy="give a path, or a list of dicts")


# ---------------------------------------------------------------------- reasoning-gym


def _from_reasoning_gym(path: str, options: dict[str, Any]) -> Rows:
    """Columns: prompt (the question), answer, metadata, and task: what `rewards.reasoning_gym` needs to score again."""
    try:
        import reasoning_gym
        from reasoning_gym.factory import DATASETS
    except ImportError:
        raise DataError(
            "this data set needs the package reasoning-gym",
            where=path,
            remedy="install it with: pip install 'podium[rewards]'",
        ) from None
    name, _, query = path.removeprefix(GENERATED).partition("?")
    options = {"size": 500, "seed": 0, **options, **_query(query, path)}
    if name not in DATASETS:
        raise DataError(f"reasoning-gym has no task '{name}'", where=path, remedy=did_you_mean(name, DATASETS))
    try:
        made = reasoning_gym.create_dataset(name, **options)
    except (TypeError, ValueError, AssertionError) as error:
        fields = DATASETS[name][1].__dataclass_fields__
        raise DataError(
            f"the task '{name}' refuses these options: {error}",
            where=path,
            remedy="its settings (data.options): " + ", ".join(fields),
        ) from error
    return Rows([_task_row(name, options, i, made[i]) for i in range(len(made))], path)


def _task_row(name: str, options: dict[str, Any], index: int, entry: Mapping[str, Any]) -> dict[str, Any]:
    # Metadata as plain JSON values: rows are logged and saved. What JSON cannot hold is why `task` is there too.
    return {
        "prompt": entry["question"],
        "answer": entry["answer"],
        "metadata": json.loads(json.dumps(entry["metadata"], default=str)),
        "task": {"name": name, "options": options, "index": index},
    }


def _query(query: str, path: str) -> dict[str, Any]:
    import yaml

    out: dict[str, Any] = {}
    for part in filter(None, query.split("&")):
        key, equals, value = part.partition("=")
        if not equals:
            raise DataError(f"'{part}' is not key=value", where=path, remedy="write reasoning_gym:TASK?seed=1&size=100")
        out[key] = yaml.safe_load(value)
    return out


# ---------------------------------------------------------------------- messages


def _near_files(path: Path) -> str:
    folder = path.parent
    if not folder.is_dir():
        return f"the folder '{folder}' does not exist either"
    near = difflib.get_close_matches(path.name, [p.name for p in folder.iterdir()], n=1, cutoff=0.5)
    return f"did you mean '{folder / near[0]}'?" if near else "give a file, a folder, a hub name or reasoning_gym:TASK"


def _kind(value: Any) -> str:
    return f"{type(value).__name__} ({_short(repr(value))})"


def _short(text: str, length: int = 80) -> str:
    return text if len(text) <= length else text[: length - 3] + "..."
