"""Every shape of TRL and verl: from JSONL, parquet and a datasets folder to the kinds of training that can use it."""

from __future__ import annotations

import json

import pytest

from podium.core.errors import DataError
from podium.core.settings import DataSettings
from podium.data.formats import FormatKind, detect, to_examples
from podium.data.prepare import PREPARE, prepare, prepare_prompts, prepare_supervised
from podium.data.sources import load_rows
from tests.tiny import CHAT_TEMPLATE, tiny_tokenizer

USER = {"role": "user", "content": "2 + 2 ="}
GOOD = {"role": "assistant", "content": "4"}
BAD = {"role": "assistant", "content": "5"}
VERL = {
    "data_source": "openai/gsm8k",
    "prompt": [USER],
    "ability": "math",
    "reward_model": {"style": "rule", "ground_truth": "4"},
    "extra_info": {"index": 0, "split": "train"},
}
ONLINE, SFT = ("prompts",), ("supervised", "prompts")
PAIRS, LABELLED = ("preferences", "unpaired", "prompts"), ("unpaired", "supervised", "prompts")

SHAPES = [
    (FormatKind.PROMPT, False, ONLINE, {"prompt": "2 + 2 ="}),
    (FormatKind.PROMPT, True, ONLINE, {"prompt": [USER]}),
    (FormatKind.PROMPT_COMPLETION, False, SFT, {"prompt": "2 + 2 =", "completion": " 4"}),
    (FormatKind.PROMPT_COMPLETION, True, SFT, {"prompt": [USER], "completion": [GOOD]}),
    (FormatKind.MESSAGES, True, SFT, {"messages": [USER, GOOD]}),
    (FormatKind.PLAIN_TEXT, False, ("supervised",), {"text": "2 + 2 = 4"}),
    (FormatKind.PREFERENCE, False, PAIRS, {"prompt": "2 + 2 =", "chosen": " 4", "rejected": " 5"}),
    (FormatKind.PREFERENCE, True, PAIRS, {"prompt": [USER], "chosen": [GOOD], "rejected": [BAD]}),
    (FormatKind.IMPLICIT_PREFERENCE, False, PAIRS, {"chosen": "2 + 2 = 4", "rejected": "2 + 2 = 5"}),
    (FormatKind.IMPLICIT_PREFERENCE, True, PAIRS, {"chosen": [USER, GOOD], "rejected": [USER, BAD]}),
    (FormatKind.LABELLED, False, LABELLED, {"prompt": "2 + 2 =", "completion": " 4", "label": True}),
    (FormatKind.LABELLED, True, LABELLED, {"prompt": [USER], "completion": [GOOD], "label": True}),
    (FormatKind.VERL, True, ONLINE, VERL),
]
NAMES = [f"{kind.name.lower()}-{'chat' if chat else 'text'}" for kind, chat, _, _ in SHAPES]


def written(row, form, folder):
    if form == "jsonl":
        path = folder / "rows.jsonl"
        path.write_text(json.dumps(row) + "\n")
        return path
    if form == "parquet":
        import pyarrow
        import pyarrow.parquet as parquet

        parquet.write_table(pyarrow.Table.from_pylist([row]), folder / "rows.parquet")
        return folder / "rows.parquet"
    import datasets

    datasets.Dataset.from_list([row]).save_to_disk(folder / "saved")
    return folder / "saved"


@pytest.mark.parametrize("form", ["jsonl", "parquet", "datasets"])
@pytest.mark.parametrize(("kind", "chat", "uses", "row"), SHAPES, ids=NAMES)
def test_a_shape_is_detected_said_and_used(kind, chat, uses, row, form, tmp_path):
    rows = load_rows(written(row, form, tmp_path))
    fmt = detect(rows)
    assert (fmt.kind, fmt.chat, fmt.uses) == (kind, chat, uses)
    for use in PREPARE:
        if use not in uses:
            with pytest.raises(DataError, match=r"row|line 1"):
                prepare(use, rows, tiny_tokenizer(), DataSettings())
            continue
        batch, report = prepare(use, rows, tiny_tokenizer(), DataSettings())
        assert len(batch) == (2 if fmt.pairs and use in ("preferences", "unpaired") else 1)
        assert fmt.description in str(report)
        if kind is not FormatKind.PLAIN_TEXT:
            prompt = tiny_tokenizer().decode(batch["prompt_ids"][0])
            assert prompt == ("<|user|>2 + 2 =<|assistant|>" if chat else "2 + 2 =")


@pytest.mark.parametrize("form", ["jsonl", "parquet"])
def test_verl_rows_keep_every_column(form, tmp_path):
    batch, _ = prepare_prompts(load_rows(written(VERL, form, tmp_path)), tiny_tokenizer(), DataSettings())
    extras = {name: values[0] for name, values in batch.extras().items()}
    assert extras == {"ground_truth": "4", **{k: v for k, v in VERL.items() if k != "prompt"}}


# ---------------------------------------------------------------------- what goes with the messages

TOOL = {"type": "function", "function": {"name": "add", "parameters": {"type": "object"}}}
SHOWS_TOOLS = "{% if tools %}<|user|>{{ tools[0].function.name }}{% endif %}{% if loud %}!{% endif %}" + CHAT_TEMPLATE


@pytest.mark.parametrize("given", [[TOOL], json.dumps([TOOL])], ids=["list", "json"])
def test_tools_go_to_the_chat_template(given):
    tokenizer = tiny_tokenizer()
    tokenizer.chat_template = SHOWS_TOOLS
    batch, report = prepare_prompts([{"prompt": [USER], "tools": given}], tokenizer, DataSettings())
    assert tokenizer.decode(batch["prompt_ids"][0]) == "<|user|>add<|user|>2 + 2 =<|assistant|>"
    assert batch["data.tools"] == [given]  # rewards and environments see them too
    assert "1 of 1 rows give tools to the chat template" in report.lines()
    batch, _ = prepare_supervised([{"messages": [USER, GOOD], "tools": given}], tokenizer, DataSettings())
    assert tokenizer.decode(batch["response_ids"][0]) == "4</s>"
    _, report = prepare_prompts([{"prompt": [USER], "tools": given}], tiny_tokenizer(), DataSettings())
    assert any("no place for them: the model does not see them" in line for line in report.lines())


def test_options_of_the_chat_template():
    tokenizer = tiny_tokenizer()
    tokenizer.chat_template = SHOWS_TOOLS
    row = {"prompt": [USER], "chat_template_kwargs": {"loud": True}}
    batch, _ = prepare_prompts([row], tokenizer, DataSettings())
    assert tokenizer.decode(batch["prompt_ids"][0]) == "!<|user|>2 + 2 =<|assistant|>"


@pytest.mark.parametrize(
    ("row", "message"),
    [
        ({"tools": "add"}, r"row 1, column 'tools': found str 'add'[\s\S]*JSON schemas"),
        ({"tools": [1]}, r"row 1, column 'tools': found list \[1\]"),
        ({"chat_template_kwargs": "loud"}, r"column 'chat_template_kwargs': found str 'loud'"),
        ({"images": [{"bytes": "..."}]}, r"row 1, column 'images': the row has images \(list\)[\s\S]*remove the row"),
    ],
)
def test_what_cannot_be_passed_on(row, message):
    with pytest.raises(DataError, match=message):
        prepare_prompts([{"prompt": [USER], **row}], tiny_tokenizer(), DataSettings())


def test_an_images_column_without_images_is_an_extra_column():
    for value in ([], None, "cat.png"):
        batch, _ = prepare_prompts([{"prompt": [USER], "images": value}], tiny_tokenizer(), DataSettings())
        assert batch["data.images"] == [value]


def test_content_in_parts():
    parts = [{"type": "text", "text": "2 + 2"}, {"type": "text", "text": " ="}]
    batch, _ = prepare_prompts([{"prompt": [{"role": "user", "content": parts}]}], tiny_tokenizer(), DataSettings())
    assert tiny_tokenizer().decode(batch["prompt_ids"][0]) == "<|user|>2 + 2 =<|assistant|>"
    parts[1] = {"type": "image", "image": "cat.png"}
    with pytest.raises(DataError, match=r"message 1: the content is list.*a part of type 'image' is no text"):
        prepare_prompts([{"prompt": [{"role": "user", "content": parts}]}], tiny_tokenizer(), DataSettings())


def test_a_row_of_two_kinds():
    pair = {"prompt": "a", "chosen": "b", "rejected": "c"}
    for label in (True, 0):
        with pytest.raises(DataError, match=r"row 2: the row has 'chosen' and 'label' \((True|0)\)[\s\S]*not meant"):
            to_examples([pair, {**pair, "label": label}], detect([pair]))
    assert to_examples([{**pair, "label": "math"}], detect([pair]))[0].extras == {"label": "math"}
    with pytest.raises(DataError, match=r"the row has 'chosen' and 'label'"):
        row = {"prompt": "a", "completion": "b", "label": True, "chosen": "b"}
        to_examples([row], detect([row]))


def test_a_prompt_and_an_answer_in_two_forms():
    row = {"prompt": "a", "completion": [GOOD]}
    with pytest.raises(DataError, match=r"column 'completion': found a list of messages where the other columns have text"):
        to_examples([row], detect([row]))
