"""The loops of docs/algorithms/switching.md: each at most five changed lines from PPO, and each runs."""

from __future__ import annotations

import itertools
import re
from pathlib import Path

import pytest
import torch

import podium
from podium.algorithms.constraints import LagrangeMultiplier
from podium.models.heads import RewardModel
from tests.tiny import tiny_model, tiny_tokenizer

PAGE = (Path(__file__).parents[2] / "docs/algorithms/switching.md").read_text(encoding="utf-8")
PPO = re.search(r"```python\n(.*?)```", PAGE, flags=re.DOTALL)[1].splitlines()
SECTIONS = {part.split("\n", 1)[0]: part for part in PAGE.split("\n## ")[1:]}
DIFFS = {n: re.search(r"```diff\n(.*?)```", part, flags=re.DOTALL)[1] for n, part in SECTIONS.items() if "```diff" in part}


def applied(diff: str) -> list[str]:
    """PPO's loop with the diff's lines taken out and put in where the ones around them stand."""
    lines = list(PPO)
    at = next(i for i, line in enumerate(lines) if "compute_log_probs" in line) + 1  # what is only added: to a complete batch
    for mark, text in [(line[0], line[1:]) for line in diff.splitlines()]:
        if mark == "-":
            at = lines.index(text)
            del lines[at]
        else:
            lines.insert(at, text)
            at += 1
    return lines


def changed_lines(diff: str) -> int:
    """Lines added, taken out, or edited: one that goes and comes back with other arguments counts once."""
    lines = diff.splitlines()
    edited = sum(
        a[0] == "-" and b[0] == "+" and a[1:].split("(")[0] == b[1:].split("(")[0] for a, b in itertools.pairwise(lines)
    )
    renamed = sum("estimate_" in a and "estimate_constrained" in b and a[0] == "-" for a, b in itertools.pairwise(lines))
    return len(lines) - edited - renamed


def test_the_page_has_the_three():
    assert set(DIFFS) == {"GRPO", "ReMax", "Safe-RLHF"}


@pytest.mark.parametrize("name", ["GRPO", "ReMax", "Safe-RLHF"])
def test_at_most_five_lines(name):
    assert changed_lines(DIFFS[name]) <= 5


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    root = tmp_path_factory.mktemp("switching")
    tiny_model().save_pretrained(root / "model")
    tiny_tokenizer().save_pretrained(root / "model")
    for seed, name in ((1, "reward"), (2, "cost")):
        RewardModel.from_causal_lm(tiny_model(seed=seed)).save_pretrained(root / name, tiny_tokenizer())
    return root


@pytest.mark.parametrize("name", ["PPO", "GRPO", "ReMax", "Safe-RLHF"])
def test_the_loop_runs(name, folders):
    algorithm = {"PPO": "ppo", "GRPO": "grpo", "ReMax": "remax", "Safe-RLHF": "safe_rlhf"}[name]
    model = {"path": str(folders / "model"), "reward_path": str(folders / "reward"), "dtype": "float32"}
    if name == "Safe-RLHF":
        model["cost_path"] = str(folders / "cost")
    config = {
        "algorithm": algorithm,
        "model": model,
        "batch": {"prompts_per_step": 4, "group_size": 8 if name == "GRPO" else 1},
        "kl": {"coef": 0.05},
        "optimizer": {"lr": 1e-3},
        "rollout": {"max_new_tokens": 6},
        "run": {"steps": 2},
    }
    rows = [{"prompt": f"What is {a} plus {b}?"} for a in range(3) for b in range(3)]
    trainer = podium.Trainer(config=config, data=rows, evaluation=[]).prepare()
    roles = {"actor": "actor", "critic": "critic", "ref": "reference", "reward_model": "reward"}
    roles |= {"cost_model": "cost", "cost_critic": "cost_critic"}
    handles = {variable: trainer.roles[role] for variable, role in roles.items() if role in trainer.roles}
    multiplier = LagrangeMultiplier(threshold=-1.0)
    names = {**vars(podium), **handles, "loader": itertools.islice(trainer.loader, 2), "multiplier": multiplier}
    names |= {n: getattr(podium, n) for n in ("estimate_advantages", "estimate_constrained_advantages")}
    before = {n: t.clone() for n, t in handles["actor"].state_dict().result()["engine"]["model"].items()}
    exec("\n".join(PPO if name == "PPO" else applied(DIFFS[name])), names)
    after = handles["actor"].state_dict().result()["engine"]["model"]
    assert any(not torch.equal(before[n], after[n]) for n in after)
    assert torch.isfinite(names["batch"]["advantages"].values).all()
    if name == "Safe-RLHF":
        assert multiplier.value != 1.0 and "cost_returns" in names["batch"]
