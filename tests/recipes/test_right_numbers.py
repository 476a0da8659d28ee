"""Numbers that a run can get wrong in silence: each was wrong once, or nearly."""

from __future__ import annotations

import json

import pytest
import torch

from podium import GRPOStage, PPOStage, RewardStage, RolloutStage, Trainer, estimate_advantages
from podium.core.batch import Batch
from podium.core.errors import ConfigError, GraphError, RewardError
from podium.recipes import train
from podium.stages.base import Stage
from tests.tiny import tiny_model, tiny_tokenizer

PROMPTS = [{"prompt": f"What is {a} plus {b}?", "answer": str(a + b)} for a in range(4) for b in range(4)]
ROWS = [{"prompt": row["prompt"], "completion": f" {row['answer']}"} for row in PROMPTS]
PAIRS = [{"prompt": row["prompt"], "chosen": f" {row['answer']}", "rejected": " no"} for row in PROMPTS]


def reward(prompts, completions, **columns):
    return [float(len(c) % 5) / 4 for c in completions]


def config(tmp_path, **sections):
    base = {
        "batch": {"prompts_per_step": 4, "group_size": 2},
        "rollout": {"max_new_tokens": 5},
        "run": {"folder": str(tmp_path), "steps": 2, "trackers": [], "progress": False},
    }
    return {**base, **sections}


def made(tmp_path, algorithm="grpo", data=PROMPTS, **sections):
    values = {"algorithm": algorithm, "rewards": [{"function": reward}], **config(tmp_path), **sections}
    if algorithm in ("sft", "reward_model"):
        values["batch"] = {"prompts_per_step": 4, **sections.get("batch", {})}
    if algorithm == "reward_model":
        values.pop("rewards"), values.pop("rollout")
    return Trainer(config=values, models={"actor": tiny_model()}, tokenizer=tiny_tokenizer(), data=data)


def rows(result):
    return [json.loads(line) for line in (result.run_folder / "metrics.jsonl").read_text().splitlines()]


def test_a_second_update_on_the_same_batch_is_not_on_policy(tmp_path):
    actor = made(tmp_path, optimizer={"lr": 1e-2}).prepare().roles["actor"]
    prompts = Batch({"prompt_ids": [[1, 50], [1, 60]], "row_index": [0, 1]})
    batch = actor.generate_sequences(prompts, group_size=4).result()
    batch = estimate_advantages(batch.with_columns({"rewards": torch.arange(8.0)}), estimator="grpo")
    kept = batch.union(actor.compute_log_probs(batch))
    assert actor.update_policy(kept).result().mean("ratio") == pytest.approx(1.0, abs=1e-5)
    assert abs(actor.update_policy(kept).result().mean("ratio") - 1.0) > 1e-3
    with pytest.raises(ConfigError, match="sampled at version 0 of the actor, which is now at 2"):
        actor.update_policy(batch)


def test_one_update_is_dropped_where_a_step_makes_several(tmp_path):
    trainer = Trainer(
        [RolloutStage(tiny_model(), tiny_tokenizer()), RewardStage(functions=[reward]), GRPOStage(one_update=True)],
        config(tmp_path, batch={"prompts_per_step": 4, "group_size": 2, "epochs": 3}, optimizer={"lr": 1e-2}),
        data=PROMPTS,
    )
    assert rows(trainer.train())[-1]["actor/ratio"] != 1.0


def test_a_stage_s_temperature_is_that_of_the_log_probs(tmp_path):
    stages = [RolloutStage(tiny_model(), tiny_tokenizer(), temperature=0.5), RewardStage(functions=[reward]), GRPOStage()]
    assert rows(Trainer(stages, config(tmp_path), data=PROMPTS).train())[-1]["rollout/log_prob_gap"] < 1e-4


def test_supervised_loss_does_not_know_the_sampling_temperature(tmp_path):
    losses = [
        rows(made(tmp_path, "sft", ROWS, rollout={"temperature": t, "max_new_tokens": 5}).train())[0]["actor/loss"]
        for t in (1.0, 0.5)
    ]
    assert losses[0] == losses[1]


@pytest.mark.parametrize(
    ("algorithm", "data", "sections", "role"),
    [
        ("sft", ROWS, {}, "actor"),
        ("grpo", PROMPTS, {"batch": {"prompts_per_step": 4, "group_size": 2, "minibatch_sequences": 4}}, "actor"),
        ("ppo", PROMPTS, {"critic_warmup_steps": 2}, "actor"),
        ("reward_model", PAIRS, {"batch": {"prompts_per_step": 4, "minibatch_sequences": 2}}, "reward"),
    ],
)
def test_a_decaying_rate_ends_at_its_minimum(algorithm, data, sections, role, tmp_path):
    run = {"folder": str(tmp_path), "steps": 4, "trackers": [], "progress": False}
    optimizer = {"lr": 1e-3, "schedule": "linear", "min_lr_ratio": 0.1}
    trainer = made(tmp_path, algorithm, data, optimizer=optimizer, run=run, **sections)
    last = rows(trainer.train())[-1]
    engine = trainer.roles[role].workers[0].engine
    assert engine._optimizer.updates == engine._optimizer.total_updates
    per_step = engine._optimizer.updates / (4 - sections.get("critic_warmup_steps", 0))
    assert last[f"{role}/lr"] == pytest.approx(1e-4, rel=1e-6 if per_step == 1 else 2.0)
    assert last[f"{role}/skipped_updates"] == 0


def test_a_stage_returns_what_it_says_it_writes(tmp_path):
    class Sloppy(Stage):
        name, reads, writes = "sloppy", ("rewards", "group_id"), ("scores",)

        def run(self, batch, context):
            return Batch({"scores": batch["rewards"], "group_id": batch["group_id"].flip(0)})

    stages = [RolloutStage(tiny_model(), tiny_tokenizer()), RewardStage(functions=[reward]), Sloppy(), GRPOStage()]
    with pytest.raises(GraphError, match=r"'sloppy' returned the columns \['group_id', 'scores'\]"):
        Trainer(stages, config(tmp_path), data=PROMPTS).train()


def test_a_stage_may_read_the_data_set_s_columns(tmp_path):
    class Easy(Stage):
        name, reads, writes = "easy", ("data.answer",), ("scores",)

        def run(self, batch, context):
            return Batch({"scores": [float(a) for a in batch["data.answer"]]})

    stages = [RolloutStage(tiny_model(), tiny_tokenizer()), Easy(), RewardStage(functions=[reward]), GRPOStage()]
    assert Trainer(stages, config(tmp_path), data=PROMPTS).train().steps == 2
    with pytest.raises(GraphError, match=r"'data.answer', which the data set lacks"):
        Trainer(stages, config(tmp_path), data=[{"prompt": "x"} for _ in range(8)]).prepare()


def test_a_reward_function_knows_where_the_run_is(tmp_path):
    seen = []

    def watching(prompts, completions, trainer_state=None, **columns):
        seen.append((trainer_state.global_step, trainer_state.max_steps))
        return [1.0] * len(completions)

    made(tmp_path, rewards=[{"function": watching}]).train()
    assert seen == [(0, 2), (1, 2)]


def test_a_held_out_response_that_cannot_be_scored_is_not_solved(tmp_path):
    def half(prompts, completions, answer, **columns):
        return [1.0 if int(a) % 2 else float("nan") for a in answer]

    held_out = [{"prompt": f"What is {n}?", "answer": str(n)} for n in range(8)]
    values = {"algorithm": "grpo", "rewards": [{"function": half, "on_error": "skip"}], **config(tmp_path)}
    trainer = Trainer(
        config=values, models={"actor": tiny_model()}, tokenizer=tiny_tokenizer(), data=PROMPTS, eval_data=held_out
    )
    assert trainer.evaluate()["eval/accuracy"] == 0.5


def test_names_of_models_and_functions_do_not_meet():
    with pytest.raises(ConfigError, match=r"called 'reward'"):
        RewardStage(models=["a"], functions=[reward])


def test_weights_and_sums_are_finite(tmp_path):
    with pytest.raises(ConfigError, match=r"rewards.0.weight"):
        made(tmp_path, rewards=[{"function": reward, "weight": float("nan")}])
    with pytest.raises(RewardError, match="not a finite number"):
        made(tmp_path, rewards=[{"function": reward, "weight": 1e39}]).train()


def test_settings_that_would_do_nothing_are_refused(tmp_path):
    with pytest.raises(ConfigError, match="reads no token rewards"):
        batch = Batch({"rewards": [1.0], "group_id": [0], "response_mask": [[True]]})
        estimate_advantages(batch, estimator="grpo", kl_coef=1.0)
    with pytest.raises(ConfigError, match="kl_coef, which is 0"):
        PPOStage(kl_controller="adaptive", kl_coef=0.0)
    with pytest.raises(ConfigError, match="did you mean 'epsilon'"):
        GRPOStage(epsilonn=1).expand()
    with pytest.raises(ConfigError, match="SFT generates nothing"):
        made(tmp_path, "sft", ROWS, batch={"group_size": 8})
    with pytest.raises(ConfigError, match="unknown setting 'kl'"):
        Trainer([RolloutStage(tiny_model(), tiny_tokenizer())], config(tmp_path, kl={"coef": 0.1}), data=PROMPTS)


def test_train_takes_one_reward_or_many_and_says_what_is_missing(tmp_path):
    given = {"tokenizer": tiny_tokenizer(), **config(tmp_path)}
    assert train(tiny_model(), PROMPTS, reward, **given).steps == 2
    assert train(tiny_model(), PROMPTS, [{"function": reward, "weight": 0.5}, "exact_match"], **given).steps == 2
    with pytest.raises(ConfigError, match="comes with its tokenizer"):
        train(tiny_model(), PROMPTS, reward, **config(tmp_path))
    with pytest.raises(ConfigError, match="there is no data"):
        train(tiny_model(), None, reward, **given)
