"""Rules from YAML: every check, weights, what must hold, and what is said of a wrong file."""

from __future__ import annotations

import time

import pytest

from podium.core.batch import Batch
from podium.core.errors import ConfigError, RewardError
from podium.core.settings import RewardSettings
from podium.rewards.fusion import fuse
from podium.rewards.loading import load_reward
from podium.rewards.rules import Matcher, check_of, field_of, json_in

QUOTE = """
- name: tax
  json_field: quote.tax
  weight: 2
  required: true
- name: short
  max_words: 20
- name: polite
  contains: thank you
  ignore_case: true
"""


@pytest.fixture
def rules(tmp_path):
    made = []

    def write(text, name="quote.yaml", **keywords):
        path = tmp_path / name
        path.write_text(text)
        made.append(load_reward(RewardSettings(function=str(path), **keywords)))
        return made[-1]

    yield write
    for reward in made:
        reward.function._matcher.close()


def batch_of(*responses):
    return Batch({"prompt": ["p"] * len(responses), "response": list(responses), "row_index": list(range(len(responses)))})


def test_the_share_passed_by_weight_and_what_is_required(rules):
    reward = rules(QUOTE, weight=3.0)
    assert (reward.name, reward.weight) == ("quote", 3.0)
    batch = batch_of(
        'Thank you. {"quote": {"tax": 19}}',
        '{"quote": {"tax": 0}}',
        "thank you " * 15 + '```json\n{"quote": {"tax": 1}}\n```',
        "thank you",
    )
    out, metrics = fuse(batch, [reward])
    assert out["reward.quote"].tolist() == [1.0, 0.75, 0.75, 0.0]
    assert metrics.mean("reward/quote/tax") == 0.75
    assert metrics.mean("reward/quote/short") == 0.75
    assert metrics.mean("reward/quote/polite") == 0.75


@pytest.mark.parametrize(
    ("check", "text", "passes"),
    [
        ({"contains": ["a", 5]}, "a 5", True),
        ({"contains": ["a", "b"]}, "a", False),
        ({"contains": "A"}, "a", False),
        ({"matches": r"^total: \d+$"}, "x\ntotal: 12\ny", True),
        ({"matches": "TOTAL", "ignore_case": True}, "total", True),
        ({"matches": r"^\d+$"}, "a1", False),
        ({"min_words": 2}, "one", False),
        ({"max_words": 0}, " ", True),
        ({"json_field": "a.0.b"}, '{"a": [{"b": 1}]}', True),
        ({"json_field": "a"}, '{"a": null}', False),
        ({"json_field": "a"}, "none here {", False),
        ({"json_field": {"path": "a", "type": "number"}}, '{"a": true}', False),
        ({"json_field": {"path": "a", "type": "number", "equals": 2}}, 'see {x} {"a": 2} ok', True),
        ({"json_field": {"path": "a", "equals": "x"}}, '{"a": "y"}', False),
        ({"not": {"contains": "a"}}, "b", True),
        ({"any": [{"contains": "a"}, {"contains": "b"}]}, "b", True),
        ({"all": [{"contains": "a"}, {"not": {"matches": "b"}}]}, "ab", False),
    ],
)
def test_checks(check, text, passes):
    matcher = Matcher(5.0)
    assert check_of(check, "here").passes([text], matcher) == [passes]
    matcher.close()


def test_json_that_is_made_to_hang():
    started = time.perf_counter()
    for text in ("{" * 50_000, '{"a":' * 20_000, "[" * 50_000, "{}" * 10):
        assert field_of(json_in(text), "tax") is None
    assert time.perf_counter() - started < 1.0


def test_a_pattern_that_takes_for_ever(rules):
    reward = rules("- matches: (a+)+$", on_error="skip", options={"deadline": 0.3})
    scored = reward(batch_of("a" * 40 + "b", "aa"))
    assert scored.failed[0][0] == 0
    assert "the pattern '(a+)+$': no answer within 0.3 seconds" in scored.failed[0][1]
    assert float(scored.values[1]) == 1.0
    raising = rules("- matches: (a+)+$", "other.yaml", options={"deadline": 0.3})
    with pytest.raises(RewardError, match="no answer within"):
        raising(batch_of("a" * 40 + "b"))


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("- contain: tax", r"rule 1: unknown key 'contain'\n.*did you mean 'contains'"),
        ("- contains: tax\n- name: x", r"rule 2: it has no check\n.*one of: contains, matches"),
        ("- {contains: a, matches: b}", r"has 2 checks \(contains, matches\)"),
        ("- matches: '('", "rule 1, matches: '\\(' is no pattern"),
        ("- max_words: many", "'many' is no number of words"),
        ("- contains: ''", "'' is no text"),
        ("- json_field: a..b", "'a..b' is no path"),
        ("- json_field: {path: a, typ: number}", r"unknown key 'typ'\n.*did you mean 'type'"),
        ("- json_field: {path: a, type: numbr}", r"unknown type 'numbr'\n.*did you mean 'number'"),
        ("- {contains: a, weight: -1}", "weight is -1"),
        ("- {contains: a, required: 1}", "required is 1"),
        ("- not: tax", r"rule 1, not: 'tax' is no check"),
        ("- any: []", "is no list of checks"),
        ("- not: {contian: a}", r"unknown key 'contian'\n.*did you mean 'contains'"),
        ("- tax", "'tax' is no rule"),
        ("contains: tax", "expected a list of rules, found dict"),
        ("", "found nothing"),
        ("- [", "not valid YAML"),
        ("- {contains: a, name: x}\n- {contains: b, name: x}", "two rules are called 'x'"),
    ],
)
def test_a_wrong_file(rules, text, message):
    with pytest.raises(ConfigError, match=message):
        rules(text)


def test_a_file_that_is_not_there(rules, tmp_path):
    rules(QUOTE)
    with pytest.raises(ConfigError, match=r"no such file: .*qote\.yaml\n.*did you mean 'quote\.yaml'"):
        load_reward(str(tmp_path / "qote.yaml"))
    with pytest.raises(ConfigError, match=r"unknown option 'timeout'\n.*deadline"):
        rules(QUOTE, options={"timeout": 1})
