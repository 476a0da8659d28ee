"""Rows as they stand in `samples/`: what comes back is what was there, to six digits."""

from __future__ import annotations

import json
import math
from pathlib import Path

import pytest
import torch

from podium.core.batch import Batch
from podium.runs.folder import RunFolder, read_jsonl
from podium.trainer.samples import encoded, sampled_rows

INF = math.inf


@pytest.mark.parametrize(
    ("values", "expected"),
    [
        ([-0.1234567, 1e-9, -1e20, 3.0], [-0.123457, 1e-09, -1e20, 3.0]),
        ([math.nan, 0.5, INF, -INF], [None, 0.5, None, None]),
        ([1.0, -2.0], [1.0, -2.0]),
        ([], []),
    ],
)
def test_numbers_come_back_to_six_digits(values: list[float], expected: list[float | None]) -> None:
    found = json.loads(encoded(torch.tensor(values).tolist()) or "")
    assert found == expected and all(v is None or isinstance(v, int | float) for v in found)


def test_what_was_not_measured_is_null_and_integers_stay_such() -> None:
    assert encoded([math.nan, math.nan]) is None
    assert json.loads(encoded([3, 5]) or "") == [3, 5]


def test_the_first_rows_are_written_with_their_tokens_up_to_a_number_of_them(tmp_path: Path) -> None:
    batch = Batch(
        {
            "prompt": ["a", 'b "quoted"\n', "c"],
            "response": ["x", "é", "z"],
            "prompt_ids": [torch.tensor([1, 2])] * 3,
            "response_ids": [torch.tensor([3]), torch.tensor([4, 5, 6]), torch.tensor([7])],
            "rollout_log_probs": [torch.tensor([-0.25]), torch.tensor([-0.5, -1.0, math.nan]), torch.tensor([-2.0])],
            "response_mask": [torch.tensor([True]), torch.tensor([True, True, False]), torch.tensor([True])],
            "rewards": torch.tensor([1.0, math.nan, 0.5]),
        }
    )
    run = RunFolder.create(tmp_path, "run")
    rows = list(read_jsonl(run.write_samples(1, sampled_rows(batch, 2, tokens=4))))
    assert rows == [
        {
            "prompt": "a",
            "response": "x",
            "rewards": 1.0,
            "prompt_ids": [1, 2],
            "response_ids": [3],
            "response_mask": [1],
            "rollout_log_probs": [-0.25],
        },
        {"prompt": 'b "quoted"\n', "response": "é", "rewards": None},
    ]
    path = run.keep_nonfinite(1, sampled_rows(batch, 3, tokens=None))
    assert path is not None and [row.get("rollout_log_probs") for row in read_jsonl(path)] == [
        [-0.25],
        [-0.5, -1.0, None],
        [-2.0],
    ]
