"""What a row costs a model to compute: attention grows with the square of its length, everything else with the length."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor


@dataclass(frozen=True)
class Work:
    """The cost of a row of n tokens, r of them predicted:

        token * n + predicted * r + pair * n^2 + near * m * (2 n - m), m = min(n, window)

    The last term is that of layers which see `window` tokens back. Whole numbers in a unit of the model's own
    (`models.work`), so that a sum does not depend on its order. The default counts tokens.
    """

    token: int = 1
    predicted: int = 0
    pair: int = 0
    near: int = 0
    window: int = 0

    def of(self, tokens: Tensor, responses: Tensor | int = 0) -> Tensor:
        """The cost of each row, int64, from its tokens and those of them that are predicted.

        A response that goes on from a prompt costs `of(both, response) - of(prompt)`: it sees the prompt's keys.
        """
        cost = self.token * tokens + self.predicted * responses + self.pair * tokens * tokens
        if not self.near:
            return cost
        near = tokens.clamp(max=self.window)
        return cost + self.near * near * (2 * tokens - near)
