"""Which format a data set has, and its rows in one form."""

from __future__ import annotations

import json

import pytest

from podium.core.errors import DataError
from podium.data.formats import FormatKind, detect, to_examples
from podium.data.sources import Rows, load_rows
from podium.data.texts import as_label

USER = {"role": "user", "content": "2 + 2 ="}
BOT = {"role": "assistant", "content": "4"}
WRONG = {"role": "assistant", "content": "5"}
VERL = {
    "data_source": "openai/gsm8k",
    "prompt": [USER],
    "ability": "math",
    "reward_model": {"style": "rule", "ground_truth": "4"},
    "extra_info": {"index": 0},
}


def example(row, prompt_column="prompt"):
    fmt = detect([row], prompt_column)
    return fmt, to_examples([row], fmt)[0]


@pytest.mark.parametrize(
    ("row", "kind", "chat", "description"),
    [
        ({"prompt": "a"}, FormatKind.PROMPT, False, "prompts (prompt), text"),
        ({"prompt": [USER]}, FormatKind.PROMPT, True, "prompts (prompt), chat messages"),
        (
            {"prompt": "a", "completion": "b"},
            FormatKind.PROMPT_COMPLETION,
            False,
            "prompts with completions (prompt, completion), text",
        ),
        ({"prompt": [USER], "completion": [BOT]}, FormatKind.PROMPT_COMPLETION, True, None),
        (
            {"prompt": "a", "chosen": "b", "rejected": "c"},
            FormatKind.PREFERENCE,
            False,
            "preference pairs (prompt, chosen, rejected), text",
        ),
        ({"prompt": [USER], "chosen": [BOT], "rejected": [WRONG]}, FormatKind.PREFERENCE, True, None),
        ({"chosen": [USER, BOT], "rejected": [USER, WRONG]}, FormatKind.IMPLICIT_PREFERENCE, True, None),
        ({"messages": [USER, BOT]}, FormatKind.MESSAGES, True, "conversations (messages), chat messages"),
        ({"prompt": "a", "completion": "b", "label": True}, FormatKind.LABELLED, False, None),
        (VERL, FormatKind.VERL, True, "verl's rows (data_source, prompt, reward_model), chat messages"),
    ],
)
def test_every_format_is_detected_and_said(row, kind, chat, description):
    fmt, _ = example(row)
    assert (fmt.kind, fmt.chat) == (kind, chat)
    if description:
        assert fmt.description == description


def test_examples_keep_texts_and_extra_columns():
    _, made = example({"prompt": "a", "completion": "b", "label": False, "topic": "x"})
    assert (made.prompt, made.completion, made.label, made.extras) == ("a", "b", False, {"topic": "x"})
    _, made = example({"question": "a", "answer": "b"}, "question")
    assert (made.prompt, made.extras) == ("a", {"answer": "b"})


def test_the_last_assistant_turn_is_the_completion():
    _, made = example({"messages": [USER, BOT, USER, WRONG]})
    assert (made.prompt, made.completion) == ([USER, BOT, USER], [WRONG])
    _, made = example({"messages": [USER]})
    assert (made.prompt, made.completion) == ([USER], None)


def test_the_prompt_is_what_both_answers_begin_with():
    _, made = example({"chosen": "The sky is blue.", "rejected": "The sky is green."})
    assert (made.prompt, made.chosen, made.rejected) == ("The sky is", " blue.", " green.")
    _, made = example({"prompt": "2 + 2 =", "chosen": [USER, BOT], "rejected": [USER, WRONG]})
    assert (made.prompt, made.chosen, made.rejected) == ([USER], [BOT], [WRONG])


def test_verl_rows_keep_what_its_functions_read():
    _, made = example(VERL)
    assert made.prompt == [USER]
    assert made.extras["data_source"] == "openai/gsm8k"
    assert made.extras["ground_truth"] == "4"
    assert made.extras["extra_info"] == {"index": 0}


def test_null_keys_that_arrow_fills_in_are_left_out():
    _, made = example({"prompt": [{**USER, "tool_calls": None}]})
    assert made.prompt == [USER]


def test_a_missing_column_lists_those_present(tmp_path):
    with pytest.raises(DataError, match=r"data: no column 'prompt'; the row has: answer, promt\n.*did you mean 'promt'"):
        example({"promt": "a", "answer": "b"})
    with pytest.raises(DataError, match=r"no column 'prompt'; the row has: body[\s\S]*data\.prompt_column"):
        example({"body": "a"})
    with pytest.raises(DataError, match=r"no column 'question'; the row has: prompt"):
        example({"prompt": "a"}, "question")
    path = tmp_path / "rows.jsonl"
    path.write_text('{"prompt": "a"}\n\n{"x": 1}\n')
    rows = load_rows(path)
    with pytest.raises(DataError, match=r"rows\.jsonl, line 3: no column 'prompt'; the row has: x"):
        to_examples(rows, detect(rows))


@pytest.mark.parametrize(
    ("bad", "message"),
    [
        (None, "found null"),
        (7, "found int 7"),
        ({"a": 1}, "found dict"),
        ("", "the prompt is empty"),
        (" \n", "the prompt is empty"),
        ([USER], "found a list of messages where the rows before have text"),
        (json.loads('"\\ud83d"'), "half of a surrogate pair"),
    ],
)
def test_bad_text_prompts(bad, message):
    rows = Rows([{"prompt": "a"}, {"prompt": bad}], "rows.jsonl", [1, 4])
    with pytest.raises(DataError, match=rf"rows\.jsonl, line 4, column 'prompt': .*{message}"):
        to_examples(rows, detect(rows))


@pytest.mark.parametrize(
    ("bad", "message"),
    [
        ([], "the prompt is empty"),
        ([{"role": "user", "content": ""}], "the prompt is empty"),
        (["hello"], "message 1: not a chat message: str 'hello'"),
        ([USER, {"content": "x"}], "message 2: not a chat message"),
        ([{"role": "user", "content": None}], "message 1: the content is null"),
        ([{"role": "user", "content": [{"type": "image"}]}], "message 1: the content is list"),
        ("text", "found text where the rows before have a list of messages"),
        (None, "found null"),
    ],
)
def test_bad_chat_prompts(bad, message):
    rows = [{"prompt": [USER]}, {"prompt": bad}]
    with pytest.raises(DataError, match=rf"data, row 2, column 'prompt'.*{message}"):
        to_examples(rows, detect(rows))


def test_other_bad_values():
    with pytest.raises(DataError, match="column 'completion': found null"):
        example({"prompt": "a", "completion": None})
    with pytest.raises(DataError, match="begin with no common prompt"):
        example({"chosen": "a", "rejected": "b"})
    with pytest.raises(DataError, match="there is no turn before the assistant's last one"):
        example({"messages": [BOT]})


def test_a_label_is_true_or_false():
    assert [as_label(value, "x") for value in (True, False, 1, 0)] == [True, False, True, False]
    for bad, found in [("yes", "str 'yes'"), (2, "int 2"), (None, "null"), (0.5, "float 0.5"), (1.0, "float 1.0")]:
        with pytest.raises(DataError, match=rf"rows, row 3, column 'label': a label is true or false.*found {found}"):
            as_label(bad, "rows, row 3")
