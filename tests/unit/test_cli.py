"""The command line as a user meets it: exit status, what is on stdout and stderr, nothing left behind."""

from __future__ import annotations

import io
import json
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from podium import __version__
from podium.cli.console import sort_arguments
from podium.cli.main import main
from podium.core.errors import ConfigError

COMMANDS = ("quickstart", "train", "eval", "chat", "explain", "profile", "settings")


class Ran:
    def __init__(self, code: int, out: str, err: str) -> None:
        self.code, self.out, self.err = code, out, err


@pytest.fixture
def podium(capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    """Runs a command in this process, in an empty folder."""
    monkeypatch.chdir(tmp_path)

    def run(*arguments: str) -> Ran:
        with pytest.raises(SystemExit) as ended:
            main(arguments)
        code = ended.value.code
        captured = capsys.readouterr()
        return Ran(code if isinstance(code, int) else 0, captured.out, captured.err)

    return run


def shell(*arguments: str, **options: Any) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-c", "from podium.cli.main import main; main()", *arguments]
    return subprocess.run(command, capture_output=True, text=True, timeout=120, check=False, **options)


def test_help_is_fast_and_light() -> None:
    code = (
        "import sys, podium.cli.main as m\n"
        "try: m.main(['--help'])\n"
        "except SystemExit as e: assert not e.code\n"
        "print([x for x in ('torch', 'transformers', 'matplotlib', 'numpy') if x in sys.modules], file=sys.stderr)"
    )
    seconds = []
    for _ in range(3):
        started = time.perf_counter()
        done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=True)
        seconds.append(time.perf_counter() - started)
    assert done.stderr.strip() == "[]"
    assert all(command in done.stdout for command in COMMANDS)
    assert min(seconds) < 1.0


@pytest.mark.parametrize("command", COMMANDS)
def test_every_command_has_help_with_examples(podium: Any, command: str) -> None:
    ran = podium(command, "--help")
    assert ran.code == 0 and "Examples" in ran.out and f"podium {command}" in ran.out


def test_version(podium: Any) -> None:
    ran = podium("--version")
    assert ran.code == 0 and ran.out == f"podium {__version__}\n"


def test_unknown_command_and_option(podium: Any) -> None:
    assert podium("trian").code == 2
    assert podium("train", "--recipe", "x").code == 2


# ---------------------------------------------------------------------- arguments


def test_arguments_are_told_apart(tmp_path: Path) -> None:
    recipe, run = tmp_path / "recipe.yaml", tmp_path / "run"
    recipe.write_text("")
    run.mkdir()
    (run / "settings.yaml").write_text("")
    given = sort_arguments([str(recipe), "a.b=1", str(run), "c=x=y"])
    assert (given.recipe, given.run, given.overrides) == (recipe, run, ["a.b=1", "c=x=y"])
    assert given.settings_file == str(recipe)
    assert sort_arguments([str(run)]).settings_file == str(run / "settings.yaml")
    assert sort_arguments(None).settings_file is None
    given = sort_arguments([str(recipe), "run.folder=/x/r.yaml"])
    assert given.recipe == recipe and given.overrides == ["run.folder=/x/r.yaml"]


def test_two_recipes(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="two recipes"):
        sort_arguments(["a.yaml", "b.yaml"])


def test_folder_that_is_no_run(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="is no run folder"):
        sort_arguments([str(tmp_path)])


def test_argument_that_is_nothing(podium: Any) -> None:
    Path("recipe.yaml").write_text("")
    ran = podium("train", "recipe")
    assert ran.code == 2 and ran.out == ""
    assert "'recipe' is no recipe file" in ran.err and "did you mean 'recipe.yaml'?" in ran.err
    assert "Traceback" not in ran.err


# ---------------------------------------------------------------------- errors


def test_error_has_no_traceback_unless_asked(tmp_path: Path) -> None:
    plain = shell("train", "--resume", cwd=tmp_path)
    assert plain.returncode == 2 and plain.stdout == ""
    assert plain.stderr.startswith("error: --resume: there is no run in 'runs'\n  -> ")
    assert "Traceback" not in plain.stderr
    debug = shell("train", "--resume", "--debug", cwd=tmp_path)
    assert debug.returncode == 1 and "Traceback" in debug.stderr and "ConfigError" in debug.stderr
    assert list(tmp_path.iterdir()) == []


def test_missing_recipe(podium: Any) -> None:
    ran = podium("train", "missing.yaml")
    assert ran.code == 2 and ran.out == "" and "no such file: missing.yaml" in ran.err
    assert list(Path().iterdir()) == []


RECIPE = """
algorithm: grpo
model: {path: nowhere}
data: {path: rows.jsonl}
rewards: [{function: exact_match}]
batch: {prompts_per_step: 4, group_size: 4}
"""


def test_misspelt_setting(podium: Any) -> None:
    Path("recipe.yaml").write_text(RECIPE)
    ran = podium("train", "recipe.yaml", "optimizer.lrr=1e-5")
    assert ran.code == 2 and "unknown setting 'optimizer.lrr'" in ran.err and "did you mean 'lr'?" in ran.err
    assert not Path("runs").exists()


def test_wrong_type(podium: Any) -> None:
    Path("recipe.yaml").write_text(RECIPE)
    ran = podium("train", "recipe.yaml", "run.steps=many")
    assert ran.code == 2 and "'run.steps'" in ran.err and "'many'" in ran.err


def test_batch_sizes_that_do_not_divide(podium: Any) -> None:
    Path("recipe.yaml").write_text(RECIPE)
    ran = podium("explain", "recipe.yaml", "batch.minibatch_sequences=5")
    assert ran.code == 2 and "does not divide" in ran.err and ran.out == ""


def test_group_of_one(podium: Any) -> None:
    Path("recipe.yaml").write_text(RECIPE)
    ran = podium("train", "recipe.yaml", "batch.group_size=1", "--dry-run")
    assert ran.code == 2 and "group_size=1" in ran.err


def test_nothing_to_train(podium: Any) -> None:
    ran = podium("train")
    assert ran.code == 2 and "nothing to train" in ran.err


def test_run_without_resume(podium: Any) -> None:
    Path("r").mkdir()
    Path("r/settings.yaml").write_text(RECIPE)
    ran = podium("train", "r")
    assert ran.code == 2 and "--resume" in ran.err


def test_resume_where_there_is_no_run(podium: Any) -> None:
    ran = podium("train", "--resume")
    assert ran.code == 2 and "there is no run in 'runs'" in ran.err


def test_eval_of_an_unfinished_run(podium: Any) -> None:
    Path("r").mkdir()
    Path("r/settings.yaml").write_text(RECIPE)
    for command in ("eval", "chat"):
        ran = podium(command, "r")
        assert ran.code == 2 and "no trained model yet" in ran.err


def test_chat_without_a_model(podium: Any) -> None:
    ran = podium("chat", "./nowhere")
    assert ran.code == 2 and "nowhere" in ran.err and "Traceback" not in ran.err


def test_quickstart_of_another_algorithm(podium: Any) -> None:
    ran = podium("quickstart", "--algorithm", "grop")
    assert ran.code == 2 and "did you mean 'grpo'?" in ran.err


# ---------------------------------------------------------------------- explain, settings


def test_explain_says_the_arithmetic_and_the_stages(podium: Any) -> None:
    Path("recipe.yaml").write_text(RECIPE)
    ran = podium("explain", "recipe.yaml", "batch.minibatch_sequences=8")
    assert ran.code == 0
    lines = [line.split() for line in ran.out.splitlines()]
    assert any(line[:4] == ["sequences", "per", "step", "16"] for line in lines)
    assert any(line[:4] == ["updates", "per", "step", "2"] for line in lines)
    assert [line[1] for line in lines if line[:1] and line[0].isdigit()][:2] == ["rollout", "reward"]


def test_dry_run_is_explain_and_leaves_nothing(podium: Any) -> None:
    Path("recipe.yaml").write_text(RECIPE)
    missing = podium("train", "recipe.yaml", "--dry-run")
    assert missing.code == 2 and "rows.jsonl" in missing.err
    Path("rows.jsonl").touch()
    ran = podium("train", "recipe.yaml", "--dry-run", "--json")
    assert ran.code == 0
    said = json.loads(ran.out)
    assert {row["name"]: row["value"] for row in said["arithmetic"]}["sequences per step"] == "16"
    assert said["stages"][0]["name"] == "rollout"
    assert sorted(p.name for p in Path().iterdir()) == ["recipe.yaml", "rows.jsonl"]


def test_train_without_a_recipe(podium: Any) -> None:
    options = ("--algorithm", "grpo", "--model", "m", "--data", "d.jsonl", "--reward", "exact_match")
    Path("d.jsonl").touch()
    ran = podium("train", *options, "batch.prompts_per_step=3", "--dry-run", "--json")
    assert ran.code == 0
    values = {row["name"]: row["value"] for row in json.loads(ran.out)["arithmetic"]}
    assert values["prompts per step"] == "3"


def test_settings_are_listed_and_filtered(podium: Any) -> None:
    every, some = podium("settings", "grpo", "--json"), podium("settings", "grpo", "group_size", "--json")
    names = [json.loads(line)["name"] for line in every.out.splitlines()]
    assert "optimizer.lr" in names and "clip_high" in names and len(names) == len(set(names))
    assert "batch.group_size" in [json.loads(line)["name"] for line in some.out.splitlines()]
    table = podium("settings", "grpo", "optimizer.lr")
    assert "1e-06" in table.out and "Peak learning rate." in table.out
    assert podium("settings", "grpo", "zzzz").code == 2
    assert "did you mean 'grpo'" in podium("settings", "grop").err


# ---------------------------------------------------------------------- chat


@pytest.fixture(scope="module")
def model_folder(tmp_path_factory: pytest.TempPathFactory) -> str:
    from tests.tiny import tiny_model, tiny_tokenizer

    folder = tmp_path_factory.mktemp("model")
    tiny_model().save_pretrained(folder)
    tiny_tokenizer().save_pretrained(folder)
    return str(folder)


def test_chat_once(podium: Any, model_folder: str) -> None:
    options = ("--temperature", "0", "--max-new-tokens", "8", "--dtype", "float32", "--device", "cpu")
    first = podium("chat", model_folder, "--prompt", "1 + 2 =", *options)
    assert first.code == 0 and first.out.strip()
    assert podium("chat", model_folder, "--prompt", "1 + 2 =", *options).out == first.out


def test_chat_from_a_pipe(podium: Any, model_folder: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "stdin", io.StringIO("hello\n/help\n/reset\nhello\n/quit\nnever read\n"))
    options = ("--temperature", "0", "--max-new-tokens", "4", "--dtype", "float32", "--device", "cpu")
    ran = podium("chat", model_folder, *options)
    first, forgotten, second = ran.out.partition("(forgotten)\n")
    assert ran.code == 0 and forgotten and second.strip() and first.startswith(second)


def test_chat_ends_with_its_input(podium: Any, model_folder: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "stdin", io.StringIO(""))
    ran = podium("chat", model_folder, "--device", "cpu")
    assert ran.code == 0 and ran.out == ""


def test_chat_forgets_the_oldest_turns(model_folder: str) -> None:
    from podium.cli.chat import Chat
    from podium.core.errors import ModelError
    from tests.tiny import tiny_model, tiny_tokenizer

    sampling = {"do_sample": False, "max_new_tokens": 40}
    chat = Chat(tiny_model(max_position_embeddings=64), tiny_tokenizer(), system=None, sampling=sampling)
    pieces: list[str] = []
    for _ in range(3):
        answer = chat.answer("hello", pieces.append)
    assert [turn["role"] for turn in chat.turns] == ["user", "assistant"]
    assert "".join(pieces).endswith(answer)
    with pytest.raises(ModelError, match="more than the model's 64"):
        chat.answer("hello " * 60, pieces.append)
    assert len(chat.turns) == 0 or chat.turns[-1]["role"] == "assistant"
