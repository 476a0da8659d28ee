"""Rows to batches: tokens, masks, limits, and the report."""

from __future__ import annotations

import pytest
import torch
from tokenizers.processors import TemplateProcessing

from podium.core.batch import Batch
from podium.core.errors import DataError, ModelError
from podium.core.settings import DataSettings
from podium.data.prepare import prepare_preferences, prepare_prompts, prepare_supervised
from podium.data.sources import Rows
from tests.tiny import BOS_ID, EOS, EOS_ID, tiny_tokenizer

USER = {"role": "user", "content": "2 + 2 ="}
BOT = {"role": "assistant", "content": "4"}
WRONG = {"role": "assistant", "content": "5 or so"}


@pytest.fixture(scope="module")
def tokenizer():
    return tiny_tokenizer()


def settings(**values) -> DataSettings:
    return DataSettings(path="rows.jsonl", **values)


def text(tokenizer, ids) -> str:
    return tokenizer.decode(ids, skip_special_tokens=False)


def with_special(template: str):
    tokenizer = tiny_tokenizer()
    tokenizer.backend_tokenizer.post_processor = TemplateProcessing(
        single=template, special_tokens=[("<s>", BOS_ID), ("</s>", EOS_ID)]
    )
    return tokenizer


# ---------------------------------------------------------------------- prompts


def test_text_prompts_keep_their_extra_columns(tokenizer):
    rows = [{"prompt": "1 + 1 =", "answer": "2"}, {"prompt": "naïve 🙂", "level": 3}]
    batch, report = prepare_prompts(rows, tokenizer, settings())
    assert batch.names == ["data.answer", "data.level", "prompt", "prompt_ids", "row_index"]
    assert [text(tokenizer, ids) for ids in batch["prompt_ids"].to_list()] == ["1 + 1 =", "naïve 🙂"]
    assert batch["prompt"] == ["1 + 1 =", "naïve 🙂"]
    assert batch["data.answer"] == ["2", None]
    assert batch["data.level"] == [None, 3]
    assert batch["row_index"].tolist() == [0, 1]
    assert (report.rows, report.used, report.columns) == (2, 2, ("answer", "level"))


def test_text_gets_the_tokenizers_own_special_tokens_but_no_end():
    for template in ("<s> $A", "<s> $A </s>"):
        tokenizer = with_special(template)
        batch, _ = prepare_prompts([{"prompt": "a b"}], tokenizer, settings())
        assert text(tokenizer, batch["prompt_ids"][0]) == "<s>a b"
        batch, _ = prepare_supervised([{"prompt": "a b", "completion": " c"}], tokenizer, settings())
        assert text(tokenizer, batch["prompt_ids"][0]) == "<s>a b"
        assert text(tokenizer, batch["response_ids"][0]) == " c</s>"


@pytest.mark.parametrize(
    ("prompt", "values", "expected"),
    [
        ([USER], {}, "<|user|>2 + 2 =<|assistant|>"),
        ("2 + 2 =", {"chat": "always"}, "<|user|>2 + 2 =<|assistant|>"),
        ("2 + 2 =", {"chat": "never"}, "2 + 2 ="),
        ("2 + 2 =", {"system_prompt": "Add."}, "Add.\n\n2 + 2 ="),
        ([USER], {"system_prompt": "Add."}, "<|user|>Add.<|user|>2 + 2 =<|assistant|>"),
        ([{"role": "system", "content": "Be brief."}, USER], {"system_prompt": "Add."}, None),
        ([USER, {"role": "assistant", "content": "It is"}], {}, "<|user|>2 + 2 =<|assistant|>It is"),
    ],
)
def test_chat_template_and_system_prompt(tokenizer, prompt, values, expected):
    batch, _ = prepare_prompts([{"prompt": prompt}], tokenizer, settings(**values))
    expected = expected or "<|user|>Add.\n\nBe brief.<|user|>2 + 2 =<|assistant|>"
    assert text(tokenizer, batch["prompt_ids"][0]) == expected
    assert batch["prompt"] == [prompt]  # rewards see the prompt as the data gave it


def test_completions_and_verl_rows_as_prompts(tokenizer):
    batch, _ = prepare_prompts([{"messages": [USER, BOT]}], tokenizer, settings())
    assert text(tokenizer, batch["prompt_ids"][0]) == "<|user|>2 + 2 =<|assistant|>"
    assert batch["data.completion"] == [[BOT]]
    verl = {"data_source": "s", "prompt": [USER], "ability": "a", "reward_model": {"ground_truth": "4"}, "extra_info": {"i": 1}}
    batch, _ = prepare_prompts([verl], tokenizer, settings())
    assert batch.extras()["ground_truth"] == ["4"]
    assert batch.extras()["data_source"] == ["s"]
    assert batch.extras()["extra_info"] == [{"i": 1}]


def test_messages_need_a_template_that_takes_them(tokenizer):
    bare = tiny_tokenizer()
    bare.chat_template = None
    with pytest.raises(ModelError, match=r"row 1: the tokenizer has no chat template[\s\S]*model\.chat_template"):
        prepare_prompts([{"prompt": [USER]}], bare, settings())
    with pytest.raises(DataError, match=r"data\.chat is 'never'"):
        prepare_prompts([{"prompt": [USER]}], tokenizer, settings(chat="never"))
    strict = tiny_tokenizer()
    strict.chat_template = "{{ raise_exception('roles must alternate') }}"
    with pytest.raises(DataError, match=r"refuses this conversation \(user\): roles must alternate"):
        prepare_prompts([{"prompt": [USER]}], strict, settings())


# ---------------------------------------------------------------------- limits


LONG = "7 * 8 = " * 20


def test_long_prompts_are_dropped_and_counted(tokenizer):
    batch, report = prepare_prompts([{"prompt": LONG}, {"prompt": "short"}], tokenizer, settings(max_prompt_tokens=16))
    assert batch["prompt"] == ["short"]
    assert batch["row_index"].tolist() == [1]
    assert (report.rows, report.used, report.dropped, report.truncated) == (2, 1, 1, 0)
    assert "1 of 2 rows used" in str(report)
    assert "1 dropped: prompt longer than 16 tokens (data.max_prompt_tokens)" in report.lines()


def test_long_prompts_are_cut_on_the_left(tokenizer):
    rows = [{"prompt": LONG}, {"prompt": "short"}]
    whole = tokenizer(LONG).input_ids
    batch, report = prepare_prompts(rows, tokenizer, settings(max_prompt_tokens=16, too_long="truncate"))
    assert batch["prompt_ids"].to_list()[0] == whole[-16:]
    assert (report.used, report.dropped, report.truncated) == (2, 0, 1)
    assert report.longest_prompt == len(whole)
    assert "1 cut on the left: prompt longer than 16 tokens (data.max_prompt_tokens)" in report.lines()


def test_long_prompts_as_an_error(tokenizer):
    rows = Rows([{"prompt": "short"}, {"prompt": LONG}], "rows.jsonl", [1, 2])
    with pytest.raises(DataError, match=r"rows\.jsonl, line 2: the prompt has \d+ tokens, data\.max_prompt_tokens is 16"):
        prepare_prompts(rows, tokenizer, settings(max_prompt_tokens=16, too_long="error"))
    with pytest.raises(DataError, match=r"all 1 prompts are longer than data\.max_prompt_tokens=16; the shortest has"):
        prepare_prompts([{"prompt": LONG}], tokenizer, settings(max_prompt_tokens=16))


# ---------------------------------------------------------------------- supervised


def test_supervised_text(tokenizer):
    rows = [{"prompt": "1 + 1 =", "completion": " 2"}, {"prompt": "say", "completion": f" so{EOS}"}]
    batch, _ = prepare_supervised(rows, tokenizer, settings())
    assert [text(tokenizer, ids) for ids in batch["response_ids"].to_list()] == [" 2</s>", " so</s>"]
    assert batch["loss_mask"].values.all()
    assert batch["loss_mask"].lengths.tolist() == batch["response_ids"].lengths.tolist()


def test_the_prompts_tokens_are_those_of_generation(tokenizer):
    word = next(w for w in sorted(tokenizer.get_vocab(), key=len) if w.isascii() and w.isalpha() and len(w) == 3)
    assert len(tokenizer(word).input_ids) == 1  # so it would be, if both were tokenised together
    rows = [{"prompt": "ans", "completion": "wer"}, {"prompt": word[:2], "completion": word[2:]}]
    batch, _ = prepare_supervised(rows, tokenizer, settings())
    alone, _ = prepare_prompts(rows, tokenizer, settings())
    assert batch["prompt_ids"].to_list() == alone["prompt_ids"].to_list()
    joined = [p + r for p, r in zip(batch["prompt_ids"].to_list(), batch["response_ids"].to_list(), strict=True)]
    assert [text(tokenizer, ids) for ids in joined] == ["answer</s>", f"{word}</s>"]


def test_supervised_messages(tokenizer):
    batch, report = prepare_supervised([{"messages": [USER, BOT, USER, WRONG]}], tokenizer, settings())
    assert text(tokenizer, batch["prompt_ids"][0]) == "<|user|>2 + 2 =<|assistant|>4</s><|user|>2 + 2 =<|assistant|>"
    assert text(tokenizer, batch["response_ids"][0]) == "5 or so</s>"
    assert report.format.description == "conversations (messages), chat messages"
    batch, _ = prepare_supervised([{"prompt": "hi", "completion": "ho"}], tokenizer, settings(chat="always"))
    assert text(tokenizer, batch["prompt_ids"][0]) == "<|user|>hi<|assistant|>"
    assert text(tokenizer, batch["response_ids"][0]) == "ho</s>"


def test_the_end_token_is_last_whatever_the_template_writes():
    tokenizer = tiny_tokenizer()
    plain = tokenizer.chat_template
    for template in (plain.replace("</s>", ""), plain.replace("</s>", "</s>\n"), plain):
        tokenizer.chat_template = template
        batch, _ = prepare_supervised([{"messages": [USER, BOT]}], tokenizer, settings())
        assert text(tokenizer, batch["response_ids"][0]) == "4</s>"


def test_an_answer_that_the_prompt_opened_is_continued(tokenizer):
    opened = {"role": "assistant", "content": "It is"}
    rest = {"role": "assistant", "content": " 4"}
    batch, _ = prepare_supervised([{"prompt": [USER, opened], "completion": [rest]}], tokenizer, settings())
    assert text(tokenizer, batch["prompt_ids"][0]) == "<|user|>2 + 2 =<|assistant|>It is"
    assert text(tokenizer, batch["response_ids"][0]) == " 4</s>"


def test_supervised_errors(tokenizer):
    with pytest.raises(DataError, match=r"row 1: no response to learn; the rows are prompts \(prompt\), text"):
        prepare_supervised([{"prompt": "a"}], tokenizer, settings())
    with pytest.raises(DataError, match="row 2: no response to learn"):
        prepare_supervised([{"messages": [USER, BOT]}, {"messages": [USER]}], tokenizer, settings())
    endless = tiny_tokenizer()
    endless.eos_token = None
    with pytest.raises(ModelError, match="no end-of-sequence token"):
        prepare_supervised([{"prompt": "a", "completion": "b"}], endless, settings())
    rewriting = tiny_tokenizer()
    rewriting.chat_template = "{{ messages | length }}" + rewriting.chat_template
    with pytest.raises(DataError, match="renders the prompt differently once it is answered"):
        prepare_supervised([{"messages": [USER, BOT]}], rewriting, settings())
    with pytest.raises(DataError, match=r"rows\.jsonl: the data set has no rows"):
        prepare_supervised(Rows([], "rows.jsonl"), tokenizer, settings())


# ---------------------------------------------------------------------- preferences


def test_pairs_are_two_adjacent_rows(tokenizer):
    rows = [
        {"prompt": "2 + 2 =", "chosen": " 4", "rejected": " 5 or so", "by": "x"},
        {"prompt": LONG, "chosen": "a", "rejected": "b", "by": "y"},
        {"prompt": "1 + 1 =", "chosen": " 2", "rejected": " 3", "by": "z"},
    ]
    batch, report = prepare_preferences(rows, tokenizer, settings(max_prompt_tokens=16))
    assert len(batch) == 4
    assert batch["pair_id"].tolist() == [0, 0, 1, 1]
    assert batch["chosen"].tolist() == [True, False, True, False]
    assert batch["row_index"].tolist() == [0, 0, 2, 2]
    assert batch["data.by"] == ["x", "x", "z", "z"]
    assert [text(tokenizer, r) for r in batch["response_ids"].to_list()] == [" 4</s>", " 5 or so</s>", " 2</s>", " 3</s>"]
    assert (report.rows, report.used, report.dropped) == (3, 2, 1)


def test_pairs_of_messages_and_implicit_prompts(tokenizer):
    for row in (
        {"prompt": [USER], "chosen": [BOT], "rejected": [WRONG]},
        {"chosen": [USER, BOT], "rejected": [USER, WRONG]},
    ):
        batch, _ = prepare_preferences([row], tokenizer, settings())
        assert text(tokenizer, batch["prompt_ids"][1]) == "<|user|>2 + 2 =<|assistant|>"
        assert [text(tokenizer, r) for r in batch["response_ids"].to_list()] == ["4</s>", "5 or so</s>"]
    with pytest.raises(DataError, match="no pair of responses; the rows are prompts"):
        prepare_preferences([{"prompt": "a"}], tokenizer, settings())


def test_a_data_set_survives_the_disk(tokenizer, tmp_path):
    batch, _ = prepare_preferences([{"prompt": [USER], "chosen": [BOT], "rejected": [WRONG]}], tokenizer, settings())
    batch.save(tmp_path)
    assert Batch.load(tmp_path).names == batch.names
    assert torch.equal(Batch.load(tmp_path)["response_ids"].values, batch["response_ids"].values)
