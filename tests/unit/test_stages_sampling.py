"""Stages around a rollout: groups without signal replaced, greedy baselines, the best and the worst as a pair."""

from __future__ import annotations

import json

import pytest
import torch

from podium import RewardStage, RolloutStage
from podium.controller.future import Future
from podium.core.batch import Batch
from podium.core.errors import ConfigError
from podium.core.settings import RewardSettings
from podium.recipes import build, load
from podium.stages.base import StepContext
from podium.stages.sampling import BestWorstStage, DynamicSamplingStage, GreedyBaselineStage, with_signal
from tests.tiny import tiny_model, tiny_tokenizer

PROMPTS = [{"prompt": f"What is {a} plus {b}?"} for a in range(4) for b in range(3)]


def prompts_of(*names):
    return Batch({"prompt_ids": [[1, ord(n)] for n in names], "prompt": list(names)})


class Actor:
    """Answers each prompt by a function of (prompt, round, index in the group); remembers what it was asked."""

    def __init__(self, answer):
        self.answer, self.calls = answer, []

    def generate_sequences(self, prompts, *, group_size, step, round=0, temperature=None, on_progress=None):
        self.calls.append({"prompts": prompts, "group_size": group_size, "round": round, "temperature": temperature})
        names = prompts["prompt"]
        texts = [self.answer(name, round, i) for name in names for i in range(group_size)]
        rows = prompts.repeat(group_size)
        tokens = [[ord(c) for c in text] or [0] for text in texts]
        group_id = rows["group_id"] if "group_id" in rows else torch.arange(len(names)).repeat_interleave(group_size)
        made = {
            "response_ids": tokens,
            "response_mask": [[True] * len(t) for t in tokens],
            "loss_mask": [[True] * len(t) for t in tokens],
            "rollout_log_probs": [[-1.0] * len(t) for t in tokens],
            "finish_reason": ["stop"] * len(texts),
            "policy_version": [0] * len(texts),
            "group_id": group_id,
            "sample_seed": list(range(len(texts))),
            "response": texts,
        }
        return Future.of(rows.with_columns(made))


def length(completions):
    return [float(len(c)) for c in completions]


def varied(name, round, i):
    """Capital prompts get answers of different lengths, others always the same."""
    return "x" * (1 + (i if name.isupper() else 0))


def sampled(names, *, answer=varied, rounds=4, more=(), group_size=2):
    """The stage's step over these prompts; `more` are the prompts that the data has left."""
    actor, left, asked = Actor(answer), list(more), []

    def more_prompts(count):
        asked.append(count)
        return prompts_of(*[left.pop(0) for _ in range(count)])

    context = StepContext(0, {"actor": actor}, group_size, more_prompts=more_prompts if more else None)
    out = DynamicSamplingStage(RolloutStage(), RewardStage(functions=[length]), rounds=rounds).run(prompts_of(*names), context)
    return out, context.metrics.means(), actor, asked


# ---------------------------------------------------------------------- dynamic sampling


def test_groups_without_signal_are_replaced_and_numbered_anew():
    out, metrics, actor, asked = sampled("aBcD", more="eFgHI")
    assert out["prompt"] == ["B", "B", "D", "D", "F", "F", "H", "H"]
    assert out["group_id"].tolist() == [0, 0, 1, 1, 2, 2, 3, 3]
    assert asked == [2, 1, 1]  # as many as are missing, each time
    assert [call["round"] for call in actor.calls] == [0, 1, 2, 3]
    assert out["rewards"].tolist() == [1.0, 2.0] * 4
    assert metrics["sampling/rounds"] == 4 and metrics["sampling/groups"] == 4
    assert metrics["sampling/signal_share"] == 4 / 8


def test_no_more_rollouts_than_it_may_make():
    out, metrics, actor, asked = sampled("aB", more="cdefgh", rounds=3)
    assert len(actor.calls) == 3 and asked == [1, 1]
    assert (out["prompt"], out["group_id"].tolist()) == (["B", "B"], [0, 0])
    assert metrics["sampling/groups"] == 1 and metrics["sampling/rounds"] == 3
    out, _, actor, asked = sampled("aBC", more="D", rounds=1)  # leaves out, replaces none
    assert (out["prompt"], asked, len(actor.calls)) == (["B", "B", "C", "C"], [], 1)


def test_a_full_step_is_rolled_out_once():
    out, metrics, actor, asked = sampled("AB", more="C")
    assert (len(actor.calls), asked, out["prompt"]) == (1, [], ["A", "A", "B", "B"])
    assert metrics["sampling/signal_share"] == 1.0


def test_without_any_signal_the_step_goes_on_with_its_first_rollout():
    out, metrics, actor, _ = sampled("ab", more="cdefgh", rounds=3)
    assert (out["prompt"], out["group_id"].tolist()) == (["a", "a", "b", "b"], [0, 0, 1, 1])
    assert metrics["sampling/groups"] == 0 and len(actor.calls) == 3


def test_without_further_data_nothing_is_replaced():
    out, _, actor, _ = sampled("aB")
    assert (out["prompt"], len(actor.calls)) == (["B", "B"], 1)


def test_a_group_that_scoring_left_with_one_row_has_no_signal():
    def answer(name, round, i):
        return "bad" if name == "B" and i == 1 else varied(name, round, i)

    def scores(completions):
        return [None if c == "bad" else float(len(c)) for c in completions]

    context = StepContext(0, {"actor": Actor(answer)}, 2)
    stage = DynamicSamplingStage(RolloutStage(), RewardStage(functions=[scores]), rounds=1)
    assert stage.run(prompts_of("A", "B"), context)["prompt"] == ["A", "A"]


def test_signal_by_group_in_any_order():
    batch = Batch({"group_id": [7, 3, 7, 3, 5], "rewards": [1.0, 2.0, 1.0, 2.5, 0.0]})
    assert with_signal(batch).tolist() == [False, True, False, True, False]
    assert with_signal(batch.index([])).tolist() == []


class Spy:
    """A role handle that keeps the samples' seeds."""

    def __init__(self, role, seeds):
        self.role, self.seeds = role, seeds

    def generate_sequences(self, *args, **kwargs):
        out = self.role.generate_sequences(*args, **kwargs).result()
        self.seeds.append(out["sample_seed"].tolist())
        return Future.of(out)


def trainer_of(algorithm, folder, reward, steps=1, name="run", **values):
    settings = {
        "algorithm": algorithm,
        "model": {"dtype": "float32"},
        "batch": {"prompts_per_step": 4, "group_size": 2},
        "optimizer": {"lr": 1e-3},
        "rollout": {"max_new_tokens": 4},
        "rewards": [{"function": reward}],
        "checkpoint": {"export": False},
        "run": {"folder": str(folder), "name": name, "steps": steps, "trackers": [], "progress": False, "device": "cpu"},
    }
    made = load(None, [], settings | values)
    return build(made, data=PROMPTS, models={"actor": tiny_model()}, tokenizer=tiny_tokenizer())


def test_a_prompt_that_is_drawn_again_is_answered_from_other_seeds(tmp_path):
    trainer, seeds = trainer_of("dapo", tmp_path, length).prepare(), []
    prompts = trainer.loader.next_batch()

    def flat_at_first(completions):
        return [float(i % 2) if len(seeds) > 1 else 1.0 for i in range(len(completions))]

    context = StepContext(0, {"actor": Spy(trainer.roles["actor"], seeds)}, 2, more_prompts=lambda n: prompts.index(range(n)))
    stage = DynamicSamplingStage(RolloutStage(), RewardStage(functions=[flat_at_first]), rounds=2)
    out = stage.run(prompts, context)
    assert len(seeds) == 2 and not set(seeds[0]) & set(seeds[1])
    assert out["sample_seed"].tolist() == seeds[1] and len(set(seeds[1])) == 8


def one_token_parity(completions):
    return [float(len(c) % 2) for c in completions]


def curve(result):
    rows = [json.loads(line) for line in (result.run_folder / "metrics.jsonl").read_text().splitlines()]
    return [{k: v for k, v in row.items() if not k.startswith(("time", "speed", "memory"))} for row in rows]


def test_dapo_resumes_exactly_where_extra_prompts_were_taken(tmp_path):
    whole = trainer_of("dapo", tmp_path, one_token_parity, steps=3, name="whole")
    part = trainer_of("dapo", tmp_path, one_token_parity, steps=2, name="part")
    rows = curve(whole.train())
    assert max(row["sampling/rounds"] for row in rows[:2]) > 1 and rows[1]["data/epoch"] > 2 * 4 / len(PROMPTS)
    part.train()
    resumed = trainer_of("dapo", tmp_path, one_token_parity, steps=3, name="part")
    assert curve(resumed.train(resume=True)) == rows
    assert resumed.loader.state_dict() == whole.loader.state_dict()
    assert torch.equal(resumed.loader.next_batch()["prompt_ids"].values, whole.loader.next_batch()["prompt_ids"].values)


def test_a_dapo_step_without_any_signal_teaches_nothing_and_does_not_stop_the_run(tmp_path):
    def flat(completions):
        return [1.0] * len(completions)

    result = trainer_of("dapo", tmp_path, flat, steps=2).train()
    for row in curve(result):
        assert (row["sampling/groups"], row["sampling/rounds"], row["advantages/abs"]) == (0, 4, 0.0)
        assert row["actor/grad_norm"] == 0.0


# ---------------------------------------------------------------------- greedy baseline


def greedy(name, round, i):
    return "y" * (ord(name) - ord("a") + 2)  # a: 2, b: 3, c: 4


def rows_of(names, groups, rewards):
    batch = prompts_of(*names).with_columns({"group_id": groups, "rewards": rewards})
    texts = ["x"] * len(names)
    more = {"response": texts, "response_ids": [[5]] * len(names), "response_mask": [[True]] * len(names)}
    return batch.with_columns({**more, "reward.length": rewards})


def baseline_of(batch, function=length, **keywords):
    actor = Actor(greedy)
    context = StepContext(3, {"actor": actor}, 2)
    stage = GreedyBaselineStage(RewardStage(functions=[function], **keywords))
    return stage.run(batch, context), context.metrics.means(), actor, stage


def test_every_row_gets_the_baseline_of_its_own_prompt():
    batch = rows_of("bcab", [4, 9, 2, 4], [1.0, 2.0, 3.0, 4.0])
    out, metrics, actor, _ = baseline_of(batch)
    assert out["baseline_rewards"].tolist() == [3.0, 4.0, 2.0, 3.0]
    assert (out["rewards"].tolist(), out["prompt"]) == ([1.0, 2.0, 3.0, 4.0], list("bcab"))
    (call,) = actor.calls  # one greedy answer a prompt
    assert (call["temperature"], call["group_size"], sorted(call["prompts"]["prompt"])) == (0.0, 1, list("abc"))
    assert not {"response_ids", "rewards", "reward.length"} & set(call["prompts"].names)
    assert metrics == {"baseline/reward": 3.0, "baseline/skipped": 0.0}


def test_a_greedy_answer_that_cannot_be_scored_leaves_with_its_group():
    def scores(completions):
        return [None if len(c) == 3 else float(len(c)) for c in completions]

    out, metrics, _, _ = baseline_of(rows_of("bcab", [0, 1, 2, 0], [1.0, 2.0, 3.0, 4.0]), scores)
    assert out["baseline_rewards"].tolist() == [4.0, 2.0] and out["prompt"] == ["c", "a"]
    assert metrics == {"baseline/reward": 3.0, "baseline/skipped": 1.0}


def test_running_statistics_do_not_learn_from_it():
    stage = RewardStage(functions=[length], scaling="dynamic")
    context = StepContext(0, {"actor": Actor(greedy)}, 2)
    batch = stage.run(rows_of("ab", [0, 1], [0.0, 0.0]).with_columns({"response": ["xx", "xxxx"]}), context)
    learnt = stage.state_dict()
    out = GreedyBaselineStage(stage).run(batch, context)
    assert stage.state_dict() == learnt
    # Mean 3 and deviation 1 of the samples: the same scale for the greedy answers of 2 and 3 characters.
    assert out["rewards"].tolist() == [-1.0, 1.0] and out["baseline_rewards"].tolist() == [-1.0, 0.0]
    assert context.metrics.means()["reward/length"] == 3.0  # the samples' alone


@pytest.mark.parametrize("scaling", ["batch", "group"])
def test_rewards_that_depend_on_their_company_are_refused(scaling):
    with pytest.raises(ConfigError, match=r"cannot be compared[\s\S]*normalize: none or running"):
        GreedyBaselineStage(RewardStage(functions=[RewardSettings(function=length, normalize=scaling)]))


# ---------------------------------------------------------------------- best and worst


def pairs_of(groups, rewards):
    context = StepContext(0, {})
    rows = {"group_id": groups, "rewards": rewards, "sample_seed": list(range(len(groups)))}
    return BestWorstStage().run(Batch(rows), context), context.metrics.means()


def test_best_and_worst_of_each_group_the_first_of_equals():
    out, metrics = pairs_of([3, 1, 3, 1, 3, 1, 3], [2.0, 5.0, 0.0, 5.0, 2.0, 1.0, 0.0])
    assert out["sample_seed"].tolist() == [1, 5, 0, 2]
    assert out["chosen"].tolist() == [True, False, True, False]
    assert out["pair_id"].tolist() == [0, 0, 1, 1]
    assert metrics == {"pairs/share": 1.0, "pairs/gap": 3.0}


def test_a_group_of_equals_gives_no_pair():
    out, metrics = pairs_of([0, 0, 1, 1, 2], [1.0, 1.0, 0.0, 3.0, 9.0])
    assert out["sample_seed"].tolist() == [3, 2] and metrics == {"pairs/share": 1 / 3, "pairs/gap": 3.0}


def test_no_pair_at_all():
    out, metrics = pairs_of([0, 0, 1], [1.0, 1.0, 0.0])
    assert len(out) == 0 and {"pair_id", "chosen", "sample_seed"} <= set(out.names)
    assert metrics == {"pairs/share": 0.0}


def test_an_online_dpo_step_without_a_pair_changes_nothing_and_the_run_goes_on(tmp_path):
    calls = []

    def reward(completions):
        calls.append(1)
        return [1.0] * len(completions) if len(calls) == 1 else [float(i % 2) for i in range(len(completions))]

    trainer = trainer_of("online_dpo", tmp_path, reward, steps=2)
    empty, full = curve(trainer.train())
    assert empty["pairs/share"] == 0.0 and "actor/loss" not in empty
    assert full["pairs/share"] == 1.0
    assert full["actor/loss"] == pytest.approx(0.693147, abs=1e-5)  # ln 2: the first step changed no weight
