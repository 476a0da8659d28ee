"""A user's own file, named in the settings, registers what the settings then name."""

from __future__ import annotations

import pytest

from podium.core.errors import ConfigError
from podium.core.imports import load_module
from podium.recipes import load

MINE = """
from podium.algorithms import advantage_estimator, broadcast_to_tokens

@advantage_estimator("plain_{name}", needs=("rewards", "mask"))
def plain(*, rewards, mask):
    return {{"advantages": broadcast_to_tokens(rewards, mask)}}
"""


def test_an_estimator_of_ones_own_from_the_command_line(tmp_path):
    from podium.trainer.trainer import Trainer

    (tmp_path / "mine.py").write_text(MINE.format(name="a"))
    overrides = [f"imports=[{tmp_path}/mine.py]", "advantage=plain_a", "batch.group_size=1"]
    settings = load(None, overrides, {"algorithm": "grpo", "rewards": [{"function": "podium.quickstart.task:correct"}]})
    assert "plain_a" in repr([stage.estimator for stage in Trainer(settings).graph.order if stage.label == "advantages"])


def test_a_file_is_run_once(tmp_path):
    (tmp_path / "mine.py").write_text(MINE.format(name="b"))
    assert load_module(str(tmp_path / "mine.py"), "imports") is load_module(str(tmp_path / "mine.py"), "rewards")


@pytest.mark.parametrize(
    ("text", "source", "message"),
    [
        (None, "mien.py", "no such file"),
        ("1 / 0", "mine.py", "ZeroDivisionError"),
        (None, "no_such_module_of_mine", "no module 'no_such_module_of_mine'"),
    ],
)
def test_what_cannot_be_imported(text, source, message, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "mine.py").write_text(text or "")
    with pytest.raises(ConfigError, match=message):
        load(None, [f"imports=[{source}]"], {"algorithm": "grpo"})
