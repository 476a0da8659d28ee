"""Every registered loss and every policy objective, by hand and by what must hold for all of them.

A new loss or objective fails here until it has a case in `CASES` and one in `HAND`.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import cache
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.testing import assert_close

from podium.algorithms import LOSSES, POLICY_LOSSES, Loss, token_weights
from podium.core.batch import Batch, Ragged
from podium.core.metrics import Metrics
from podium.core.settings import OptimizerSettings
from podium.engines.train import SingleDeviceEngine
from podium.models.heads import ActorModel, CriticModel, RewardModel
from podium.models.lm_head import base_of, own_attention
from tests.tiny import tiny_model

# Those of the package itself: other tests register their own while they run.
OBJECTIVES = sorted(name for name, o in POLICY_LOSSES.items() if o.function.__module__.startswith("podium."))
BUILDERS = sorted(name for name, b in LOSSES.items() if b.__module__.startswith("podium."))


@dataclass(frozen=True)
class Case:
    """A loss as a recipe builds it; `on_policy` where its metrics have a ratio."""

    builder: str
    model: str
    settings: dict[str, Any] = field(default_factory=dict)

    @property
    def loss(self) -> Loss:
        return LOSSES[self.builder](**self.settings)

    @property
    def on_policy(self) -> bool:
        return self.builder == "policy"


ALL_TERMS = {"entropy_coef": 0.01, "kl_coef": 0.1, "corrected": True}
CASES: dict[str, Case] = {
    "policy": Case("policy", "actor"),
    "policy, dual clip": Case("policy", "actor", {"dual_clip": 1.5, "clip_high": 0.28}),
    "policy, all terms": Case("policy", "actor", {"dual_clip": 3.0, "kl_estimator": "k2", **ALL_TERMS}),
    "policy, constant": Case("policy", "actor", {"reduction": "constant", "constant_length": 64}),
    "policy, sequence sums": Case("policy", "actor", {"reduction": "sequence_mean_token_sum"}),
    "policy, one update": Case("policy", "actor", {"one_update": True, "kl_coef": 0.1}),
    "gspo": Case("policy", "actor", {"objective": "gspo", "reduction": "sequence_mean_token_mean"}),
    "gspo, wide": Case("policy", "actor", {"objective": "gspo", "clip_low": 0.9, "clip_high": 9.0}),
    "gspo, all terms": Case("policy", "actor", {"objective": "gspo", **ALL_TERMS}),
    "gspo, one update": Case("policy", "actor", {"objective": "gspo", "one_update": True}),
    "cispo": Case("policy", "actor", {"objective": "cispo", "clip_low": 0.2, "clip_high": 0.2}),
    "cispo, all terms": Case("policy", "actor", {"objective": "cispo", **ALL_TERMS}),
    "cispo, one update": Case("policy", "actor", {"objective": "cispo", "one_update": True}),
    "reinforce": Case("policy", "actor", {"objective": "reinforce"}),
    "reinforce, one update": Case("policy", "actor", {"objective": "reinforce", "one_update": True, "corrected": True}),
    "value": Case("value", "critic", {"clip": 0.2}),
    "cost value": Case("value", "critic", {"values": "cost_values", "returns": "cost_returns"}),
    "supervised": Case("supervised", "actor"),
    "pairwise reward": Case("pairwise_reward", "reward", {"margin": 0.5}),
    "pairwise reward, heads": Case("pairwise_reward", "reward with heads", {"heads": True}),
    "dpo": Case("preference", "actor", {"kind": "dpo", "label_smoothing": 0.1}),
    "ipo": Case("preference", "actor", {"kind": "ipo", "beta": 0.3}),
    "kto": Case("kto", "actor", {"desirable_weight": 1.5}),
}


def test_every_loss_and_every_objective_has_a_case():
    assert {case.builder for case in CASES.values()} == set(BUILDERS)
    assert {case.settings.get("objective", "clip") for case in CASES.values() if case.on_policy} == set(OBJECTIVES)


# ------------------------------------------------------------------ by hand


def one_row(*values: float) -> Tensor:
    return torch.tensor([values], dtype=torch.float64)


def log(*values: float) -> Tensor:
    return one_row(*values).log()


TOKENS = {"old_log_probs": log(0.5, 0.5, 0.5, 0.5), "loss_mask": torch.tensor([[True, True, True, False]])}
# Ratios 2, 1/2, 1 and one outside the mask; their geometric mean is 1.
RATIOS = {"log_probs": log(1.0, 0.25, 0.5, 0.1)}
PAIR = {
    "pair_id": torch.tensor([3, 3]),
    "chosen": torch.tensor([True, False]),
    "loss_mask": torch.tensor([[True, True], [True, False]]),
    "ref_log_probs": torch.tensor([[-1.0, -1.0], [-1.0, -1.0]], dtype=torch.float64),
}
PAIR_OUT = {"log_probs": torch.tensor([[-0.5, -0.5], [-2.0, -9.0]], dtype=torch.float64)}  # log-ratios 1 and -1
LN2, LN_HALF = math.log(2), math.log(0.5)


def softplus(x: float) -> float:
    return math.log1p(math.exp(x))


@dataclass(frozen=True)
class ByHand:
    case: str
    outputs: dict[str, Tensor]
    columns: dict[str, Tensor]
    loss: list[float]
    """Of the entries in the mask."""
    gradient: list[float]
    """Of their sum, in the first output where the mask (or the row) counts."""


def advantages(*values: float) -> dict[str, Tensor]:
    return {**TOKENS, "advantages": one_row(*values)}


GOOD = {"entropy": one_row(1, 1, 1, 9), "log_probs": RATIOS["log_probs"]}
HAND: list[ByHand] = [
    ByHand("policy", RATIOS, advantages(1, 1, -3, 9), [-1.2, -0.5, 3.0], [0.0, -0.5, 3.0]),
    ByHand("policy, dual clip", RATIOS, advantages(-1, -1, 1, 9), [1.5, 0.8, -1.0], [0.0, 0.0, -1.0]),
    # weight * PPO - .01 * entropy + .1 * (log p - log ref)^2 / 2, where ref is a quarter
    ByHand(
        "policy, all terms",
        GOOD,
        {
            "old_log_probs": TOKENS["old_log_probs"],
            "advantages": one_row(1, 1, 1, 9),
            "importance_weights": one_row(2, 3, 4, 0),
            "corrected_mask": TOKENS["loss_mask"],
            "ref_log_probs": log(0.25, 0.25, 0.25, 0.25),
        },
        [-2.4 - 0.01 + 0.2 * LN2**2, -1.5 - 0.01, -4 - 0.01 + 0.05 * LN2**2],
        [0.2 * LN2, -1.5, -4.0 + 0.1 * LN2],
    ),
    ByHand("policy, one update", {"log_probs": log(1.0, 0.25, 0.5, 0.1)}, {
        "advantages": one_row(1, -2, 3, 9), "loss_mask": TOKENS["loss_mask"], "ref_log_probs": log(1.0, 0.25, 0.5, 0.1),
    }, [-1, 2, -3], [-1, 2, -3]),
    ByHand("policy, constant", RATIOS, advantages(1, 1, -3, 9), [-1.2, -0.5, 3.0], [0.0, -0.5, 3.0]),
    ByHand("policy, sequence sums", RATIOS, advantages(1, 1, -3, 9), [-1.2, -0.5, 3.0], [0.0, -0.5, 3.0]),
    # The sequence's ratio is 1: not clipped.
    ByHand("gspo", RATIOS, advantages(2, 2, 2, 9), [-2.0, -2.0, -2.0], [-2.0, -2.0, -2.0]),
    # Ratios 8, 1, 1: a geometric mean of 2, which is clipped at 1.0004 ...
    ByHand("gspo", {"log_probs": log(4.0, 0.5, 0.5, 0.1)}, advantages(1, 1, 1, 9), [-1.0004] * 3, [0.0] * 3),
    # ... for good advantages only.
    ByHand("gspo", {"log_probs": log(4.0, 0.5, 0.5, 0.1)}, advantages(-1, -1, -1, 9), [2.0] * 3, [2.0] * 3),
    ByHand("gspo, wide", {"log_probs": log(4.0, 0.5, 0.5, 0.1)}, advantages(1, 1, 1, 9), [-2.0] * 3, [-2.0] * 3),
    ByHand(
        "cispo",
        RATIOS,
        advantages(1, 1, -3, 9),
        [0.0, -0.8 * math.log(0.25), 3 * LN_HALF],
        [-1.2, -0.8, 3.0],
    ),
    ByHand("reinforce", RATIOS, advantages(1, 1, -3, 9), [0.0, -math.log(0.25), 3 * LN_HALF], [-1, -1, 3]),
    ByHand(
        "value",
        {"values": one_row(1.0, 3.0)},
        {"values": one_row(1.0, 1.0), "returns": one_row(2.0, 4.0), "loss_mask": torch.ones(1, 2).bool()},
        [0.5, 0.5 * 2.8**2],
        [-1.0, 0.0],
    ),
    ByHand(
        "cost value",
        {"values": one_row(1.0, 3.0)},
        {"cost_values": one_row(0, 0), "cost_returns": one_row(2, 5), "loss_mask": torch.ones(1, 2).bool()},
        [0.5, 2.0],
        [-1.0, -2.0],
    ),
    ByHand("supervised", RATIOS, {"loss_mask": TOKENS["loss_mask"]}, [0.0, math.log(4), LN2], [-1.0, -1.0, -1.0]),
    ByHand(
        "pairwise reward",
        {"scores": torch.tensor([2.0, 1.0], dtype=torch.float64)},
        {key: PAIR[key] for key in ("pair_id", "chosen")},
        [softplus(-0.5)],
        [-1 / (1 + math.exp(0.5))],
    ),
    ByHand(
        "pairwise reward, heads",
        {"scores": torch.tensor([[9.0, 2.0], [9.0, 1.0]], dtype=torch.float64)},
        {key: PAIR[key] for key in ("pair_id", "chosen")} | {"head": torch.tensor([1, 1])},
        [softplus(-1.0)],
        [0.0, -1 / (1 + math.exp(1.0))],
    ),
    # beta * (1 - -1) = .2
    ByHand(
        "dpo", PAIR_OUT, PAIR, [0.9 * softplus(-0.2) + 0.1 * softplus(0.2)],
        [0.1 * (-0.9 / (1 + math.exp(0.2)) + 0.1 / (1 + math.exp(-0.2)))] * 2,
    ),
    # Means: .5 - -1 = 1.5, and the target is 1 / .6; the chosen answer has two tokens.
    ByHand("ipo", PAIR_OUT, PAIR, [(1.5 - 1 / 0.6) ** 2], [(1.5 - 1 / 0.6)] * 2),
    # 1.5 * (1 - sigmoid(.1 * (1 - .5))) and 1 - sigmoid(.1 * (.5 - -1))
    ByHand(
        "kto",
        PAIR_OUT,
        {
            **{key: PAIR[key] for key in ("loss_mask", "ref_log_probs")},
            "label": torch.tensor([True, False]),
            "reference_point": torch.tensor([0.5, 0.5], dtype=torch.float64),
            "row_mask": torch.tensor([True, False]),
        },
        [1.5 / (1 + math.exp(0.05))],
        [-0.15 / (2 + math.exp(0.05) + math.exp(-0.05))] * 2,
    ),
]  # fmt: skip


def test_every_loss_and_every_objective_is_worked_out_by_hand():
    done = {CASES[each.case].builder for each in HAND}
    assert done == set(BUILDERS)
    assert {CASES[e.case].settings.get("objective", "clip") for e in HAND if CASES[e.case].on_policy} == set(OBJECTIVES)
    kinds = {CASES[e.case].settings.get("kind") for e in HAND if CASES[e.case].builder == "preference"}
    assert kinds == {"dpo", "ipo"}


@pytest.mark.parametrize("number", range(len(HAND)), ids=lambda n: f"{n}: {HAND[n].case}")
def test_by_hand(number: int):
    hand = HAND[number]
    loss = CASES[hand.case].loss
    assert set(hand.outputs) == set(loss.outputs) and set(hand.columns) == {*loss.columns, loss.mask}
    outputs = {name: value.clone().requires_grad_() for name, value in hand.outputs.items()}
    value, _ = loss.function(outputs, hand.columns)
    mask = hand.columns[loss.mask]
    assert value[mask].tolist() == pytest.approx(hand.loss, abs=1e-12)
    value[mask].sum().backward()
    gradient = outputs.get("log_probs", next(iter(outputs.values()))).grad
    assert gradient is not None
    first = gradient[mask] if mask.shape == gradient.shape else gradient[0]
    assert first.flatten()[: len(hand.gradient)].tolist() == pytest.approx(hand.gradient, abs=1e-12)


# ------------------------------------------------------------------ what holds for all of them, on tensors

LENGTHS = [4, 0, 6, 3, 1, 5]


def tensors(case: Case, seed: int = 0) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """Outputs and columns of six rows in three pairs, one row with nothing in its mask; fp64."""
    generator = torch.Generator().manual_seed(seed)

    def normal(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator, dtype=torch.float64)

    mask = torch.arange(6) < torch.tensor(LENGTHS)[:, None]
    mask[2, 1:3] = False
    log_probs = -1 - normal(6, 6).abs()
    every = {
        "old_log_probs": log_probs + 0.3 * normal(6, 6),
        "ref_log_probs": log_probs + normal(6, 6),
        "advantages": normal(6, 6),
        "importance_weights": normal(6, 6).abs(),
        "values": normal(6, 6),
        "returns": normal(6, 6),
        "cost_values": normal(6, 6),
        "cost_returns": normal(6, 6),
        "loss_mask": mask,
        "corrected_mask": mask & (normal(6, 6) < 1),
        "pair_id": torch.tensor([0, 1, 2, 1, 0, 2]),
        "chosen": torch.tensor([1, 1, 0, 0, 0, 1]).bool(),
        "head": torch.tensor([1, 0, 2, 0, 1, 2]),
        "label": torch.tensor([1, 0, 0, 1, 0, 1]).bool(),
        "reference_point": torch.full((6,), 0.3, dtype=torch.float64),
        "row_mask": torch.tensor([1, 1, 0, 1, 1, 1]).bool(),
    }
    outputs = {
        "log_probs": log_probs,
        "entropy": normal(6, 6).abs(),
        "values": normal(6, 6),
        "scores": normal(6, 3) if "heads" in case.model else normal(6),
    }
    loss = case.loss
    return {n: outputs[n] for n in loss.outputs}, {n: every[n] for n in {*loss.columns, loss.mask}}


def evaluate(loss: Loss, outputs: dict[str, Tensor], columns: dict[str, Tensor]) -> tuple[Tensor, dict, dict]:
    """The reduced loss, the gradients of the outputs, and the metrics: as an engine reduces."""
    leaves = {name: value.clone().requires_grad_() for name, value in outputs.items()}
    per_entry, metrics = loss.function(leaves, columns)
    mask = columns[loss.mask]
    assert per_entry.shape == mask.shape
    assert all(m.shape == mask.shape and not m.requires_grad for m in metrics.values())
    weights = token_weights(mask, loss.reduction, constant_length=loss.constant_length)
    total = (weights * per_entry).masked_fill(~mask, 0.0).sum()
    gradients = torch.autograd.grad(total, list(leaves.values()), allow_unused=True)
    means = {name: value.masked_fill(~mask, 0.0).sum() / mask.sum().clamp(min=1) for name, value in metrics.items()}
    return total.detach(), dict(zip(leaves, gradients, strict=True)), means


def is_token(value: Tensor) -> bool:
    return value.shape == (6, 6)


@pytest.mark.parametrize("name", CASES)
def test_padding_is_never_read(name: str):
    """More columns of padding, and garbage in it and in the holes of the mask: the same loss, gradients and metrics."""
    case = CASES[name]
    outputs, columns = tensors(case)
    want = evaluate(case.loss, outputs, columns)
    response = torch.arange(9) < torch.tensor(LENGTHS)[:, None]

    def padded(value: Tensor) -> Tensor:
        if not is_token(value):
            return value
        filling = False if value.dtype == torch.bool else 1e3
        wide = torch.cat([value, torch.full((6, 3), filling, dtype=value.dtype)], dim=1)
        return wide if value.dtype == torch.bool else wide.masked_fill(~response, 1e3)

    total, gradients, means = evaluate(
        case.loss, {n: padded(v) for n, v in outputs.items()}, {n: padded(v) for n, v in columns.items()}
    )
    assert_close(total, want[0])
    for key, gradient in want[1].items():
        assert_close(gradients[key][:, :6] if is_token(gradient) else gradients[key], gradient)
        assert not is_token(gradient) or not gradients[key][~response].any()
    assert_close(means, want[2])


@pytest.mark.parametrize("name", CASES)
def test_rows_are_treated_by_themselves(name: str):
    """In another order, or a part at a time: each row's (or pair's) loss is the same."""
    case = CASES[name]
    outputs, columns = tensors(case)
    loss = case.loss
    whole, _ = loss.function(outputs, columns)
    mask = columns[loss.mask]
    for rows in ([4, 0], [5, 2], [3, 1], [2, 5, 4, 1, 0, 3]):  # the pairs, and all in another order
        part, _ = loss.function({n: v[rows] for n, v in outputs.items()}, {n: v[rows] for n, v in columns.items()})
        assert_close(part[mask[rows]], whole[rows][mask[rows]])


@pytest.mark.parametrize("name", CASES)
def test_nothing_to_train_on_gives_zero(name: str):
    case = CASES[name]
    outputs, columns = tensors(case)
    columns[case.loss.mask] = torch.zeros_like(columns[case.loss.mask])
    if case.loss.keep_together:  # pairs must be whole; the mask itself says which row is which
        outputs = {n: v[:0] for n, v in outputs.items()}
        columns = {n: v[:0] for n, v in columns.items()}
    total, gradients, means = evaluate(case.loss, outputs, columns)
    assert total == 0
    assert all(not gradient.any() for gradient in gradients.values() if gradient is not None)
    assert all(torch.isfinite(value) for value in means.values())


@pytest.mark.parametrize("name", [name for name, case in CASES.items() if "scores" not in case.loss.outputs])
def test_rows_without_tokens_have_no_gradient(name: str):
    case = CASES[name]
    outputs, columns = tensors(case)
    _, gradients, _ = evaluate(case.loss, outputs, columns)
    assert all(not gradient[1].any() and torch.isfinite(gradient).all() for gradient in gradients.values())


def frozen(case: Case, outputs: dict[str, Tensor], columns: dict[str, Tensor]) -> Callable[[Tensor], Tensor]:
    """The reduced loss as a function of the first output, with what the loss holds constant held constant.

    GSPO's loss is taken whole: the sum over a row with one advantage has the gradient that its stop-gradient form says.
    CISPO's weight and a single update's old policy are constants: they are computed from the given outputs.
    """
    loss, first = case.loss, next(iter(outputs))
    if case.settings.get("objective") == "cispo":
        weights = _cispo_weights(case, outputs["log_probs"], columns)
        case = Case("policy", "actor", {**case.settings, "objective": "reinforce", "clip_low": None, "clip_high": None})
        columns = {**columns, "advantages": columns["advantages"] * weights}
        columns.setdefault("old_log_probs", outputs["log_probs"])
        loss = case.loss
    elif case.settings.get("one_update"):
        loss = loss.otherwise
        columns = {**columns, "old_log_probs": outputs["log_probs"]}
    mask = columns[loss.mask]
    shares = token_weights(mask, loss.reduction, constant_length=loss.constant_length).double()
    return lambda value: (shares * loss.function({**outputs, first: value}, columns)[0]).masked_fill(~mask, 0.0).sum()


def _cispo_weights(case: Case, log_probs: Tensor, columns: dict[str, Tensor]) -> Tensor:
    ratio = (log_probs - columns.get("old_log_probs", log_probs)).exp()
    return ratio.clamp(1 - case.settings.get("clip_low", 1.0), 1 + case.settings.get("clip_high", 4.0))


@pytest.mark.parametrize("name", CASES)
def test_the_gradient_agrees_with_finite_differences(name: str):
    case = CASES[name]
    outputs, columns = tensors(case)
    if case.settings.get("objective") == "gspo":  # one advantage a row, and equal weights: what GSPO is about
        columns["advantages"] = columns["advantages"][:, :1].expand(6, 6)
        if "importance_weights" in columns:
            columns["importance_weights"] = columns["importance_weights"][:, :1].expand(6, 6)
    loss, first = case.loss, next(iter(outputs))
    # In fp64 throughout: `token_weights` are fp32, so theirs are taken as they are on both sides.
    _, gradients, _ = evaluate(loss, outputs, columns)
    function, step = frozen(case, outputs, columns), 1e-6
    found = torch.zeros_like(outputs[first])
    for at in range(found.numel()):
        bump = torch.zeros_like(found).view(-1)
        bump[at] = step
        up, down = (function(outputs[first] + sign * bump.view_as(found)) for sign in (1, -1))
        found.view(-1)[at] = (up - down) / (2 * step)
    assert_close(gradients[first], found, rtol=1e-5, atol=1e-8)


@pytest.mark.parametrize("objective", OBJECTIVES)
def test_descent_makes_good_tokens_likelier_and_bad_ones_less_likely(objective: str):
    case = Case("policy", "actor", {"objective": objective})
    outputs, columns = tensors(case)
    columns["old_log_probs"] = outputs["log_probs"]  # nothing is clipped
    _, gradients, _ = evaluate(case.loss, outputs, columns)
    mask = columns["loss_mask"]
    assert (gradients["log_probs"][mask].sign() == -columns["advantages"][mask].sign()).all()
    assert not gradients["log_probs"][~mask].any()


SIGNS = {"supervised": "log_probs", "dpo": "log_probs", "ipo": "log_probs", "kto": "log_probs", "pairwise reward": "scores"}


@pytest.mark.parametrize("name", SIGNS)
def test_descent_makes_preferred_answers_likelier(name: str):
    case = CASES[name]
    outputs, columns = tensors(case)
    if "ref_log_probs" in columns:
        columns["ref_log_probs"] = outputs["log_probs"]
    _, gradients, _ = evaluate(case.loss, outputs, columns)
    good = columns.get("chosen", columns.get("label", torch.ones(6).bool()))
    gradient = gradients[SIGNS[name]]
    counted = gradient != 0
    assert counted.any()
    sides = good[:, None].expand_as(gradient) if gradient.dim() == 2 else good
    assert (gradient[counted & sides] < 0).all() and (gradient[counted & ~sides] > 0).all()


@pytest.mark.parametrize("name", [name for name, case in CASES.items() if case.on_policy])
def test_the_first_update_has_ratio_one_and_clips_nothing(name: str):
    case = CASES[name]
    outputs, columns = tensors(case)
    # fp32, as in training; what is compared is exact
    outputs = {n: v.float() for n, v in outputs.items()}
    columns = {n: v.float() if v.is_floating_point() else v for n, v in columns.items()}
    if "old_log_probs" in columns:
        columns["old_log_probs"] = outputs["log_probs"].clone()
    _, metrics = case.loss.function(outputs, columns)
    mask = columns[case.loss.mask]
    assert torch.equal(metrics["ratio"][mask], torch.ones(int(mask.sum())))
    assert not metrics["clip_fraction"][mask].any() and not metrics["approx_kl"][mask].any()
    assert not metrics.get("dual_clip_fraction", torch.zeros(6, 6))[mask].any()


@pytest.mark.parametrize("objective", OBJECTIVES)
def test_one_update_has_the_gradient_of_the_loss_that_reads_old_log_probs(objective: str):
    case = Case("policy", "actor", {"objective": objective, "one_update": True})
    outputs, columns = tensors(case)
    loss = case.loss
    assert "old_log_probs" not in loss.columns and loss.otherwise is not None
    assert "old_log_probs" in loss.otherwise.columns
    alone = evaluate(loss, outputs, columns)
    both = evaluate(loss.otherwise, outputs, {**columns, "old_log_probs": outputs["log_probs"]})
    for mine, theirs in zip(alone, both, strict=True):
        assert_close(mine, theirs)


def test_settings_that_an_objective_lacks_are_named():
    with pytest.raises(ValueError, match=r"'gspo' has no setting 'dual_clip'. It has: .*Those that have it: clip."):
        LOSSES["policy"](objective="gspo", dual_clip=3.0)
    with pytest.raises(ValueError, match=r"'reinforce' has no setting 'clip_low'. It has: none."):
        LOSSES["policy"](objective="reinforce", clip_low=0.1)
    with pytest.raises(ValueError, match=r"'cispo' has no setting 'scale'"):
        LOSSES["policy"](objective="cispo", scale=0.1)
    with pytest.raises(ValueError, match=r"'gspoo'. Did you mean 'gspo'\?"):
        LOSSES["policy"](objective="gspoo")
    with pytest.raises(ValueError, match="clip_high"):
        LOSSES["policy"](objective="gspo", clip_high=-0.1)


# ------------------------------------------------------------------ through the engine: any split gives the same gradient

PROMPTS = [3, 9, 1, 20, 6, 14]
RESPONSES = [4, 0, 25, 11, 1, 17]
TEMPERATURE = 0.8


@cache
def batch() -> Batch:
    """Six rows of very different lengths, one response empty, two with a prompt in common; all columns."""
    generator = torch.Generator().manual_seed(5)
    total = sum(RESPONSES)
    prompts = list(torch.randint(3, 500, (sum(PROMPTS),), generator=generator).split(PROMPTS))
    prompts[5] = prompts[0]
    mask = torch.rand(total, generator=generator) < 0.8

    def token(values: Tensor) -> Ragged:
        return Ragged.of_lengths(values, torch.tensor(RESPONSES))

    def normal() -> Tensor:
        return torch.randn(total, generator=generator)

    return Batch(
        {
            "prompt_ids": prompts,
            "response_ids": token(torch.randint(3, 500, (total,), generator=generator)),
            "loss_mask": token(mask),
            "corrected_mask": token(mask & (normal() < 1)),
            "importance_weights": token(normal().abs()),
            "old_log_probs": token(-5 + normal()),
            "ref_log_probs": token(-5 + normal()),
            "advantages": token(normal()),
            "values": token(normal()),
            "returns": token(normal()),
            "cost_values": token(normal()),
            "cost_returns": token(normal()),
            "pair_id": [0, 1, 2, 1, 2, 0],
            "chosen": [True, False, True, True, False, False],
            "head": [1, 0, 2, 0, 2, 1],
            "label": torch.tensor([1, 0, 1, 1, 0, 0]).bool(),
            "reference_point": torch.full((6,), 0.3),
            "row_mask": torch.tensor([1, 1, 1, 0, 1, 1]).bool(),
        }
    )


def actor() -> nn.Module:
    return ActorModel(tiny_model("qwen2"), temperature=TEMPERATURE)


def critic() -> nn.Module:
    made = CriticModel.from_causal_lm(tiny_model("llama"))
    torch.manual_seed(1)
    nn.init.normal_(made.head.weight, std=0.2)
    return made


def reward(heads: int = 1) -> nn.Module:
    torch.manual_seed(1)
    return RewardModel.from_causal_lm(tiny_model("mistral"), heads=heads)


MODELS: dict[str, Callable[[], nn.Module]] = {
    "actor": actor,
    "critic": critic,
    "reward": reward,
    "reward with heads": lambda: reward(3),
}


class Captured(SingleDeviceEngine):
    """Keeps the gradient that the optimizer would have used, before clipping."""

    def __init__(self, model: nn.Module, budget: int) -> None:
        super().__init__(model, optimizer=OptimizerSettings(lr=1e-3, max_grad_norm=1e9), microbatch_tokens=budget)
        assert self._optimizer is not None
        own = self._optimizer.step

        def step() -> Any:
            self.gradients = {n: p.grad.clone() for n, p in model.named_parameters() if p.grad is not None}
            return own()

        self._optimizer.step = step  # type: ignore[method-assign]


def update(case: Case, budget: int, given: Batch | None = None) -> tuple[Metrics, dict[str, Tensor]]:
    engine = Captured(MODELS[case.model](), budget)
    return engine.update(batch() if given is None else given, case.loss), engine.gradients


def plain(case: Case) -> tuple[float, dict[str, Tensor]]:
    """Loss and gradients of one padded forward pass with the library's own attention: no packing, no sharing, no split."""
    model: Any = MODELS[case.model]()
    rows, loss = batch(), case.loss
    both = [torch.cat(pair) for pair in zip(rows["prompt_ids"], rows["response_ids"], strict=True)]
    ids = nn.utils.rnn.pad_sequence(both, batch_first=True)
    mask = nn.utils.rnn.pad_sequence([torch.ones(len(row)) for row in both], batch_first=True).long()
    inner = model.base if isinstance(model, CriticModel) else model.model
    with own_attention(inner):
        base = inner if isinstance(model, CriticModel) else base_of(inner)
        hidden = base(input_ids=ids, attention_mask=mask, use_cache=False).last_hidden_state
    outputs = _plain_outputs(model, rows, hidden, mask)
    counted = rows.padded(loss.mask)
    per_entry, _ = loss.function(outputs, {name: rows.padded(name) for name in {*loss.columns, loss.mask}})
    weights = token_weights(counted, loss.reduction, constant_length=loss.constant_length)
    total = per_entry[counted] @ weights[counted]
    total.backward()
    return float(total.detach()), {n: p.grad for n, p in model.named_parameters() if p.grad is not None}


def _plain_outputs(model: Any, rows: Batch, hidden: Tensor, mask: Tensor) -> dict[str, Tensor]:
    if isinstance(model, RewardModel):
        scores = model.model.score(hidden[torch.arange(len(rows)), mask.sum(1) - 1])
        return {"scores": scores[:, 0] if model.heads == 1 else scores}
    at = rows.lengths("prompt")[:, None] - 1 + torch.arange(max(RESPONSES))
    state = hidden.gather(1, at.clamp(max=hidden.shape[1] - 1)[..., None].expand(-1, -1, hidden.shape[-1]))
    if isinstance(model, CriticModel):
        return {"values": model.head(state)[..., 0]}
    log_softmax = (model.model.lm_head(state) / TEMPERATURE).log_softmax(-1)
    targets = rows.padded("response_ids")
    return {
        "log_probs": log_softmax.gather(-1, targets[..., None])[..., 0],
        "entropy": -(log_softmax.exp() * log_softmax).sum(-1),
    }


def assert_same_gradients(got: dict[str, Tensor], want: dict[str, Tensor]) -> None:
    assert got.keys() == want.keys()
    for name in want:
        assert float((got[name] - want[name]).norm()) <= 1e-5 * float(want[name].norm()) + 1e-9, name


@pytest.mark.parametrize("name", CASES)
def test_any_packing_gives_the_gradient_of_a_plain_padded_pass(name: str):
    case = CASES[name]
    loss, want = plain(case)
    whole, gradients = update(case, 10**6)
    assert whole.mean("loss") == pytest.approx(loss, rel=1e-5)
    assert_same_gradients(gradients, want)
    for budget, given in ((1, batch()), (40, batch()), (40, batch().index([4, 2, 0, 5, 3, 1]))):
        metrics, got = update(case, budget, given)
        assert_same_gradients(got, want)
        for key, (total, count) in whole.items():
            mine = dict(metrics.items())[key]
            assert mine[1] == count, key
            assert mine[0] == pytest.approx(total, rel=1e-5, abs=1e-5), key


@pytest.mark.parametrize("name", [name for name, case in CASES.items() if case.on_policy])
def test_the_first_update_through_the_engine_has_ratio_exactly_one(name: str):
    """The pass for old log-probs and the update's own are the same numbers, bit for bit."""
    case = CASES[name]
    engine = Captured(MODELS[case.model](), 40)
    old = engine.compute(batch(), ("log_probs",))["log_probs"]
    metrics = engine.update(batch().with_columns({"old_log_probs": old}), case.loss)
    assert metrics.mean("ratio") == 1.0
    assert metrics.mean("clip_fraction") == metrics.mean("approx_kl") == 0.0


def test_the_first_step_of_dpo_through_the_engine_is_ln_2():
    engine = Captured(actor(), 40)
    ref = engine.compute(batch(), ("log_probs",))["log_probs"]
    metrics = engine.update(batch().with_columns({"ref_log_probs": ref}), LOSSES["preference"](kind="dpo"))
    assert metrics.mean("loss") == pytest.approx(math.log(2), abs=1e-5)
    assert metrics.mean("margin") == pytest.approx(0.0, abs=1e-5)  # pairs are cut otherwise than the reference's rows


# A pair always has its chosen row, so a minibatch of pairs always has something to train on.
@pytest.mark.parametrize("name", [name for name, case in CASES.items() if not case.loss.keep_together])
def test_a_minibatch_with_nothing_to_train_on_changes_no_weight(name: str):
    case = CASES[name]
    given = batch()
    empty = given[case.loss.mask]
    nothing = (
        Ragged.of_lengths(torch.zeros_like(empty.values), empty.lengths)
        if isinstance(empty, Ragged)
        else torch.zeros_like(empty)
    )
    engine = SingleDeviceEngine(MODELS[case.model](), optimizer=OptimizerSettings(lr=1e-3), microbatch_tokens=40)
    before = [p.detach().clone() for p in engine.model.parameters()]
    metrics = engine.update(given.with_columns({case.loss.mask: nothing}), case.loss)
    assert metrics.mean("skipped_updates") == 1.0
    assert all(torch.equal(p, q) for p, q in zip(before, engine.model.parameters(), strict=True))
