"""Which token completes which character of a response's text: from what the tokens decode to, never by tokenising anew."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from typing import Any

UNREADABLE = "\ufffd"
"""What a decoder writes for bytes that are no character, or not yet one."""


def completing_tokens(ids: Sequence[int], tokenizer: Any, left_out: Collection[int]) -> tuple[str, list[int]]:
    """The text of the tokens (special ones left out), and for each character the last token that overlaps it.

    A character whose bytes are spread over tokens belongs to the last of them; special tokens inside the response hold no
    character. Tokens are decoded in small windows, each after the tokens before it (a token's text depends on them); a
    tokenizer for which the windows do not add up to the whole text is decoded prefix by prefix, which is slower.

    Args:
        left_out: ids that `skip_special_tokens` drops (`tokens_left_out`).
    """
    kept = [i for i, token in enumerate(ids) if token not in left_out]
    shown = [ids[i] for i in kept]

    def decode(start: int, end: int) -> str:
        return tokenizer.decode(shown[start:end], skip_special_tokens=True)

    text = decode(0, len(shown))
    found = _by_windows(len(shown), decode)
    if found is None or found[0] != text:
        prefixes = [decode(0, end + 1) for end in range(len(shown))]
        found = text, _completed(prefixes, text, 0)
    return text, [kept[i] for i in found[1]]


def tokens_left_out(tokenizer: Any) -> set[int]:
    """Ids of tokens that `skip_special_tokens` drops: not only those with a role (pad, eos)."""
    added = {*getattr(tokenizer, "added_tokens_decoder", {}), *tokenizer.all_special_ids}
    return {token for token in added if tokenizer.decode([token], skip_special_tokens=True) == ""}


def _by_windows(count: int, decode: Callable[[int, int], str]) -> tuple[str, list[int]] | None:
    """Text and tokens by windows that end where the text so far is whole; None where text was taken back."""
    text, tokens = "", list[int]()
    context, start = 0, 0  # the window's tokens are start..end, decoded after those from `context` on
    prefixes: list[str] = []
    before = ""
    for end in range(1, count + 1):
        now = decode(context, end)
        if not now.startswith(before):
            return None
        prefixes.append(now[len(before) :])
        if end < count and (not prefixes[-1] or prefixes[-1].endswith(UNREADABLE)):
            continue  # a character is not complete yet
        text += prefixes[-1]
        tokens += _completed(prefixes, prefixes[-1], start)
        context, start, prefixes = start, end, []
        before = decode(context, start)
    return text, tokens


def _completed(prefixes: Sequence[str], text: str, first: int) -> list[int]:
    """For each character of `text`, the token after which it stands for good; `prefixes[j]`: the text up to token first+j."""
    stable, agreed = [0] * len(prefixes), len(text)
    for j in range(len(prefixes) - 1, -1, -1):
        agreed = min(agreed, _common(prefixes[j], text))
        stable[j] = agreed
    tokens, j = list[int](), 0
    for at, character in enumerate(text):
        while stable[j] <= at:
            j += 1
        if character == UNREADABLE:  # it looks the same from its first byte on: its last token is that before the next one
            while j + 1 < len(prefixes) and len(prefixes[j + 1]) <= at + 1:
                j += 1
        tokens.append(first + j)
    return tokens


def _common(a: str, b: str) -> int:
    """The length of the common beginning."""
    if b.startswith(a):
        return len(a)
    return next((i for i, (x, y) in enumerate(zip(a, b, strict=False)) if x != y), min(len(a), len(b)))
