"""Rows to batches: tokens, masks, limits, and the report."""

from __future__ import annotations

import pytest
import torch
from tokenizers.processors import TemplateProcessing

from podium.core.batch import Batch
from podium.core.errors import DataError, ModelError
from podium.core.settings import DataSettings
from podium.data.prepare import prepare_preferences, prepare_prompts, prepare_supervised, prepare_unpaired
from podium.data.sources import Rows
from podium.data.split import first, hold_out
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


def test_equal_answers_are_dropped_and_counted(tokenizer):
    rows = [{"prompt": "2 + 2 =", "chosen": " 4", "rejected": r} for r in (" 4", " 5")]
    for prepare, column in ((prepare_preferences, "chosen"), (prepare_unpaired, "label")):
        batch, report = prepare(rows, tokenizer, settings())
        assert batch["row_index"].tolist() == [1, 1] and batch[column].tolist() == [True, False]
        assert (report.rows, report.used, report.equal) == (2, 1, 1)
        assert "1 dropped: the chosen and the rejected answer are the same" in report.lines()
        with pytest.raises(DataError, match=r"row 1: in all 1 pairs the chosen and the rejected answer are the same.*' 4'"):
            prepare(rows[:1], tokenizer, settings())


def test_equal_is_what_the_model_reads(tokenizer):
    stripping = tiny_tokenizer()
    stripping.chat_template = stripping.chat_template.replace("message['content'] }}", "message['content'] | trim }}")
    rows = [{"prompt": [USER], "chosen": [BOT], "rejected": [{**BOT, "content": " 4\n"}]}]
    rows.append({"prompt": [USER], "chosen": [BOT], "rejected": [WRONG]})
    assert prepare_preferences(rows, stripping, settings())[1].equal == 1
    assert prepare_preferences(rows, tokenizer, settings())[1].equal == 0


@pytest.mark.parametrize("empty", ["", " \n"])
@pytest.mark.parametrize("side", ["chosen", "rejected"])
def test_an_empty_answer_of_a_pair(tokenizer, side, empty):
    good = {"prompt": "2 + 2 =", "chosen": " 4", "rejected": " 5"}
    rows = Rows([good, {**good, side: empty}], "rows.jsonl", [1, 2])
    with pytest.raises(DataError, match=rf"rows\.jsonl, line 2: the answer '{side}' is empty[\s\S]*remove the row"):
        prepare_preferences(rows, tokenizer, settings())
    chat = {"prompt": [USER], "chosen": [BOT], "rejected": [WRONG], side: [{"role": "assistant", "content": empty}]}
    with pytest.raises(DataError, match=rf"row 1: the answer '{side}' is empty"):
        prepare_preferences([chat], tokenizer, settings())


# ---------------------------------------------------------------------- the heads of a reward model

HEADS = ["helpfulness", "honesty", "harmlessness"]
PAIR = {"prompt": "2 + 2 =", "chosen": " 4", "rejected": " 5"}


def test_pairs_say_which_head_they_judge(tokenizer):
    rows = [{**PAIR, "aspect": name} for name in ("honesty", "helpfulness", "honesty")]
    batch, report = prepare_preferences(rows, tokenizer, settings(), heads=HEADS)
    assert batch["head"].dtype == torch.int64 and batch["head"].tolist() == [1, 1, 0, 0, 1, 1]
    assert "pairs per head: helpfulness 1, honesty 2, harmlessness 0" in report.lines()
    for heads in (None, [], ["quality"]):  # one head judges all
        assert prepare_preferences([PAIR], tokenizer, settings(), heads=heads)[0]["head"].tolist() == [0, 0]
    assert prepare_preferences(rows, tokenizer, settings())[0]["head"].tolist() == [0] * 6


@pytest.mark.parametrize(
    ("aspect", "message"),
    [
        ("honest", r"the aspect 'honest' is no head of the reward model[\s\S]*did you mean 'honesty'"),
        (7, r"the aspect 7 is no head"),
        (None, r"no aspect; its heads are helpfulness, honesty, harmlessness[\s\S]*name in each row"),
    ],
)
def test_an_aspect_that_is_no_head(tokenizer, aspect, message):
    rows = Rows([{**PAIR, "aspect": "honesty"}, {**PAIR, "aspect": aspect}], "rows.jsonl", [1, 2])
    with pytest.raises(DataError, match=r"rows\.jsonl, line 2, column 'aspect': " + message):
        prepare_preferences(rows, tokenizer, settings(), heads=HEADS)
    with pytest.raises(DataError, match="no aspect"):
        prepare_preferences([PAIR], tokenizer, settings(), heads=HEADS)


# ---------------------------------------------------------------------- unpaired


def test_labelled_answers(tokenizer):
    rows = [
        {"prompt": "2 + 2 =", "completion": " 4", "label": True, "by": "x"},
        {"prompt": LONG, "completion": " 4", "label": True, "by": "x"},
        {"prompt": "2 + 2 =", "completion": " 5", "label": False, "by": "y"},
    ]
    batch, report = prepare_unpaired(rows, tokenizer, settings(max_prompt_tokens=16))
    assert batch["label"].tolist() == [True, False] and batch["label"].dtype == torch.bool
    assert batch["row_mask"].tolist() == [True, True] and batch["row_index"].tolist() == [0, 2]
    assert [text(tokenizer, r) for r in batch["response_ids"].to_list()] == [" 4</s>", " 5</s>"]
    assert batch["data.by"] == ["x", "y"] and report.used == 2
    assert "labels: 1 true, 1 false" in report.lines()
    chat = [{"prompt": [USER], "completion": [m], "label": int(m is BOT)} for m in (BOT, WRONG)]
    batch, report = prepare_unpaired(chat, tokenizer, settings())
    assert batch["label"].tolist() == [True, False]
    assert text(tokenizer, batch["prompt_ids"][0]) == "<|user|>2 + 2 =<|assistant|>"
    assert "labels are numbers: 1 is read as true, 0 as false" in report.lines()


def test_pairs_as_labelled_answers(tokenizer):
    batch, report = prepare_unpaired([PAIR, PAIR], tokenizer, settings())
    assert batch["label"].tolist() == [True, False] * 2 and batch["row_mask"].all()
    assert [text(tokenizer, r) for r in batch["response_ids"].to_list()] == [" 4</s>", " 5</s>"] * 2
    assert any("each pair gives two rows" in line for line in report.lines())
    train, held = hold_out(batch, 1, seed=0)  # both answers of a prompt go to the same side
    assert len(train) == len(held) == 2 and held["label"].tolist() == [True, False]
    assert first(batch, 1)["row_index"].tolist() == [0, 0]


def test_unpaired_errors(tokenizer):
    good = {"prompt": "a", "completion": "b", "label": True}
    rows = Rows([good, {**good, "label": "yes"}], "rows.jsonl", [1, 2])
    with pytest.raises(DataError, match=r"rows\.jsonl, line 2, column 'label': a label is true or false.*found str 'yes'"):
        prepare_unpaired(rows, tokenizer, settings())
    with pytest.raises(DataError, match=r"row 1: no labelled answer; the rows are prompts with completions"):
        prepare_unpaired([{"prompt": "a", "completion": "b"}], tokenizer, settings())
    with pytest.raises(DataError, match=r"row 1: the answer 'completion' is empty"):
        prepare_unpaired([{**good, "completion": ""}], tokenizer, settings())


def test_a_label_that_nobody_reads_may_be_anything(tokenizer):
    rows = [{"prompt": "a", "completion": "b", "label": "math"}]
    assert prepare_prompts(rows, tokenizer, settings())[0].extras() == {"completion": ["b"], "label": ["math"]}
    assert len(prepare_supervised(rows, tokenizer, settings())[0]) == 1
