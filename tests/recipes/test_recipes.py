"""Every recipe trains for a few tiny steps, evaluates, writes its run folder, stops, and goes on as if it had not."""

from __future__ import annotations

import json
import math
import signal

import pytest
import torch

from podium.checkpoints.store import CheckpointStore
from podium.core.errors import CheckpointError, ConfigError
from podium.recipes import build, known_recipes, load
from tests.tiny import tiny_model, tiny_tokenizer

PROMPTS = [{"prompt": f"What is {a} plus {b}?", "answer": str(a + b)} for a in range(4) for b in range(4)]
ROWS = [{"prompt": row["prompt"], "completion": f" {row['answer']}"} for row in PROMPTS]
PROMPTS_WITH_ANSWERS = [{**row, "answer": "1"} for row in ROWS]
PAIRS = [{"prompt": row["prompt"], "chosen": f" {row['answer']}", "rejected": " no"} for row in PROMPTS]
MARKED = [
    {"prompt": row["prompt"], "completion": f" {a}", "label": a != "no"} for row in PROMPTS for a in (row["answer"], "no")
]
GROUPS = ("grpo", "dr_grpo", "dapo", "gspo", "cispo", "rloo", "reinforce_plus_plus_baseline", "opo", "online_dpo")
ALONE = ("ppo", "safe_rlhf", "reinforce_plus_plus", "remax", "distillation")
ONLINE = (*GROUPS, *ALONE)
DATA = dict.fromkeys(ONLINE, PROMPTS) | {"sft": ROWS, "kto": MARKED, **dict.fromkeys(("reward_model", "dpo", "ipo"), PAIRS)}


def length_reward(prompts, completions, **columns):
    return [float(len(c) % 5) / 4 for c in completions]


def words_cost(prompts, completions, **columns):
    return [float(len(c.split())) for c in completions]


@pytest.fixture(scope="module")
def model_folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("model")
    tiny_model().save_pretrained(folder)
    tiny_tokenizer().save_pretrained(folder)
    return str(folder)


def trainer(algorithm, model_folder, tmp_path, *overrides, **values):
    group = 1 if algorithm in (*ALONE, "sft", "kto") else 2
    base = {
        "algorithm": algorithm,
        "model": {"path": model_folder, "dtype": "float32"},
        "data": {"eval_samples": 4},
        "batch": {"prompts_per_step": 4, "group_size": group, "microbatch_tokens": 64},
        "optimizer": {"lr": 1e-3},
        "run": {"folder": str(tmp_path), "name": "run", "steps": 2, "trackers": [], "progress": False},
    }
    if algorithm in ONLINE:
        base |= {"rewards": [{"function": length_reward}], "rollout": {"max_new_tokens": 6}}
    if algorithm == "safe_rlhf":
        base |= {"costs": [{"function": words_cost}], "lagrange": {"threshold": 1.0}}
    if algorithm == "distillation":
        base["model"] = {"path": model_folder, "dtype": "float32", "teacher_path": model_folder}
    if algorithm == "dapo":
        base |= {"overlong_buffer": 2}
    return build(load(None, overrides, base | values), data=DATA[algorithm])


def numbers(run_folder):
    """The metrics that depend on what was computed, not on how long it took."""
    rows = [json.loads(line) for line in (run_folder / "metrics.jsonl").read_text().splitlines()]
    return [{k: v for k, v in row.items() if not k.startswith(("time", "speed", "memory"))} for row in rows]


def test_every_recipe_is_tried_here():
    assert set(known_recipes()) == set(DATA)


@pytest.mark.parametrize("algorithm", sorted(DATA))
def test_two_steps_and_the_run_folder(algorithm, model_folder, tmp_path):
    result = trainer(algorithm, model_folder, tmp_path).train()
    assert result.steps == 2 and not result.interrupted
    assert result.evaluation_before.keys() == result.evaluation_after.keys()
    rows = numbers(result.run_folder)
    assert [row["step"] for row in rows] == [0, 1, 2]
    role = {"reward_model": "reward"}.get(algorithm, "actor")
    assert all(torch.isfinite(torch.tensor(rows[i][f"{role}/loss"])) and rows[i][f"{role}/grad_norm"] > 0 for i in (1, 2))
    for name in ("settings.yaml", "summary.json", "plot.png", "model/config.json", "checkpoints/step_000002/manifest.json"):
        assert (result.run_folder / name).is_file(), name


@pytest.mark.parametrize("algorithm", sorted(DATA))
def test_a_resumed_run_gives_the_same_numbers(algorithm, model_folder, tmp_path):
    whole = trainer(algorithm, model_folder, tmp_path, "run.name=whole", "run.steps=3").train()
    trainer(algorithm, model_folder, tmp_path, "run.name=part", "run.steps=2").train()
    resumed = trainer(algorithm, model_folder, tmp_path, "run.name=part", "run.steps=3")
    result = resumed.train(resume=True)
    # Evaluations stand where the runs were told to make them: compare what each step of training computed.
    both = [
        [{k: v for k, v in row.items() if not k.startswith("eval/")} for row in numbers(r.run_folder)] for r in (whole, result)
    ]
    assert both[0] == both[1]
    assert whole.evaluation_after.items() >= {k: v for k, v in result.evaluation_after.items() if k.startswith("eval/")}.items()


def test_several_updates_adaptive_kl_and_epochs_resume_too(model_folder, tmp_path):
    settings = ("kl.controller=adaptive", "kl.coef=0.1", "batch.minibatch_sequences=2", "batch.epochs=2")
    whole = trainer("ppo", model_folder, tmp_path, *settings, "run.name=whole", "run.steps=3").train()
    trainer("ppo", model_folder, tmp_path, *settings, "run.name=part", "run.steps=1").train()
    result = trainer("ppo", model_folder, tmp_path, *settings, "run.name=part", "run.steps=3").train(resume=True)
    assert [r["kl/coef"] for r in numbers(whole.run_folder)[1:]] == [r["kl/coef"] for r in numbers(result.run_folder)[1:]]
    assert numbers(whole.run_folder)[-1] == numbers(result.run_folder)[-1]


def test_first_update_of_a_step_has_ratio_one_and_nothing_clipped(model_folder, tmp_path):
    result = trainer("grpo", model_folder, tmp_path).train()
    for row in numbers(result.run_folder)[1:]:
        assert row["actor/ratio"] == 1.0 and row["actor/clip_fraction"] == 0.0


def test_one_update_gives_the_gradient_of_the_old_log_prob_pass(model_folder, tmp_path):
    """Leaving the pass out changes nothing: the same step with a pass of its own gives the same numbers."""
    from podium.stages.policy import GRPOStage

    runs = []
    for name, one_update in (("without", True), ("with", False)):
        made = trainer("grpo", model_folder, tmp_path, f"run.name={name}")
        made.stages[-1] = GRPOStage(one_update=one_update)
        made.graph = type(made.graph)(made.stages, made.graph.sources)
        runs.append(numbers(made.train().run_folder))
    for a, b in zip(runs[0][1:], runs[1][1:], strict=True):
        assert a["actor/grad_norm"] == pytest.approx(b["actor/grad_norm"], rel=1e-5)


def test_overlong_shaping_is_of_training_not_of_the_evaluation(model_folder, tmp_path):
    result = trainer("dapo", model_folder, tmp_path).train()
    assert "reward/overlong" in result.metrics and "eval/reward/length_reward" in result.evaluation_after
    assert "eval/reward/overlong" not in result.evaluation_after


@pytest.mark.parametrize("algorithm", ["dpo", "online_dpo"])
def test_the_first_loss_of_dpo_is_ln_2(algorithm, model_folder, tmp_path):
    first = numbers(trainer(algorithm, model_folder, tmp_path).train().run_folder)[1]
    assert first["actor/loss"] == pytest.approx(math.log(2), abs=1e-5)


@pytest.mark.parametrize("algorithm", sorted({*ONLINE} - {"online_dpo"}))  # whose loss has no ratio
def test_the_ratio_of_a_single_update_is_one_and_nothing_is_clipped(algorithm, model_folder, tmp_path):
    for row in numbers(trainer(algorithm, model_folder, tmp_path).train().run_folder)[1:]:
        assert row["actor/ratio"] == 1.0 and row["actor/clip_fraction"] == 0.0


def test_ctrl_c_saves_and_the_run_goes_on_to_the_same_numbers(model_folder, tmp_path):
    calls: list[int] = []
    stop_at = [3]  # evaluation, first step, second step

    def reward(prompts, completions, **columns):
        calls.append(1)
        if len(calls) == stop_at[0]:
            signal.raise_signal(signal.SIGINT)
        return length_reward(prompts, completions)

    def made(name):
        calls.clear()
        return trainer("grpo", model_folder, tmp_path, f"run.name={name}", "run.steps=3", rewards=[{"function": reward}])

    stopped = made("part").train()
    assert stopped.interrupted and stopped.steps == 2
    assert CheckpointStore(stopped.run_folder / "checkpoints").steps() == [2]
    stop_at[0] = 0
    result = made("part").train(resume=stopped.run_folder)
    whole = made("whole").train()
    assert numbers(whole.run_folder)[-1] == numbers(result.run_folder)[-1]


def test_ctrl_c_in_a_rollout_gives_it_up_and_makes_it_again(model_folder, tmp_path):
    whole = trainer("grpo", model_folder, tmp_path, "run.name=whole").train()
    part = trainer("grpo", model_folder, tmp_path, "run.name=part").prepare()
    engine = part.roles["actor"].workers[0].rollout
    step, seen = engine.step, []

    def stop_in_the_second_step():
        seen.append(engine.policy_version)
        if seen.count(1) == 2:
            signal.raise_signal(signal.SIGINT)
        return step()

    engine.step = stop_in_the_second_step
    stopped = part.train()
    assert stopped.interrupted and stopped.steps == 1 and engine.pending == 0
    result = trainer("grpo", model_folder, tmp_path, "run.name=part").train(resume=stopped.run_folder)
    assert numbers(whole.run_folder)[-1] == numbers(result.run_folder)[-1]


def test_resuming_with_other_settings_says_which(model_folder, tmp_path):
    trainer("grpo", model_folder, tmp_path).train()
    changed = trainer("grpo", model_folder, tmp_path, "optimizer.lr=1e-4", "run.steps=3")
    with pytest.raises(CheckpointError, match=r"optimizer.lr +0.001 +0.0001"):
        changed.train(resume=True)


@pytest.mark.parametrize(
    ("algorithm", "override", "message"),
    [
        ("grpo", "batch.group_size=1", "takes a group as its own baseline"),
        ("grpo", "advantage=gae", "needs a critic's values"),
        ("grpo", "advantage=distillation", "needs a teacher's log-probs"),
        ("grpo", "advantage=dr_grop", "dr_grpo"),
        ("grpo", "policy_loss=gsop", "gspo"),
        ("grpo", "correction.kind=token_truncate", "token_truncated"),
        ("grpo", "correction={kind: token_masked, low: 2}", "low <= 1"),
        ("grpo", "correction={kind: token_masked, cap: 2}", "setting of correction 'token_masked'"),
        ("gspo", "dual_clip=3", "'gspo' has no setting 'dual_clip'"),
        ("dapo", "batch.group_size=1", "batch.group_size=8"),
        ("dapo", "overlong_buffer=6", "leaves no length free"),
        ("remax", "rewards.0.normalize=batch", "cannot be compared"),
        ("safe_rlhf", "costs=[]", "no cost is set"),
        ("distillation", "model.teacher_path=null", "no teacher is set"),
        ("online_dpo", "batch.group_size=1", "a pair takes two responses"),
        ("online_dpo", "kl.coef=0.1", "unknown setting 'kl'"),
        ("sft", "policy_loss=gspo", "unknown setting 'policy_loss'"),
        ("online_dpo", "dual_clip=3", "unknown setting 'dual_clip'"),
        ("distillation", "step_rewards=[{function: podium.quickstart.task:correct}]", "teacher alone"),
        ("online_dpo", "correction.kind=token_masked", "unknown setting 'correction'"),
        ("online_dpo", "step_rewards.0.function=score.py:steps", "unknown setting 'step_rewards'"),
        ("dpo", "batch.group_size=4", "a pair has two rows"),
        ("ipo", "beta=0", "beta"),
        ("kto", "batch.group_size=2", "KTO generates nothing"),
        ("reward_model", "heads=[a, a]", "each name once"),
        ("grpo", "rewards=[]", "no reward is set"),
        ("grpo", "rollout.engine=vlm", "vllm"),
        ("grpo", "batch.minibatch_sequences=3", "does not divide"),
        ("ppo", "kl.place=loss", "PPO takes its KL term in the reward"),
        ("grop", None, "did you mean 'grpo'"),
    ],
)
def test_wrong_settings_fail_before_anything_is_loaded(algorithm, override, message, model_folder, tmp_path):
    DATA.setdefault("grop", PROMPTS)
    overrides = [override] if override else []
    try:
        with pytest.raises(ConfigError, match=message):
            trainer(algorithm, model_folder, tmp_path, *overrides, model={"path": "nowhere"})
    finally:
        DATA.pop("grop")
    assert not list(tmp_path.iterdir())


def test_an_evaluation_s_columns_are_those_of_the_held_out_rows(model_folder, tmp_path):
    def needs_answer(prompts, completions, answer, **columns):
        return [1.0] * len(answer)

    from podium.stages.reward import RewardStage
    from podium.stages.rollout import RolloutStage
    from podium.trainer.trainer import Trainer

    settings = trainer("sft", model_folder, tmp_path, "rollout.max_new_tokens=6").settings
    evaluation = [RolloutStage(group_size=1), RewardStage(functions=[needs_answer])]
    Trainer(settings, data=ROWS, eval_data=PROMPTS_WITH_ANSWERS, evaluation=evaluation).prepare()
    with pytest.raises(ConfigError, match="answer"):
        Trainer(settings, data=PROMPTS_WITH_ANSWERS, eval_data=ROWS, evaluation=evaluation).prepare()


def test_more_prompts_a_step_than_rows(model_folder, tmp_path):
    with pytest.raises(ConfigError, match="a step takes 64 rows, the data set has 12"):
        trainer("grpo", model_folder, tmp_path, "batch.prompts_per_step=64").prepare()
