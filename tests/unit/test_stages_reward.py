"""The scoring stages: roles, heads, weights, what an evaluation and a baseline see."""

from __future__ import annotations

import json
from dataclasses import dataclass
from types import SimpleNamespace

import pytest
import torch

from podium import (
    CostStage,
    PPOStage,
    RewardStage,
    RolloutStage,
    StepwiseRewardInjector,
    StepwiseRewardStage,
    Trainer,
)
from podium.controller.future import Future
from podium.core.batch import Batch
from podium.core.errors import ConfigError, RewardError
from podium.core.settings import RewardSettings
from podium.models.heads import RewardModel
from podium.stages.base import StepContext
from podium.stages.graph import StageGraph
from tests.tiny import tiny_model, tiny_tokenizer

BATCH = Batch(
    {
        "prompt_ids": [[1], [1]],
        "response_ids": [[5, 6], [7]],
        "response": ["ab", "c"],
        "prompt": ["p", "p"],
        "group_id": [0, 0],
    }
)


@dataclass(frozen=True)
class Head:
    model: object
    name: str


class Role:
    """Answers like a reward role; counts its passes."""

    def __init__(self, **scores):
        self.scores, self.passes = scores, 0

    def score(self, batch, name):
        assert (batch.names, name) == (["prompt_ids", "response_ids"], "scores")
        self.passes += 1
        return Future(lambda: Batch({column.replace("_", "."): values for column, values in self.scores.items()}))


def length(completions):
    return [float(len(c)) for c in completions]


def context_of(step=0, **roles):
    return StepContext(step, roles)


# ---------------------------------------------------------------------- roles and heads


def test_models_side_by_side_and_functions():
    stage = RewardStage(models=["one", "two"], functions=[length], weights=[0.5, 2.0, 10.0])
    assert stage.models() == {"reward": "one", "reward_2": "two"}
    context = context_of(reward=Role(scores=[1.0, 2.0]), reward_2=Role(scores=[0.0, 1.0]))
    out = stage.run(BATCH, context)
    assert out["rewards"].tolist() == [20.5, 13.0]
    assert out["reward.reward_2"].tolist() == [0.0, 1.0]
    assert context.metrics.mean("reward/mean") == 16.75


def test_heads_of_one_model_share_a_role_and_a_pass():
    model = SimpleNamespace()
    stage = RewardStage(models=[Head(model, "helpful"), Head(model, "honest")], weights=[0.75, 0.25])
    assert (stage.roles, stage.models()) == (("reward",), {"reward": model})
    role = Role(scores_helpful=[1.0, 0.0], scores_honest=[4.0, 8.0])
    out = stage.run(BATCH, context_of(reward=role))
    assert role.passes == 1
    assert out["rewards"].tolist() == [1.75, 2.0]
    assert out["reward.honest"].tolist() == [4.0, 8.0]


def test_heads_of_two_models_may_have_one_name():
    stage = RewardStage(models=[Head("a", "safe"), "b", Head("c", "safe")])
    assert [s.name for s in stage.sources] == ["reward.safe", "reward_2", "reward_3.safe"]


def test_a_whole_model_with_several_heads():
    model = RewardModel.from_causal_lm(tiny_model(), heads=["helpful", "honest"])
    with pytest.raises(ConfigError, match=r"has 2 heads: helpful, honest\n.*model\.head\('helpful'\)"):
        RewardStage(models=[model])
    with pytest.raises(ConfigError, match="no weight is given for honest"):
        RewardStage(models=[model], weights={"helpful": 1.0})
    with pytest.raises(ConfigError, match=r"'honset', which is no source here\n.*did you mean 'honest'"):
        RewardStage(models=[model], weights={"helpful": 1.0, "honset": 1.0})
    stage = RewardStage(models=[model], weights={"helpful": 0.5, "honest": 0.5})
    assert [s.name for s in stage.sources] == ["helpful", "honest"]
    same = RewardStage(models=[model.head("honest"), model.head("helpful")], weights=[1, 2])
    assert (same.weights, same.roles) == ({"honest": 1.0, "helpful": 2.0}, ("reward",))
    with pytest.raises(ConfigError, match="the head 'honest' is given twice"):
        RewardStage(models=[model.head("honest"), model.head("honest")])


def test_heads_of_a_folder_are_seen_when_it_scores():
    stage = RewardStage(models=["folder"], weights={"helpful": 1.0, "honset": 1.0})
    role = Role(scores_helpful=[1.0, 0.0], scores_honest=[4.0, 8.0])
    with pytest.raises(RewardError, match=r"no head 'honset'\n.*did you mean 'honest'"):
        stage.run(BATCH, context_of(reward=role))
    both = RewardStage(models=["folder"], functions=[length], weights={"helpful": 1.0, "length": 0.5})
    assert both.run(BATCH, context_of(reward=role))["rewards"].tolist() == [2.0, 0.5]
    with pytest.raises(RewardError, match="the model has 2 heads: helpful, honest"):
        RewardStage(models=["folder"]).run(BATCH, context_of(reward=role))


@pytest.mark.parametrize(
    ("keywords", "message"),
    [
        ({}, "no reward source"),
        ({"models": [length]}, r"no reward model\n.*functions=\["),
        ({"models": ["m"], "functions": [length], "weights": [1.0]}, r"1 weights for 2 reward sources \(reward, length\)"),
        ({"functions": [length], "weights": [float("nan")]}, r"nan is no weight"),
        ({"functions": [length], "weights": {"length": "2"}}, r"'2' is no weight"),
        ({"models": ["m"], "functions": [RewardSettings(function=length, name="reward")]}, "called 'reward', as"),
        ({"functions": [length], "scaling": "dinamic"}, "scaling='dinamic'\n.*did you mean 'dynamic'"),
        ({"functions": [length], "shaping": {"lenght": {}}}, r"shaping is given for 'lenght'[\s\S]*did you mean 'length'"),
        ({"functions": [length], "shaping": {"length": {"clp": 1}}}, r"unknown setting 'clp'\n.*did you mean 'clip'"),
    ],
)
def test_what_does_not_match(keywords, message):
    with pytest.raises(ConfigError, match=message):
        RewardStage(**keywords)


# ---------------------------------------------------------------------- costs


def test_costs_have_columns_roles_and_metrics_of_their_own():
    stage = CostStage(models=["one", "two"], functions=[length])
    assert (stage.roles, stage.writes) == (("cost", "cost_2"), ("costs",))
    context = context_of(cost=Role(scores=[1.0, 2.0]), cost_2=Role(scores=[3.0, 4.0]))
    out = stage.run(BATCH, context)
    assert out["costs"].tolist() == [6.0, 7.0]
    assert out["cost.length"].tolist() == [2.0, 1.0]
    assert {"cost/mean", "cost/length", "cost/skipped"} <= set(context.metrics.means())
    sources = ("prompt_ids", "response_ids", "response")
    assert StageGraph([RewardStage(functions=[length]), CostStage(functions=[length])], sources).levels == [[0], [1]]


# ---------------------------------------------------------------------- dynamic scaling, evaluation, baselines


def test_dynamic_scaling_of_all_sources_models_too():
    stage = RewardStage(models=["m"], functions=[length], scaling="dynamic", shaping={"length": {"clip": 0.5}})
    context = context_of(reward=Role(scores=[1.0, 3.0]))
    out = stage.run(BATCH, context)
    assert out["rewards"].tolist() == [-0.5, 0.5]  # the model's -1, 1; the function's 1, -1 clipped
    assert out["reward.reward"].tolist() == [1.0, 3.0]
    assert set(stage.state_dict()["scaling"]) == {"reward", "length"}
    assert stage.comparable
    other = RewardStage(models=["m"], functions=[length], scaling="dynamic", shaping={"length": {"clip": 0.5}})
    other.load_state_dict(stage.state_dict())
    later = context_of(reward=Role(scores=[2.0, 7.0]))
    assert torch.equal(stage.run(BATCH, later)["rewards"], other.run(BATCH, later)["rewards"])


def test_an_evaluation_learns_nothing_and_sums_the_scores_as_they_are():
    stage = RewardStage(functions=[length], weights=[2.0], scaling="dynamic")
    stage.run(BATCH, context_of())
    before = stage.state_dict()
    context = context_of(step=-1)
    assert stage.run(BATCH, context)["rewards"].tolist() == [4.0, 2.0]
    assert stage.state_dict() == before
    assert context.metrics.mean("reward/mean") == 3.0


def test_scoring_a_baseline_leaves_no_trace():
    stage = RewardStage(functions=[length], scaling="dynamic")
    context = context_of()
    sampled = stage.run(BATCH, context)["rewards"]
    before, metrics = stage.state_dict(), context.metrics.means()
    assert torch.equal(stage.score(BATCH, context, learn=False)["rewards"], sampled)  # the same scale
    assert (stage.state_dict(), context.metrics.means()) == (before, metrics)


def test_scaling_by_group_reads_the_groups():
    stage = RewardStage(functions=[length], scaling="group")
    assert "group_id" in stage.reads
    assert not stage.comparable
    assert stage.run(BATCH, context_of())["rewards"].tolist() == [1.0, -1.0]


# ---------------------------------------------------------------------- in a run


def score(prompts, completions, trainer_state):
    return [float(len(c) % 7) * (1 + trainer_state.global_step) for c in completions]


def first_half(completions):
    return [[((0, (len(c) + 1) // 2), 1.0)] if c else [] for c in completions]


def trainer_of(folder, steps):
    torch.manual_seed(3)  # the reward model's head is drawn
    stages = [
        RolloutStage(model=tiny_model(), tokenizer=tiny_tokenizer(), max_length=6),
        RewardStage(functions=[score], scaling="dynamic"),
        StepwiseRewardStage([first_half, StepwiseRewardInjector.from_model(RewardModel.from_causal_lm(tiny_model(seed=1)))]),
        PPOStage(kl_controller="none", use_stepwise_reward=True),
    ]
    config = {
        "model": {"dtype": "float32"},
        "batch": {"prompts_per_step": 4, "group_size": 2},
        "optimizer": {"lr": 1e-3},
        "evaluation": {"every_steps": 1},
        "checkpoint": {"export": False},
        "run": {"folder": str(folder), "name": "r", "steps": steps, "trackers": [], "progress": False, "device": "cpu"},
    }
    rows = [{"prompt": f"What is {a}?"} for a in range(10)]
    return Trainer(stages=stages, config=config, data=rows[:8], eval_data=rows[8:])


def curve(folder):
    rows = [json.loads(line) for line in (folder / "r" / "metrics.jsonl").read_text().splitlines()]
    return [{k: v for k, v in row.items() if not k.startswith(("time", "speed", "memory"))} for row in rows]


def test_a_resumed_run_goes_on_with_its_statistics_bit_for_bit(tmp_path):
    trainer_of(tmp_path / "whole", 2).train()
    trainer_of(tmp_path / "parts", 1).train()
    resumed = trainer_of(tmp_path / "parts", 2)
    resumed.train(resume=True)
    whole = curve(tmp_path / "whole")
    assert curve(tmp_path / "parts") == whole
    assert whole[-1]["reward/score/shaped"] != whole[-1]["reward/score"]
    assert whole[-1]["step_rewards/steps"] > 1
    assert "reward/score/shaped" not in {k.removeprefix("eval/") for k in whole[-1] if k.startswith("eval/")}
    stage = resumed.graph.stages[1]
    assert stage.state_dict()["scaling"]["score"]["count"] == 2 * 8  # evaluations taught it nothing
