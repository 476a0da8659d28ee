"""Values on the exact tokens: multi-byte characters, tokens over a span's border, special tokens, process models."""

from __future__ import annotations

import codecs

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer, decoders, models
from transformers import PreTrainedTokenizerFast

from podium import StepwiseRewardInjector, StepwiseRewardStage
from podium.controller.future import Future
from podium.core.batch import Batch
from podium.core.errors import ConfigError, RewardError
from podium.models.heads import RewardModel
from podium.rewards.stepwise import steps_of
from podium.rewards.token_spans import completing_tokens as completing
from podium.rewards.token_spans import tokens_left_out
from podium.stages.base import StepContext
from podium.stages.graph import StageGraph
from tests.tiny import BOS_ID, EOS_ID, tiny_model, tiny_tokenizer

TOKENIZER = tiny_tokenizer()
SPECIAL_IDS = set(TOKENIZER.all_special_ids)


def completing_tokens(ids, tokenizer):
    return completing(ids, tokenizer, tokens_left_out(tokenizer))


def batch_of(*rows, **columns) -> Batch:
    """Rows of token ids, or texts to be tokenised."""
    ids = [TOKENIZER(row, add_special_tokens=False)["input_ids"] if isinstance(row, str) else row for row in rows]
    text = TOKENIZER.batch_decode(ids, skip_special_tokens=True)
    n = len(rows)
    data = {f"data.{name}": values for name, values in columns.items()}
    common = {"prompt": ["p"] * n, "prompt_ids": [[BOS_ID]] * n, "row_index": list(range(n))}
    return Batch({**common, "response_ids": ids, "response": text, **data})


def placed(batch, function, unit="char", **options):
    return StepwiseRewardInjector(function, unit, **options).place(batch, TOKENIZER).values.to_list()


def giving(*answers):
    return lambda completions: list(answers)


# ---------------------------------------------------------------------- an oracle: the bytes of each token


def _byte_of():
    """GPT-2's table from the characters of a byte-level vocabulary to bytes."""
    shown = [*range(33, 127), *range(161, 173), *range(174, 256)]
    hidden = [b for b in range(256) if b not in shown]
    return {chr(b): b for b in shown} | {chr(256 + i): b for i, b in enumerate(hidden)}


BYTE_OF = _byte_of()


def by_bytes(ids):
    """Text, and the last token of each character, from the tokens' bytes; None for what is no character."""
    owner, data = [], b""
    for at, token in enumerate(ids):
        if token not in SPECIAL_IDS and token < len(TOKENIZER):
            piece = bytes(BYTE_OF[c] for c in TOKENIZER.convert_ids_to_tokens(token))
            owner += [at] * len(piece)
            data += piece
    spans, tokens = [], []

    def note(error):
        spans.append((error.start, error.end))
        return "\ufffd", error.end

    codecs.register_error("note", note)
    text = data.decode("utf-8", "note")
    at, bad = 0, dict(spans)
    for character in text:
        end = bad.get(at) or at + len(character.encode())
        tokens.append(None if at in bad else owner[end - 1])
        at = end
    return text, tokens


@settings(max_examples=150, deadline=None)
@given(st.lists(st.integers(0, len(TOKENIZER) - 1), max_size=40))
def test_any_tokens(ids):
    text, expected = by_bytes(ids)
    found, tokens = completing_tokens(ids, TOKENIZER)
    assert found == text == TOKENIZER.decode(ids, skip_special_tokens=True)
    assert [t if e is not None else None for t, e in zip(tokens, expected, strict=True)] == expected
    assert tokens == sorted(tokens)


@settings(max_examples=100, deadline=None)
@given(st.text(max_size=30))
def test_any_text(text):
    ids = TOKENIZER(text, add_special_tokens=False)["input_ids"]
    assert completing_tokens([BOS_ID, *ids, EOS_ID], TOKENIZER)[1] == by_bytes([BOS_ID, *ids, EOS_ID])[1]


def test_a_character_over_several_tokens_belongs_to_the_last():
    row = TOKENIZER("a🙂日b", add_special_tokens=False)["input_ids"]
    text, tokens = completing_tokens(row, TOKENIZER)
    assert text == "a🙂日b"
    assert len(row) > len(text)  # the tokenizer has no token for an emoji
    assert tokens == by_bytes(row)[1]


def test_unreadable_bytes_end_before_the_next_character():
    half = TOKENIZER("🚀", add_special_tokens=False)["input_ids"][:2]
    letter = TOKENIZER("x", add_special_tokens=False)["input_ids"]
    text, tokens = completing_tokens([*half, *letter, EOS_ID], TOKENIZER)
    assert (text, tokens) == ("\ufffdx", [1, 2])
    assert completing_tokens([*letter, *half, EOS_ID], TOKENIZER) == ("x\ufffd", [0, 2])


def test_a_tokenizer_that_marks_words_and_falls_back_to_bytes():
    pieces = ["<unk>", "▁the", "▁fox", "es", ",", *(f"<0x{b:02X}>" for b in range(256))]
    model = models.BPE({p: i for i, p in enumerate(pieces)}, [], unk_token="<unk>", byte_fallback=True)
    made = Tokenizer(model)
    steps = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    made.decoder = decoders.Sequence(steps)
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=made, unk_token="<unk>", clean_up_tokenization_spaces=False)
    ids = [1, 2, 3, 4, *(5 + b for b in "é".encode()), 2]
    assert completing_tokens(ids, tokenizer) == ("the foxes,é fox", [0] * 3 + [1] * 4 + [2] * 2 + [3, 5] + [6] * 4)


def test_a_tokenizer_whose_text_changes_behind_is_decoded_prefix_by_prefix():
    class Cleaning:  # as clean_up_tokenization_spaces does: " ." becomes "."
        all_special_ids = ()

        def decode(self, ids, skip_special_tokens):
            return "".join({0: "a ", 1: ".", 2: " b"}[i] for i in ids).replace(" .", ".")

    assert completing_tokens([0, 1, 2], Cleaning()) == ("a. b", [0, 1, 2, 2])


# ---------------------------------------------------------------------- placing


def test_a_token_that_crosses_the_border_is_the_one():
    row = TOKENIZER("What is two plus three?", add_special_tokens=False)["input_ids"]
    text, tokens = completing_tokens(row, TOKENIZER)
    inside = next(i for i in range(1, len(text)) if tokens[i - 1] == tokens[i])  # a border within a token
    values = placed(batch_of(row), giving([((0, inside), 1.0), ((inside, len(text)), 0.5)]))[0]
    assert values[tokens[inside]] == 1.0
    assert values[-1] == 0.5
    assert sum(values) == 1.5


def test_values_add_up_weights_and_tokens_as_unit():
    batch = batch_of([5, 6, EOS_ID], [7])
    steps = giving([((0, 2), 1.0), ((1, 2), 2.0), ((2, 3), -1.0)], None)
    assert placed(batch, steps, "token", weight=0.5) == [[0.0, 1.5, -0.5], [0.0]]


def test_special_tokens_and_empty_responses():
    row = TOKENIZER("日本", add_special_tokens=False)["input_ids"]
    batch = batch_of([BOS_ID, *row, EOS_ID], [], [EOS_ID])
    values = placed(batch, giving([((0, 2), 1.0)], [], []))
    assert values == [[0.0] * len(row) + [1.0, 0.0], [], [0.0]]


def test_functions_get_the_data_columns():
    def steps(prompts, completions, answer):
        return [[((c.index(a), c.index(a) + len(a)), 1.0)] if a in c else [] for c, a in zip(completions, answer, strict=True)]

    batch = batch_of("it is 5", "no", answer=["5", "5"])
    assert [sum(row) for row in placed(batch, steps)] == [1.0, 0.0]
    stage = StepwiseRewardStage(steps)
    with pytest.raises(ConfigError, match="needs the data column answer; the data set has: label"):
        stage.check_data(["label"])


@pytest.mark.parametrize(
    ("answer", "unit", "message"),
    [
        ([((0, 9), 1.0)], "char", r"sample 1 \(data row 1\), .*response 'no': the span \(0, 9\) is not inside .* 2 characters"),
        ([((-1, 1), 1.0)], "char", r"the span \(-1, 1\)"),
        ([((1, 1), 1.0)], "char", r"the span \(1, 1\) is empty"),
        ([((0, 50), 1.0)], "token", r"the span \(0, 50\) is not inside the response, which has \d tokens"),
        ([((0, 1), float("nan"))], "char", r"gave nan for the span \(0, 1\), not a finite number"),
        ([((0, 1), "1")], "char", r"gave '1' for the span"),
        ([(0, 1, 1.0)], "char", r"gave \(0, 1, 1.0\), not \(\(start, end\), value\)"),
        ([((0.0, 1.0), 1.0)], "char", r"not \(\(start, end\), value\)"),
        (0.5, "char", r"gave 0.5 \(float\), not a list"),
        (ValueError("x"), "char", "gave ValueError: x"),
    ],
)
def test_what_cannot_be_placed(answer, unit, message):
    batch = batch_of("yes", "no")
    with pytest.raises(RewardError, match=message):
        placed(batch, giving([], answer), unit)
    skipping = StepwiseRewardInjector(giving([((0, 1), 1.0)], answer), unit, on_error="skip")
    stage, context = StepwiseRewardStage(skipping, TOKENIZER), StepContext(0, {})
    out = stage.run(batch, context)
    assert (out["row_index"].tolist(), context.metrics.mean("step_rewards/skipped")) == ([0], 1.0)


def test_other_mistakes():
    with pytest.raises(RewardError, match="returned 1 rewards for 2 completions"):
        placed(batch_of("a", "b"), giving([]))
    with pytest.raises(RewardError, match="raised KeyError: 'x'"):
        placed(batch_of("a"), lambda completions: {}["x"])
    with pytest.raises(RewardError, match=r"decode to another text[\s\S]*tokenizer="):
        placed(batch_of("a").with_columns({"response": ["b"]}), giving([((0, 1), 1.0)]))
    with pytest.raises(ConfigError, match="unit='word'"):
        StepwiseRewardInjector(giving(), "word")
    with pytest.raises(ConfigError, match="no function of the signature"):
        StepwiseRewardInjector(lambda solution_str, ground_truth: 0.0)
    with pytest.raises(ConfigError, match=r"there is no tokenizer[\s\S]*tokenizer=tokenizer"):
        StepwiseRewardStage(giving([])).run(batch_of("a"), StepContext(0, {}))
    with pytest.raises(ConfigError, match="no step-wise reward"):
        StepwiseRewardStage([])


# ---------------------------------------------------------------------- process models, the stage


def test_steps():
    assert list(steps_of("one\n\n two\nx", "\n")) == [(0, 3), (5, 9), (10, 11)]
    assert list(steps_of("", "\n")) == []


def test_a_process_model_scores_each_prefix():
    model = RewardModel.from_causal_lm(tiny_model())
    injector = StepwiseRewardInjector.from_model(model)
    seen = []

    def score(batch):
        seen.extend(batch["response_ids"].to_list())
        return Future(lambda: Batch({"scores": [float(i + 1) for i in range(len(batch))]}))

    batch = batch_of("one\ntwo", "", "日本")
    values = injector.place(batch, TOKENIZER, score=score).values.to_list()
    assert [TOKENIZER.decode(ids) for ids in seen] == ["one", "one\ntwo", "日本"]
    assert [sum(row) for row in values] == [3.0, 0.0, 3.0]
    assert values[0][-1] == 2.0
    with pytest.raises(ConfigError, match="is no reward model"):
        StepwiseRewardInjector.from_model(5)


def test_the_stage_adds_up_its_sources():
    class Role:
        def score(self, batch, name):
            return Future(lambda: Batch({"scores.good": torch.full((len(batch),), 2.0)}))

    model = RewardModel.from_causal_lm(tiny_model(), heads=["good", "bad"])
    injectors = [StepwiseRewardInjector.from_model(model.head("good")), giving([((0, 1), 1.0)])]
    stage = StepwiseRewardStage(injectors, TOKENIZER)
    assert (stage.roles, list(stage.models())) == (("reward_steps",), ["reward_steps"])
    context = StepContext(0, {"reward_steps": Role()})
    out = stage.run(batch_of("ab\ncd"), context)
    assert float(out["step_rewards"].values.sum()) == 5.0
    assert context.metrics.mean("step_rewards/steps") == 3.0
    graph = StageGraph([stage], ("prompt_ids", "response_ids", "response"))
    assert graph.roles == ["reward_steps"]
