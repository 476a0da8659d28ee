"""`generate`: the batch it gives back, and what it leaves behind when it fails."""

from __future__ import annotations

import pytest
import torch

from podium.core.batch import Batch
from podium.core.errors import BatchError, RolloutError
from podium.engines.base import SamplingParams, Segment, Trajectory
from podium.engines.rollout.generate import generate, response_columns
from podium.engines.rollout.hf import HFEngine
from podium.engines.rollout.native.engine import NativeEngine
from podium.models.packed import pack
from tests.tiny import tiny_model, tiny_tokenizer

TOKENIZER = tiny_tokenizer()


def _batch() -> Batch:
    prompts = [[5, 6, 7], [8], [5, 6, 7], [9, 10, 11, 12, 13, 14], [8]]
    return Batch({"prompt_ids": prompts, "sample_seed": [3, 1, 4, 1, 5], "row_index": [10, 11, 12, 13, 14]})


def test_rows_stay_in_order_whatever_finishes_first() -> None:
    engine = NativeEngine(tiny_model(), TOKENIZER, max_concurrent=2)
    engine.update_weights(4)
    seen: list[tuple[int, int, int]] = []
    sampling = SamplingParams(max_new_tokens=15, stop_token_ids=tuple(range(100, 140)))
    out = generate(engine, _batch(), sampling, on_progress=lambda *numbers: seen.append(numbers))
    assert out["row_index"].tolist() == [10, 11, 12, 13, 14]
    assert out["policy_version"].tolist() == [4] * 5
    assert set(out["finish_reason"]) <= {"stop", "length"}
    assert out["response_mask"].values.all()
    assert out["loss_mask"].values.all()
    assert seen[-1] == (5, 5, len(out["response_ids"].values))
    assert engine.cache_bytes == 0
    for row in range(5):
        single = generate(NativeEngine(tiny_model(), TOKENIZER), _batch().index([row]), sampling)
        assert single["response_ids"].to_list()[0] == out["response_ids"].to_list()[row]
    pack(out)


def test_both_engines_serve_it() -> None:
    sampling = SamplingParams(max_new_tokens=8, temperature=0)
    model = tiny_model()
    ours = generate(NativeEngine(model, TOKENIZER), _batch(), sampling)
    theirs = generate(HFEngine(model, TOKENIZER, max_concurrent=3), _batch(), sampling)
    assert ours["response_ids"].to_list() == theirs["response_ids"].to_list()
    torch.testing.assert_close(ours["rollout_log_probs"].values, theirs["rollout_log_probs"].values, atol=1e-4, rtol=0)


def test_a_bad_row_is_named_and_nothing_is_left_in_the_engine() -> None:
    engine = NativeEngine(tiny_model(), TOKENIZER)
    batch = Batch({"prompt_ids": [[5, 6], [], [7]], "sample_seed": [1, 2, 3]})
    with pytest.raises(RolloutError, match="row 1 of the batch: the prompt is empty"):
        generate(engine, batch, SamplingParams(max_new_tokens=4))
    assert engine.pending == 0
    with pytest.raises(BatchError, match="sample_seed"):
        generate(engine, batch.drop("sample_seed"), SamplingParams())


def test_an_interrupt_leaves_nothing_in_the_engine() -> None:
    engine = NativeEngine(tiny_model(), TOKENIZER)

    def interrupt(*_: int) -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        generate(engine, _batch(), SamplingParams(max_new_tokens=9), on_progress=interrupt)
    assert engine.pending == 0
    assert engine.cache_bytes == 0


def test_an_empty_batch() -> None:
    batch = Batch({"prompt_ids": [], "sample_seed": torch.zeros(0, dtype=torch.int64)})
    out = generate(NativeEngine(tiny_model(), TOKENIZER), batch, SamplingParams())
    assert len(out) == 0
    assert len(out["response_ids"]) == 0


def test_columns_of_several_writers() -> None:
    segments = [
        Segment("policy", [5, 6], [-0.5, -1.0], 1),
        Segment("environment", [7], [], 0),
        Segment("policy", [8], [-2.0], 2),
    ]
    columns = Batch(response_columns([Trajectory(0, (1,), segments, "stop"), Trajectory(1, (1,), [], "aborted")], version=9))
    assert columns["response_ids"].to_list() == [[5, 6, 7, 8], []]
    assert columns["response_mask"].to_list() == [[True, True, False, True], []]
    assert columns["rollout_log_probs"].to_list() == [[-0.5, -1.0, 0.0, -2.0], []]
    assert columns["policy_version"].tolist() == [2, 9]
