"""Stages around a rollout: groups without signal replaced, greedy baselines, the best and the worst as a pair."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from podium.core.batch import Batch
from podium.core.errors import ConfigError
from podium.stages.base import Stage, StepContext
from podium.stages.reward import RewardStage
from podium.stages.rollout import GENERATED, RolloutStage


class DynamicSamplingStage(Stage):
    """Rollout and reward until the step has its number of groups with signal (DAPO, Yu et al. 2025, arXiv:2503.14476, 3.2).

    A group whose rewards are all equal has advantages of 0: it is left out, and fresh prompts are rolled out in its place,
    until the step is full or `rounds` rollouts were made. What is above the step's number is dropped. A step in which no
    group has signal goes on with its first rollout, and teaches nothing.

    Args:
        rollout, reward: the two stages that this one stands for.
        rounds: rollouts in a step, at most; 1 leaves groups out and replaces none.
    """

    name = "dynamic_sampling"
    changes_rows = True

    def __init__(self, rollout: RolloutStage, reward: RewardStage, *, rounds: int = 4) -> None:
        self.rollout, self.reward, self.rounds = rollout, reward, rounds
        self.tokenizer = rollout.tokenizer
        self.reads = rollout.reads
        self.writes = (*rollout.writes, *reward.writes)
        self.roles = tuple(dict.fromkeys((*rollout.roles, *reward.roles)))

    def models(self) -> dict[str, Any]:
        return {**self.rollout.models(), **self.reward.models()}

    def settings(self) -> dict[str, Any]:
        return self.rollout.settings()

    def check_data(self, columns: Iterable[str]) -> None:
        self.reward.check_data(columns)

    def run(self, batch: Batch, context: StepContext) -> Batch:
        wanted, kept, first = len(batch), list[Batch](), None
        groups = rolled_out = made = 0
        for made in range(1, self.rounds + 1):
            prompts = batch if made == 1 else self._more(wanted - groups, context)
            now = replace(context, rollout_round=made - 1)
            with now.watch(self.rollout, prompts):
                rolled = self.rollout.run(prompts, now)
            with now.watch(self.reward, rolled):
                scored = self.reward.run(rolled, now)
            first = first or scored
            rolled_out += len(prompts)
            useful = _numbered(scored.index(with_signal(scored)), groups)
            kept.append(useful)
            groups += int(useful["group_id"].max()) + 1 - groups if len(useful) else 0
            if groups >= wanted or context.more_prompts is None:
                break
        context.metrics.add("sampling/rounds", made)
        context.metrics.add("sampling/signal_share", groups, rolled_out)
        context.metrics.add("sampling/groups", min(groups, wanted))
        assert first is not None
        return _first_groups(Batch.concatenate(kept), wanted) if groups else first

    def _more(self, groups: int, context: StepContext) -> Batch:
        assert context.more_prompts is not None
        return context.more_prompts(groups)

    def state_dict(self) -> dict[str, Any]:
        return self.reward.state_dict()

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.reward.load_state_dict(state)


def with_signal(batch: Batch) -> Tensor:
    """Bool `[B]`: rows of groups whose `rewards` are not all equal."""
    _, group = torch.unique(batch["group_id"], return_inverse=True)
    rewards, groups = batch["rewards"], int(group.max()) + 1 if len(batch) else 0
    low = torch.full((groups,), float("inf")).scatter_reduce(0, group, rewards, "amin")
    high = torch.full((groups,), float("-inf")).scatter_reduce(0, group, rewards, "amax")
    return (high > low)[group]


def _numbered(batch: Batch, start: int) -> Batch:
    """Group ids counted from `start`, in the order in which the groups come."""
    _, group = torch.unique(batch["group_id"], return_inverse=True)
    return batch.with_columns({"group_id": group + start})


def _first_groups(batch: Batch, groups: int) -> Batch:
    return batch.index(batch["group_id"] < groups)


class GreedyBaselineStage(Stage):
    """ReMax's baseline (Li et al. 2023, arXiv:2310.10505): the reward of the greedy response to the same prompt.

    Each prompt is answered once more, greedily, and scored by the same rewards (running statistics do not learn from it).
    A prompt whose greedy response cannot be scored leaves the step, counted as `baseline/skipped`.

    Args:
        reward: the step's reward stage.
    """

    name = "baseline"
    reads = ("prompt_ids", "group_id")
    writes = ("baseline_rewards",)
    changes_rows = True

    def __init__(self, reward: RewardStage) -> None:
        if not reward.comparable:
            raise ConfigError(
                "a greedy response cannot be compared with rewards that are normalised by the batch or the group they are in",
                where="rewards",
                remedy="set normalize: none or running for every reward source",
            )
        self.reward = reward
        self.roles = tuple(dict.fromkeys(("actor", *reward.roles)))

    def run(self, batch: Batch, context: StepContext) -> Batch:
        groups, group = torch.unique(batch["group_id"], return_inverse=True)
        leaders = torch.full((len(groups),), len(batch)).scatter_reduce(0, group, torch.arange(len(batch)), "amin")
        prompts = batch.index(leaders).drop(*_of_responses(batch))
        greedy = context.roles["actor"].generate_sequences(
            prompts,
            group_size=1,
            step=context.step,
            temperature=0.0,
            on_progress=context.progress_of(self.label),
        )
        answered = greedy.result()
        with context.watch(self.reward, answered):
            scored = self.reward.score(answered, context, learn=False)
        found = torch.full((len(groups),), float("nan")).scatter(0, scored["group_id"], scored["rewards"])
        context.metrics.add("baseline/reward", float(scored["rewards"].sum()), len(scored))
        context.metrics.add("baseline/skipped", float(found.isnan().sum()))
        baseline = found[group]
        return batch.with_columns({"baseline_rewards": baseline}).index(~baseline.isnan())


def _of_responses(batch: Batch) -> list[str]:
    """The columns that belong to responses, not to prompts."""
    made = {*GENERATED, "rewards", "costs"}
    return [name for name in batch.names if name in made or name.startswith(("reward.", "cost."))]


class BestWorstStage(Stage):
    """Online DPO's pairs (Guo et al. 2024, arXiv:2402.04792): of each group the best response and the worst.

    The first of equals is taken; a group whose rewards are all equal gives no pair. A step without a pair teaches nothing.
    """

    name = "pairs"
    reads = ("group_id", "rewards")
    writes = ("pair_id", "chosen")
    changes_rows = True

    def run(self, batch: Batch, context: StepContext) -> Batch:
        groups = torch.unique(batch["group_id"]).tolist()
        rows: list[int] = []
        for group in groups:
            members = (batch["group_id"] == group).nonzero()[:, 0]
            rewards = batch["rewards"][members]
            if bool(rewards.max() > rewards.min()):
                rows += [int(members[rewards.argmax()]), int(members[rewards.argmin()])]
        pairs = len(rows) // 2
        context.metrics.add("pairs/share", pairs, len(groups))
        out = batch.index(torch.tensor(rows, dtype=torch.int64))
        if pairs:
            gap = out["rewards"][0::2] - out["rewards"][1::2]
            context.metrics.add("pairs/gap", float(gap.sum()), pairs)
        ids, chosen = torch.arange(pairs).repeat_interleave(2), torch.tensor([True, False]).repeat(pairs)
        return out.with_columns({"pair_id": ids, "chosen": chosen})
