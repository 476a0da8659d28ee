from __future__ import annotations

import json
import math
from pathlib import Path

import numpy as np
import torch

from podium.core.jsonable import jsonable


def test_every_reader_of_json_takes_it() -> None:
    value = {1: math.nan, "deep": [{"more": (math.inf, 2.5)}], "numpy": np.float32("-inf"), "torch": torch.tensor(3)}
    want = {"1": None, "deep": [{"more": [None, 2.5]}], "numpy": None, "torch": 3}
    assert json.loads(json.dumps(jsonable(value), allow_nan=False)) == want


def test_what_json_holds_already_stays() -> None:
    value = {"text": "item", "flag": True, "none": None, "count": 3}
    assert jsonable({**value, "path": Path("a/b")}) == {**value, "path": "a/b"}
