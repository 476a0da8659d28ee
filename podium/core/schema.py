"""Every column a batch may carry: its kind, dtype, unit and meaning.

Three kinds. `token`: one value per token, ragged (values and offsets). `sequence`: one value per row, a tensor `[B]`.
`object`: one Python value per row. Token columns of one `axis` have the same lengths, row by row.
Users add their own with `schema.column(...)`; a data set's extra columns travel under `data.<name>`.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch

from podium.core.errors import BatchError, did_you_mean

Kind = Literal["token", "sequence", "object"]


@dataclass(frozen=True)
class Column:
    """What a column holds. `axis` is set for token columns only; `dtype` is None for objects."""

    name: str
    kind: Kind
    dtype: torch.dtype | None = None
    axis: str | None = None
    unit: str = ""
    meaning: str = ""


_COLUMNS: dict[str, Column] = {}


def column(
    name: str,
    kind: Kind,
    dtype: torch.dtype | None = None,
    *,
    axis: str | None = None,
    unit: str = "",
    meaning: str = "",
) -> Column:
    """Registers a column. A name that ends in `.*` stands for a family (`reward.*`).

    Raises BatchError when the name is registered with another definition, or a token column has no axis.
    """
    if (kind == "token") != (axis is not None):
        raise BatchError(f"column '{name}': a token column needs an axis, any other has none", where="schema.column")
    made = Column(name, kind, dtype, axis, unit, meaning)
    if _COLUMNS.get(name, made) != made:
        raise BatchError(f"column '{name}' is registered already, as {_COLUMNS[name]}", where="schema.column")
    _COLUMNS[name] = made
    return made


def lookup(name: str) -> Column:
    """The definition of a column. Raises BatchError, with the nearest name, for one that is not registered."""
    family, dot, _ = name.partition(".")
    found = _COLUMNS.get(name) or (_COLUMNS.get(f"{family}.*") if dot else None)
    if found is None:
        raise BatchError(
            f"unknown column '{name}'",
            remedy=did_you_mean(name, _COLUMNS) + " A new one is registered with podium.core.schema.column(...).",
        )
    return found


def known() -> list[Column]:
    """All registered columns, by name."""
    return [_COLUMNS[name] for name in sorted(_COLUMNS)]


I64, F32, BOOL = torch.int64, torch.float32, torch.bool

column("prompt_ids", "token", I64, axis="prompt", unit="token id", meaning="the prompt, after the chat template")
column("response_ids", "token", I64, axis="response", unit="token id", meaning="what followed the prompt, all turns")
column("response_mask", "token", BOOL, axis="response", meaning="sampled by the policy (a fact of the rollout)")
column("loss_mask", "token", BOOL, axis="response", meaning="trained on")
column("rollout_log_probs", "token", F32, axis="response", unit="nat", meaning="log-prob when sampled (behaviour policy)")
column("old_log_probs", "token", F32, axis="response", unit="nat", meaning="log-prob under the actor before the update")
column("ref_log_probs", "token", F32, axis="response", unit="nat", meaning="log-prob under the reference")
column("teacher_log_probs", "token", F32, axis="response", unit="nat", meaning="log-prob under the teacher (distillation)")
column("log_probs", "token", F32, axis="response", unit="nat", meaning="log-prob under the model that was asked")
column("entropy", "token", F32, axis="response", unit="nat", meaning="entropy of the next-token distribution")
column("values", "token", F32, axis="response", unit="reward", meaning="the critic's value before each token")
column("returns", "token", F32, axis="response", unit="reward", meaning="value targets")
column("advantages", "token", F32, axis="response", unit="reward", meaning="advantage of each token")
column("token_rewards", "token", F32, axis="response", unit="reward", meaning="reward at each token, KL penalty included")
column("step_rewards", "token", F32, axis="response", unit="reward", meaning="step-wise rewards placed at their tokens")
column("token_costs", "token", F32, axis="response", unit="cost", meaning="cost at each token")
column("cost_values", "token", F32, axis="response", unit="cost", meaning="the cost critic's value before each token")
column("cost_returns", "token", F32, axis="response", unit="cost", meaning="cost value targets")
column("cost_advantages", "token", F32, axis="response", unit="cost", meaning="cost advantage of each token")
column("reward_advantages", "token", F32, axis="response", unit="reward", meaning="advantage before costs are set against it")
column("importance_weights", "token", F32, axis="response", meaning="a token's training policy over its rollout policy")
column("corrected_mask", "token", BOOL, axis="response", meaning="loss_mask without what an importance correction leaves out")
column(
    "loss_weights", "token", F32, axis="response", meaning="a token's share of the minibatch's loss; sums to 1 in token_mean"
)
column("rewards", "sequence", F32, unit="reward", meaning="the reward of the whole response, all sources fused")
column("reward.*", "sequence", F32, unit="reward", meaning="what one reward source gave, before its weight")
column(
    "shaped_rewards", "sequence", F32, unit="reward", meaning="sum of a response's token rewards: step-wise, KL penalty, reward"
)
column("baseline_rewards", "sequence", F32, unit="reward", meaning="reward of the greedy response to the same prompt (ReMax)")
column("costs", "sequence", F32, unit="cost", meaning="the cost of the whole response, all sources fused")
column("cost.*", "sequence", F32, unit="cost", meaning="what one cost source gave, before its weight")
column("scores.*", "sequence", F32, unit="reward", meaning="the score of one head of a reward model that has several")
column("head", "sequence", I64, meaning="which head of a reward model a preference pair is about")
column("label", "sequence", BOOL, meaning="the response is desirable (KTO)")
column("reference_point", "sequence", F32, unit="nat", meaning="KTO's z_0: the KL that a response's log-ratio is held against")
column("row_mask", "sequence", BOOL, meaning="rows that are trained on, for losses of whole rows")
column("scores", "sequence", F32, unit="reward", meaning="a reward model's score")
column("group_id", "sequence", I64, meaning="rows that answer the same prompt share it")
column("occurrence", "sequence", I64, meaning="how often the data set's row came before in the same step")
column("pair_id", "sequence", I64, meaning="rows of one preference pair share it")
column("chosen", "sequence", BOOL, meaning="the preferred row of its pair")
column("row_index", "sequence", I64, meaning="the data set's row")
column("sample_seed", "sequence", I64, meaning="the sample's own seed")
column("policy_version", "sequence", I64, unit="updates", meaning="the actor's version that finished the sample")
column("sequence_weights", "sequence", F32, meaning="a sequence's share of the minibatch's loss")
column("finish_reason", "object", meaning="why generation ended: stop, length, aborted")
column("prompt", "object", meaning="the prompt as the data set gave it: text or chat messages")
column("response", "object", meaning="the response's text, special tokens left out")
column("data.*", "object", meaning="a data set's extra column")
