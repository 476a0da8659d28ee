"""Stop strings over token borders, characters of several bytes, special tokens; which rule ends a response."""

from __future__ import annotations

import pytest

from podium.engines.base import SamplingParams
from podium.engines.rollout.stopping import StopRule, StopStrings, end_token_ids
from tests.tiny import EOS_ID, tiny_model, tiny_tokenizer

TOKENIZER = tiny_tokenizer()


def _ids(text: str) -> list[int]:
    return TOKENIZER.encode(text, add_special_tokens=False)


def _first_stop(text: str, stop: tuple[str, ...], prompt: str = "") -> str | None:
    """The text up to the token that completes a stop string."""
    strings, ids = StopStrings(TOKENIZER, stop, _ids(prompt)), _ids(text)
    for end, token in enumerate(ids, start=1):
        if strings.push(token):
            return TOKENIZER.decode(ids[:end])
    return None


@pytest.mark.parametrize(
    ("text", "stop", "upto"),
    [
        ("go on. END more", ("END",), "go on. END"),
        ("x #@#% y", ("#@#",), "x #@#"),  # each character a token of its own
        ("ab 火山木 cd", ("山",), "ab 火山"),  # a character of three tokens
        ("ab 🙂🙂 cd", ("🙂",), "ab 🙂"),
        ("Zürich", ("üri",), None),
        ("nothing here", ("END",), None),
        ("one; two. three", (".", ";"), "one;"),
        ("done</s>", ("</s>",), "done</s>"),  # a special token's text
    ],
)
def test_stop_strings(text: str, stop: tuple[str, ...], upto: str | None) -> None:
    found = _first_stop(text, stop)
    if upto is None and stop[0] in text:
        upto = found  # the token that completes it may hold more text
        assert found is not None
        assert stop[0] in found
    assert found == upto


def test_every_stop_string_is_found_with_the_token_that_completes_it() -> None:
    text = "1 + 2 = 3; Zürich, naïve café, 日本語 🙂 fox jumps. <answer>5</answer> END"
    ids = _ids(text)
    for start in range(0, len(text), 3):
        for length in (1, 2, 5, 9):
            stop = text[start : start + length]
            found = _first_stop(text, (stop,))
            shortest = next(end for end in range(1, len(ids) + 1) if stop in TOKENIZER.decode(ids[:end]))
            assert found == TOKENIZER.decode(ids[:shortest]), stop


def test_the_prompt_is_not_searched() -> None:
    assert _first_stop("ND and END", ("END",), prompt="the E") == "ND and END"
    assert _first_stop("nothing", ("END",), prompt="END END") is None


def test_what_stands_before_half_a_character_counts() -> None:
    """A token may hold the end of a stop string and the first bytes of the next character."""
    late = StopStrings(_Merged(), ("END",), ())
    assert [late.push(t) for t in (0, 1)] == [False, True]


class _Merged:
    """Token 1 is "D" and the first byte of a character."""

    def decode(self, ids: list[int], **_: bool) -> str:
        return b"".join((b"EN", b"D\xf0")[i] for i in ids).decode(errors="replace")


def test_invalid_bytes_do_not_hide_what_follows() -> None:
    half = _ids("日")[0]
    strings = StopStrings(TOKENIZER, ("END",), ())
    assert [strings.push(t) for t in [half, *_ids("END")]][-1]


def _run(rule: StopRule, tokens: list[int]) -> tuple[int, str | None]:
    for end, token in enumerate(tokens, start=1):
        reason = rule.push(token)
        if reason is not None:
            return end, reason
    return len(tokens), None


def test_rules() -> None:
    ends = frozenset({EOS_ID})
    tokens = [10, 11, 12, EOS_ID, 13]
    assert _run(StopRule(TOKENIZER, SamplingParams(max_new_tokens=9), ends, (5,)), tokens) == (4, "stop")
    assert _run(StopRule(TOKENIZER, SamplingParams(max_new_tokens=2), ends, (5,)), tokens) == (2, "length")
    assert _run(StopRule(TOKENIZER, SamplingParams(max_new_tokens=4), ends, (5,)), tokens) == (4, "stop")
    other = SamplingParams(max_new_tokens=9, stop_token_ids=(11,))
    assert _run(StopRule(TOKENIZER, other, ends, (5,)), tokens) == (2, "stop")
    assert _run(StopRule(TOKENIZER, SamplingParams(max_new_tokens=9), frozenset(), (5,)), tokens) == (5, None)


def test_a_continued_response_counts_what_is_there() -> None:
    ids = _ids("the END of it")
    sampling = SamplingParams(max_new_tokens=len(ids), stop=("END",))
    whole, reason = _run(StopRule(TOKENIZER, sampling, frozenset(), (5,)), ids)
    assert reason == "stop"
    for cut in range(1, whole):
        rule = StopRule(TOKENIZER, sampling, frozenset(), (5,), ids[:cut])
        assert _run(rule, ids[cut:]) == (whole - cut, "stop")
    length = SamplingParams(max_new_tokens=3)
    assert _run(StopRule(TOKENIZER, length, frozenset(), (5,), [7, 8]), [9, 10]) == (1, "length")


def test_end_tokens_are_the_models_and_the_tokenizers() -> None:
    model, tokenizer = tiny_model(), tiny_tokenizer()
    model.generation_config.eos_token_id = [7, 8]
    assert end_token_ids(model, tokenizer) == {7, 8, EOS_ID}
    model.generation_config.eos_token_id = None
    tokenizer.eos_token = None
    assert end_token_ids(model, tokenizer) == frozenset()
