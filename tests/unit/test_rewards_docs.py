"""The snippets of docs/rewards.md: settings parse, programs run."""

from __future__ import annotations

import re
import threading
from http.server import ThreadingHTTPServer
from pathlib import Path

import pytest
import yaml

from podium.core.batch import Batch
from podium.core.config import parse
from podium.core.settings import RewardSettings
from podium.models.heads import RewardModel
from podium.rewards.loading import load_rewards
from podium.rewards.remote import HttpReward
from podium.rewards.rules import RuleReward
from podium.stages.graph import StageGraph
from tests.tiny import tiny_model, tiny_tokenizer

PAGE = (Path(__file__).parents[2] / "docs/rewards.md").read_text(encoding="utf-8")


def snippet(language: str, containing: str) -> str:
    blocks = [b for b in re.findall(rf"^```{language}\n(.*?)^```", PAGE, re.DOTALL | re.MULTILINE) if containing in b]
    assert len(blocks) == 1, f"{len(blocks)} snippets contain {containing!r}"
    return blocks[0]


def test_every_list_of_rewards_parses():
    blocks = re.findall(r"^```yaml\nrewards:\n.*?^```", PAGE, re.DOTALL | re.MULTILINE)
    assert len(blocks) >= 3
    for block in blocks:
        for entry in yaml.safe_load(block.removeprefix("```yaml\n").removesuffix("```"))["rewards"]:
            parse(RewardSettings, entry)


def test_the_rules(tmp_path):
    (tmp_path / "quote.yaml").write_text(snippet("yaml", "json_field: quote.tax"))
    rules = RuleReward(tmp_path / "quote.yaml")
    good = '```json\n{"quote": {"tax": 1}}\n```\nTotal: 5 EUR'
    assert rules([good, "Total: 5 EUR"]) == [1.0, 0.0]
    rules._matcher.close()


def test_the_server(monkeypatch):
    made, serve = [], ThreadingHTTPServer.serve_forever
    monkeypatch.setattr(ThreadingHTTPServer, "serve_forever", lambda self: made.append(self))
    exec(snippet("python", "BaseHTTPRequestHandler").replace("8000", "0"), {})
    server = made[0]
    threading.Thread(target=serve, args=(server,), kwargs={"poll_interval": 0.01}, daemon=True).start()
    try:
        reward = HttpReward(f"http://127.0.0.1:{server.server_port}/score")
        batch = Batch({"prompt": ["p"] * 3, "response": ["a", "x", "xy"], "data.answer": ["x", "y", "x"]})
        assert reward(batch).values.tolist() == [0.0, 0.0, 1.0]
    finally:
        server.shutdown()
        server.server_close()


def test_the_stages_of_reward_models(tmp_path, monkeypatch):
    for name, heads in {"helpful": 1, "honest": 1, "three-heads": ["helpfulness", "honesty", "harmlessness"]}.items():
        RewardModel.from_causal_lm(tiny_model(), heads=heads).save_pretrained(tmp_path / name, tiny_tokenizer())
    monkeypatch.chdir(tmp_path)
    exec(snippet("python", "three-heads"), {})


def test_the_stages_of_step_wise_rewards():
    model = tiny_model()
    names = {"actor": model, "tokenizer": tiny_tokenizer(), "process_model": RewardModel.from_causal_lm(model)}
    exec(snippet("python", "def cites"), names)
    roles = StageGraph(names["stages"], ("prompt_ids", "prompt")).roles
    assert roles[0] == "actor"
    assert "reward_steps" in roles
    assert names["cites"](["p"], ["see a.txt"], source=["a.txt"]) == [[((4, 9), 0.1)]]


@pytest.mark.parametrize("name", ["matches", "compute_score"])
def test_the_functions(name):
    scope: dict[str, object] = {}
    exec(snippet("python", f"def {name}("), scope)
    assert load_rewards([scope[name]])[0].name == name
