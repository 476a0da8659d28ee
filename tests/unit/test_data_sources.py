"""Reading rows, and every way in which a file can be wrong."""

from __future__ import annotations

import builtins
import json
from pathlib import Path

import pytest

from podium.core.errors import DataError
from podium.data.sources import load_rows

ROWS = [{"prompt": "1 + 1 =", "answer": 2}, {"prompt": "1 + 2 =", "answer": 3}]


def write(path: Path, text: str | bytes) -> Path:
    path.write_bytes(text if isinstance(text, bytes) else text.encode())
    return path


def lines(rows=ROWS) -> str:
    return "\n".join(json.dumps(row) for row in rows) + "\n"


def test_jsonl_json_and_lists_give_the_same_rows(tmp_path):
    jsonl = write(tmp_path / "rows.jsonl", lines())
    blank = write(tmp_path / "blank.jsonl", "\ufeff" + lines().replace("\n", "\r\n\n"))
    array = write(tmp_path / "rows.json", json.dumps(ROWS, indent=1))
    one_a_line = write(tmp_path / "lines.json", lines())
    for source in (jsonl, str(jsonl), blank, array, one_a_line, ROWS, iter(ROWS)):
        assert load_rows(source) == ROWS


def test_parquet_and_datasets_folders(tmp_path):
    datasets = pytest.importorskip("datasets")
    made = datasets.Dataset.from_list(ROWS)
    made.to_parquet(str(tmp_path / "rows.parquet"))
    made.save_to_disk(str(tmp_path / "saved"))
    splits = datasets.DatasetDict({"train": made, "test": made.select([1])})
    splits.save_to_disk(str(tmp_path / "splits"))
    for source in (tmp_path / "rows.parquet", tmp_path / "saved", tmp_path / "splits", made, splits):
        assert load_rows(source) == ROWS
    assert load_rows(tmp_path / "splits", {"split": "test"}) == ROWS[1:]
    with pytest.raises(DataError, match=r"no split 'tests'[\s\S]*did you mean 'test'"):
        load_rows(tmp_path / "splits", {"split": "tests"})


def test_missing_file_names_the_nearest(tmp_path):
    write(tmp_path / "rows.jsonl", lines())
    with pytest.raises(DataError, match=r"row\.jsonl: no such file or folder[\s\S]*did you mean '.*rows\.jsonl'"):
        load_rows(tmp_path / "row.jsonl")
    with pytest.raises(DataError, match="does not exist either"):
        load_rows(tmp_path / "nowhere" / "rows.jsonl")
    with pytest.raises(DataError, match=r"data\.path: no data set is given"):
        load_rows(None)


def test_a_name_that_is_neither_file_nor_data_set():
    pytest.importorskip("datasets")
    with pytest.raises(DataError, match="neither a file nor a data set that can be loaded from the hub"):
        load_rows("nobody/has-this-data-set")


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("a.jsonl", "", r"a\.jsonl: the data set has no rows"),
        ("a.jsonl", "\n \n", r"a\.jsonl: the data set has no rows"),
        ("a.json", "[]", r"a\.json: the data set has no rows"),
        ("a.jsonl", lines() + '{"prompt": "x"', r"a\.jsonl, line 3: not valid JSON: .* at column 15"),
        ("a.jsonl", "[" * 100_000 + "\n", r"a\.jsonl, line 1: nested too deeply"),
        ("a.json", '[{"prompt": "x"},\n{"prompt" "y"}]', r"a\.json, line 2: not valid JSON"),
        ("a.jsonl", '{"prompt": "x"}\n[1, 2]\n', r"a\.jsonl, line 2: expected an object with columns, found list \(\[1, 2\]\)"),
        ("a.json", '[{"prompt": "x"}, "y"]', r"a\.json, row 2: expected an object with columns, found str"),
        ("a.jsonl", b'{"prompt": "x"}\n{"prompt": "\xe9t\xe9"}\n', r"line 2: invalid UTF-8: byte 0xe9 at byte 28 of the file"),
        ("a.jsonl", "\u00e9".encode("utf-16"), r"line 1: invalid UTF-8: byte 0xff at byte 0"),
        ("a.csv", "prompt\nx\n", r"cannot tell the format of 'a\.csv'[\s\S]*\.jsonl"),
        ("a.parquet", "no parquet", r"a\.parquet: not a readable parquet file"),
    ],
)
def test_bad_files(tmp_path, name, content, message):
    path = write(tmp_path / name, content)
    with pytest.raises(DataError, match=message):
        load_rows(path)


def test_a_plain_folder_is_no_data_set(tmp_path):
    write(tmp_path / "rows.jsonl", lines())
    with pytest.raises(DataError, match=r"not one that `datasets` saved[\s\S]*give a file: rows\.jsonl"):
        load_rows(tmp_path)


def test_an_unreadable_object():
    with pytest.raises(DataError, match=r"cannot read rows from int \(5\)"):
        load_rows(5)
    with pytest.raises(DataError, match="data, row 1: expected an object with columns, found str"):
        load_rows(["text"])


def test_the_extra_is_named_when_a_package_is_missing(tmp_path, monkeypatch):
    real = builtins.__import__

    def without(name, *args, **kwargs):
        if name.split(".")[0] in ("pyarrow", "datasets", "reasoning_gym"):
            raise ImportError(name)
        return real(name, *args, **kwargs)

    path = write(tmp_path / "rows.parquet", "x")
    (tmp_path / "saved").mkdir()
    write(tmp_path / "saved" / "dataset_info.json", "{}")
    monkeypatch.setattr(builtins, "__import__", without)
    with pytest.raises(DataError, match=r"reading parquet needs pyarrow[\s\S]*pip install 'podium\[data\]'"):
        load_rows(path)
    for source in (tmp_path / "saved", "owner/name"):
        with pytest.raises(DataError, match=r"needs the package datasets[\s\S]*pip install 'podium\[data\]'"):
            load_rows(source)
    with pytest.raises(DataError, match=r"reasoning-gym[\s\S]*pip install 'podium\[rewards\]'"):
        load_rows("reasoning_gym:chain_sum")


def test_reasoning_gym_rows():
    pytest.importorskip("reasoning_gym")
    rows = load_rows("reasoning_gym:chain_sum", {"size": 5, "seed": 3, "max_terms": 2})
    assert len(rows) == 5
    assert set(rows[0]) == {"prompt", "answer", "metadata", "task"}
    assert rows[0]["task"] == {"name": "chain_sum", "options": {"size": 5, "seed": 3, "max_terms": 2}, "index": 0}
    json.dumps(rows)
    assert rows == load_rows("reasoning_gym:chain_sum", {"size": 5, "seed": 3, "max_terms": 2})
    # The path's own options come before: other rows of the same task, for evaluation.
    assert rows[0] != load_rows("reasoning_gym:chain_sum?seed=4&size=2", {"size": 5, "seed": 3, "max_terms": 2})[0]


def test_reasoning_gym_errors():
    pytest.importorskip("reasoning_gym")
    with pytest.raises(DataError, match=r"no task 'chain_sums'[\s\S]*did you mean 'chain_sum'"):
        load_rows("reasoning_gym:chain_sums")
    with pytest.raises(DataError, match=r"refuses these options[\s\S]*its settings \(data\.options\): .*max_terms"):
        load_rows("reasoning_gym:chain_sum", {"max_term": 2})
    with pytest.raises(DataError, match="refuses these options"):
        load_rows("reasoning_gym:chain_sum", {"min_terms": 9, "max_terms": 2})
    with pytest.raises(DataError, match="'seed' is not key=value"):
        load_rows("reasoning_gym:chain_sum?seed")
