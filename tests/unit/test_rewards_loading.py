"""Finding a reward by name, module, file; and what is said where there is none."""

from __future__ import annotations

import sys

import pytest

from podium.core.batch import Batch
from podium.core.errors import ConfigError
from podium.core.settings import RewardSettings
from podium.rewards.loading import load_reward, load_rewards

FILE = """
from helper import BONUS

def short(completions, scale=1.0, **kwargs):
    return [BONUS + scale * len(c) for c in completions]

def neither(text):
    return 0.0

number = 5
"""


@pytest.fixture
def folder(tmp_path, monkeypatch):
    (tmp_path / "my_rewards.py").write_text(FILE)
    (tmp_path / "helper.py").write_text("BONUS = 10.0")
    (tmp_path / "broken.py").write_text("import a_package_that_is_not_there")
    (tmp_path / "syntax.py").write_text("def f(:")
    (tmp_path / "empty").mkdir()
    monkeypatch.chdir(tmp_path)
    yield tmp_path
    for name in ("my_rewards", "helper", "broken", "syntax"):
        sys.modules.pop(name, None)


BATCH = Batch({"prompt": ["p"], "response": ["abc"], "row_index": [0]})


@pytest.mark.parametrize("where", ["my_rewards", "my_rewards.py", "{folder}/my_rewards.py"])
def test_module_and_file(folder, where):
    path = list(sys.path)
    settings = RewardSettings(function=where.format(folder=folder) + ":short", weight=0.5, options={"scale": 2.0})
    reward = load_reward(settings)
    assert (reward.name, reward.weight) == ("short", 0.5)
    assert reward(BATCH).values.tolist() == [16.0]
    assert sys.path == path


def test_functions_names_and_weights(folder):
    def mine(completions):
        return [1.0]

    assert load_reward(mine).name == "mine"
    assert load_reward(mine, weight=0.3).weight == 0.3
    assert load_reward("exact_match", 2.0).weight == 2.0
    assert load_reward(RewardSettings(function="exact_match", name="em")).name == "em"
    assert load_reward(RewardSettings(function=mine, weight=4.0)).weight == 4.0
    ready = load_reward(mine)
    assert load_reward(ready) is ready
    assert [r.name for r in load_rewards([mine, "exact_match"])] == ["mine", "exact_match"]
    with pytest.raises(ConfigError, match=r"2 rewards are called 'mine'[\s\S]*rewards\.N\.name"):
        load_rewards([mine, mine])


@pytest.mark.parametrize(
    ("function", "message"),
    [
        ("exact_mach", r"no built-in reward is called 'exact_mach'\n.*did you mean 'exact_match'"),
        ("my_rewards.py:shorter", r"my_rewards\.py: it has no function 'shorter'\n.*did you mean 'short'"),
        ("my_reward.py:short", r"no such file: my_reward\.py\n.*did you mean 'my_rewards\.py'"),
        ("nowhere/a.py:f", r"no such file: nowhere/a\.py\n.*no such folder: nowhere"),
        ("empty/a.py:f", r"no such file: empty/a\.py\n.*that folder has no \.py file"),
        ("my_reward:short", r"no module 'my_reward'[\s\S]*path/file\.py"),
        ("broken:f", r"broken: cannot be imported: ModuleNotFoundError: No module named 'a_package_that_is_not_there'"),
        ("broken.py:f", r"broken\.py: cannot be imported: ModuleNotFoundError"),
        ("syntax.py:f", r"syntax\.py: cannot be imported: SyntaxError"),
        ("my_rewards.py:number", "'number' is a int, not a function"),
        ("my_rewards.py:neither", r"reward 'neither': the signature \(text\) fits neither"),
        ("my_rewards:", "no built-in reward is called 'my_rewards:'"),
    ],
)
def test_what_cannot_be_found(folder, function, message):
    with pytest.raises(ConfigError, match=message):
        load_reward(function)


def test_options_that_do_not_exist(folder):
    with pytest.raises(ConfigError, match=r"reward 'exact_match': unknown option 'extrac'\n.*did you mean 'extract'"):
        load_reward(RewardSettings(function="exact_match", options={"extrac": "tags"}))
    with pytest.raises(ConfigError, match=r"extract is 'tag'\n.*whole, tags"):
        load_reward(RewardSettings(function="exact_match", options={"extract": "tag"}))
    with pytest.raises(ConfigError, match="5 is not a reward"):
        load_reward(5)
