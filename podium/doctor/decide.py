"""Which cause a difference between training's and the rollout's log-probs has: a pure function of replays' results.

A replay is the same tokens scored once more under one hypothesis: another temperature, a truncated distribution, older weights,
one old tensor, another prompt. The right hypothesis gives back the numbers that the run recorded; the others do not.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Literal

import torch
from torch import Tensor

Side = Literal["rollout", "training"]
Rows = list[Tensor]
"""Log-probs of each row's response tokens, fp32."""

CAUSES = {
    "none": "training and rollout agree",
    "temperature": "the temperature is applied on one side only, or differs",
    "truncation": "log-probs are those of a truncated distribution (top-k, top-p, min-p)",
    "stale weights": "the rollout used weights of an older version",
    "partial weights": "part of the weights was not handed over",
    "adapter": "the LoRA adapter was not handed over",
    "template": "the two sides saw different prompts (template, special tokens)",
    "retokenisation": "the tokens that are trained on are not those that were sampled",
    "precision": "the difference is of the size of rounding in another dtype",
    "kernel": "with the same weights and tokens, one engine computes other numbers",
    "unknown": "no replay gives the recorded numbers",
}
EXACT = 0.15
"""A hypothesis explains a side where it leaves less than this share of the difference (or no more than noise)."""
CLEAN_TOKEN = 0.02
"""Nats by which a single token may differ where both sides agree (fp32; in 16 bits, ten times the noise)."""


@dataclass(frozen=True)
class Hypothesis:
    """What one side would have recorded, had `detail` been so. Lower `rank`: simpler, wins among equals."""

    cause: str
    detail: str
    values: Rows
    rank: int = 0


@dataclass(frozen=True)
class Evidence:
    """What was recorded, and the replays.

    Attributes:
        rollout: log-probs that the rollout recorded.
        training: those that training computed at the time, of the rows `measured`.
        replay: by the training engine, now, with the weights that the samples claim, at the run's temperature; None where
            those weights are not there any more.
        oracle: the same by the `hf` oracle.
        hypotheses: further replays.
        noise: mean difference that rounding explains, nats a token, in the run's own dtype.
        low_precision: mean difference of the oracle in 16 bits and in fp32, where it was measured.
        live_gap: mean difference of a fresh rollout's log-probs, now, from the oracle's of the same tokens.
        reencoded: rows whose tokens are others after decoding and encoding their text.
    """

    rollout: Rows
    training: Rows | None = None
    replay: Rows | None = None
    oracle: Rows | None = None
    hypotheses: Sequence[Hypothesis] = ()
    noise: float = 1e-4
    low_precision: float | None = None
    live_gap: float | None = None
    reencoded: int = 0
    measured: Sequence[int] | None = None
    """None: all rows."""

    def of_measured(self, rows: Rows) -> Rows:
        """Those rows that training was recorded of."""
        return rows if self.measured is None else [rows[i] for i in self.measured]

    def on_measured(self) -> Evidence:
        """The same of the measured rows alone."""
        pick = self.of_measured
        return replace(
            self,
            rollout=pick(self.rollout),
            replay=pick(self.replay) if self.replay is not None else None,
            oracle=pick(self.oracle) if self.oracle is not None else None,
            hypotheses=[replace(h, values=pick(h.values)) for h in self.hypotheses],
            measured=None,
        )


@dataclass(frozen=True)
class Diagnosis:
    """The likeliest cause; `gap` is the mean |difference| in nats a token, `left` what the cause does not explain."""

    cause: str
    side: Side | None
    detail: str
    gap: float
    left: float | None = None
    table: list[tuple[str, str, float]] = field(default_factory=list)
    """(cause, detail, what is left) of each hypothesis, best first."""

    def __str__(self) -> str:
        where = f" ({self.side} side)" if self.side else ""
        more = f": {self.detail}" if self.detail else ""
        return f"{self.cause}{where}{more}"


def gap(a: Rows, b: Rows) -> float:
    """Mean |difference| over all tokens, nats."""
    parts = [(x.double() - y.double()).abs() for x, y in zip(a, b, strict=True)]
    every = torch.cat(parts) if parts else torch.zeros(0)
    return float(every.nan_to_num(nan=100.0).mean()) if len(every) else 0.0


def decide(evidence: Evidence) -> Diagnosis:
    """The cause of the difference between the recorded log-probs of both sides."""
    if evidence.replay is None:
        return _without_weights(evidence)
    kernel = _kernel_of_training(evidence)
    if kernel is not None:
        return kernel
    worst: list[tuple[float, Side, Rows]] = [(gap(evidence.rollout, evidence.replay), "rollout", evidence.rollout)]
    if evidence.training is not None:
        worst.append((gap(evidence.training, evidence.of_measured(evidence.replay)), "training", evidence.training))
    distance, side, recorded = max(worst, key=lambda item: item[0])
    if distance <= 3 * evidence.noise:
        return Diagnosis("none", None, "", distance)
    return _explain(evidence.on_measured() if side == "training" else evidence, side, recorded, distance)


def _explain(evidence: Evidence, side: Side, recorded: Rows, distance: float) -> Diagnosis:
    assert evidence.replay is not None
    tried = sorted(((gap(recorded, h.values), h.rank, h) for h in evidence.hypotheses), key=lambda item: item[:2])
    table = [(h.cause, h.detail, left) for left, _, h in tried]
    good = [item for item in tried if item[0] <= max(3 * evidence.noise, EXACT * distance)]
    if good:
        # Among those that explain it as well as the best, the simplest.
        near = [item for item in good if item[0] <= 2 * good[0][0] + evidence.noise]
        left, _, best = min(near, key=lambda item: (item[1], item[0]))
        return Diagnosis(best.cause, side, best.detail, distance, left, table)
    prefix = _clean_prefix(recorded, evidence.replay, evidence.noise)
    if prefix:
        more = f"; {evidence.reencoded} rows change when their text is encoded again" if evidence.reencoded else ""
        return Diagnosis("retokenisation", side, prefix + more, distance, None, table)
    if evidence.low_precision and 0.2 * evidence.low_precision <= distance <= 3 * evidence.low_precision:
        detail = f"16 bits and fp32 differ by {evidence.low_precision:.2g} nats a token on these samples"
        return Diagnosis("precision", side, detail, distance, None, table)
    if evidence.live_gap is not None and evidence.live_gap > max(3 * evidence.noise, 0.2 * distance):
        detail = f"a fresh rollout with the same weights differs from the oracle by {evidence.live_gap:.2g} nats a token"
        return Diagnosis("kernel", "rollout", detail, distance, None, table)
    if evidence.live_gap is not None and side == "rollout":
        detail = "a fresh rollout agrees with training, the recorded one did not: its weights were others than it says"
        return Diagnosis("stale weights", side, detail, distance, None, table)
    return Diagnosis("unknown", side, "", distance, None, table)


def _kernel_of_training(evidence: Evidence) -> Diagnosis | None:
    """The training engine and the oracle differ on the same weights and tokens, and the rollout goes with the oracle."""
    if evidence.oracle is None or evidence.replay is None:
        return None
    apart = gap(evidence.replay, evidence.oracle)
    if apart <= max(5 * evidence.noise, 2 * (evidence.low_precision or 0.0)):
        return None
    if gap(evidence.rollout, evidence.oracle) < EXACT * apart + 3 * evidence.noise:
        detail = f"training and the oracle differ by {apart:.2g} nats a token on the same weights"
        return Diagnosis("kernel", "training", detail, apart)
    return None


def _without_weights(evidence: Evidence) -> Diagnosis:
    """Only what both sides recorded, and whether the engines agree now."""
    if evidence.training is None:
        return Diagnosis(
            "unknown", None, "training's log-probs were not recorded, and these weights are not there any more", 0.0
        )
    evidence = evidence.on_measured()
    assert evidence.training is not None
    distance = gap(evidence.rollout, evidence.training)
    if distance <= 3 * evidence.noise:
        return Diagnosis("none", None, "", distance)
    return _explain(replace(evidence, replay=evidence.training, training=None), "rollout", evidence.rollout, distance)


def _clean_prefix(recorded: Rows, replay: Rows, noise: float) -> str:
    """Says so where rows agree up to a token and differ from there on: the tokens themselves are others."""
    bound = max(CLEAN_TOKEN, 10 * noise)
    first_bad, clean_rows = [], 0
    for a, b in zip(recorded, replay, strict=True):
        bad = ((a - b).abs() > bound).nonzero()
        if not len(bad):
            clean_rows += 1
        else:
            first_bad.append(int(bad[0]))
    if not first_bad:
        return ""
    late = [at for at in first_bad if at >= 1]
    # A cause in the weights or the sampling shows from the first token on, in nearly every row.
    if len(late) + clean_rows < 0.75 * len(recorded) or _agreement(recorded, replay, first_bad, bound) > 2 * noise:
        return ""
    middle = sorted(late)[len(late) // 2] if late else 0
    return (
        f"{len(first_bad)} of {len(recorded)} rows agree up to one token (token {middle} in the middle one) and differ after it"
    )


def _agreement(recorded: Rows, replay: Rows, first_bad: list[int], bound: float) -> float:
    """Mean |difference| of the tokens before each row's first bad one."""
    parts = []
    for a, b in zip(recorded, replay, strict=True):
        difference = (a - b).abs()
        bad = (difference > bound).nonzero()
        parts.append(difference[: int(bad[0])] if len(bad) else difference)
    every = torch.cat(parts)
    return float(every.mean()) if len(every) >= len(first_bad) else float("inf")
