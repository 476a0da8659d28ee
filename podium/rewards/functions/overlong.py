"""A soft punishment of responses that come near the longest length."""

from __future__ import annotations

from collections.abc import Sequence

from podium.core.errors import ConfigError
from podium.rewards.functions import BUILT_IN


@BUILT_IN.register("overlong")
class Overlong:
    """DAPO's soft overlong punishment (Yu et al. 2025, arXiv:2503.14476, equation 13), times `penalty`.

    With y tokens: 0 up to max_tokens - buffer_tokens; from there down to -1 at max_tokens, in a straight line; -1 beyond.

    Args:
        max_tokens: the longest response, in tokens (`rollout.max_new_tokens`).
        buffer_tokens: over so many tokens before it the punishment grows.
        penalty: its greatest size.
    """

    def __init__(self, max_tokens: int, buffer_tokens: int, penalty: float = 1.0) -> None:
        if not 0 < buffer_tokens <= max_tokens or penalty < 0:
            raise ConfigError(
                f"max_tokens={max_tokens}, buffer_tokens={buffer_tokens}, penalty={penalty}",
                where="reward 'overlong'",
                remedy="0 < buffer_tokens <= max_tokens, and penalty at least 0",
            )
        self.max_tokens, self.buffer_tokens, self.penalty = max_tokens, buffer_tokens, penalty

    def __call__(self, completion_ids: Sequence[Sequence[int]]) -> list[float]:
        return [self._score(len(ids)) for ids in completion_ids]

    def _score(self, tokens: int) -> float:
        over = tokens - (self.max_tokens - self.buffer_tokens)
        return -self.penalty * min(max(over / self.buffer_tokens, 0.0), 1.0)
