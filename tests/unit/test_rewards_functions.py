"""Functions of TRL's and verl's signatures run unchanged; what they get wrong is said."""

from __future__ import annotations

import asyncio
import functools
import math

import numpy as np
import pytest
import torch

from podium.core.batch import Batch
from podium.core.errors import ConfigError, RewardError
from podium.rewards.adapters import TRLReward, VerlReward, adapt
from podium.rewards.base import Reward, TrainerState

USER = {"role": "user", "content": "2 + 2 ="}


def batch_of(responses, prompts=None, **columns) -> Batch:
    n = len(responses)
    return Batch(
        {
            "prompt": prompts or [f"prompt {i}" for i in range(n)],
            "response": responses,
            "response_ids": [[i] * (i + 1) for i in range(n)],
            "row_index": [10 + i for i in range(n)],
            **{f"data.{name}": values for name, values in columns.items()},
        }
    )


# ---------------------------------------------------------------------- TRL


def by_length(completions, **kwargs):
    return [float(len(c)) for c in completions]


def matches(prompts, completions, answer, **kwargs):
    """The example of TRL's documentation, as it stands there."""
    return [1.0 if a in c else 0.0 for c, a in zip(completions, answer, strict=True)]


def test_trl_functions_get_texts_and_columns():
    reward = adapt(matches, "matches", weight=0.5)
    assert isinstance(reward, TRLReward)
    assert isinstance(reward, Reward)
    assert reward.columns == ("answer",)
    assert reward.description == "reward 'matches' (weight 0.5): TRL's f(prompts, completions, **columns), once per batch"
    scored = reward(batch_of(["it is 4", "5"], answer=["4", "4"]))
    assert scored.values.dtype == torch.float32
    assert scored.values.tolist() == [1.0, 0.0]
    assert scored.failed == []


def test_trl_chat_completions_are_messages():
    def f(prompts, completions, **kwargs):
        assert prompts == [[USER]]
        assert completions == [[{"role": "assistant", "content": "4"}]]
        return [1.0]

    assert adapt(f, "f")(batch_of(["4"], prompts=[[USER]])).values.tolist() == [1.0]


def test_trl_arguments_are_passed_only_to_who_wants_them():
    seen = {}

    def everything(**kwargs):
        seen.update(kwargs)
        return [0.0]

    def f(completions, **kwargs):
        return everything(completions=completions, **kwargs)

    adapt(f, "f")(batch_of(["a"], answer=["4"], completion=["x"]), TrainerState(global_step=7))
    assert sorted(seen) == ["answer", "completion_ids", "completions", "log_extra", "log_metric", "prompts", "trainer_state"]
    assert seen["completion_ids"] == [[0]]
    assert seen["trainer_state"].global_step == 7

    def only(completion_ids, trainer_state=None):
        return [len(ids) + trainer_state.global_step for ids in completion_ids]

    assert adapt(only, "only")(batch_of(["a", "b"])).values.tolist() == [1.0, 2.0]


def test_trl_functions_may_log():
    def f(completions, log_metric, log_extra, **kwargs):
        log_metric("share", 0.25)
        log_extra("seen", [c.upper() for c in completions])
        return [0.0] * len(completions)

    scored = adapt(f, "f")(batch_of(["a", "b"]))
    assert scored.metrics.means() == {"share": 0.25}
    assert scored.columns == {"seen": ["A", "B"]}


def test_async_partial_object_and_method():
    async def later(completions, **kwargs):
        await asyncio.sleep(0)
        return [1.0] * len(completions)

    class Judge:
        async def __call__(self, completions, **kwargs):
            return [2.0] * len(completions)

        def method(self, completions, bonus, **kwargs):
            return [3.0 + bonus] * len(completions)

    batch = batch_of(["a", "b"])
    assert adapt(later, "later")(batch).values.tolist() == [1.0, 1.0]
    assert adapt(Judge(), "judge")(batch).values.tolist() == [2.0, 2.0]
    assert adapt(Judge().method, "m", options={"bonus": 1})(batch).values.tolist() == [4.0, 4.0]
    assert adapt(functools.partial(Judge().method, bonus=2), "p")(batch).values.tolist() == [5.0, 5.0]

    async def in_a_notebook():
        return adapt(later, "later")(batch).values.tolist()

    assert asyncio.run(in_a_notebook()) == [1.0, 1.0]


@pytest.mark.parametrize(
    "answer",
    [[1, True], (1.0, 1), np.array([1, 1]), torch.ones(2), [torch.tensor(1.0), np.float32(1)], (x for x in (1, 1))],
)
def test_numbers_in_any_form(answer):
    assert adapt(lambda completions: answer, "f")(batch_of(["a", "b"])).values.tolist() == [1.0, 1.0]


def test_none_does_not_apply_as_in_trl():
    scored = adapt(lambda completions: [None, 1.0], "f")(batch_of(["a", "b"]))
    assert scored.values.isnan().tolist() == [True, False]
    assert (scored.absent, scored.failed) == ([0], [])


# ---------------------------------------------------------------------- verl


def compute_score(data_source, solution_str, ground_truth, extra_info=None):
    """As in verl's documentation."""
    assert data_source == "openai/gsm8k"
    return {"score": float(solution_str == ground_truth), "length": len(solution_str), "text": solution_str}


VERL = {"data_source": ["openai/gsm8k"] * 2, "ground_truth": ["4", "4"], "extra_info": [{"index": 3}, None]}


def test_verl_functions():
    reward = adapt(compute_score, "score")
    assert isinstance(reward, VerlReward)
    assert reward.columns == ("data_source", "ground_truth")
    assert "verl's compute_score" in reward.description
    scored = reward(batch_of(["4", "five"], **VERL))
    assert scored.values.tolist() == [1.0, 0.0]
    assert scored.metrics.means() == {"length": 2.5}


def test_verl_extra_info_and_options():
    seen = []

    def score(data_source, solution_str, ground_truth, extra_info, scale, **kwargs):
        seen.append(extra_info)
        return scale

    assert adapt(score, "s", options={"scale": 3})(batch_of(["4", "5"], **VERL)).values.tolist() == [3.0, 3.0]
    assert seen[0] == {"index": 3, "num_turns": None, "rollout_reward_scores": {}}
    assert seen[1] == {"num_turns": None, "rollout_reward_scores": {}}
    assert VERL["extra_info"] == [{"index": 3}, None]  # the data set's own is left as it was


def test_verl_async_functions():
    async def score(data_source, solution_str, ground_truth, extra_info=None):
        if solution_str == "5":
            raise ValueError("no")
        return 1.0

    scored = adapt(score, "s", on_error="skip")(batch_of(["4", "5"], **VERL))
    assert scored.values[0] == 1.0
    assert scored.failed == [(1, "raised ValueError: no")]


def test_verls_own_scorer_runs():
    default = pytest.importorskip("verl.utils.reward_score").default_compute_score
    columns = {"data_source": ["openai/gsm8k"] * 2, "ground_truth": ["72", "72"]}
    assert adapt(default, "verl")(batch_of(["so #### 72", "#### 7"], **columns)).values.tolist() == [1.0, 0.0]


def test_trls_own_reward_runs():
    trl = pytest.importorskip("trl.rewards")
    batch = batch_of(["<think>\nx\n</think>\n4", "4"], prompts=[[USER], [USER]])
    assert adapt(trl.think_format_reward, "think")(batch).values.tolist() == [1.0, 0.0]


# ---------------------------------------------------------------------- what is wrong


def test_a_function_of_neither_signature_is_refused_at_once():
    for function in (lambda text: 1.0, lambda *args: 1.0, lambda **kwargs: 1.0):
        with pytest.raises(
            ConfigError, match=r"reward 'f': the signature \(.*\) fits neither TRL's f\(.*nor verl's compute_score"
        ):
            adapt(function, "f")
    with pytest.raises(ConfigError, match="it requires url, which verl's convention does not give"):
        adapt(lambda data_source, solution_str, ground_truth, url: 1.0, "f")
    with pytest.raises(ConfigError, match=r"takes no option scale\n.*its parameters: completions"):
        adapt(lambda completions: [1.0], "f", options={"scale": 2})


def test_a_missing_column_is_named():
    with pytest.raises(
        RewardError, match="reward 'matches': the function needs the data column answer; the data set has: topic"
    ):
        adapt(matches, "matches")(batch_of(["a"], topic=["x"]))
    with pytest.raises(RewardError, match="data column data_source, ground_truth; the data set has: none"):
        adapt(compute_score, "score")(batch_of(["a"]))


def raises_on_b(completions, **kwargs):
    return [{"a": 1.0, "c": 3.0}[c] for c in completions]


def test_a_function_that_raises_names_the_sample():
    batch = batch_of(["a", "b", "c"], prompts=["x", "y" * 300, "z"])
    with pytest.raises(RewardError) as caught:
        adapt(raises_on_b, "table")(batch)
    message = str(caught.value)
    assert (
        "reward 'table', sample 1 (data row 11), prompt '" + "y" * 200 + "...', response 'b': raised KeyError: 'b'" in message
    )
    assert "on_error: skip" in message
    assert isinstance(caught.value.__cause__, KeyError)
    frames = caught.value.__cause__.__traceback__
    while frames.tb_next:
        frames = frames.tb_next
    assert frames.tb_frame.f_code.co_filename == __file__  # the traceback leads into the function


def test_a_function_that_raises_can_be_skipped():
    scored = adapt(raises_on_b, "table", on_error="skip")(batch_of(["a", "b", "c"]))
    assert scored.values.tolist()[::2] == [1.0, 3.0]
    assert math.isnan(scored.values[1])
    assert scored.failed == [(1, "raised KeyError: 'b'")]


def test_a_failure_of_the_batch_alone_fails_every_row():
    def needs_one(completions):
        if len(completions) > 1:
            raise RuntimeError("one at a time")
        return [1.0]

    with pytest.raises(RewardError, match=r"one at a time \(for the batch of 2; for no sample alone\)"):
        adapt(needs_one, "f")(batch_of(["a", "b"]))
    scored = adapt(needs_one, "f", on_error="skip")(batch_of(["a", "b"]))
    assert scored.values.isnan().all()
    assert [row for row, _ in scored.failed] == [0, 1]


@pytest.mark.parametrize(
    ("bad", "message"),
    [
        (math.nan, "returned nan, not a finite number"),
        (math.inf, "returned inf, not a finite number"),
        (1e300, r"returned 1e\+300, not a finite number"),  # finite, but not as float32
        ("1.0", r"returned '1\.0' \(str\), not a number"),
        ([1.0], r"returned \[1\.0\] \(list\), not a number"),
        (ValueError("parse"), "raised ValueError: parse"),
    ],
)
def test_values_that_are_no_finite_number(bad, message):
    batch = batch_of(["a", "b"], **VERL)
    for make in (lambda **kw: adapt(lambda completions: [0.5, bad], "f", **kw),):
        with pytest.raises(
            RewardError, match=rf"reward 'f', sample 1 \(data row 11\), prompt 'prompt 1', response 'b': {message}"
        ):
            make()(batch)
        scored = make(on_error="skip")(batch)
        assert scored.values[0] == 0.5
        assert [row for row, _ in scored.failed] == [1]


@pytest.mark.parametrize("bad", [None, math.nan, "1", {"scores": 1}, (1.0, "x")])
def test_verl_values_that_are_no_finite_number(bad):
    def score(data_source, solution_str, ground_truth):
        return bad if solution_str == "b" else 1.0

    batch = batch_of(["a", "b"], **VERL)
    with pytest.raises(RewardError, match=r"reward 's', sample 1 .*(returned|has no 'score', only: scores)"):
        adapt(score, "s")(batch)
    assert [row for row, _ in adapt(score, "s", on_error="skip")(batch).failed] == [1]


@pytest.mark.parametrize("on_error", ["raise", "skip"])
@pytest.mark.parametrize("bad", [[1.0], [1.0] * 3, 1.0, None])
def test_a_wrong_number_of_rewards_is_always_an_error(bad, on_error):
    with pytest.raises(RewardError, match=r"reward 'f': returned .* for 2 completions"):
        adapt(lambda completions: bad, "f", on_error=on_error)(batch_of(["a", "b"]))


def test_an_empty_batch():
    assert adapt(by_length, "f")(batch_of(["a"]).index([])).values.tolist() == []
