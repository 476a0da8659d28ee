"""The programs that Podium promises, run as they are written (small models, local paths)."""

from __future__ import annotations

import functools
import itertools
import json
import re
from pathlib import Path

import pytest
import torch
import yaml

import podium
from podium.core.errors import ConfigError, ResourceError
from podium.models.heads import RewardModel
from tests.tiny import tiny_model, tiny_tokenizer

PROMPTS = [{"prompt": f"What is {a} plus {b}?", "answer": str(a + b)} for a in range(4) for b in range(4)]


def my_reward(prompts, completions, **columns):
    return [float(len(c) % 5) / 4 for c in completions]


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    """A policy, a reward model, and a data file."""
    root = tmp_path_factory.mktemp("programs")
    tiny_model().save_pretrained(root / "model")
    tiny_tokenizer().save_pretrained(root / "model")
    RewardModel.from_causal_lm(tiny_model(seed=1)).save_pretrained(root / "reward", tiny_tokenizer())
    (root / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in PROMPTS))
    return root


@pytest.fixture
def config(folders, tmp_path):
    return {
        "data": {"path": str(folders / "rows.jsonl"), "eval_samples": 4},
        "batch": {"prompts_per_step": 4, "group_size": 2},
        "rollout": {"max_new_tokens": 6},
        "model": {"dtype": "float32"},
        "run": {"folder": str(tmp_path), "steps": 2, "trackers": [], "progress": False},
    }


def test_one_call(folders, config):
    sections = {name: config[name] for name in ("batch", "rollout", "run")}
    sections["data__eval_samples"] = 4
    result = podium.train(
        model=str(folders / "model"), data=str(folders / "rows.jsonl"), rewards=[my_reward], algorithm="grpo", **sections
    )
    assert result.steps == 2 and (result.run_folder / "model" / "config.json").is_file()


def test_one_call_with_models_and_rows_in_memory(config):
    sections = {name: config[name] for name in ("batch", "rollout", "run")}
    result = podium.train(tiny_model(), PROMPTS, [my_reward], tokenizer=tiny_tokenizer(), optimizer__lr=1e-4, **sections)
    assert result.steps == 2


def test_stages(folders, config):
    from podium import PPOStage, RewardStage, RolloutStage, Trainer, load_reward_model

    actor, tokenizer = tiny_model(), tiny_tokenizer()
    helpful, honest, harmless = (load_reward_model(str(folders / "reward")) for _ in range(3))
    stages = [
        RolloutStage(model=actor, tokenizer=tokenizer, max_length=8),
        RewardStage(models=[helpful, honest, harmless], weights=[0.4, 0.3, 0.3]),
        PPOStage(kl_controller="adaptive", kl_target=0.05, use_stepwise_reward=True),
    ]
    trainer = Trainer(stages=stages, config=config)
    result = trainer.train()
    assert result.steps == 2 and {"kl/coef", "actor/loss", "critic/loss", "reward/mean"} <= result.metrics.keys()
    assert trainer.settings.rollout.max_new_tokens == 8


POOLS = {
    "actor": {"gpus": [0, 1, 2, 3], "backend": "fsdp"},
    "critic": {"gpus": [4, 5], "backend": "megatron"},
    "reward": {"gpus": [6, 7], "backend": "vllm"},
}


@pytest.fixture
def ppo_yaml(folders, config, tmp_path):
    path = tmp_path / "ppo.yaml"
    model = {"path": str(folders / "model"), "reward_path": str(folders / "reward"), "dtype": "float32"}
    path.write_text(yaml.safe_dump({**config, "algorithm": "ppo", "model": model, "kl": {"coef": 0.0}}))
    return path


def test_roles_placed_by_hand_names_the_backend_that_is_missing(ppo_yaml):
    from podium import Trainer

    with pytest.raises(ResourceError, match=r"backend 'megatron' .* role 'critic'"):
        Trainer(model_names=["actor", "critic", "reward"], resource_pool=POOLS, config_path=str(ppo_yaml))


def test_roles_placed_by_hand_with_backends_that_are_there(ppo_yaml):
    from podium import Trainer

    pools = {role: {**pool, "backend": "single"} for role, pool in POOLS.items()}
    trainer = Trainer(model_names=["actor", "critic", "reward"], resource_pool=pools, config_path=str(ppo_yaml))
    assert trainer.train().steps == 2


def test_a_role_that_was_not_named_is_an_error(ppo_yaml):
    from podium import Trainer

    with pytest.raises(ConfigError, match=r"call the roles \['critic'\]"):
        Trainer(model_names=["actor", "reward"], config_path=str(ppo_yaml))
    with pytest.raises(ConfigError, match=r"no stage calls the roles \['cost'\]"):
        Trainer(model_names=["actor", "critic", "reward", "cost"], config_path=str(ppo_yaml))


def test_the_loop(folders, ppo_yaml):
    from podium import Trainer, estimate_advantages

    trainer = Trainer(config_path=str(ppo_yaml), evaluation=[]).prepare()
    actor, critic, reward_model = (trainer.roles[name] for name in ("actor", "critic", "reward"))
    before = actor.state_dict().result()["engine"]["model"]
    before = {name: tensor.clone() for name, tensor in before.items()}
    for prompts in itertools.islice(trainer.loader, 2):
        batch = actor.generate_sequences(prompts)
        batch = batch.union(reward_model.score(batch))
        batch = batch.union(critic.compute_values(batch))
        batch = estimate_advantages(batch, gamma=1.0, gae_lambda=0.95)
        critic.update(batch)
        actor.update_policy(batch)
    after = actor.state_dict().result()["engine"]["model"]
    assert any(not torch.equal(before[name], after[name]) for name in after)


def test_the_loop_with_a_reference_and_a_group_baseline(folders, config, tmp_path):
    """PPO to GRPO: no critic, a group, another estimator."""
    from podium import Trainer, estimate_advantages

    values = {**config, "algorithm": "grpo", "kl": {"coef": 0.1}, "rewards": [{"function": my_reward}]}
    values["model"] = {"path": str(folders / "model"), "dtype": "float32", "reward_path": str(folders / "reward")}
    trainer = Trainer(config=values).prepare()
    actor, ref, reward_model = (trainer.roles[name] for name in ("actor", "reference", "reward"))
    prompts = trainer.loader.next_batch()
    batch = actor.generate_sequences(prompts, group_size=4)
    batch = batch.union(reward_model.score(batch))
    batch = batch.union(ref.compute_log_probs(batch, name="ref_log_probs"))
    batch = estimate_advantages(batch, estimator="grpo")
    metrics = actor.update_policy(batch).result()
    assert metrics.mean("ratio") == 1.0 and "ref_kl" in metrics


def test_ppo_trainer_by_its_other_name(ppo_yaml):
    from podium import LLMTrainer, Trainer
    from podium.trainer.ppo import PPOTrainer

    assert LLMTrainer is Trainer
    assert PPOTrainer(str(ppo_yaml)).settings.algorithm == "ppo"


def test_names_on_handles(ppo_yaml):
    trainer = podium.Trainer(config_path=str(ppo_yaml)).prepare()
    actor, critic, reward = (trainer.roles[name] for name in ("actor", "critic", "reward"))
    batch = actor.generate_sequences(trainer.loader.next_batch())
    batch = batch.union(reward.get_reward(batch))
    advantages = critic.compute_advantages(batch, batch["rewards"])
    assert {"values", "advantages", "returns"} <= set(advantages.names)
    critic.update_critic(advantages)
    actor.update_policy(advantages)


def test_the_kl_controller_is_switched_at_a_border(folders, config):
    values = {**config, "algorithm": "grpo", "rewards": [{"function": my_reward}]}
    values["model"] = {"path": str(folders / "model"), "dtype": "float32"}
    with pytest.raises(podium.core.errors.GraphError, match="no KL controller"):
        podium.Trainer(config=values).set_kl_controller("fixed")
    trainer = podium.Trainer(config={**values, "kl": {"coef": 0.1}})
    trainer.set_kl_controller("adaptive", target=0.1)
    assert trainer.train().metrics["kl/coef"] != 0.1


def readme_programs():
    """The README's python blocks, by what they contain."""
    text = (Path(__file__).parents[2] / "README.md").read_text(encoding="utf-8")
    return re.findall(r"```python\n(.*?)```", text, flags=re.DOTALL)


def readme_program(part):
    found = [block for block in readme_programs() if part in block]
    assert len(found) == 1, f"README has {len(found)} programs with {part}"
    return found[0]


def test_the_readme_s_reward_and_one_call(folders, config, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "my-model").symlink_to(folders / "model")
    rows = (folders / "rows.jsonl").read_text().splitlines()
    (tmp_path / "problems.jsonl").write_text("\n".join(rows * 2) + "\n")
    names: dict = {}
    exec(readme_program("def correct("), names)
    quick = {"batch": config["batch"], "rollout": config["rollout"], "run": {**config["run"], "steps": 1}}
    monkeypatch.setattr(podium, "train", functools.partial(podium.train, **quick))
    exec(readme_program("podium.train("), names)
    assert list(tmp_path.glob("*/model/config.json"))


def test_the_readme_s_stages(folders, config):
    reward_models = [podium.load_reward_model(str(folders / "reward")) for _ in range(3)]
    names = dict(zip(("helpful", "honest", "harmless"), reward_models, strict=True))
    names |= {"actor": tiny_model(), "tokenizer": tiny_tokenizer(), "config": config}
    program = readme_program("PPOStage(").replace("max_length=8192", "max_length=8")  # the tiny model ends at 256
    exec(program, names)


def test_the_readme_s_loop(ppo_yaml):
    from podium import Trainer, estimate_advantages

    values = {**yaml.safe_load(ppo_yaml.read_text()), "kl": {"coef": 0.05}}
    trainer = Trainer(config=values).prepare()
    roles = {"actor": "actor", "critic": "critic", "ref": "reference", "reward_model": "reward"}
    names = {name: trainer.roles[role] for name, role in roles.items()}
    loader = itertools.islice(trainer.loader, 2)
    exec(readme_program("for prompts in loader"), {**names, "loader": loader, "estimate_advantages": estimate_advantages})
    assert trainer.roles["actor"].workers[0].engine.policy_version == 2
