"""The actor: trains and generates, over one set of weights."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

from podium.algorithms.base import Loss
from podium.controller.dispatch import dispatch, number_prompts
from podium.core.batch import Batch
from podium.core.errors import ConfigError
from podium.core.metrics import Metrics
from podium.core.seeding import derive_seed
from podium.engines.base import Request, RolloutEngine, SamplingParams, TrainEngine
from podium.engines.rollout.generate import generate
from podium.hybrid.engine import HandOver
from podium.workers.base import TrainedRole
from podium.workers.rollout import RowExchange

Progress = Callable[[int, int, int], None]


def log_probs_as(engine: TrainEngine, batch: Batch, name: str) -> Batch:
    """The engine's log-probs of the responses, as the one column `name`."""
    return Batch({name: engine.compute(batch, ("log_probs",))["log_probs"]})


class ActorWorker(TrainedRole):
    """The policy: a train engine and a rollout engine over the same parameters.

    After every update the rollout engine takes the new version (`update_weights`), so no sample is drawn from older
    weights than its `policy_version` says.
    """

    def __init__(
        self, engine: TrainEngine, rollout: RolloutEngine | None, sampling: SamplingParams, tokenizer: Any, **trained: Any
    ) -> None:
        super().__init__(engine, **trained)
        self.rollout, self.sampling, self.tokenizer = rollout, sampling, tokenizer
        self.calls = 0
        self.hand_over: HandOver | None = None
        """Moves the weights to the rollout engine, where that has others than the train engine's own."""
        self.exchange: RowExchange | None = None
        """Deals rows among the workers, where several generate with one copy of the model."""

    @dispatch("prompts")
    def generate_sequences(
        self,
        prompts: Batch,
        *,
        group_size: int = 1,
        step: int | None = None,
        round: int = 0,
        temperature: float | None = None,
        on_progress: Progress | None = None,
    ) -> Batch:
        """Samples `group_size` responses to each prompt.

        Args:
            prompts: with `prompt_ids`; other columns travel along.
            group_size: responses per prompt; they share a `group_id`.
            step: what the samples' seeds are derived from, besides the run's seed, the row and the index in the group;
                by default the number of such calls so far.
            round: further rollouts of one step are numbered, so that a prompt that comes again is answered anew.
            temperature: instead of the role's own, for measuring (0 is greedy): training's log-probs are at the role's.

        Returns:
            `len(prompts) * group_size` rows, a group's together, with `response_ids`, `response_mask`, `loss_mask`,
            `rollout_log_probs`, `finish_reason`, `policy_version`, `group_id`, `sample_seed`, and `response` (text).
        """
        if self.rollout is None:
            raise RuntimeError("this actor was built without a rollout engine")
        if step is None:  # a step that is given counts nothing: one that broke off leaves no trace
            step, self.calls = self.calls, self.calls + 1
        batch = number_prompts(prompts).repeat(group_size)
        rows = batch["row_index" if "row_index" in batch else "group_id"].tolist()
        # A row that a step takes twice (at an epoch's end) goes on counting.
        firsts = (batch["occurrence"] * group_size).tolist()
        again = (round,) if round else ()
        seeds = [
            derive_seed(self.seed, "rollout", step, row, first + i % group_size, *again)
            for i, (row, first) in enumerate(zip(rows, firsts, strict=True))
        ]
        batch = batch.drop("occurrence").with_columns({"sample_seed": seeds})
        sampling = self.sampling if temperature is None else replace(self.sampling, temperature=temperature)
        run = generate if self.exchange is None else self.exchange.generate
        out = run(self.rollout, batch, sampling, on_progress=on_progress)
        text = self.tokenizer.batch_decode(out["response_ids"].to_list(), skip_special_tokens=True)
        return out.with_columns({"response": text})

    @dispatch("broadcast")
    def check_prompt(self, prompt_ids: Sequence[int]) -> None:
        """Raises RolloutError where no response to this prompt could be generated (too long for the model or the cache)."""
        if self.rollout is not None:
            self.rollout.abort(self.rollout.submit(Request(tuple(prompt_ids), self.sampling)))

    @dispatch("broadcast")
    def training_version(self) -> int:
        """Updates that the trained weights have had: what a sample's `policy_version` is held against."""
        return self.engine.policy_version

    @dispatch("rows")
    def compute_log_probs(self, batch: Batch, name: str = "old_log_probs") -> Batch:
        """Log-probs of the responses under the present weights, as the column `name` (nats, fp32)."""
        return log_probs_as(self.engine, batch, name)

    @dispatch("broadcast")
    def update_policy(self, batch: Batch, loss: Any = None) -> Metrics:
        """Updates the policy on `advantages` (and what else its loss names), then hands the weights to the rollout.

        `old_log_probs` are computed here where the loss needs them and the batch has none. Raises ConfigError where that is
        too late: the batch was sampled from older weights than the actor has now.
        """
        loss = loss or self.loss
        fresh = "policy_version" not in batch or bool((batch["policy_version"] == self.engine.policy_version).all())
        if loss is not None and loss.otherwise is not None and not (fresh and self._only_update(batch, loss)):
            loss = loss.otherwise
        if loss is not None and "old_log_probs" in loss.columns and "old_log_probs" not in batch:
            if not fresh:
                raise ConfigError(
                    f"the batch was sampled at version {int(batch['policy_version'].min())} of the actor, which is now at "
                    f"{self.engine.policy_version}, and has no old_log_probs",
                    where="update_policy",
                    remedy="before the first update: batch = batch.union(actor.compute_log_probs(batch))",
                )
            batch = batch.union(self.over_all_rows(batch, self.compute_log_probs))
        metrics = super().update(batch, loss)
        self._hand_over()
        return metrics

    def _only_update(self, batch: Batch, loss: Loss) -> bool:
        return "old_log_probs" not in batch and self.updates_on(batch, loss) == 1

    @dispatch("broadcast")
    def update(self, batch: Batch, loss: Any = None) -> Metrics:
        """Any other loss on the same weights (SFT)."""
        return self.update_policy(batch, loss)

    def _hand_over(self) -> None:
        if self.rollout is not None:
            if self.hand_over is not None:
                self.hand_over(self.engine.policy_version)
            self.rollout.update_weights(self.engine.policy_version)

    @dispatch("for_files")
    def state_dict(self) -> dict[str, Any]:
        return {"engine": self.engine.state_dict(), "calls": self.calls}

    @dispatch("broadcast")
    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.engine.load_state_dict(state["engine"])
        self.calls = state["calls"]
        self._hand_over()
