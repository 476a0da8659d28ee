"""The R1 example: the whole path, tiny; its task; its step-wise rewards at their tokens."""

from __future__ import annotations

import importlib
import json
import sys
from pathlib import Path

import pytest
import torch

from podium import StepwiseRewardInjector
from podium.core.batch import Batch
from podium.quickstart.model import make_tokenizer

FOLDER = Path(__file__).parents[2] / "examples" / "r1"


@pytest.fixture(scope="module")
def modules():
    """The example's two modules, under names that nothing else keeps."""
    sys.path.insert(0, str(FOLDER))
    try:
        yield importlib.import_module("run"), importlib.import_module("task")
    finally:
        sys.path.remove(str(FOLDER))
        for name in ("run", "task"):
            sys.modules.pop(name, None)


@pytest.fixture(scope="module")
def tokenizer(modules):
    _, task = modules
    return make_tokenizer(row["prompt"] + row["completion"] for row in task.demonstrations(0, 300))


def test_the_whole_path(modules, tmp_path, monkeypatch, capsys):
    run, task = modules
    size = {"seed": 3, "share": 0.004, "rows": 4}
    table = run.main(tmp_path, **size)
    rows = [line.split("|")[1].strip() for line in table.splitlines()[2:] if line.startswith("|")]
    assert rows == ["1-sft", "2-reward-model", "3-ppo", "4-rejection-sampling", "5-ppo"]
    found = json.loads((tmp_path / "table.json").read_text())
    assert set(found["2-reward-model"]) >= {f"accuracy/{aspect}" for aspect in task.ASPECTS}
    for name in ("1-sft", "3-ppo", "4-rejection-sampling", "5-ppo"):
        assert {"reward/overall", "reward/harmless"} <= set(found[name])
        assert (tmp_path / name / "model" / "config.json").is_file()
    steps = [json.loads(line) for line in (tmp_path / "3-ppo" / "metrics.jsonl").read_text().splitlines()]
    assert {"kl/coef", "reward/helpfulness/shaped", "reward/honesty/shaped", "step_rewards/steps"} <= set(steps[0])
    assert steps[0]["kl/coef"] != steps[-1]["kl/coef"]  # adaptive
    assert "after SFT" in capsys.readouterr().out

    # Called again, finished stages are read; one that stopped before its numbers were written goes on from its checkpoint.
    (tmp_path / "5-ppo.json").unlink()
    monkeypatch.setattr(run.R1Path, "sft", None)
    assert [line.split("|")[1:6] for line in run.main(tmp_path, **size).splitlines()] == [
        line.split("|")[1:6] for line in table.splitlines()
    ]
    assert not (tmp_path / "5-ppo-2").exists()


def test_the_truth_knows_right_from_wrong(modules):
    import random

    _, task = modules
    draw = random.Random(1)
    source = task.questions(draw, held_out=True)
    for question in (next(source) for _ in range(200)):
        row = ([question.prompt], [question.right], [question.kind], [question.row["lines"]])
        assert task.overall(*row) == [1.0]
        assert task.overall(row[0], [question.right + task.RUDE], *row[2:]) == [0.0]
        if (wrong := question.wrong(draw)) != question.right:
            assert task.overall(row[0], [wrong], *row[2:]) == [0.0]


def test_held_out_questions_are_not_trained_on(modules):
    _, task = modules
    shown = {row["prompt"] for row in [*task.demonstrations(0, 3000), *task.prompts(0, 1000, held_out=False)]}
    shown |= {row["prompt"] for row in task.preference_pairs(0, 1000, held_out=False)}
    assert not shown & {row["prompt"] for row in task.prompts(0, 500, held_out=True)}
    assert not shown & {row["prompt"] for row in task.preference_pairs(0, 300, held_out=True)}


def test_same_seed_same_data(modules):
    _, task = modules
    assert task.preference_pairs(5, 60, held_out=False) == task.preference_pairs(5, 60, held_out=False)
    assert task.demonstrations(5, 60) == task.demonstrations(5, 60) != task.demonstrations(6, 60)


def test_step_rewards_stand_where_the_step_ends(modules, tokenizer):
    """Items are emoji, of which many are several tokens; a step ends with one."""
    _, task = modules
    rows = [f"7 + 5 = 13 {item}\n13 − 3 = 9 {item}\n9 + 1 = 10 {item}\nAnswer: 9" for item in task.ITEMS]
    ids = [[*tokenizer(row).input_ids, tokenizer.eos_token_id] for row in rows]
    batch = Batch({"prompt": ["?"] * len(rows), "response": rows, "response_ids": ids})
    placed = StepwiseRewardInjector(task.check_steps).place(batch, tokenizer)
    spread = 0
    for row, tokens, values in zip(rows, ids, placed.values.to_list(), strict=True):
        lines = row.split("\n")
        at = [i for i, value in enumerate(values) if value]
        assert [values[i] for i in at] == [-1.0, -1.0]
        for end, text in zip(at, (lines[0], "\n".join(lines[:2])), strict=True):
            assert tokenizer.decode(tokens[: end + 1]) == text  # whole with this token,
            assert tokenizer.decode(tokens[:end]) != text  # and not before it
        spread += len(tokenizer(lines[0][-2:]).input_ids) > 1
    assert spread >= 3 and placed.steps == 2 * len(rows)
    assert torch.equal(placed.values.values.abs().bool().sum(), torch.tensor(2 * len(rows)))
