"""`podium data inspect`: what was understood, and all that is wrong."""

from __future__ import annotations

import json

import pytest
from typer.testing import CliRunner

from podium.cli.main import app, main
from podium.data.lengths import Lengths
from tests.tiny import tiny_model, tiny_tokenizer

USER = {"role": "user", "content": "2 + 2 ="}
BOT = {"role": "assistant", "content": "4"}
PAIR = {"prompt": "2 + 2 =", "chosen": " 4", "rejected": " 5"}


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    folder = tmp_path_factory.mktemp("model")
    tiny_model().config.save_pretrained(folder)  # the tokenizer is all that is read
    tiny_tokenizer().save_pretrained(folder)
    return str(folder)


def inspect(path, *arguments, rows=None):
    """(exit code, what was printed, the JSON object)."""
    if rows is not None:
        path.write_text("".join((row if isinstance(row, str) else json.dumps(row)) + "\n" for row in rows))
    result = CliRunner().invoke(app, ["data", "inspect", str(path), *map(str, arguments), "--json"])
    assert result.exit_code in (0, 1), result.output
    lines = result.stdout.splitlines()
    return result.exit_code, "\n".join(lines[:-1]), json.loads(lines[-1])


def test_good_rows_without_a_model(tmp_path):
    rows = [{"prompt": f"What is {n} plus {n}?", "answer": str(2 * n)} for n in range(9)]
    code, text, found = inspect(tmp_path / "rows.jsonl", rows=rows)
    assert code == 0 and found["problems"] == [] and found["format"] == "prompt"
    assert (found["rows"], found["usable"], found["unit"], found["over_limit"]) == (9, 9, "words", None)
    assert "grpo" in found["algorithms"]["prompts"] and found["columns"] == {"prompt": "prompt", "answer": "given to rewards"}
    assert found["lengths"]["prompt"]["median"] == 5
    assert "9 of 9 rows can be used as prompts" in text and "Lengths in words (--model gives tokens)" in text
    assert "What is 0 plus 0?" in text and "No problem found." in text


def test_pairs_with_a_model(tmp_path, model):
    long = {**PAIR, "prompt": "7 * 8 = " * 20}
    rows = [PAIR, {**PAIR, "rejected": " 4"}, long, PAIR]
    code, text, found = inspect(tmp_path / "rows.jsonl", "--model", model, "data.max_prompt_tokens=16", rows=rows)
    assert code == 0 and found["kind"] == "preferences" and "kto" in found["algorithms"]["unpaired"]
    assert (found["rows"], found["usable"], found["over_limit"], found["duplicates"]) == (4, 2, 1, 1)
    assert found["example"] == [
        {"part": "prompt", "learnt": False, "text": "2 + 2 =", "tokens": ["2", " +", " 2", " ="]},
        {"part": "chosen answer", "learnt": True, "text": " 4</s>", "tokens": [" 4", "</s>"]},
        {"part": "rejected answer", "learnt": True, "text": " 5</s>", "tokens": [" ", "5", "</s>"]},
    ]
    assert found["lengths"]["prompt"]["count"] == 3 and found["lengths"]["chosen answer"]["max"] == 2
    assert "1 prompt longer than 16 tokens (data.max_prompt_tokens): dropped" in text
    assert "1 dropped: the chosen and the rejected answer are the same" in text
    assert "line 4 is" in text and "line 1 again" in text


def test_what_is_learnt_of_a_conversation(tmp_path, model):
    talk = {"messages": [USER, BOT, USER, BOT]}
    path = tmp_path / "rows.jsonl"
    _, text, found = inspect(path, "--model", model, "--algorithm", "sft", "data.train_on=assistant", rows=[talk])
    shown = [(part["text"], part["learnt"]) for part in found["example"]]
    turn = "<|user|>2 + 2 =<|assistant|>"
    assert shown == [(turn, False), ("4</s>", True), (turn, False), ("4</s>", True)]
    assert "the loss is on every assistant turn" in text


def test_every_problem_with_its_row(tmp_path, model):
    rows = [
        PAIR,
        {**PAIR, "chosen": ""},
        "{broken",
        {**PAIR, "prompt": 7},
        {"prompt": "2 + 2 ="},
        [1],
        {**PAIR, "label": True},
        PAIR,
    ]
    path = tmp_path / "rows.jsonl"
    for extra in ((), ("--model", model)):
        code, text, found = inspect(path, *extra, rows=rows)
        assert code == 1 and (found["rows"], found["usable"], found["problem_count"]) == (8, 2, 6)
        lines = [int(p["where"].split("line ")[1].split(",")[0]) for p in found["problems"]]
        assert lines == [2, 3, 4, 5, 6, 7]
        assert all(p["remedy"] for p in found["problems"]) and "6 problems (a run stops at the first)" in text
    code, text, found = inspect(path, "--problems", 2)
    assert len(found["problems"]) == 2 and found["problem_count"] == 6 and "and 4 more" in text


def test_rows_that_only_the_template_refuses(tmp_path, model):
    template = (
        "{% for m in messages %}{% if m['role'] == 'tool' %}{{ raise_exception('no tools here') }}{% endif %}"
        "<|user|>{{ m['content'] }}{% endfor %}"
    )
    rows = [{"prompt": [USER]} for _ in range(9)]
    for bad in (2, 7):
        rows[bad] = {"prompt": [USER, {"role": "tool", "content": "x"}]}
    arguments = ("--model", model, f"model.chat_template={template!r}")
    code, _, found = inspect(tmp_path / "rows.jsonl", *arguments, rows=rows)
    assert code == 1 and found["usable"] == 7 and found["all_found"]
    assert [p["where"].split("line ")[1] for p in found["problems"]] == ["3", "8"]
    assert "no tools here" in found["problems"][0]["what"]
    code, text, found = inspect(tmp_path / "rows.jsonl", *arguments, "--problems", 1)
    assert len(found["problems"]) == 1 and not found["all_found"] and "At least 1 problem" in text


def test_messages_without_a_chat_template(tmp_path, model):
    tokenizer = tiny_tokenizer()
    tokenizer.chat_template = None
    tokenizer.save_pretrained(tmp_path)
    tiny_model().config.save_pretrained(tmp_path)
    code, _, found = inspect(tmp_path / "rows.jsonl", "--model", tmp_path, rows=[{"messages": [USER, BOT]}])
    assert code == 1 and found["usable"] == 0 and found["unit"] == "words"
    assert "no chat template" in found["problems"][0]["what"] and "model.chat_template" in found["problems"][0]["remedy"]


@pytest.mark.parametrize(
    ("rows", "arguments", "parts"),
    [
        ([{"prompt": "a"}], ["--algorithm", "dpo"], ["the rows are prompts", "preference pairs (prompt, chosen, rejected)"]),
        ([{"prompt": "a", "completion": "b", "label": "yes"}], [], ["column 'label'", "found str 'yes'"]),
        (
            [{**PAIR, "aspect": "honest"}],
            ["--algorithm", "reward_model", "heads=[helpful, honesty]"],
            ["'honest'", "'honesty'"],
        ),
        ([{**PAIR, "rejected": " 4"}], ["MODEL"], ["all 1 pairs", "are the same"]),
        ([{**PAIR, "rejected": " 4"}], [], ["every pair", "the same"]),
        ([{"prompt": "7 * 8 = " * 20}], ["MODEL", "data.max_prompt_tokens=9"], ["all 1 prompts", "data.max_prompt_tokens"]),
        (
            [{"prompt": "a"}, {"prompt": "7 * 8 = " * 20}],
            ["MODEL", "data.max_prompt_tokens=9", "data.too_long=error"],
            ["line 2", "data.too_long"],
        ),
        ([{"question": "a"}], [], ["no column 'prompt'", "question"]),
        (["broken"], [], ["line 1", "not valid JSON"]),
        ([], [], ["no rows"]),
    ],
)
def test_data_that_no_run_can_use(rows, arguments, parts, tmp_path, model):
    arguments = [x for argument in arguments for x in (["--model", model] if argument == "MODEL" else [argument])]
    code, text, found = inspect(tmp_path / "rows.jsonl", *arguments, rows=rows)
    said = str(found["problems"]) + text
    assert code == 1 and found["usable"] == 0 and all(part in said for part in parts), said


def test_the_kinds_of_source(tmp_path):
    import datasets

    data = datasets.Dataset.from_list([PAIR, PAIR])
    data.to_parquet(tmp_path / "rows.parquet")
    data.save_to_disk(tmp_path / "saved")
    for path in (tmp_path / "rows.parquet", tmp_path / "saved"):
        code, _, found = inspect(path)
        assert code == 0 and (found["usable"], found["duplicates"]) == (2, 1)
    code, _, found = inspect("reasoning_gym:chain_sum?size=5", "--rows", 3)
    assert code == 0 and found["rows"] == 3 and found["columns"]["answer"] == "given to rewards"
    code, _, found = inspect(tmp_path / "nowhere.jsonl")
    assert code == 1 and "no such file" in found["problems"][0]["what"]


def test_a_picture_of_the_lengths(tmp_path, model):
    path = tmp_path / "rows.jsonl"
    _, text, _ = inspect(path, "--model", model, "--plot", tmp_path / "x.png", "data.max_prompt_tokens=3", rows=[PAIR, PAIR])
    assert (tmp_path / "x.png").read_bytes()[:4] == b"\x89PNG" and "x.png" in text


@pytest.mark.parametrize(
    ("arguments", "part"),
    [
        (["--plot", "x.pdf"], "does not end in .png"),
        (["--plot", "nowhere/x.png"], "cannot write"),
        (["data.promt_column=a"], "did you mean 'prompt_column'"),
        (["--algorithm", "dpoo"], "did you mean 'dpo'"),
        (["second.jsonl"], "is not KEY=VALUE"),
        (["--model", "nowhere"], "nowhere"),
    ],
)
def test_a_wrong_call(arguments, part, tmp_path, capsys, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "rows.jsonl").write_text('{"prompt": "a"}\n')
    with pytest.raises(SystemExit) as ended:
        main(["data", "inspect", "rows.jsonl", *arguments])
    assert ended.value.code == 2 and part in " ".join(capsys.readouterr().err.split())


def test_lengths():
    found = Lengths.of([1] * 95 + [2] * 4 + [11])
    assert (found.count, found.min, found.median, found.p95, found.max, found.total) == (100, 1, 1, 1, 11, 114)
    assert found.mean == pytest.approx(1.14)
    assert found.bins == ((1, 2, 99), (3, 4, 0), (5, 6, 0), (7, 8, 0), (9, 10, 0), (11, 12, 1))
    assert Lengths.of([5]).bins == ((5, 5, 1),) and Lengths.of([5]).p95 == 5
