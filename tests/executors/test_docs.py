"""The code of docs/executors.md runs as it stands there: a protocol, a train engine and a rollout engine of one's own."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from podium import Trainer
from podium.core.batch import Batch
from podium.core.ranks import Ranks
from tests.executors.test_runs import PROMPTS, settings
from tests.tiny import tiny_model, tiny_tokenizer

PAGE = Path(__file__).parents[2] / "docs" / "executors.md"


@pytest.fixture(scope="module")
def mine(tmp_path_factory):
    """The page's python blocks as one file, as the page says."""
    file = tmp_path_factory.mktemp("docs") / "mine.py"
    file.write_text("\n\n".join(re.findall(r"```python\n(.*?)```", PAGE.read_text(), re.S)))
    return file


def run(mine, folder, **sections):
    values = settings(
        folder,
        algorithm="grpo",
        imports=[str(mine)],
        kl={"coef": 0.0},
        rollout={"max_new_tokens": 4, "engine": "patient"},
        resource_pool={"actor": {"backend": "measured"}},
    )
    trainer = Trainer(config={**values, **sections}, models={"actor": tiny_model()}, tokenizer=tiny_tokenizer(), data=PROMPTS)
    result = trainer.train()
    trainer.close()
    return [json.loads(line) for line in (result.run_folder / "metrics.jsonl").read_text().splitlines()]


def test_engines_of_one_s_own_train_and_generate(mine, tmp_path):
    rows = run(mine, tmp_path)
    assert [row["actor/minibatch_rows"] for row in rows] == [4.0, 4.0]


@pytest.mark.slow
def test_workers_in_other_processes_know_them_too(mine, tmp_path, ray_cluster):
    rows = run(mine, tmp_path, executor={"kind": "ray"}, resource_pool={"actor": {"cpus": 1, "backend": "measured"}})
    assert [row["actor/minibatch_rows"] for row in rows] == [4.0, 4.0]


def test_a_protocol_of_one_s_own(mine):
    from podium.controller.dispatch import PROTOCOLS
    from podium.core.imports import load_module

    load_module(str(mine), "imports")
    rows = Batch({"scores": [0.0, 1.0, 2.0, 3.0, 4.0]})
    plan = PROTOCOLS.get("round_robin")((rows,), {}, Ranks(data=2, tensor=2))
    assert [args[0]["scores"].tolist() for args, _ in plan.calls[1:3]] == [[0.0, 2.0, 4.0], [1.0, 3.0]]
    assert plan.collect([plan.calls[rank][0][0] for rank in plan.read])["scores"].tolist() == rows["scores"].tolist()
