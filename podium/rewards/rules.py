"""Business rules from a short YAML, as a reward: the weighted share of rules that a response passes."""

from __future__ import annotations

import json
import re
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import yaml

from podium.core.errors import ConfigError, did_you_mean
from podium.core.files import nearest_file
from podium.rewards.base import SampleFailure
from podium.rewards.functions import text_of
from podium.rewards.processes import CallFailure, DeadlinePool

Verdict = bool | SampleFailure


class RuleReward:
    """A function of TRL's signature: for each response the sum of the weights of rules passed, over that of all.

    The file is a list; each rule has one check (`contains`, `matches`, `json_field`, `min_words`, `max_words`, `not`, `any`,
    `all`) and may have `name`, `weight` (1), `required` (a response that fails it gets 0), `ignore_case`. Each rule's share of
    passes is a metric.

    Args:
        path: the YAML file.
        deadline: seconds for matching one pattern in one response, in a process of its own: a pattern may take for ever.

    Raises ConfigError (file, rule, nearest name) for a file that is no such list.
    """

    def __init__(self, path: str | Path, deadline: float = 1.0) -> None:
        self.__name__ = Path(path).stem
        self.rules = [_Rule(entry, str(path), i) for i, entry in enumerate(_entries(path))]
        names = [rule.name for rule in self.rules]
        for name in names:
            if names.count(name) > 1:
                raise ConfigError(f"two rules are called '{name}'", where=str(path), remedy="give one another name")
        self._matcher = Matcher(deadline)

    def __call__(
        self, completions: list[Any], log_metric: Callable[[str, float], None] = lambda name, value: None
    ) -> list[Any]:
        texts = [text_of(c) for c in completions]
        verdicts = [rule.check.passes(texts, self._matcher) for rule in self.rules]
        scores = []
        for row in zip(*verdicts, strict=True):
            failure = next((v for v in row if isinstance(v, SampleFailure)), None)
            scores.append(failure or self._score(row))
            for rule, passed in zip(self.rules, row, strict=True):
                if log_metric is not None and not isinstance(passed, SampleFailure):
                    log_metric(rule.name, float(passed))
        return scores

    def _score(self, passed: Sequence[Any]) -> float:
        if any(rule.required and not p for rule, p in zip(self.rules, passed, strict=True)):
            return 0.0
        total = sum(rule.weight for rule in self.rules)
        return sum(rule.weight for rule, p in zip(self.rules, passed, strict=True) if p) / total


class Matcher:
    """Searches for patterns in processes of its own, started when the first rule needs them."""

    def __init__(self, deadline: float) -> None:
        self.deadline = deadline
        self._pool: DeadlinePool | None = None

    def __call__(self, pattern: str, texts: Sequence[str], ignore_case: bool) -> list[Verdict]:
        if self._pool is None:
            self._pool = DeadlinePool("podium.rewards.rule_worker:search", 1, self.deadline)
        calls = [{"pattern": pattern, "text": text, "ignore_case": ignore_case} for text in texts]
        return [
            SampleFailure(f"the pattern {pattern!r}: {found}") if isinstance(found, CallFailure) else found
            for found in self._pool.map(calls)
        ]

    def close(self) -> None:
        if self._pool is not None:
            self._pool.close()


class Check(ABC):
    """One condition on a text."""

    @abstractmethod
    def passes(self, texts: Sequence[str], matcher: Matcher) -> list[Verdict]:
        """For each text: passed, failed, or could not be told."""


class _Plain(Check):
    def __init__(self, test: Callable[[str], bool]) -> None:
        self.test = test

    def passes(self, texts: Sequence[str], matcher: Matcher) -> list[Verdict]:
        return [self.test(text) for text in texts]


class _Matches(Check):
    def __init__(self, pattern: str, ignore_case: bool) -> None:
        self.pattern, self.ignore_case = pattern, ignore_case

    def passes(self, texts: Sequence[str], matcher: Matcher) -> list[Verdict]:
        return matcher(self.pattern, texts, self.ignore_case)


class _Combined(Check):
    def __init__(self, parts: Sequence[Check], decide: Callable[[Sequence[Any]], bool]) -> None:
        self.parts, self.decide = parts, decide

    def passes(self, texts: Sequence[str], matcher: Matcher) -> list[Verdict]:
        rows = zip(*(part.passes(texts, matcher) for part in self.parts), strict=True)
        return [next((v for v in row if isinstance(v, SampleFailure)), None) or self.decide(row) for row in rows]


class _Rule:
    def __init__(self, entry: Any, path: str, index: int) -> None:
        where = f"{path}, rule {index + 1}"
        if not isinstance(entry, Mapping):
            raise ConfigError(f"{entry!r} is no rule", where=where, remedy="write for example `- contains: tax`")
        known = [*CHECKS, "name", "weight", "required", "ignore_case"]
        for key in entry:
            if key not in known:
                raise ConfigError(f"unknown key '{key}'", where=where, remedy=did_you_mean(str(key), known))
        self.check = check_of(entry, where)
        kind = next(key for key in entry if key in CHECKS)
        self.name = str(entry.get("name") or f"{kind}_{index + 1}")
        self.weight, self.required = entry.get("weight", 1.0), entry.get("required", False)
        if isinstance(self.weight, bool) or not isinstance(self.weight, int | float) or not 0 < self.weight < float("inf"):
            raise ConfigError(f"weight is {self.weight!r}", where=where, remedy="a number above 0")
        for key in ("required", "ignore_case"):
            if not isinstance(entry.get(key, False), bool):
                raise ConfigError(f"{key} is {entry[key]!r}", where=where, remedy="true or false")


def check_of(entry: Mapping[str, Any], where: str) -> Check:
    """The one check of a rule. Raises ConfigError where there is none, or several."""
    kinds = [key for key in entry if key in CHECKS]
    if len(kinds) != 1:
        what = f"it has {len(kinds)} checks ({', '.join(kinds)})" if kinds else "it has no check"
        raise ConfigError(what, where=where, remedy="give it one of: " + ", ".join(CHECKS))
    kind = kinds[0]
    return CHECKS[kind](entry[kind], bool(entry.get("ignore_case", False)), f"{where}, {kind}")


def _contains(value: Any, ignore_case: bool, where: str) -> Check:
    words = value if isinstance(value, list) else [value]
    if not words or not all(isinstance(word, str | int | float) and str(word) for word in words):
        raise ConfigError(f"{value!r} is no text", where=where, remedy="a text, or a list of texts that must all be there")
    fold = str.casefold if ignore_case else str
    wanted = [fold(str(word)) for word in words]
    return _Plain(lambda text: all(word in fold(text) for word in wanted))


def _matches(value: Any, ignore_case: bool, where: str) -> Check:
    try:
        re.compile(value)
    except (re.error, TypeError, RecursionError) as error:
        raise ConfigError(f"{value!r} is no pattern: {error}", where=where, remedy="a regular expression of python") from None
    return _Matches(value, ignore_case)


def _words(compare: Callable[[int, int], bool]) -> Callable[[Any, bool, str], Check]:
    def make(value: Any, ignore_case: bool, where: str) -> Check:
        if isinstance(value, bool) or not isinstance(value, int) or value < 0:
            raise ConfigError(f"{value!r} is no number of words", where=where)
        return _Plain(lambda text: compare(len(text.split()), value))

    return make


TYPES: dict[str, Any] = {"number": (int, float), "text": str, "list": list, "mapping": dict, "boolean": bool}


def _json_field(value: Any, ignore_case: bool, where: str) -> Check:
    settings = value if isinstance(value, Mapping) else {"path": value}
    for key in settings:
        if key not in ("path", "type", "equals"):
            raise ConfigError(f"unknown key '{key}'", where=where, remedy=did_you_mean(str(key), ("path", "type", "equals")))
    path, kind = settings.get("path"), settings.get("type")
    if not isinstance(path, str) or not all(path.split(".")):
        raise ConfigError(f"{path!r} is no path", where=where, remedy="names with dots between, such as quote.tax")
    if kind is not None and kind not in TYPES:
        raise ConfigError(f"unknown type '{kind}'", where=where, remedy=did_you_mean(str(kind), TYPES))

    def test(text: str) -> bool:
        found = field_of(json_in(text), path)
        if found is None or (isinstance(found, bool) and kind == "number"):
            return False
        return (kind is None or isinstance(found, TYPES[kind])) and ("equals" not in settings or found == settings["equals"])

    return _Plain(test)


def json_in(text: str) -> Any:
    """The JSON value of a response: in its last fenced block, the whole text, or the first object in it; None: none."""
    fenced = re.findall(r"```(?:json)?\s*\n(.*?)```", text, re.DOTALL)
    for candidate in (*fenced[-1:], text):
        try:
            return json.loads(candidate)
        except (ValueError, RecursionError):
            pass
    at, decoder = -1, json.JSONDecoder()
    for _ in range(50):  # braces that begin no object; a response of nothing else must not take for ever
        at = text.find("{", at + 1)
        if at < 0:
            return None
        try:
            return decoder.raw_decode(text, at)[0]
        except (ValueError, RecursionError):
            continue
    return None


def field_of(value: Any, path: str) -> Any:
    """What stands at a dotted path (names of mappings, indices of lists), or None."""
    for name in path.split("."):
        if isinstance(value, dict):
            value = value.get(name)
        elif isinstance(value, list) and name.isdigit() and int(name) < len(value):
            value = value[int(name)]
        else:
            return None
    return value


def _not(value: Any, ignore_case: bool, where: str) -> Check:
    return _Combined([_nested(value, ignore_case, where)], lambda row: not row[0])


def _several(decide: Callable[[Sequence[Any]], bool]) -> Callable[[Any, bool, str], Check]:
    def make(value: Any, ignore_case: bool, where: str) -> Check:
        if not isinstance(value, list) or not value:
            raise ConfigError(f"{value!r} is no list of checks", where=where)
        return _Combined([_nested(part, ignore_case, where) for part in value], decide)

    return make


def _nested(value: Any, ignore_case: bool, where: str) -> Check:
    if not isinstance(value, Mapping):
        raise ConfigError(f"{value!r} is no check", where=where, remedy="write for example {contains: tax}")
    for key in value:
        if key not in CHECKS and key != "ignore_case":
            raise ConfigError(f"unknown key '{key}'", where=where, remedy=did_you_mean(str(key), [*CHECKS, "ignore_case"]))
    return check_of({"ignore_case": ignore_case, **value}, where)


CHECKS: dict[str, Callable[[Any, bool, str], Check]] = {
    "contains": _contains,
    "matches": _matches,
    "json_field": _json_field,
    "min_words": _words(lambda count, bound: count >= bound),
    "max_words": _words(lambda count, bound: count <= bound),
    "not": _not,
    "any": _several(any),
    "all": _several(all),
}


def _entries(path: str | Path) -> list[Any]:
    path = Path(path)
    if not path.is_file():
        raise ConfigError(f"no such file: {path}", where="rewards", remedy=nearest_file(path, path.suffix))
    try:
        entries = yaml.safe_load(path.read_text(encoding="utf-8"))
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        raise ConfigError(f"not valid YAML: {error}", where=str(path)) from None
    if not isinstance(entries, list) or not entries:
        found = type(entries).__name__ if entries is not None else "nothing"
        raise ConfigError(f"expected a list of rules, found {found}", where=str(path), remedy="write `- contains: tax`")
    return entries
