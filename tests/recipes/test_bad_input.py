"""What a user may get wrong: each ends with exit code 2, a message that names value, place and remedy, and no run folder."""

from __future__ import annotations

import json

import pytest
from typer.testing import CliRunner

from podium.cli.main import app, main
from tests.tiny import tiny_model, tiny_tokenizer

REWARDS = """
def good(prompts, completions, **columns):
    return [1.0] * len(completions)

def nan(prompts, completions, **columns):
    return [float("nan")] * len(completions)

def short(prompts, completions, **columns):
    return [1.0]

def raises(prompts, completions, **columns):
    raise KeyError("lookup")

def wants_answer(prompts, completions, answer):
    return [1.0] * len(completions)
"""


@pytest.fixture(scope="module")
def place(tmp_path_factory):
    root = tmp_path_factory.mktemp("bad_input")
    tiny_model().save_pretrained(root / "model")
    tiny_tokenizer().save_pretrained(root / "model")
    (root / "score.py").write_text(REWARDS)
    rows = [{"prompt": f"What is {n} plus {n}?"} for n in range(8)]
    (root / "good.jsonl").write_text("".join(json.dumps(r) + "\n" for r in rows))
    (root / "empty.jsonl").write_text("")
    (root / "column.jsonl").write_text('{"question": "What?"}\n')
    (root / "null.jsonl").write_text('{"prompt": "What?"}\n{"prompt": null}\n')
    (root / "number.jsonl").write_text('{"prompt": "What?"}\n{"prompt": 7}\n')
    (root / "utf8.jsonl").write_bytes(b'{"prompt": "What?"}\n{"prompt": "W\xffhat?"}\n')
    (root / "broken.jsonl").write_text('{"prompt": "What?"}\n{"prompt": \n')
    return root


def run(place, tmp_path, capsys, *overrides, data="good.jsonl", model="model", reward="good"):
    """The command's exit code and what it wrote to stderr."""
    arguments = ["train", "--algorithm", "grpo", "--model", str(place / model), "--data", str(place / data)]
    arguments += ["--reward", f"{place / 'score.py'}:{reward}", f"run.folder={tmp_path / 'runs'}", "run.steps=1"]
    arguments += ["run.trackers=[]", "batch.prompts_per_step=2", "batch.group_size=2", "rollout.max_new_tokens=3", *overrides]
    with pytest.raises(SystemExit) as ended:
        main(arguments)
    return ended.value.code, " ".join(capsys.readouterr().err.split())


BEFORE_THE_RUN = [
    ({"overrides": ["optimizer.learning_rate=1"]}, ["unknown setting 'optimizer.learning_rate'"]),
    ({"overrides": ["rollout.temprature=1"]}, ["'rollout.temprature'", "did you mean 'temperature'"]),
    ({"overrides": ["optimizer.lr=fast"]}, ["'optimizer.lr'", "'fast'"]),
    ({"overrides": ["batch.group_size=1"]}, ["group_size=1", "batch.group_size"]),
    ({"overrides": ["batch.minibatch_sequences=3"]}, ["minibatch_sequences=3", "4 sequences"]),
    ({"overrides": ["batch.prompts_per_step=64"]}, ["64", "8"]),
    ({"overrides": ["rollout.engine=vllm"]}, ["vllm", "not in this version"]),
    ({"overrides": ["run.device=cuda:7"]}, ["cuda:7"]),
    ({"model": "nowhere"}, ["nowhere"]),
    ({"data": "nowhere.jsonl"}, ["nowhere.jsonl"]),
    ({"data": "empty.jsonl"}, ["empty.jsonl"]),
    ({"data": "column.jsonl"}, ["question", "prompt"]),
    ({"data": "null.jsonl"}, ["null.jsonl", "2", "prompt"]),
    ({"data": "number.jsonl"}, ["number.jsonl", "2", "prompt"]),
    ({"data": "utf8.jsonl"}, ["utf8.jsonl", "2", "UTF-8"]),
    ({"data": "broken.jsonl"}, ["broken.jsonl", "2"]),
    ({"reward": "missing"}, ["missing", "score.py"]),
    ({"reward": "wants_answer"}, ["wants_answer", "answer"]),
    ({"overrides": ["data.max_prompt_tokens=2"]}, ["max_prompt_tokens"]),
    ({"overrides": ["data.max_prompt_tokens=2", "data.too_long=error"]}, ["line 1", "8 tokens", "data.max_prompt_tokens is 2"]),
    ({"overrides": ["rollout.max_new_tokens=100000"]}, ["100000", "256"]),
]


@pytest.mark.parametrize(("given", "parts"), BEFORE_THE_RUN, ids=lambda v: str(v)[:60])
def test_before_the_run(given, parts, place, tmp_path, capsys):
    overrides = given.pop("overrides", []) if isinstance(given, dict) else []
    code, message = run(place, tmp_path, capsys, *overrides, **given)
    assert code == 2 and all(part in message for part in parts), message
    assert "Traceback" not in message and not (tmp_path / "runs").exists()


@pytest.mark.parametrize(("reward", "part"), [("nan", "nan"), ("short", "1"), ("raises", "KeyError")])
def test_a_reward_that_is_no_number(reward, part, place, tmp_path, capsys):
    code, message = run(place, tmp_path, capsys, reward=reward)
    assert code == 2 and f"'{reward}'" in message and part in message and "Traceback" not in message
    assert not list((tmp_path / "runs").glob("*/model")) and not list((tmp_path / "runs").glob("*/checkpoints/step*"))


def test_a_reward_that_raises_may_be_skipped_but_never_for_all(place, tmp_path, capsys):
    code, message = run(place, tmp_path, capsys, "rewards.0.on_error=skip", reward="raises")
    assert code == 2 and "none of the 4 samples could be scored" in message


def test_a_long_prompt_is_dropped_or_cut_counted_and_said(place, tmp_path, capsys):
    long = [{"prompt": "What is two plus three? " * 40}] + [{"prompt": f"What is {n}?"} for n in range(4)]
    (tmp_path / "long.jsonl").write_text("".join(json.dumps(r) + "\n" for r in long))
    for how, said in (("drop", "4 of 5 rows used"), ("truncate", "5 of 5 rows used")):
        arguments = ["train", "--algorithm", "grpo", "--model", str(place / "model"), "--data", str(tmp_path / "long.jsonl")]
        arguments += ["--reward", f"{place / 'score.py'}:good", f"run.folder={tmp_path}", "run.steps=1", "run.trackers=[]"]
        arguments += ["batch.prompts_per_step=2", "batch.group_size=2", "rollout.max_new_tokens=3"]
        arguments += ["data.max_prompt_tokens=20", f"data.too_long={how}"]
        result = CliRunner().invoke(app, arguments)
        shown = " ".join((result.stderr or result.output).split())
        assert result.exit_code == 0 and said in shown, shown


@pytest.mark.parametrize("lacks", ["pad_token", "eos_token"])
def test_a_tokenizer_without_pad_or_end(lacks, place, tmp_path, capsys):
    tokenizer = tiny_tokenizer()
    setattr(tokenizer, lacks, None)
    model = tiny_model()
    model.config.eos_token_id = model.generation_config.eos_token_id = None if lacks == "eos_token" else 2
    folder = tmp_path / "model"
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    arguments = ["train", "--algorithm", "grpo", "--model", str(folder), "--data", str(place / "good.jsonl")]
    arguments += ["--reward", f"{place / 'score.py'}:good", f"run.folder={tmp_path / 'runs'}", "run.steps=1", "run.trackers=[]"]
    arguments += ["batch.prompts_per_step=2", "batch.group_size=2", "rollout.max_new_tokens=3"]
    if lacks == "pad_token":  # nothing in Podium reads pad ids: masks come from the rollout
        assert CliRunner().invoke(app, arguments).exit_code == 0
        return
    with pytest.raises(SystemExit) as ended:
        main(arguments)
    message = capsys.readouterr().err
    assert ended.value.code == 2 and "eos" in message.lower() and not (tmp_path / "runs").exists()


# ---------------------------------------------------------------------- rows to learn from

CHAT = [{"role": "user", "content": "What?"}]
PAIR = {"prompt": "What?", "chosen": " Yes.", "rejected": " No."}
LABELLED = {"prompt": "What?", "completion": " Yes.", "label": True}

UNUSABLE = [
    ("dpo", [{**PAIR, "rejected": " Yes."}] * 2, [], ["rows.jsonl, line 1", "all 2 pairs", "the same", "' Yes.'", "->"]),
    ("dpo", [PAIR, {**PAIR, "chosen": ""}], [], ["rows.jsonl, line 2", "'chosen' is empty: ''", "remove the row"]),
    ("reward_model", [PAIR, {**PAIR, "rejected": " "}], [], ["rows.jsonl, line 2", "'rejected' is empty: ' '"]),
    ("dpo", [PAIR, {**PAIR, "label": True}], [], ["rows.jsonl, line 2", "'chosen' and 'label' (True)", "not meant"]),
    ("dpo", [LABELLED], [], ["rows.jsonl, line 1", "no pair of responses", "prompt, chosen and rejected"]),
    ("kto", [LABELLED, {**LABELLED, "label": "good"}], [], ["rows.jsonl, line 2, column 'label'", "str 'good'", "write true"]),
    ("kto", [{"prompt": "What?", "completion": " Yes."}], [], ["line 1", "no labelled answer", "label (true or false)"]),
    ("kto", [LABELLED, {**LABELLED, "completion": ""}], [], ["rows.jsonl, line 2", "'completion' is empty"]),
    ("sft", [{"prompt": "What?", "completion": ""}], [], ["rows.jsonl, line 1", "'completion' is empty"]),
    ("sft", [{"messages": CHAT}], ["data.train_on=assistant"], ["line 1", "no assistant turn", "add the assistant's answer"]),
    (
        "reward_model",
        [{**PAIR, "aspect": "honesty"}, {**PAIR, "aspect": "honest"}],
        ["heads=[helpfulness, honesty]"],
        ["rows.jsonl, line 2, column 'aspect'", "'honest'", "did you mean 'honesty'"],
    ),
    (
        "reward_model",
        [PAIR],
        ["heads=[helpfulness, honesty]"],
        ["line 1, column 'aspect'", "no aspect", "helpfulness, honesty"],
    ),
    ("sft", [{"prompt": CHAT, "completion": CHAT, "images": [[1]]}], [], ["column 'images'", "text only", "remove the row"]),
]


def learn(algorithm, rows, tmp_path, capsys, model, *overrides):
    """The command's exit code and what it wrote to stderr."""
    path = tmp_path / "rows.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    arguments = ["train", "--algorithm", algorithm, "--model", str(model), "--data", str(path)]
    arguments += [f"run.folder={tmp_path / 'runs'}", "run.steps=1", "run.trackers=[]"]
    arguments += [f"batch.prompts_per_step={2 if algorithm == 'kto' else 1}", *overrides]
    with pytest.raises(SystemExit) as ended:
        main(arguments)
    return ended.value.code, " ".join(capsys.readouterr().err.split())


@pytest.mark.parametrize(("algorithm", "rows", "overrides", "parts"), UNUSABLE)
def test_rows_that_cannot_be_learnt_from(algorithm, rows, overrides, parts, place, tmp_path, capsys):
    code, message = learn(algorithm, rows, tmp_path, capsys, place / "model", *overrides)
    assert code == 2 and all(part in message for part in parts), message
    assert "Traceback" not in message and not (tmp_path / "runs").exists()


@pytest.mark.parametrize("row", [{"messages": [*CHAT, {"role": "assistant", "content": "Yes."}]}, {"prompt": CHAT}])
def test_chat_messages_without_a_chat_template(row, tmp_path, capsys):
    tokenizer = tiny_tokenizer()
    tokenizer.chat_template = None
    tokenizer.save_pretrained(tmp_path / "model")
    tiny_model().save_pretrained(tmp_path / "model")
    code, message = learn("sft", [row], tmp_path, capsys, tmp_path / "model")
    expected = "no chat template" if "messages" in row else "no response to learn"
    assert code == 2 and expected in message and ("model.chat_template" in message or "prompt" in row)


def test_equal_pairs_are_dropped_counted_and_said(place, tmp_path, capsys):
    rows = [PAIR, {**PAIR, "rejected": " Yes."}]
    code, message = learn("dpo", rows, tmp_path, capsys, place / "model")
    assert (
        code == 0 and "1 of 2 rows used" in message and "1 dropped: the chosen and the rejected answer are the same" in message
    )
