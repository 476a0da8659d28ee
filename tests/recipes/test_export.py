"""`podium export`: a model folder from a checkpoint, which plain transformers loads."""

from __future__ import annotations

import json

import pytest
import torch
from transformers import AutoModelForCausalLM

from podium.cli.main import main
from podium.core.errors import CheckpointError, ConfigError
from podium.models.heads import CriticModel
from podium.recipes import build, load
from podium.trainer.export import export_checkpoint
from tests.tiny import tiny_model, tiny_tokenizer

ROWS = [{"prompt": f"What is {n}?"} for n in range(8)]


def reward(completions, **columns):
    return [float(len(c) % 5) for c in completions]


@pytest.fixture(scope="module")
def run_of(tmp_path_factory):
    root = tmp_path_factory.mktemp("export")
    tiny_model().save_pretrained(root / "model")
    tiny_tokenizer().save_pretrained(root / "model")

    def made(name, *overrides, algorithm="grpo"):
        values = {
            "algorithm": algorithm,
            "model": {"path": str(root / "model"), "dtype": "float32"},
            "batch": {"prompts_per_step": 2, "group_size": 2},
            "optimizer": {"lr": 1e-2},
            "rollout": {"max_new_tokens": 4},
            "checkpoint": {"every_steps": 1, "keep": 2},
            "rewards": [{"function": reward}],
            "run": {"folder": str(root), "name": name, "steps": 2, "trackers": [], "progress": False},
        }
        return build(load(None, overrides, values), data=ROWS).train().run_folder

    return made


def weights(folder):
    return AutoModelForCausalLM.from_pretrained(folder).state_dict()


@pytest.mark.parametrize("lora", [False, True], ids=["full", "lora"])
def test_the_newest_is_what_the_run_itself_wrote(run_of, lora, tmp_path):
    run = run_of(f"run-{lora}", *(("model.lora.rank=4",) if lora else ()))
    assert export_checkpoint(run, tmp_path / "new") == 2
    mine, theirs = weights(tmp_path / "new"), weights(run / "model")
    assert mine.keys() == theirs.keys() and all(torch.equal(mine[n], theirs[n]) for n in mine)
    assert (tmp_path / "new" / "adapter").exists() is lora and (tmp_path / "new" / "tokenizer.json").exists()
    assert export_checkpoint(run, tmp_path / "old", step=1) == 1
    old = weights(tmp_path / "old")
    assert any(not torch.equal(mine[n], old[n]) for n in mine)


def test_a_critic(run_of, tmp_path):
    run = run_of("ppo", algorithm="ppo")
    export_checkpoint(run, tmp_path / "critic", role="critic")
    model = CriticModel.from_pretrained(tmp_path / "critic", dtype="float32")
    assert model.head.weight.abs().sum() > 0


def test_the_command_and_what_it_refuses(run_of, tmp_path, capsys):
    run = run_of("command")
    main_ok(["export", str(run), str(tmp_path / "out"), "--step", "1", "--json"])
    assert json.loads(capsys.readouterr().out.splitlines()[-1])["step"] == 1
    with pytest.raises(ConfigError, match="is there already"):
        export_checkpoint(run, tmp_path / "out")
    with pytest.raises(CheckpointError, match=r"no checkpoint of step 9(.|\n)*it has: 1, 2"):
        export_checkpoint(run, tmp_path / "none", step=9)
    with pytest.raises(CheckpointError, match="has no 'role_critic/model'\n  -> it has: role_actor"):
        export_checkpoint(run, tmp_path / "none", role="critic")
    tensors = run / "checkpoints" / "step_000002" / "role_actor.safetensors"
    tensors.write_bytes(tensors.read_bytes()[:-1] + b"\1")
    with pytest.raises(CheckpointError, match="damaged"):
        export_checkpoint(run, tmp_path / "none")
    assert not (tmp_path / "none").exists()


def main_ok(arguments):
    with pytest.raises(SystemExit) as ended:
        main(arguments)
    assert ended.value.code == 0
