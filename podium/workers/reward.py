"""A reward model as a role: it scores responses, and can be trained from preferences."""

from __future__ import annotations

from typing import Any

from podium.controller.dispatch import dispatch
from podium.core.batch import Batch
from podium.core.errors import RewardError, did_you_mean
from podium.workers.base import TrainedRole


class RewardWorker(TrainedRole):
    """Scores whole responses.

    Args:
        tokenizer: the reward model's own. Where it differs from the policy's, texts are tokenised anew.
        policy_tokenizer: the tokenizer of the batches that arrive.
    """

    def __init__(self, engine: Any, *, tokenizer: Any, policy_tokenizer: Any = None, **trained: Any) -> None:
        super().__init__(engine, **trained)
        self.tokenizer, self.policy_tokenizer = tokenizer, policy_tokenizer
        self.head_names: list[str] = engine.model.head_names
        # An encoder's tokenizer frames a pair of texts with tokens of its own; one without an end token can close nothing.
        self._pairs = tokenizer.eos_token_id is None or None not in (tokenizer.cls_token_id, tokenizer.sep_token_id)
        self._same = policy_tokenizer is None or tokenizer.get_vocab() == policy_tokenizer.get_vocab()

    @dispatch("rows")
    def score(self, batch: Batch, name: str = "rewards", head: str | None = None) -> Batch:
        """The model's score of each row's prompt and response, as the sequence column `name`.

        A model with several heads gives one of them (`head`), or all as `scores.<head>` where `name` is "scores".
        A decoder was trained on answers that end: a response that was cut is closed with the end token before it is judged.
        Raises RewardError where a row is longer than the model's tokenizer allows; or where there are several heads and
        one score is asked for without saying which.
        """
        scored = self._closed(batch) if self._same else self._retokenised(batch)
        names = self.head_names
        if head is not None and head not in names:
            raise RewardError(f"the reward model has no head '{head}'", where="score", remedy=did_you_mean(head, names))
        if len(names) > 1 and head is None and name != "scores":
            raise RewardError(
                f"the reward model has several heads ({', '.join(names)}), and one score was asked for",
                where="score",
                remedy='say which: RewardStage(models=[model.head("...")]), score(batch, head="..."); '
                'or take them all: score(batch, name="scores")',
            )
        scores = self.engine.compute(scored, ("scores",))
        if len(names) > 1:
            return scores if head is None else Batch({name: scores[f"scores.{head}"]})
        return Batch({name: scores["scores"]})

    @dispatch("rows")
    def get_reward(self, batch: Batch) -> Batch:
        """The same as `score`, by the name that other programs use."""
        return self.score(batch)

    def _closed(self, batch: Batch) -> Batch:
        if self._pairs:
            return batch.select("prompt_ids", "response_ids")
        end = self.tokenizer.eos_token_id
        rows = [row if row[-1:] == [end] else [*row, end] for row in batch["response_ids"].to_list()]
        return Batch({"prompt_ids": batch["prompt_ids"], "response_ids": rows})

    def _retokenised(self, batch: Batch) -> Batch:
        """Prompt and response through text into this model's tokens. The policy's special tokens are left out."""
        columns = (batch["prompt_ids"], batch["response_ids"])
        texts = [self.policy_tokenizer.batch_decode(ids.to_list(), skip_special_tokens=True) for ids in columns]
        rows = [(self._pair if self._pairs else self._continued)(*row) for row in zip(*texts, strict=True)]
        most, longest = self.tokenizer.model_max_length, max((len(p) + len(r) for p, r in rows), default=0)
        if longest > most:
            raise RewardError(
                f"a prompt and its response are {longest} tokens for the reward model, which takes {most}",
                where="reward",
                remedy="lower rollout.max_new_tokens, shorten the prompts, or use a reward model with a longer context",
            )
        return Batch({"prompt_ids": [p for p, _ in rows], "response_ids": [r for _, r in rows]})

    def _continued(self, prompt: str, response: str) -> tuple[list[int], list[int]]:
        """For a decoder: one text goes on from the other; its begin and end tokens stand around both."""
        first, last = (self.tokenizer(text, add_special_tokens=False)["input_ids"] for text in (prompt, response))
        bos = self.tokenizer.bos_token_id
        return ([bos] if bos is not None else []) + first, [*last, self.tokenizer.eos_token_id]

    def _pair(self, prompt: str, response: str) -> tuple[list[int], list[int]]:
        """For an encoder: the tokenizer's own pair, cut where its types say; without types the model sees no border."""
        pair = self.tokenizer(prompt, response)
        ids, types = pair["input_ids"], pair.get("token_type_ids", [])
        cut = types.index(1) if 1 in types else len(ids)
        return ids[:cut], ids[cut:]
