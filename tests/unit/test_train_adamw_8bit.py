"""AdamW with moments in 8 bits: the codes, the update, and a run resumed."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

from podium.core.settings import OptimizerSettings
from podium.engines.train import adamw_8bit
from podium.engines.train.adamw_8bit import AdamW8bit
from podium.engines.train.optim import MasterAdamW

CODES = [
    (adamw_8bit.encode_first, adamw_8bit.decode_first, adamw_8bit.STEP_FIRST),
    (adamw_8bit.encode_second, adamw_8bit.decode_second, adamw_8bit.STEP_SECOND),
]


@pytest.mark.parametrize(("encode", "decode", "step"), CODES)
def test_codes_are_near_and_right_on_average(encode: Callable[..., None], decode: Callable[..., Tensor], step: float) -> None:
    draw = torch.Generator().manual_seed(0)
    values = torch.randn(1000, generator=draw) * torch.logspace(-2, 0, 1000)
    values = values.abs() if decode is adamw_8bit.decode_second else values
    codes, scale, total = torch.zeros(1000, dtype=torch.uint8), torch.zeros(4), torch.zeros(1000)
    for _ in range(200):
        encode(values, codes, scale, torch.rand(1000, generator=draw))
        total += decode(codes, scale)
    large = values.abs() > 1e-3 * values.abs().max()
    relative = ((decode(codes, scale) - values) / values)[large].abs()
    assert float(relative.max()) < 2**step - 1 + 1e-4
    assert float(((total / 200 - values) / values)[large].abs().mean()) < 3e-3


def test_zeros_stay_zeros_and_small_roots_never_become_0() -> None:
    values = torch.tensor([0.0, 1.0, 1e-12] + [0.0] * 300)
    codes, scale = torch.zeros(303, dtype=torch.uint8), torch.zeros(2)
    adamw_8bit.encode_second(values, codes, scale, torch.zeros(303))
    assert adamw_8bit.decode_second(codes, scale)[2] > 0
    assert adamw_8bit.decode_second(codes, scale)[3:].abs().max() == 0
    adamw_8bit.encode_first(-values, codes, scale, torch.zeros(303))
    assert adamw_8bit.decode_first(codes, scale).tolist()[:3] == [0.0, -1.0, 0.0]


def test_the_first_update_is_adamws() -> None:
    torch.manual_seed(0)
    grads, results = torch.randn(40, 30), []
    for kind in (AdamW8bit, torch.optim.AdamW):
        p = nn.Parameter(torch.ones(40, 30))
        p.grad = grads.clone()
        kind([p], lr=1e-2, betas=(0.9, 0.95), eps=1e-8, weight_decay=0.1).step()
        results.append(p.detach())
    torch.testing.assert_close(*results)


def _train(optimizer: MasterAdamW, model: nn.Module, steps: range) -> list[float]:
    losses = []
    target = torch.randn(16, 4, generator=torch.Generator().manual_seed(7))
    for step in steps:
        x = torch.randn(64, 16, generator=torch.Generator().manual_seed(step))
        loss = ((model(x) - torch.tanh(x @ target)) ** 2).mean()
        optimizer.zero_grad()
        optimizer.backward(loss)
        optimizer.step()
        losses.append(loss.item())
    return losses


def _made(states: str) -> tuple[MasterAdamW, nn.Module]:
    torch.manual_seed(3)
    model = nn.Sequential(nn.Linear(16, 64), nn.ReLU(), nn.Linear(64, 4))
    settings = OptimizerSettings(lr=3e-3, states=states)  # type: ignore[arg-type]
    return MasterAdamW(model.named_parameters(), settings), model


def test_it_learns_as_fp32_moments_do() -> None:
    ends = [sum(_train(*_made(states), range(300))[-30:]) / 30 for states in ("fp32", "8bit")]
    assert ends[1] < 1.1 * ends[0]


def test_a_resumed_run_is_the_same_bit_for_bit() -> None:
    optimizer, model = _made("8bit")
    _train(optimizer, model, range(5))
    weights = {name: t.clone() for name, t in model.state_dict().items()}
    state = optimizer.state_dict()
    state["moments"] = {n: {k: v.clone() for k, v in m.items()} for n, m in state["moments"].items()}
    want = _train(optimizer, model, range(5, 10))
    other, again = _made("8bit")
    again.load_state_dict(weights)
    other.load_state_dict(state)
    assert _train(other, again, range(5, 10)) == want
    assert all(torch.equal(a, b) for a, b in zip(model.parameters(), again.parameters(), strict=True))
    moments = optimizer.state_dict()["moments"]["0.weight"]
    assert sum(t.nbytes for t in moments.values()) < 2.2 * model.get_parameter("0.weight").numel()
