"""The losses agree with those of TRL's trainers, run as they are: a trainer's own `_compute_loss` on given log-probs.

Skipped where TRL is not installed: `pip install trl`. Deliberate differences are tested too.
"""

from __future__ import annotations

import importlib
from collections import defaultdict
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.testing import assert_close

from podium.algorithms import Loss, kto_loss, kto_reference_point, policy_loss, preference_loss, token_weights

B, T = 6, 5
MASK = torch.arange(T) < torch.tensor([5, 3, 4, 1, 2, 5])[:, None]


def draw(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def trainer_class(name: str) -> Any:
    # A trainer's module may need more than TRL itself (a vision library, say).
    module = pytest.importorskip(f"trl.trainer.{name.lower()}_trainer", reason="trl is not installed", exc_type=ImportError)
    return getattr(module, f"{name}Trainer")


@pytest.fixture(autouse=True)
def _trl():
    pytest.importorskip("trl", reason="trl is not installed", exc_type=ImportError)
    importlib.import_module("trl.trainer.utils")


class OneProcess:
    """`accelerate` with one process."""

    device, sync_gradients, num_processes = torch.device("cpu"), True, 1

    def gather(self, x: Tensor) -> Tensor:
        return x

    gather_for_metrics = gather

    def reduce(self, x: Tensor, reduction: str) -> Tensor:
        return x


def trainer(name: str, **settings: Any) -> SimpleNamespace:
    """What a trainer's `_compute_loss` reads of its own; not one of them is built."""
    common = {
        "model": SimpleNamespace(training=False),
        "accelerator": OneProcess(),
        "aux_loss_enabled": False,
        "_metrics": defaultdict(lambda: defaultdict(list)),
        "args": SimpleNamespace(delta=None, use_bias_correction_kl=False, gradient_checkpointing_kwargs=None),
    }
    return SimpleNamespace(**{**common, **settings})


def ours(loss: Loss, log_probs: Tensor, columns: dict[str, Tensor]) -> Tensor:
    per_entry, _ = loss.function({"log_probs": log_probs}, columns)
    mask = columns[loss.mask]
    weights = token_weights(mask, loss.reduction, constant_length=loss.constant_length)
    return (weights * per_entry).masked_fill(~mask, 0.0).sum()


def assert_alike(mine: Tensor, theirs: Tensor, log_probs: Tensor) -> None:
    """The same number and the same gradient."""
    assert_close(mine, theirs)
    assert_close(torch.autograd.grad(mine, log_probs), torch.autograd.grad(theirs, log_probs))


# ------------------------------------------------------------------ online

ONLINE: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    # TRL's loss_type -> their settings, ours
    "grpo": ({}, {"reduction": "sequence_mean_token_mean"}),
    "bnpo": ({}, {"reduction": "token_mean"}),
    "dr_grpo": ({"max_completion_length": 32}, {"reduction": "constant", "constant_length": 32}),
    "dapo": ({"epsilon_high": 0.28}, {"clip_high": 0.28}),
    # TRL's epsilon_high is the largest weight itself
    "cispo": ({"epsilon_high": 1.3}, {"objective": "cispo", "clip_high": 0.3}),
}
COLUMNS = {"advantages": draw(B, seed=2)[:, None].expand(B, T), "loss_mask": MASK, "ref_log_probs": -draw(B, T, seed=3).abs()}


def online(
    loss_type: str, log_probs: Tensor, old: Tensor, *, level: str = "token", beta: float = 0.0, **settings: Any
) -> Tensor:
    fake = trainer(
        "GRPO",
        loss_type=loss_type,
        importance_sampling_level=level,
        beta=beta,
        top_entropy_quantile=1.0,
        off_policy_mask_threshold=None,
        use_vllm=False,
        current_gradient_accumulation_steps=1,
        _entropy_bonus_enabled=False,
        _get_per_token_logps_and_entropies=lambda *_, **__: (log_probs, torch.zeros(B, T), None),
        **{"epsilon_low": 0.2, "epsilon_high": 0.2, **settings},
    )
    inputs = {
        "prompt_ids": torch.zeros(B, 1).long(),
        "prompt_mask": torch.ones(B, 1).long(),
        "completion_ids": torch.zeros(B, T).long(),
        "completion_mask": MASK.long(),
        "advantages": COLUMNS["advantages"][:, 0],
        "old_per_token_logps": old,
        "ref_per_token_logps": COLUMNS["ref_log_probs"],
        "num_items_in_batch": MASK.sum(),
    }
    return trainer_class("GRPO")._compute_loss(fake, fake.model, inputs)


def log_probs_and_old() -> tuple[Tensor, Tensor]:
    log_probs = (-draw(B, T, seed=1).abs()).requires_grad_()
    return log_probs, (log_probs + 0.4 * draw(B, T, seed=4)).detach()


@pytest.mark.parametrize("beta", [0.0, 0.1])
@pytest.mark.parametrize("loss_type", ONLINE)
def test_grpo_and_its_kin(loss_type: str, beta: float):
    their_settings, our_settings = ONLINE[loss_type]
    log_probs, old = log_probs_and_old()
    theirs = online(loss_type, log_probs, old, beta=beta, **their_settings)
    columns = {**COLUMNS, "old_log_probs": old}
    assert_alike(ours(policy_loss(kl_coef=beta, **our_settings), log_probs, columns), theirs, log_probs)


@pytest.mark.parametrize(("low", "high"), [(3e-4, 4e-4), (0.1, 0.05)])
def test_gspo(low: float, high: float):
    """TRL differentiates the sequence's ratio whole; we do token by token, which for one advantage a row is the same."""
    log_probs, old = log_probs_and_old()
    theirs = online("grpo", log_probs, old, level="sequence", epsilon_low=low, epsilon_high=high)
    loss = policy_loss(objective="gspo", clip_low=low, clip_high=high, reduction="sequence_mean_token_mean")
    assert_alike(ours(loss, log_probs, {**COLUMNS, "old_log_probs": old}), theirs, log_probs)


def test_dual_clip_is_trl_s_delta_for_bad_advantages_only():
    """TRL's `delta` holds the ratio of every token; the dual clip that of bad ones. Good ones are clipped lower anyway."""
    log_probs, old = log_probs_and_old()
    theirs = online("grpo", log_probs, old, args=SimpleNamespace(delta=1.4, use_bias_correction_kl=False))
    loss = policy_loss(dual_clip=1.4, reduction="sequence_mean_token_mean")
    assert_alike(ours(loss, log_probs, {**COLUMNS, "old_log_probs": old}), theirs, log_probs)


def rloo(log_probs: Tensor, old: Tensor) -> Tensor:
    fake = trainer(
        "RLOO",
        epsilon_low=0.2,
        epsilon_high=0.2,
        _get_per_token_logps_and_entropies=lambda *_, **__: (log_probs, torch.zeros(B, T), None),
    )
    inputs = {
        "prompt_ids": torch.zeros(B, 1).long(),
        "prompt_mask": torch.ones(B, 1).long(),
        "completion_ids": torch.zeros(B, T).long(),
        "completion_mask": MASK.long(),
        "advantages": COLUMNS["advantages"][:, 0],
        "old_logps": (old * MASK).sum(1),
    }
    return trainer_class("RLOO")._compute_loss(fake, fake.model, inputs)


def test_rloo_has_the_gradient_of_reinforce_on_the_first_update():
    log_probs, _ = log_probs_and_old()
    theirs = rloo(log_probs, log_probs.detach())
    loss = policy_loss(objective="reinforce", one_update=True, reduction="sequence_mean_token_sum")
    mine = ours(loss, log_probs, COLUMNS)
    assert_close(torch.autograd.grad(mine, log_probs), torch.autograd.grad(theirs, log_probs))


def test_later_trl_s_rloo_clips_the_product_of_a_sequence_s_ratios_and_we_each_token_s():
    log_probs, old = log_probs_and_old()
    loss = policy_loss(reduction="sequence_mean_token_sum")
    mine = ours(loss, log_probs, {**COLUMNS, "old_log_probs": old})
    assert not torch.isclose(mine, rloo(log_probs, old))


# ------------------------------------------------------------------ preferences

PAIRS = {  # TRL's order: all chosen rows, then all rejected ones
    "pair_id": torch.tensor([0, 1, 2, 0, 1, 2]),
    "chosen": torch.arange(B) < 3,
    "loss_mask": MASK,
    "ref_log_probs": COLUMNS["ref_log_probs"],
}


def answers(log_probs: Tensor) -> SimpleNamespace:
    """What a model with a fused head gives to TRL: log-probs that are 0 where there is no label."""
    zeros = torch.zeros(B, T)
    return SimpleNamespace(log_probs=log_probs * MASK, entropy=zeros, mean_logits=zeros, is_top1=zeros.bool())


def inputs() -> dict[str, Tensor]:
    mask = torch.cat([torch.zeros(B, 1), MASK], dim=1).long()
    ones = torch.ones(B, T + 1).long()
    return {"input_ids": ones, "attention_mask": ones, "completion_mask": mask}


@pytest.mark.parametrize(
    ("loss_type", "loss"),
    [("sigmoid", preference_loss(kind="dpo", beta=0.3)), ("ipo", preference_loss(kind="ipo", beta=0.3))],
)
def test_dpo_and_ipo(loss_type: str, loss: Loss):
    log_probs, _ = log_probs_and_old()
    reference = (PAIRS["ref_log_probs"] * MASK).sum(1)
    fake = trainer(
        "DPO",
        ld_alpha=None,
        precompute_ref_logps=True,
        f_divergence_type="reverse_kl",
        loss_types=[loss_type],
        loss_weights=[1.0],
        beta=0.3,
        label_smoothing=0.0,
        use_weighting=False,
        _total_train_tokens=0,
    )
    given = {**inputs(), "ref_chosen_logps": reference[:3], "ref_rejected_logps": reference[3:]}
    theirs = trainer_class("DPO")._compute_loss(fake, lambda **_: answers(log_probs), given, False)
    assert_alike(ours(loss, log_probs, PAIRS), theirs, log_probs)
    _, metrics = loss.function({"log_probs": log_probs}, PAIRS)
    logged = fake._metrics["eval"]
    if loss_type == "ipo":  # TRL logs the rewards of the summed log-ratios there; we those that the loss compares
        return
    for name, key in (("accuracy", "accuracies"), ("margin", "margins"), ("chosen_reward", "chosen")):
        assert float(metrics[name].sum()) / 3 == pytest.approx(logged[f"rewards/{key}"][0], rel=1e-5)


@pytest.mark.parametrize("offset", [0.4, -5.0])
def test_kto(offset: float):
    """With TRL's own reference point; the second is below 0 and is held there."""
    log_probs, _ = log_probs_and_old()
    mismatched, mismatched_ref = draw(B, seed=8) + offset, draw(B, seed=9)
    reference = (PAIRS["ref_log_probs"] * MASK).sum(1)
    label = torch.tensor([1, 0, 1, 1, 0, 0]).bool()
    fake = trainer(
        "KTO",
        calculate_KL=True,
        precompute_ref_logps=True,
        loss_type="kto",
        beta=0.3,
        desirable_weight=1.2,
        undesirable_weight=0.7,
        _compute_kl_logps=lambda *_: mismatched,
        _total_train_tokens=0,
    )
    given = {**inputs(), "label": label, "ref_logps": reference, "ref_KL_logps": mismatched_ref}
    theirs = trainer_class("KTO")._compute_loss(fake, lambda **_: answers(log_probs), given, False)
    columns = {
        **{name: PAIRS[name] for name in ("loss_mask", "ref_log_probs")},
        "label": label,
        "reference_point": kto_reference_point(mismatched - mismatched_ref).expand(B),
        "row_mask": torch.ones(B).bool(),
    }
    loss = kto_loss(beta=0.3, desirable_weight=1.2, undesirable_weight=0.7)
    assert_alike(ours(loss, log_probs, columns), theirs, log_probs)
