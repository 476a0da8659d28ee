"""The pages of a cache as the host sees them: which are free, who shares which, which hold the start of a known text."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence


class PagePool:
    """Pages by number, counted references.

    A full page of a prompt is found again by what it holds: the tokens on it after the page before it. (The key names that
    page itself, not a hash of its text: whoever holds a page holds all pages before it, so the name stays true.)

    Args:
        pages: how many there are.
        size: tokens on a page.
    """

    def __init__(self, pages: int, size: int) -> None:
        self.pages, self.size = pages, size
        self._free = list(range(pages - 1, -1, -1))
        self._references = [0] * pages
        self._known: dict[tuple[int, tuple[int, ...]], int] = {}
        self._key_of: dict[int, tuple[int, tuple[int, ...]]] = {}

    @property
    def free(self) -> int:
        return len(self._free)

    def needed(self, tokens: int) -> int:
        """Pages that so many tokens fill."""
        return -(-tokens // self.size)

    def take(self, count: int) -> list[int]:
        """So many free pages, each referenced once. There must be enough."""
        taken = [self._free.pop() for _ in range(count)]
        for page in taken:
            self._references[page] = 1
        return taken

    def share(self, pages: Sequence[int]) -> None:
        """One more reference to each."""
        for page in pages:
            self._references[page] += 1

    def give(self, pages: Sequence[int]) -> None:
        """One reference less to each; what nobody holds is free again."""
        for page in pages:
            self._references[page] -= 1
            if not self._references[page]:
                key = self._key_of.pop(page, None)
                if key is not None:
                    del self._known[key]
                self._free.append(page)

    def shared(self, pages: Sequence[int]) -> int:
        """How many of a holder's pages, from the first on, someone else holds too."""
        # Whoever holds a page holds all before it, so the references never rise along them.
        return bisect_left(pages, True, key=lambda page: self._references[page] < 2)

    def find(self, tokens: Sequence[int]) -> list[int]:
        """The pages that hold the longest known start of these tokens (full pages only); no reference is taken."""
        found: list[int] = []
        for start in range(0, len(tokens) - self.size + 1, self.size):
            page = self._known.get((found[-1] if found else -1, tuple(tokens[start : start + self.size])))
            if page is None:
                break
            found.append(page)
        return found

    def remember(self, tokens: Sequence[int], pages: Sequence[int]) -> None:
        """These pages hold these tokens: full ones can be found from now on, until they are given back."""
        before = -1
        for page, start in zip(pages, range(0, len(tokens) - self.size + 1, self.size), strict=False):
            key = (before, tuple(tokens[start : start + self.size]))
            if key not in self._known:
                self._known[key] = page
                self._key_of[page] = key
            elif self._known[key] != page:
                return  # another page is known for the same text; what follows would hang on this one
            before = page
