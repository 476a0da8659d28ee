"""Logit bias and bad words: the same in every engine, reflected in the log-probs, errors that name the value."""

from __future__ import annotations

import math
import re
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from podium.core.errors import RolloutError
from podium.engines.base import Request, RolloutEngine, SamplingParams
from podium.engines.rollout.hf import HFEngine
from podium.engines.rollout.native.engine import NativeEngine
from podium.engines.rollout.native.paged_engine import PagedEngine
from podium.engines.rollout.steering import MOST_BIASES, Steering
from tests.parity.test_native_vs_hf import assert_same, run
from tests.tiny import VOCAB_SIZE, tiny_model, tiny_tokenizer

TOKENIZER = tiny_tokenizer()
PAGE = Path(__file__).parents[2] / "docs" / "rollout.md"
Make = Callable[..., RolloutEngine]
ENGINES: list[Make] = [HFEngine, NativeEngine, lambda m, t: PagedEngine(m, t, page_size=8, steps_per_look=4)]
NAMES = ["hf", "slots", "paged"]


def _greedy(**settings: object) -> Request:
    return Request((5, 6, 7), SamplingParams(max_new_tokens=12, temperature=0, **settings), 0)  # type: ignore[arg-type]


def _words(tokens: list[int]) -> tuple[str, str]:
    """A bad word of one token and one of two, both parts of what is written without them."""
    return TOKENIZER.decode([tokens[1]]), TOKENIZER.decode(tokens[4:6])


def _word_of(tokens: tuple[int, ...]) -> Steering:
    return Steering({}, [tokens])


@pytest.mark.parametrize("make", ENGINES, ids=NAMES)
def test_a_bias_changes_the_draw_and_the_log_prob(make: Make) -> None:
    model = tiny_model()
    (free,) = run(make(model, TOKENIZER), [_greedy()])
    first = free.response_ids[0]
    bias = ((first, -1e3), (9, 2.5))
    (biased,) = run(make(model, TOKENIZER), [_greedy(logit_bias=bias)])
    assert first not in biased.response_ids
    ids = torch.tensor([[5, 6, 7, *biased.response_ids]])
    rows = _logits(ids)[0, 2:-1]
    rows[:, first] += -1e3
    rows[:, 9] += 2.5
    assert biased.response_ids == rows.argmax(-1).tolist()
    assert biased.segments[0].log_probs == pytest.approx(rows.log_softmax(-1).amax(-1).tolist(), abs=1e-4)


def _logits(ids: torch.Tensor) -> torch.Tensor:
    model = tiny_model()
    with torch.no_grad():
        return model(ids).logits


def test_bias_comes_before_the_temperature() -> None:
    """As every engine: log softmax((logits + bias) / temperature)."""
    request = Request((5, 6, 7), SamplingParams(max_new_tokens=8, temperature=0.5, logit_bias=((9, 3.0), (10, 3.0))), 3)
    (slots,) = run(NativeEngine(tiny_model(), TOKENIZER), [request])
    (paged,) = run(PagedEngine(tiny_model(), TOKENIZER, page_size=8), [request])
    assert_same([paged], [slots])
    rows = _logits(torch.tensor([[5, 6, 7, *slots.response_ids]]))[0, 2:-1]
    rows[:, 9:11] += 3.0
    want = (rows / 0.5).log_softmax(-1).gather(-1, torch.tensor(slots.response_ids)[:, None])[:, 0]
    assert slots.segments[0].log_probs == pytest.approx(want.tolist(), abs=1e-4)


@pytest.mark.parametrize("make", ENGINES, ids=NAMES)
def test_bad_words_are_not_written(make: Make) -> None:
    model = tiny_model(initializer_range=0.3)
    (free,) = run(make(model, TOKENIZER), [_greedy()])
    one, two = _words(free.response_ids)
    (clean,) = run(make(model, TOKENIZER), [_greedy(bad_words=(one, two))])
    banned = Steering.of(TOKENIZER, SamplingParams(bad_words=(one, two)), VOCAB_SIZE)
    assert banned is not None
    assert clean.response_ids != free.response_ids
    for at, token in enumerate(clean.response_ids):
        assert banned.at(clean.response_ids[:at]).get(token, 0.0) == 0.0


def test_engines_agree_on_bad_words_next_to_free_requests() -> None:
    model = tiny_model(initializer_range=0.3)
    (free,) = run(HFEngine(model, TOKENIZER), [_greedy()])
    one, two = _words(free.response_ids)
    requests = [
        _greedy(),
        _greedy(bad_words=(one,)),
        _greedy(bad_words=(two,)),
        _greedy(bad_words=(one, two), logit_bias=((20, 1.0),), stop_token_ids=(free.response_ids[7],)),
        _greedy(),
    ]
    theirs = run(HFEngine(model, TOKENIZER), requests)
    for make in ENGINES[1:]:
        assert_same(run(make(model, TOKENIZER), requests), theirs)
    assert_same(run(PagedEngine(model, TOKENIZER, page_size=2, max_cache_tokens=24, prefill_tokens=2), requests), theirs)


def test_a_word_of_several_tokens_is_stopped_at_its_last() -> None:
    steering = _word_of((4, 5, 6))
    assert steering.follows
    assert steering.at([4, 5]) == {6: -math.inf}
    assert steering.at([1, 4, 5]) == {6: -math.inf}
    assert steering.at([5]) == {}
    assert steering.at([4, 5, 1]) == {}
    assert _word_of((4, 4)).at([4]) == {4: -math.inf}


@pytest.mark.parametrize("make", ENGINES, ids=NAMES)
@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"logit_bias": ((VOCAB_SIZE, 1.0),)}, f"token id {VOCAB_SIZE} of logit_bias"),
        ({"logit_bias": ((-1, 1.0),)}, "token id -1 of logit_bias"),
        ({"logit_bias": ((5, math.nan),)}, r"logit_bias=\(\(5, nan\),\) is out of range"),
        ({"logit_bias": ((5, math.inf),)}, r"logit_bias=\(\(5, inf\),\) is out of range"),
        ({"logit_bias": ((5, 1.0), (5, 2.0))}, "out of range\n  -> each token id once"),
        ({"logit_bias": {5: 1.0}}, r"logit_bias={5: 1.0} is no list of pairs \(token id, number\)(.|\n)*items\(\)"),
        ({"logit_bias": ((5, "much"),)}, "is no list of pairs"),
        ({"logit_bias": (5, 1.0)}, "is no list of pairs"),
        ({"logit_bias": tuple((i, 1.0) for i in range(MOST_BIASES + 1))}, f"make {MOST_BIASES + 1} biases, more than"),
        ({"bad_words": ("fine", " ")}, r"bad_words=\('fine', ' '\) is out of range"),
        ({"bad_words": "fine"}, "bad_words='fine' is no list of texts\n  -> bad_words="),
        ({"bad_words": (5,)}, r"bad_words=\(5,\) is no list of texts"),
        ({"stop": "END"}, "stop='END' is no list of texts"),
    ],
)
def test_bad_input(make: Make, settings: dict[str, object], message: str) -> None:
    with pytest.raises(RolloutError, match=message):
        make(tiny_model(), TOKENIZER).submit(_greedy(**settings))


def test_the_page_shows_how_they_are_given() -> None:
    (code,) = re.findall(r"```python\n(.*?)```", PAGE.read_text(encoding="utf-8"), re.S)
    names = {"model": tiny_model(initializer_range=0.3), "tokenizer": TOKENIZER}
    exec(code, names)
    assert names["text"]
