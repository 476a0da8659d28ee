"""The built-in rewards, and the processes with a deadline."""

from __future__ import annotations

import time

import pytest

from podium.core.batch import Batch
from podium.core.errors import ConfigError, RewardError
from podium.core.settings import RewardSettings
from podium.data.sources import load_rows
from podium.rewards.functions import extracted
from podium.rewards.loading import load_reward
from podium.rewards.processes import CallFailure, DeadlinePool


def batch_of(responses, prompts=None, **columns) -> Batch:
    n = len(responses)
    data = {f"data.{name}": values for name, values in columns.items()}
    return Batch({"prompt": prompts or ["p"] * n, "response": responses, "row_index": list(range(n)), **data})


def reward_of(name, on_error="raise", **options):
    return load_reward(RewardSettings(function=name, on_error=on_error, options=options))


# ---------------------------------------------------------------------- exact_match


def test_exact_match():
    batch = batch_of([" 4\n", "5", "Four"], answer=[4, "4", "four"])
    assert reward_of("exact_match")(batch).values.tolist() == [1.0, 0.0, 0.0]
    assert reward_of("exact_match", ignore_case=True)(batch).values.tolist() == [1.0, 0.0, 1.0]
    tagged = batch_of(["2 <answer> 4 </answer>", "4", "<answer>4"], label=["4"] * 3)
    assert reward_of("exact_match", column="label", extract="tags")(tagged).values.tolist() == [1.0, 0.0, 0.0]
    chat = batch_of(["4"], prompts=[[{"role": "user", "content": "2 + 2"}]], answer=["4"])
    assert reward_of("exact_match")(chat).values.tolist() == [1.0]


def test_exact_match_without_an_answer():
    with pytest.raises(RewardError, match="needs the data column answer; the data set has: label"):
        reward_of("exact_match")(batch_of(["4"], label=["4"]))
    with pytest.raises(RewardError, match=r"sample 1 .*the data column 'answer' is null"):
        reward_of("exact_match")(batch_of(["4", "5"], answer=["4", None]))


def test_extraction_is_reasoning_gyms():
    theirs = pytest.importorskip("reasoning_gym.utils").extract_answer
    for text in (
        "<answer>1</answer> <answer>\n 2</answer>",
        "<answer>1</answer><answer>",
        "1",
        "</answer><answer>",
        "<answer></answer>",
    ):
        assert extracted(text, "tags") == theirs(text)


# ---------------------------------------------------------------------- reasoning-gym


@pytest.mark.parametrize("task", ["chain_sum", "time_intervals", "rearc", "countdown", "rush_hour", "polynomial_equations"])
def test_reasoning_gym_scores_by_the_tasks_own_scorer(task):
    gym = pytest.importorskip("reasoning_gym")
    options = {"size": 3, "seed": 11}
    rows = load_rows(f"reasoning_gym:{task}", options)
    entries = list(gym.create_dataset(task, **options))
    columns = {name: [row[name] for row in rows] for name in ("answer", "metadata", "task")}
    responses = [f"So: <answer>{rows[0]['answer']}</answer>", f"<answer>{rows[0]['answer']}</answer>", "no tags"]
    batch = batch_of(responses, prompts=[row["prompt"] for row in rows], **columns)
    scorer = gym.create_dataset(task, **options)
    expected = [scorer.score_answer(a, e) for a, e in zip([str(rows[0]["answer"])] * 2 + [None], entries, strict=True)]
    assert reward_of("reasoning_gym")(batch).values.tolist() == pytest.approx(expected)


def test_reasoning_gym_options_and_rows_from_a_file():
    pytest.importorskip("reasoning_gym")
    rows = load_rows("reasoning_gym:chain_sum", {"size": 2})
    batch = batch_of(
        [row["answer"] for row in rows], answer=[r["answer"] for r in rows], metadata=[r["metadata"] for r in rows]
    )
    assert reward_of("reasoning_gym", extract="whole")(batch).values.tolist() == [1.0, 1.0]
    assert reward_of("reasoning_gym")(batch).values.tolist() == [0.0, 0.0]


def test_reasoning_gym_failures_are_failures():
    pytest.importorskip("reasoning_gym")
    row = load_rows("reasoning_gym:chain_sum", {"size": 1})[0]
    columns = {name: [row[name]] for name in ("answer", "metadata", "task")}
    with pytest.raises(RewardError, match="has another answer than the row"):
        reward_of("reasoning_gym")(batch_of(["1"], **{**columns, "answer": ["x"]}))
    with pytest.raises(RewardError, match="raised KeyError: 'source_dataset'"):
        reward_of("reasoning_gym")(batch_of(["1"], answer=["1"], metadata=[{}]))


# ---------------------------------------------------------------------- processes

TARGET = """
import os, time, sys

def act(what, value=None):
    if what == "sleep":
        time.sleep(60)
    if what == "exit":
        os._exit(3)
    if what == "raise":
        raise KeyboardInterrupt("stop")
    if what == "print":
        print("this must not mix with the answers", flush=True)
    return value
"""


@pytest.fixture
def pool(tmp_path, monkeypatch):
    (tmp_path / "pool_target.py").write_text(TARGET)
    monkeypatch.syspath_prepend(str(tmp_path))
    made = DeadlinePool("pool_target:act", workers=2, deadline=0.5)
    yield made
    made.close()


def test_a_pool_answers_in_order_and_outlives_its_workers(pool):
    calls = [{"what": what, "value": i} for i, what in enumerate(["give", "sleep", "exit", "raise", "print", "give"])]
    for _ in range(2):  # the killed workers are replaced
        started = time.perf_counter()
        answers = pool.map(calls)
        assert time.perf_counter() - started < 30
        assert [answers[i] for i in (0, 4, 5)] == [0, 4, 5]
        assert all(isinstance(answers[i], CallFailure) for i in (1, 2, 3))
        assert str(answers[1]) == "no answer within 0.5 seconds; its process was killed"
        assert str(answers[2]) == "its process ended with exit code 3"
        assert str(answers[3]) == "raised KeyboardInterrupt: stop"


def test_closing_a_pool_ends_its_processes(pool):
    pool.map([{"what": "give"}])
    running = [worker.process for worker in pool._all if worker.process]
    assert running
    pool.close()
    assert all(process.poll() is not None for process in running)


# ---------------------------------------------------------------------- math_verify


def test_math_verify():
    pytest.importorskip("math_verify")
    cases = [
        ("The answer is $\\frac{1}{2}$.", "0.5", 1.0),
        ("\\boxed{\\frac12}", "\\frac{1}{2}", 1.0),
        ("so it is 12,000", "12000", 1.0),
        ("$x^2 + 2x + 1$", "(x+1)^2", 1.0),
        ("8", "7", 0.0),
        ("no idea", "7", 0.0),
    ]
    reward = reward_of("math_verify", workers=1)
    batch = batch_of([case[0] for case in cases], answer=[case[1] for case in cases])
    assert reward(batch).values.tolist() == [case[2] for case in cases]
    with pytest.raises(RewardError, match=r"sample 1 .*the data's answer ' ' cannot be read as mathematics"):
        reward(batch_of(["1", "2"], answer=["1", " "]))
    reward.function.pool.close()


def test_math_verify_kills_what_hangs_and_counts_it():
    pytest.importorskip("math_verify")
    endless = "$(1+x)^{9^{9^{9}}}$"
    reward = reward_of("math_verify", on_error="skip", workers=1, deadline=2.0)
    scored = reward(batch_of([endless, "3"], answer=["(1+x)^{9^{9^{8}}}", "3"]))
    assert scored.failed == [(0, "no answer within 2 seconds; its process was killed")]
    assert scored.values[1] == 1.0
    reward.function.pool.close()


def test_math_verify_says_what_is_missing(monkeypatch):
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    for name in ("math_verify", "reasoning_gym"):
        with pytest.raises(ConfigError, match=r"is missing\n.*pip install 'podium\[rewards\]'"):
            reward_of(name)
    monkeypatch.undo()
    if pytest.importorskip("math_verify"):
        with pytest.raises(ConfigError, match="must be positive"):
            reward_of("math_verify", deadline=0)


# ---------------------------------------------------------------------- overlong


def test_overlong_is_dapos_equation_13():
    batch = batch_of(["r"] * 6).with_columns({"response_ids": [[5] * n for n in (0, 80, 81, 90, 100, 130)]})
    reward = reward_of("overlong", max_tokens=100, buffer_tokens=20)
    assert reward(batch).values.tolist() == pytest.approx([0.0, 0.0, -0.05, -0.5, -1.0, -1.0])
    assert reward_of("overlong", max_tokens=100, buffer_tokens=20, penalty=0.5)(batch).values.tolist()[-1] == -0.5
    for options in ({"max_tokens": 10, "buffer_tokens": 0}, {"max_tokens": 10, "buffer_tokens": 11}):
        with pytest.raises(ConfigError, match=r"max_tokens=10[\s\S]*0 < buffer_tokens"):
            reward_of("overlong", **options)
