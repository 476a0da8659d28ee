"""From rewards to an update: KL in the reward, corrections, Safe-RLHF's two advantages, and what is refused."""

from __future__ import annotations

import json
import math

import pytest
import torch

from podium.algorithms.constraints import LagrangeMultiplier
from podium.checkpoints.store import CheckpointStore
from podium.core.batch import Batch
from podium.core.errors import ConfigError, GraphError
from podium.recipes import build, load
from podium.stages.base import StepContext
from podium.stages.constraint import ConstrainedAdvantageStage
from podium.stages.correction import CorrectionStage
from podium.stages.graph import StageGraph
from podium.stages.policy import GRPOStage, PPOStage, SafeRLHFStage
from podium.stages.update import UpdateStage
from podium.workers.advantages import estimate_advantages, estimate_constrained_advantages
from tests.tiny import tiny_model, tiny_tokenizer

ROWS = [[True, True, True], [True, True], [True, True, True], [True]]


def batch_of(**columns):
    """Four rows of 3, 2, 3 and 1 tokens in two groups."""
    given = {
        "prompt_ids": [[1], [1], [2], [2]],
        "response_ids": [[5, 6, 7], [5, 6], [5, 6, 7], [5]],
        "response_mask": ROWS,
        "loss_mask": ROWS,
        "group_id": [0, 0, 1, 1],
        "rewards": [1.0, 0.0, 2.0, 4.0],
    }
    return Batch({**given, **columns})


def computed(stages, batch):
    """Runs the stages that need no role, in the graph's order."""
    parts = [s for s in StageGraph(stages, batch.names).order if not s.roles]
    context = StepContext(0, {})
    for stage in parts:
        visible = batch.select(*stage.reads, *(c for c in stage.optional_reads if c in batch))
        batch = batch.union(stage.run(visible, context))
    return batch, context.metrics.means()


# ---------------------------------------------------------------------- KL in the reward

OLD = [[-1.0, -2.0, -1.0], [-1.0, -1.0], [-3.0, -1.0, -1.0], [-2.0]]
REF = [[-2.0, -2.0, -2.0], [-1.0, -1.0], [-1.0, -1.0, -1.0], [-1.0]]
"""k1 a token: 1, 0, 1 | 0, 0 | -2, 0, 0 | -1. Summed over the response: 2, 0, -2, -1."""


def in_reward(**keywords):
    stage = GRPOStage(kl_place="reward", kl_coef=0.5, kl_estimator="k1", **keywords)
    without_roles = [s for s in stage.expand() if not s.roles]
    return computed(without_roles, batch_of(old_log_probs=OLD, ref_log_probs=REF)), stage


def test_kl_in_the_reward_of_estimators_over_groups():
    (out, metrics), _ = in_reward(estimator="rloo")
    # Shaped: 1 - 0.5*2, 0, 2 + 0.5*2, 4 + 0.5*1; each less the other of its group.
    assert out["shaped_rewards"].tolist() == [0.0, 0.0, 3.0, 4.5]
    assert out["token_rewards"].to_list() == [[-0.5, 0.0, 0.5], [0.0, 0.0], [1.0, 0.0, 2.0], [4.5]]
    assert out["advantages"].to_list() == [[0.0] * 3, [0.0] * 2, [-1.5] * 3, [1.5]]
    assert out["rewards"].tolist() == [1.0, 0.0, 2.0, 4.0]  # what was scored stays
    assert metrics["kl/per_sequence"] == -0.25 and metrics["kl/coef"] == 0.5
    assert metrics["kl/per_token"] == pytest.approx(-1 / 9)


def test_grpo_dr_grpo_and_opo_take_the_shaped_rewards_too():
    (out, _), _ = in_reward(estimator="dr_grpo")
    assert out["advantages"].to_list() == [[0.0] * 3, [0.0] * 2, [-0.75] * 3, [0.75]]
    (out, _), _ = in_reward(estimator="grpo")
    unit = 0.75 / (1.5 / math.sqrt(2) + 1e-4)
    assert out["advantages"].values.tolist() == pytest.approx([0.0] * 5 + [-unit] * 3 + [unit])
    (out, _), _ = in_reward(estimator="opo")  # length-weighted mean (3*3 + 1*4.5) / 4
    assert out["advantages"].values.tolist() == pytest.approx([0.0] * 5 + [-0.375] * 3 + [1.125])


def test_kl_in_the_reward_of_estimators_over_tokens():
    (out, _), _ = in_reward(estimator="reinforce")
    assert out["advantages"].to_list() == [[0.0, 0.5, 0.5], [0.0, 0.0], [3.0, 2.0, 2.0], [4.5]]


def test_an_adaptive_coefficient_moves_after_the_step_that_used_it():
    (out, metrics), stage = in_reward(estimator="rloo", kl_controller="adaptive", kl_target=1.0, kl_horizon=100)
    assert metrics["kl/coef"] == 0.5 and out["shaped_rewards"].tolist() == [0.0, 0.0, 3.0, 4.5]
    assert stage.controller.value == pytest.approx(0.5 * (1 - 0.2 * 4 / 100))  # KL below its target, held at -0.2
    token_rewards = next(s for s in stage.expand() if s.name == "token_rewards")
    other = GRPOStage(kl_place="reward", kl_coef=0.5, kl_controller="adaptive")
    next(s for s in other.expand() if s.name == "token_rewards").load_state_dict(token_rewards.state_dict())
    assert other.controller.value == stage.controller.value


def test_without_a_penalty_the_rewards_are_as_they_were_scored():
    stages = [s for s in GRPOStage(estimator="rloo").expand() if not s.roles]
    assert [s.name for s in stages] == ["advantages"]
    out, _ = computed(stages, batch_of())
    assert out["advantages"].to_list() == [[1.0] * 3, [-1.0] * 2, [-2.0] * 3, [2.0]]


def test_the_policy_s_log_probs_are_the_rollout_s_where_the_step_makes_one_update():
    stage = GRPOStage(estimator="rloo", kl_place="reward", kl_coef=0.5, kl_estimator="k1", one_update=True)
    parts = [s for s in stage.expand() if not s.roles]
    assert "rollout_log_probs" in parts[0].reads and "old_log_probs" not in parts[0].reads
    out, _ = computed(parts, batch_of(rollout_log_probs=OLD, ref_log_probs=REF))
    assert out["shaped_rewards"].tolist() == [0.0, 0.0, 3.0, 4.5]


# ---------------------------------------------------------------------- correction

HALF, DOUBLE = math.log(0.5), math.log(2.0)
KINDS = ("token_truncated", "sequence_truncated", "token_masked", "sequence_rejected")


def corrected(kind, gaps, **settings):
    """`gaps`: training's log-probs less the rollout's."""
    rollout = [[-1.0] * len(row) for row in gaps]
    old = [[-1.0 + gap for gap in row] for row in gaps]
    masks = [[True] * len(row) for row in gaps]
    masks[0][-1] = False  # not trained on
    context = StepContext(0, {})
    batch = Batch({"old_log_probs": old, "rollout_log_probs": rollout, "loss_mask": masks})
    out = CorrectionStage(kind, **settings).run(batch, context)
    assert set(out.names) == {"importance_weights", "corrected_mask"}
    return out["importance_weights"].to_list(), out["corrected_mask"].to_list(), context.metrics.means()


@pytest.mark.parametrize("kind", KINDS)
def test_equal_log_probs_need_no_correction(kind):
    weights, mask, metrics = corrected(kind, [[0.0, 0.0, 0.0], [0.0]])
    assert weights == [[1.0, 1.0, 0.0], [1.0]]  # 0 where nothing is trained on
    assert mask == [[True, True, False], [True]]
    touched = {"token_masked": "masked", "sequence_rejected": "rejected"}.get(kind, "truncated")
    assert metrics[f"correction/{touched}"] == 0.0
    assert metrics["correction/importance_weight"] == metrics["correction/effective_sample_size"] == 1.0
    assert metrics["correction/rollout_kl"] == 0.0


PLANTED = [[DOUBLE, HALF, 9.0], [math.log(4.0)], [0.0, 0.0]]


@pytest.mark.parametrize(
    ("kind", "settings", "weights", "mask", "touched"),
    [
        ("token_truncated", {"cap": 3.0}, [[2, 0.5, 0], [3], [1, 1]], [[1, 1, 0], [1], [1, 1]], ("truncated", 1 / 5)),
        ("sequence_truncated", {"cap": 3.0}, [[1, 1, 0], [3], [1, 1]], [[1, 1, 0], [1], [1, 1]], ("truncated", 1 / 3)),
        ("token_masked", {"high": 3.0}, [[2, 0.5, 0], [0], [1, 1]], [[1, 1, 0], [0], [1, 1]], ("masked", 1 / 5)),
        ("sequence_rejected", {}, [[1, 1, 0], [0], [1, 1]], [[1, 1, 0], [0], [1, 1]], ("rejected", 1 / 3)),
    ],
)
def test_planted_differences(kind, settings, weights, mask, touched):
    given_weights, given_mask, metrics = corrected(kind, PLANTED, **settings)
    assert [w for row in given_weights for w in row] == pytest.approx([w for row in weights for w in row])
    assert given_mask == [[bool(m) for m in row] for row in mask]
    assert metrics[f"correction/{touched[0]}"] == pytest.approx(touched[1])
    assert metrics["correction/rollout_kl"] == pytest.approx(-math.log(4.0) / 5)


def test_a_correction_needs_a_pass_of_training_s_own():
    names = [s.name for s in GRPOStage(one_update=True, correction="token_truncated").expand()]
    assert names[:2] == ["old_log_probs", "correction"]
    assert [s.name for s in GRPOStage(one_update=True).expand()] == ["advantages", "update_actor"]
    update = GRPOStage(one_update=True, correction="token_truncated").expand()[-1]
    assert {"corrected_mask", "importance_weights", "old_log_probs"} <= set(update.reads)


# ---------------------------------------------------------------------- Safe-RLHF

SCORED = {
    "rewards": [1.0, 0.0, 2.0, 4.0],
    "costs": [0.5, 0.0, 3.0, -1.0],
    "values": [[0.1, 0.2, 0.3], [0.0, 0.5], [1.0, 1.0, 1.0], [2.0]],
    "cost_values": [[0.2, 0.1, 0.4], [0.3, 0.0], [0.5, 1.0, 2.0], [0.0]],
}


def safe(batch=None, **keywords):
    stage = SafeRLHFStage(kl_controller="none", **keywords)
    parts = [s for s in stage.expand() if not s.roles]
    out, metrics = computed(parts, batch or batch_of(**SCORED))
    return out, metrics, stage


@pytest.mark.parametrize("multiplier", [0.3, 2.0])
def test_safe_rlhf_s_stages_are_the_pure_function(multiplier):
    out, metrics, stage = safe(multiplier=multiplier, cost_threshold=0.5, multiplier_lr=0.2, gamma=0.9, gae_lambda=0.8)
    given = batch_of(**SCORED)
    expected = estimate_constrained_advantages(given, multiplier, gamma=0.9, gae_lambda=0.8)
    for name in ("advantages", "returns", "cost_returns", "reward_advantages", "cost_advantages"):
        torch.testing.assert_close(out[name].values, expected[name].values)
    # The step used the multiplier it began with; the mean cost of 0.625 then moved it.
    assert metrics["lagrange/multiplier"] == multiplier
    assert metrics["lagrange/violation"] == pytest.approx(0.125) and metrics["lagrange/threshold"] == 0.5
    assert stage.multiplier.value == pytest.approx(multiplier * math.exp(0.2 * multiplier * 0.125))


def test_the_combined_advantage_by_hand():
    one = batch_of(**{**SCORED, "values": [[0.0] * len(r) for r in ROWS], "cost_values": [[0.0] * len(r) for r in ROWS]})
    out, _, _ = safe(one, multiplier=3.0, gamma=1.0, gae_lambda=1.0, whiten_advantages=False)
    # (R - 3 C) / 4 at every token: without values and discount an advantage is the response's own score.
    assert out["advantages"].to_list() == [[-0.125] * 3, [0.0] * 2, [-1.75] * 3, [1.75]]
    assert out["cost_returns"].to_list() == [[0.5] * 3, [0.0] * 2, [3.0] * 3, [-1.0]]


def test_a_multiplier_of_nearly_zero_is_ppo():
    out, _, _ = safe(multiplier=1e-12, multiplier_min=0.0)
    ppo, _ = computed([s for s in PPOStage(kl_controller="none").expand() if not s.roles], batch_of(**SCORED))
    torch.testing.assert_close(out["advantages"].values, ppo["advantages"].values)
    torch.testing.assert_close(out["returns"].values, ppo["returns"].values)
    torch.testing.assert_close(ppo["advantages"].values, estimate_advantages(batch_of(**SCORED))["advantages"].values)


def test_the_multiplier_is_state():
    _, _, stage = safe(multiplier=1.5, cost_threshold=0.1)
    part = next(s for s in stage.expand() if isinstance(s, ConstrainedAdvantageStage))
    saved = json.loads(json.dumps(part.state_dict()))
    other = ConstrainedAdvantageStage(LagrangeMultiplier(threshold=9.0))
    other.load_state_dict(saved)
    assert stage.multiplier.value > 1.5
    assert other.multiplier.state_dict() == stage.multiplier.state_dict()


def test_the_cost_critic_learns_from_its_own_columns():
    updates = {s.roles[0]: s for s in SafeRLHFStage(critic_warmup_steps=2).expand() if isinstance(s, UpdateStage)}
    assert set(updates) == {"critic", "cost_critic", "actor"}
    assert {"cost_values", "cost_returns"} <= set(updates["cost_critic"].reads)
    assert not {"values", "returns"} & set(updates["cost_critic"].reads)
    assert [updates[role].skip_steps for role in ("critic", "cost_critic", "actor")] == [0, 0, 2]


PROMPTS = [{"prompt": f"What is {a} plus {b}?"} for a in range(4) for b in range(2)]


def length(completions):
    return [float(len(c) % 5) / 4 for c in completions]


def words(completions):
    return [float(len(c.split())) for c in completions]


def run_of(algorithm, folder, **values):
    settings = {
        "algorithm": algorithm,
        "model": {"dtype": "float32"},
        "batch": {"prompts_per_step": 4, "group_size": 1},
        "optimizer": {"lr": 1e-3},
        "kl": {"coef": 0.0},
        "rollout": {"max_new_tokens": 4},
        "rewards": [{"function": length}],
        "checkpoint": {"export": False},
        "run": {"folder": str(folder), "name": algorithm, "steps": 2, "trackers": [], "progress": False, "device": "cpu"},
    }
    made = load(None, [], settings | values)
    result = build(made, data=PROMPTS, models={"actor": tiny_model()}, tokenizer=tiny_tokenizer()).train()
    rows = [json.loads(line) for line in (result.run_folder / "metrics.jsonl").read_text().splitlines()]
    return result, rows


def test_runs_of_ppo_and_of_safe_rlhf_without_a_multiplier_are_the_same(tmp_path):
    _, ppo = run_of("ppo", tmp_path)
    nothing = {"initial": 1e-12, "minimum": 1e-15, "threshold": 1.0}
    result, both = run_of("safe_rlhf", tmp_path, costs=[{"function": words}], lagrange=nothing)
    for a, b in zip(ppo, both, strict=True):
        for name in ("reward/mean", "advantages/abs", "actor/loss", "actor/grad_norm", "critic/loss"):
            assert b[name] == pytest.approx(a[name], rel=1e-4, abs=1e-7), name
    _, saved = CheckpointStore(result.run_folder / "checkpoints").load()
    assert saved["stages"]["constrained_advantages"]["value"] == pytest.approx(1e-12, rel=1e-6)
    assert saved["stages"]["constrained_advantages"]["threshold"] == 1.0


# ---------------------------------------------------------------------- what is refused


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: PPOStage(kl_coef=0.0), r"adaptive controller starts from kl_coef, which is 0\n.*kl\.coef=0\.05"),
        (lambda: GRPOStage(kl_controller="adaptive"), r"adaptive controller starts from kl_coef"),
        (lambda: GRPOStage(estimator="gpro"), r"grpo"),
        (lambda: GRPOStage(estimator="grpo", epsylon=1.0), r"'grpo' has no setting 'epsylon'[\s\S]*epsilon"),
        (lambda: GRPOStage(estimator="rloo", gamma=0.9), r"'rloo' has no setting 'gamma'"),
        (lambda: GRPOStage(correction="token_truncate"), r"token_truncated"),
        (lambda: GRPOStage(estimator="distillation", kl_place="reward", kl_coef=0.1), r"reads no rewards[\s\S]*kl\.place=loss"),
        (lambda: GRPOStage(estimator="distillation", use_stepwise_reward=True), r"reads no rewards"),
        (lambda: CorrectionStage("token_masked", low=2.0), r"low <= 1 <= high"),
        (lambda: CorrectionStage("token_truncated", cap=0.0), r"cap must be above 0"),
    ],
)
def test_what_cannot_be_is_said_when_the_stage_is_made(make, message):
    with pytest.raises(ConfigError, match=message):
        make().expand()


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: GRPOStage(policy_loss="gsop"), "gspo"),
        (lambda: GRPOStage(policy_loss="gspo", dual_clip=3.0), "dual_clip"),
        (lambda: PPOStage(clip_low=-0.1), "clip_low"),
        (lambda: PPOStage(loss_reduction="constant"), "constant_length"),
        (lambda: GRPOStage(loss_reduction="mean"), "token_mean"),
        (lambda: SafeRLHFStage(multiplier=9.0), r"within \[0\.0001, 5\.0\]"),
        (lambda: SafeRLHFStage(cost_threshold=math.nan), "finite"),
    ],
)
def test_what_the_algorithms_refuse(make, message):
    with pytest.raises(ValueError, match=message):
        make().expand()


SOURCES = ("prompt_ids", "response_ids", "response_mask", "loss_mask", "rollout_log_probs", "group_id", "rewards")


@pytest.mark.parametrize(
    ("stages", "missing", "remedy"),
    [
        ([SafeRLHFStage()], "costs", "a CostStage gives it"),
        ([GRPOStage(estimator="gae")], "values", "PPOStage"),
        ([GRPOStage(estimator="remax")], "baseline_rewards", "GreedyBaselineStage"),
        ([GRPOStage(estimator="distillation")], "teacher_log_probs", "algorithm: distillation"),
    ],
)
def test_a_column_that_nothing_gives_names_what_gives_it(stages, missing, remedy):
    with pytest.raises(GraphError, match=rf"'{missing}', which nothing writes\n.*{remedy}"):
        StageGraph(stages, SOURCES)
