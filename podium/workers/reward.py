"""A reward model as a role: it scores responses, and can be trained from preferences."""

from __future__ import annotations

from typing import Any

from podium.controller.dispatch import dispatch
from podium.core.batch import Batch
from podium.engines.base import TrainEngine
from podium.workers.base import TrainedRole


class RewardWorker(TrainedRole):
    """Scores whole responses.

    Args:
        tokenizer: the reward model's own. Where it differs from the policy's, texts are tokenised anew.
        policy_tokenizer: the tokenizer of the batches that arrive.
    """

    def __init__(self, engine: TrainEngine, *, tokenizer: Any, policy_tokenizer: Any = None, **trained: Any) -> None:
        super().__init__(engine, **trained)
        self.tokenizer, self.policy_tokenizer = tokenizer, policy_tokenizer
        self._same = policy_tokenizer is None or tokenizer.get_vocab() == policy_tokenizer.get_vocab()

    @dispatch("rows")
    def score(self, batch: Batch, name: str = "rewards") -> Batch:
        """The model's score of each row's prompt and response, as the sequence column `name`.

        It was trained on answers that end: a response that was cut is closed with the end token before it is judged.
        """
        scored = self._closed(batch) if self._same else self._retokenised(batch)
        return Batch({name: self.engine.compute(scored, ("scores",))["scores"]})

    @dispatch("rows")
    def get_reward(self, batch: Batch) -> Batch:
        """The same as `score`, by the name that other programs use."""
        return self.score(batch)

    def _closed(self, batch: Batch) -> Batch:
        end = self.tokenizer.eos_token_id
        rows = [row if row[-1:] == [end] else [*row, end] for row in batch["response_ids"].to_list()]
        return Batch({"prompt_ids": batch["prompt_ids"], "response_ids": rows})

    def _retokenised(self, batch: Batch) -> Batch:
        """Prompt and response through text into this model's tokens; special tokens are the policy's own and are left out,
        an end token of this model closes each response."""
        ids = {}
        for column in ("prompt_ids", "response_ids"):
            texts = self.policy_tokenizer.batch_decode(batch[column].to_list(), skip_special_tokens=True)
            rows = [self.tokenizer(t, add_special_tokens=False)["input_ids"] for t in texts]
            ids[column] = [[*r, self.tokenizer.eos_token_id] for r in rows] if column == "response_ids" else rows
        bos = self.tokenizer.bos_token_id
        ids["prompt_ids"] = [([bos] if bos is not None else []) + r for r in ids["prompt_ids"]]
        return Batch(ids)
