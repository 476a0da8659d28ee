"""SFT on every assistant turn: which tokens are learnt, by the template's marks or by prefixes."""

from __future__ import annotations

import pytest
import torch

from podium import Trainer
from podium.core.errors import DataError, ModelError
from podium.core.settings import DataSettings
from podium.data.prepare import prepare_supervised
from podium.data.sources import Rows
from podium.trainer.recipe import read_settings
from tests.tiny import CHAT_TEMPLATE, tiny_model, tiny_tokenizer

USER = {"role": "user", "content": "2 + 2 ="}
BOT = {"role": "assistant", "content": "4"}
MORE = {"role": "user", "content": "naïve 🙂?"}
LAST = {"role": "assistant", "content": "It is 5."}
TALK = [USER, BOT, MORE, LAST]
MARKED = (
    "{% for message in messages %}{% if message['role'] == 'assistant' %}<|assistant|>"
    "{% generation %}{{ message['content'] }}</s>{% endgeneration %}{% else %}<|user|>{{ message['content'] }}{% endif %}"
    "{% endfor %}{% if add_generation_prompt %}<|assistant|>{% endif %}"
)


def tokenizer_with(template=CHAT_TEMPLATE):
    tokenizer = tiny_tokenizer()
    tokenizer.chat_template = template
    return tokenizer


def prepare(rows, tokenizer, **values):
    values = {"train_on": "assistant", **values}
    return prepare_supervised(rows, tokenizer, DataSettings(path="rows.jsonl", **values))


def parts(tokenizer, batch, row=0):
    """The prompt, and the response as runs of (learnt, text)."""
    runs: list[list] = []
    for token, learnt in zip(batch["response_ids"][row].tolist(), batch["loss_mask"][row].tolist(), strict=True):
        if not runs or runs[-1][0] != learnt:
            runs.append([learnt, []])
        runs[-1][1].append(token)
    shown = [(learnt, tokenizer.decode(ids, skip_special_tokens=False)) for learnt, ids in runs]
    return tokenizer.decode(batch["prompt_ids"][row], skip_special_tokens=False), shown


@pytest.mark.parametrize("template", [CHAT_TEMPLATE, MARKED], ids=["prefixes", "marks"])
def test_every_assistant_turn_is_learnt_and_the_rest_is_not(template):
    tokenizer = tokenizer_with(template)
    batch, report = prepare([{"messages": TALK}], tokenizer)
    prompt, shown = parts(tokenizer, batch)
    assert prompt == "<|user|>2 + 2 =<|assistant|>"
    assert shown == [(True, "4</s>"), (False, "<|user|>naïve 🙂?<|assistant|>"), (True, "It is 5.</s>")]
    assert batch["response_mask"].values.tolist() == batch["loss_mask"].values.tolist()
    whole = batch["prompt_ids"][0].tolist() + batch["response_ids"][0].tolist()
    assert whole == tokenizer(tokenizer.apply_chat_template(TALK, tokenize=False), add_special_tokens=False).input_ids
    assert any("every assistant turn (data.train_on=assistant)" in line for line in report.lines())


def test_both_ways_agree():
    conversations = [{"messages": TALK}, {"messages": TALK[:2]}]
    for rows in (conversations, [{"prompt": TALK[:3], "completion": [LAST]}], [{"prompt": [USER], "completion": TALK[1:]}]):
        a, _ = prepare(rows, tokenizer_with(CHAT_TEMPLATE))
        b, _ = prepare(rows, tokenizer_with(MARKED))
        for name in ("prompt_ids", "response_ids", "loss_mask"):
            assert a[name].to_list() == b[name].to_list()


def test_the_loss_is_on_what_the_completion_alone_has():
    tokenizer = tokenizer_with()
    turns, _ = prepare([{"messages": TALK[:2]}], tokenizer)
    last, _ = prepare([{"messages": TALK[:2]}], tokenizer, train_on="completion")
    assert turns["prompt_ids"].to_list() == last["prompt_ids"].to_list()
    assert turns["response_ids"].to_list() == last["response_ids"].to_list()


def test_turns_after_the_last_answer_are_left_out():
    tokenizer = tokenizer_with()
    batch, _ = prepare([{"messages": TALK[:3]}], tokenizer)
    assert parts(tokenizer, batch) == ("<|user|>2 + 2 =<|assistant|>", [(True, "4</s>")])


def test_white_space_after_a_turns_end_is_not_learnt_and_the_last_turn_ends():
    spaced = tokenizer_with(CHAT_TEMPLATE.replace("</s>", "</s>\n"))
    batch, _ = prepare([{"messages": TALK}], spaced)
    assert parts(spaced, batch)[1][0] == (True, "4</s>") and parts(spaced, batch)[1][-1] == (True, "It is 5.</s>")
    endless = tokenizer_with(CHAT_TEMPLATE.replace("</s>", ""))
    batch, _ = prepare([{"messages": TALK}], endless)
    assert parts(endless, batch)[1] == [(True, "4"), (False, "<|user|>naïve 🙂?<|assistant|>"), (True, "It is 5.</s>")]


def test_marks_without_the_end_token_are_said():
    outside = MARKED.replace("</s>{% endgeneration %}", "{% endgeneration %}</s>")
    batch, report = prepare([{"messages": TALK}], tokenizer_with(outside))
    assert parts(tokenizer_with(outside), batch)[1][0] == (True, "4")
    assert any("does not learn to stop by it" in line for line in report.lines())


def test_the_limit_is_on_what_stands_before_the_first_answer():
    long = {"role": "user", "content": "7 * 8 = " * 20}
    batch, report = prepare([{"messages": [long, BOT]}, {"messages": TALK}], tokenizer_with(), max_prompt_tokens=16)
    assert batch["row_index"].tolist() == [1] and report.dropped == 1


def test_templates_that_do_not_render_earlier_turns_as_they_are():
    rows = Rows([{"messages": TALK}], "rows.jsonl", [7])
    counting = tokenizer_with("{{ messages | length }}" + CHAT_TEMPLATE)
    with pytest.raises(DataError, match=r"rows\.jsonl, line 7: .*renders message 2 differently[\s\S]*\{% generation %\}"):
        prepare(rows, counting)
    thinking = tokenizer_with(
        CHAT_TEMPLATE.replace("{{ message['content'] }}", "{% if loop.last %}~{% endif %}{{ message['content'] }}")
    )
    with pytest.raises(DataError, match=r"renders message 2 differently[\s\S]*train_on=completion"):
        prepare(rows, thinking)
    tokenizer = tiny_tokenizer()
    word = next(w for w in sorted(tokenizer.get_vocab(), key=len) if w.isascii() and w.isalpha() and len(w) == 3)
    merging = tokenizer_with(CHAT_TEMPLATE.replace("<|assistant|>", word[:1]).replace("'assistant' if", "'x' if"))
    merging.chat_template = (
        "{% for m in messages %}{{ m['content'] }}{% endfor %}{% if add_generation_prompt %}" + word[:2] + "{% endif %}"
    )
    talk = [{"role": "user", "content": "a "}, {"role": "assistant", "content": word}]
    with pytest.raises(DataError, match="a token spans the border of message 2"):
        prepare([{"messages": talk}], merging)


def test_conversations_without_an_answer_or_with_an_empty_one():
    with pytest.raises(DataError, match=r"row 2: no assistant turn to learn; the roles are user"):
        prepare([{"messages": TALK}, {"messages": [USER]}], tokenizer_with())
    empty = {"role": "assistant", "content": " "}
    with pytest.raises(DataError, match=r"row 1: the assistant's turn \(message 2\) is empty"):
        prepare([{"messages": [USER, empty, MORE, LAST]}], tokenizer_with())
    with pytest.raises(DataError, match=r"marks hold no token"):
        nothing = MARKED.replace("{{ message['content'] }}</s>{% endgeneration %}", "{% endgeneration %}")
        prepare([{"messages": TALK}], tokenizer_with(nothing))
    bare = tokenizer_with()
    bare.chat_template = None
    with pytest.raises(ModelError, match=r"no chat template[\s\S]*model\.chat_template"):
        prepare([{"messages": TALK}], bare)


def test_text_has_one_answer_however_it_is_asked_for():
    rows = [{"prompt": "2 + 2 =", "completion": " 4"}]
    one, _ = prepare(rows, tokenizer_with())
    other, _ = prepare(rows, tokenizer_with(), train_on="completion")
    assert one["response_ids"].to_list() == other["response_ids"].to_list()


def test_every_token():
    tokenizer = tokenizer_with()
    batch, _ = prepare([{"prompt": "2 + 2 =", "completion": " 4"}], tokenizer, train_on="all")
    prompt, shown = parts(tokenizer, batch)
    assert len(batch["prompt_ids"][0]) == 1
    assert [prompt + text for _, text in shown] == ["2 + 2 = 4</s>"] and all(learnt for learnt, _ in shown)


def test_plain_texts():
    tokenizer = tokenizer_with()
    for train_on in ("completion", "assistant", "all"):
        batch, report = prepare([{"text": "The sky is blue."}], tokenizer, train_on=train_on)
        prompt, shown = parts(tokenizer, batch)
        assert len(batch["prompt_ids"][0]) == 1 and [prompt + t for _, t in shown] == ["The sky is blue.</s>"]
    assert report.format.description == "plain texts, all of which is learnt (text), text"


def test_sft_learns_exactly_the_assistants_tokens(tmp_path):
    """The first step's loss is the mean over the learnt tokens, computed here from the model's own logits."""
    run = {"steps": 1, "folder": str(tmp_path), "trackers": [], "progress": False}
    given = {"algorithm": "sft", "run": run, "checkpoint": {"export": False}, "data": {"train_on": "assistant"}}
    settings = read_settings({**given, "batch": {"prompts_per_step": 2}})
    rows = [{"messages": TALK}, {"messages": [USER, LAST]}]
    trainer = Trainer(settings, models={"actor": tiny_model()}, tokenizer=tiny_tokenizer(), data=rows)
    found = trainer.train().metrics["actor/loss"]
    batch, model, losses = trainer.loader.batch, tiny_model(), []
    for prompt, response, mask in zip(batch["prompt_ids"], batch["response_ids"], batch["loss_mask"], strict=True):
        ids = torch.cat([prompt, response])
        with torch.no_grad():
            log_probs = model(ids[None]).logits[0, :-1].log_softmax(-1)
        losses.append(-log_probs.gather(-1, ids[1:, None])[len(prompt) - 1 :, 0][mask])
    assert found == pytest.approx(torch.cat(losses).mean().item(), abs=1e-5)
    assert 0 < len(torch.cat(losses)) < int(batch["response_ids"].lengths.sum())
