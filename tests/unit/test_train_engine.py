"""The train engine's parts: micro-batch plans, the optimizer, state, and what is refused."""

from __future__ import annotations

import copy
import math
from typing import Any

import pytest
import torch
from torch import nn

from podium.algorithms import Loss, pairwise_reward_loss, supervised_loss
from podium.core.batch import Batch
from podium.core.errors import BatchError, CheckpointError, ConfigError
from podium.core.prompts import Prompts
from podium.core.settings import OptimizerSettings
from podium.engines.train import TRAIN_ENGINES, SingleDeviceEngine
from podium.engines.train.microbatch import plan
from podium.engines.train.optim import MasterAdamW, lr_at
from podium.engines.train.single import _misfit
from podium.models.heads import ActorModel, CriticModel, RewardModel
from podium.models.storage import by_columns
from tests.tiny import tiny_model

# ------------------------------------------------------------------ micro-batches


def test_plan_covers_every_row_once_under_the_budget_and_is_balanced() -> None:
    lengths = torch.randint(1, 300, (100,), generator=torch.Generator().manual_seed(0))
    parts = plan(lengths, 1000)
    assert torch.equal(torch.cat(parts).sort().values, torch.arange(100))
    loads = [int(lengths[part].sum()) for part in parts]
    assert max(loads) <= 1000
    assert len(parts) <= math.ceil(int(lengths.sum()) / 1000) + 1
    assert min(loads) >= 0.9 * max(loads)
    assert all(torch.equal(part, part.sort().values) for part in parts)
    again = plan(lengths, 1000)
    assert all(torch.equal(a, b) for a, b in zip(parts, again, strict=True))


def test_plan_gives_a_long_row_its_own() -> None:
    parts = plan(torch.tensor([3, 50, 4]), 10)
    assert sorted(part.tolist() for part in parts) == [[0, 2], [1]]


def test_plan_keeps_pairs_together() -> None:
    lengths, pairs = torch.tensor([5, 5, 5, 5, 9, 9]), torch.tensor([7, 3, 3, 7, 1, 1])
    parts = plan(lengths, 12, pairs)
    assert sorted(part.tolist() for part in parts) == [[0, 3], [1, 2], [4, 5]]


def test_plan_counts_a_shared_prompt_once_and_keeps_its_rows_together() -> None:
    prompts = Prompts(torch.tensor([0, 1, 0, 1, 2]), torch.tensor([0, 1, 4]), torch.tensor([10, 20, 3]))
    lengths = torch.tensor([14, 22, 15, 23, 9])
    # 10 + 4 + 5, 20 + 2 + 3 and 3 + 6 tokens.
    assert [part.tolist() for part in plan(lengths, 28, prompts=prompts)] == [[0, 2, 4], [1, 3]]
    assert [part.tolist() for part in plan(lengths, 53, prompts=prompts)] == [[0, 1, 2, 3, 4]]


def test_plan_cuts_a_group_only_where_it_exceeds_the_budget() -> None:
    of_row = torch.tensor([0, 0, 0, 0, 1, 1])
    prompts = Prompts(of_row, torch.tensor([0, 4]), torch.tensor([10, 2]))
    parts = plan(torch.tensor([15, 15, 15, 15, 4, 4]), 20, prompts=prompts)
    assert sorted(part.tolist() for part in parts) == [[0, 1], [2, 3], [4, 5]]
    pairs = torch.tensor([0, 0, 0, 1, 2, 2])
    parts = plan(torch.tensor([15, 15, 15, 15, 4, 4]), 20, pairs, prompts)
    assert sorted(part.tolist() for part in parts) == [[0, 1, 2], [3], [4, 5]]


def test_plan_of_nothing_and_of_no_budget() -> None:
    assert plan(torch.tensor([], dtype=torch.int64), 10) == []
    with pytest.raises(ConfigError, match="microbatch_tokens"):
        plan(torch.tensor([1]), 0)


# ------------------------------------------------------------------ schedules


@pytest.mark.parametrize(
    ("schedule", "expected"),
    [
        ("constant", [0.5, 1.0, 1.0, 1.0, 1.0, 1.0, 1.0]),
        ("linear", [0.5, 1.0, 1.0, 0.775, 0.55, 0.325, 0.1]),
        ("cosine", [0.5, 1.0, 1.0, 0.55 + 0.45 * math.sqrt(0.5), 0.55, 0.55 - 0.45 * math.sqrt(0.5), 0.1]),
    ],
)
def test_schedules(schedule: Any, expected: list[float]) -> None:
    settings = OptimizerSettings(lr=1.0, schedule=schedule, warmup_updates=2, min_lr_ratio=0.1)
    assert [lr_at(settings, update, 7) for update in range(7)] == pytest.approx(expected)
    assert lr_at(settings, 50, 7) == pytest.approx(expected[-1])


def test_a_decaying_schedule_needs_the_number_of_updates() -> None:
    with pytest.raises(ConfigError, match=r"optimizer\.schedule"):
        MasterAdamW([], OptimizerSettings(schedule="cosine"))


# ------------------------------------------------------------------ optimizer


def one_step(parameter: nn.Parameter, optimizer: MasterAdamW, gradient: float) -> Any:
    (parameter * gradient).sum().backward()
    return optimizer.step()


def test_updates_below_the_rounding_step_of_bf16_are_not_lost() -> None:
    low = nn.Parameter(torch.ones(4, 4, dtype=torch.bfloat16))
    optimizer = MasterAdamW([("w", low)], OptimizerSettings(lr=1e-4))
    for _ in range(100):
        one_step(low, optimizer, 1.0)
    # 1 - 1e-4 rounds to 1 in bf16 (its step below 1 is 0.0039); a hundred such updates do not.
    torch.testing.assert_close(low.float(), torch.full((4, 4), 0.99), rtol=0, atol=0.004)
    assert float(low.detach()[0, 0]) < 1.0


def test_fp32_is_its_own_master_and_equals_torch_adamw() -> None:
    torch.manual_seed(0)
    ours, theirs = nn.Linear(5, 3), nn.Linear(5, 3)
    theirs.load_state_dict(ours.state_dict())
    settings = OptimizerSettings(lr=1e-2, weight_decay=0.1, max_grad_norm=1e9)
    optimizer = MasterAdamW(ours.named_parameters(), settings)
    assert optimizer.state_dict()["masters"] == {}
    plain = torch.optim.AdamW(
        [{"params": [theirs.weight]}, {"params": [theirs.bias], "weight_decay": 0.0}],
        lr=1e-2,
        betas=settings.betas,
        eps=settings.eps,
        weight_decay=0.1,
    )
    for _ in range(5):
        x = torch.randn(7, 5)
        ours(x).square().mean().backward()
        optimizer.step()
        plain.zero_grad()
        theirs(x).square().mean().backward()
        plain.step()
    torch.testing.assert_close(ours.weight, theirs.weight)
    torch.testing.assert_close(ours.bias, theirs.bias)


def test_memory_order_does_not_change_an_update() -> None:
    """The fused kernel pairs numbers as they lie: weights by columns, then moments and a gradient by rows."""
    torch.manual_seed(0)
    start, gradient = torch.randn(6, 4), torch.randn(6, 4)
    rows, columns = nn.Parameter(start.clone()), nn.Parameter(by_columns(start))
    settings = OptimizerSettings(lr=1e-1)
    optimizers = [MasterAdamW([("w", p)], settings) for p in (rows, columns)]
    for parameter, optimizer in zip((rows, columns), optimizers, strict=True):
        one_step(parameter, optimizer, 1.0)
    optimizers[1].load_state_dict(copy.deepcopy(optimizers[0].state_dict()))
    for parameter, optimizer in zip((rows, columns), optimizers, strict=True):
        parameter.grad = gradient.clone()
        optimizer.step()
    assert columns.stride() == (1, 6)
    assert torch.equal(rows, columns)


def test_gradients_of_several_passes_add_up_in_fp32() -> None:
    low = nn.Parameter(torch.zeros(2, 2, dtype=torch.bfloat16))
    optimizer = MasterAdamW([("w", low)], OptimizerSettings(lr=1e-3, max_grad_norm=1e9))
    for _ in range(1024):
        (low * 1.0).sum().backward()
    assert low.grad is None
    assert optimizer.step().grad_norm == 2048.0  # in bf16 a sum of ones stops at 256


def test_clipping_scales_to_the_norm_and_reports_the_norm_before() -> None:
    weight = nn.Parameter(torch.zeros(4))
    optimizer = MasterAdamW([("w", weight)], OptimizerSettings(lr=1.0, betas=(0.0, 0.0), eps=1.0, max_grad_norm=1.0))
    report = one_step(weight, optimizer, 5.0)
    assert report.grad_norm == pytest.approx(10.0)
    # With no memory and eps = 1: update = g / (|g| + 1), g = 0.5 in each entry after clipping.
    torch.testing.assert_close(weight.detach(), torch.full((4,), -1 / 3), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_a_gradient_that_is_not_finite_changes_nothing(bad: float) -> None:
    weight = nn.Parameter(torch.ones(3))
    optimizer = MasterAdamW([("w", weight)], OptimizerSettings(lr=1.0))
    report = one_step(weight, optimizer, bad)
    assert not report.applied
    assert (optimizer.skipped, optimizer.updates) == (1, 0)
    assert torch.equal(weight.detach(), torch.ones(3))
    assert one_step(weight, optimizer, 1.0).applied


# ------------------------------------------------------------------ engine


def rows(n: int = 4) -> Batch:
    generator = torch.Generator().manual_seed(1)
    ids = [torch.randint(3, 500, (3 + i,), generator=generator) for i in range(2 * n)]
    mask = [torch.ones(len(r), dtype=torch.bool) for r in ids[n:]]
    return Batch({"prompt_ids": ids[:n], "response_ids": ids[n:], "loss_mask": mask})


def engine(dtype: torch.dtype = torch.float32, **settings: Any) -> SingleDeviceEngine:
    return SingleDeviceEngine(
        ActorModel(tiny_model(dtype=dtype)),
        optimizer=OptimizerSettings(**{"lr": 1e-3, "schedule": "cosine", "warmup_updates": 1, **settings}),
        microbatch_tokens=20,
        total_updates=8,
    )


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_resumed_engine_goes_on_bit_for_bit(dtype: torch.dtype) -> None:
    first = engine(dtype)
    for _ in range(2):
        first.update(rows(), supervised_loss())
    saved = copy.deepcopy(first.state_dict())
    second = engine(dtype)
    second.load_state_dict(saved)
    assert second.policy_version == 2
    for _ in range(2):
        a, b = first.update(rows(), supervised_loss()), second.update(rows(), supervised_loss())
        assert a.means() == b.means()
    ours, theirs = first.state_dict(), second.state_dict()
    for name, tensor in ours["model"].items():
        assert torch.equal(tensor, theirs["model"][name]), name
    for name, moments in ours["optimizer"]["moments"].items():
        for key, value in moments.items():
            assert torch.equal(value, theirs["optimizer"]["moments"][name][key]), (name, key)


def test_state_of_another_model_is_refused() -> None:
    other = SingleDeviceEngine(ActorModel(tiny_model(num_hidden_layers=1)))
    with pytest.raises(CheckpointError, match="do not fit"):
        other.load_state_dict(engine().state_dict())


def test_what_does_not_fit_is_said() -> None:
    mine = {"a": torch.zeros(2), "b": torch.zeros(2), "c": torch.zeros(2)}
    assert _misfit(mine, mine) == ""
    assert _misfit(mine, {**mine, "b": torch.zeros(3)}) == "b has the shape [2], there [3]"
    said = _misfit(mine, {"a": torch.zeros(2), "x": torch.zeros(2)})
    assert said == "2 are in the model alone (b, ...); 1 are in the checkpoint alone (x)"


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_training_lowers_the_loss(dtype: torch.dtype) -> None:
    trained = engine(dtype, lr=3e-3, schedule="constant")
    losses = [trained.update(rows(), supervised_loss()) for _ in range(8)]
    assert losses[-1].mean("loss") < 0.7 * losses[0].mean("loss")
    assert trained.policy_version == 8
    assert losses[0].mean("tokens") == sum(3 + i for i in range(8))
    assert losses[0].mean("lr") == 3e-3
    assert losses[0].mean("grad_norm") > 0
    assert losses[0].mean("skipped_updates") == 0


def test_the_parameters_stay_where_they_are() -> None:
    """The rollout engine reads the same storage: an update writes in place."""
    trained = engine(torch.bfloat16)
    before = [p.data_ptr() for p in trained.model.parameters()]
    trained.update(rows(), supervised_loss())
    assert [p.data_ptr() for p in trained.model.parameters()] == before


def test_nothing_to_train_on_changes_nothing() -> None:
    trained = engine()
    batch = rows().with_columns({"loss_mask": [torch.zeros(len(r), dtype=torch.bool) for r in rows()["loss_mask"]]})
    before = copy.deepcopy(trained.state_dict()["model"])
    metrics = trained.update(batch, supervised_loss())
    assert metrics.mean("skipped_updates") == 1
    assert trained.policy_version == 0
    assert all(torch.equal(before[n], t) for n, t in trained.state_dict()["model"].items())


def test_entries_outside_the_mask_may_hold_anything() -> None:
    def function(outputs: Any, columns: Any) -> Any:
        loss = -outputs["log_probs"] + columns["advantages"]
        return loss, {"seen": columns["advantages"]}

    loss = Loss("odd", function, ("log_probs",), ("advantages",))
    batch = rows()
    masks = [torch.arange(len(r)) != 0 for r in batch["loss_mask"]]
    advantages = [torch.where(m, 1.0, float("nan")) for m in masks]
    metrics = engine().update(batch.with_columns({"loss_mask": masks, "advantages": advantages}), loss)
    assert metrics.mean("seen") == 1.0
    assert math.isfinite(metrics.mean("loss"))


def test_a_loss_of_the_wrong_shape_is_named() -> None:
    loss = Loss("summed", lambda outputs, columns: (outputs["log_probs"].sum(), {}), ("log_probs",), ())
    with pytest.raises(ConfigError, match="'summed'"):
        engine().update(rows(), loss)


def test_an_engine_without_optimizer_only_computes() -> None:
    frozen = SingleDeviceEngine(ActorModel(tiny_model()))
    assert frozen.compute(rows(), ("log_probs",))["log_probs"].values.requires_grad is False
    assert frozen.state_dict()["optimizer"] is None
    with pytest.raises(ConfigError, match="without an optimizer"):
        frozen.update(rows(), supervised_loss())


def test_an_empty_prompt_is_refused() -> None:
    batch = Batch({"prompt_ids": [[5], []], "response_ids": [[1], [2]]})
    with pytest.raises(BatchError, match="row 1 has an empty prompt"):
        engine().compute(batch, ("log_probs",))


def test_critic_and_reward_model_train_through_the_same_engine() -> None:
    from podium.algorithms import value_loss

    critic = SingleDeviceEngine(CriticModel.from_causal_lm(tiny_model()), optimizer=OptimizerSettings(lr=3e-3))
    returns = [torch.full((len(r),), 0.7) for r in rows()["loss_mask"]]
    batch = rows().with_columns({"returns": returns})
    batch = batch.union(critic.compute(batch, ("values",)))
    losses = [critic.update(batch, value_loss()).mean("loss") for _ in range(6)]
    assert losses[-1] < 0.5 * losses[0]

    reward = SingleDeviceEngine(
        RewardModel.from_causal_lm(tiny_model()), optimizer=OptimizerSettings(lr=1e-3), microbatch_tokens=10
    )
    pairs = rows().with_columns({"pair_id": [0, 0, 1, 1], "chosen": [True, False, False, True]})
    metrics = [reward.update(pairs, pairwise_reward_loss()) for _ in range(6)]
    assert metrics[-1].mean("loss") < metrics[0].mean("loss")
    assert metrics[-1].mean("accuracy") == 1.0


def test_engines_by_name() -> None:
    assert TRAIN_ENGINES.get("single") is SingleDeviceEngine
    with pytest.raises(ConfigError, match="'megatron' is not in this version"):
        TRAIN_ENGINES.get("megatron")
    with pytest.raises(ConfigError, match="unknown train engine 'singel'"):
        TRAIN_ENGINES.get("singel")
