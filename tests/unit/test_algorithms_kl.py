"""The KL estimators and the controller of the KL coefficient."""

from __future__ import annotations

import json
import math

import pytest
import torch
from torch.testing import assert_close

from podium.algorithms import KLController, adapted_kl_coef, kl_estimate


@pytest.mark.parametrize(
    ("estimator", "expected"),
    [("k1", [math.log(2), 0.0]), ("k2", [math.log(2) ** 2 / 2, 0.0]), ("k3", [math.log(2) - 0.5, 0.0])],
)
def test_kl_estimates_by_hand(estimator: str, expected: list[float]):
    log_probs, ref = torch.tensor([0.5, 0.3]).log(), torch.tensor([0.25, 0.3]).log()
    assert_close(kl_estimate(log_probs, ref, estimator=estimator), torch.tensor(expected))


@pytest.mark.parametrize("estimator", ["k1", "k3"])
def test_unbiased_estimators_have_the_kl_as_their_mean(estimator: str):
    p, q = torch.tensor([0.7, 0.2, 0.1]), torch.tensor([0.3, 0.3, 0.4])
    kl = (p * (p / q).log()).sum()
    assert_close((p * kl_estimate(p.log(), q.log(), estimator=estimator)).sum(), kl)


def test_kl_estimate_stays_finite_and_names_what_it_knows():
    assert torch.isfinite(kl_estimate(torch.tensor([-900.0]), torch.tensor([0.0]), estimator="k3")).all()
    with pytest.raises(ValueError, match=r"Unknown KL estimator 'k33'. Did you mean 'k3'\? Known: k1, k2, k3"):
        kl_estimate(torch.zeros(1), torch.zeros(1), estimator="k33")


def test_adaptive_rule_by_hand():
    # twice the target is an error of +1, held to 0.2; half the samples of the horizon: 1 + 0.2 / 2
    assert adapted_kl_coef(0.1, 0.1, 50, target=0.05, horizon=100) == pytest.approx(0.11)
    assert adapted_kl_coef(0.1, 0.0, 50, target=0.05, horizon=100) == pytest.approx(0.09)
    assert adapted_kl_coef(0.1, 0.055, 100, target=0.05, horizon=100) == pytest.approx(0.11)
    assert adapted_kl_coef(0.1, 0.05, 100, target=0.05, horizon=100) == 0.1


def test_controller_kinds():
    adaptive = KLController("adaptive", kl_coef=0.1, target=0.05)
    adaptive.update(observed_kl=1.0, n_samples=5000)
    assert adaptive.value == pytest.approx(0.11)
    fixed = KLController("fixed", kl_coef=0.1)
    fixed.update(observed_kl=1.0, n_samples=5000)
    assert fixed.value == 0.1
    nothing = KLController("none")
    nothing.update(observed_kl=math.nan, n_samples=1)
    assert nothing.value == 0.0


def test_controller_is_switched_while_a_run_goes_on():
    controller = KLController("adaptive", kl_coef=0.1, target=0.05, horizon=100)
    controller.update(1.0, 50)
    controller.switch("fixed")
    assert controller.value == pytest.approx(0.11)
    controller.update(1.0, 50)
    assert controller.value == pytest.approx(0.11)
    controller.switch("none")
    assert controller.value == 0.0
    controller.switch("adaptive", target=2.0)
    controller.update(1.0, 50)
    assert controller.value == pytest.approx(0.099)
    controller.switch("fixed", kl_coef=0.5)
    assert controller.value == 0.5


def test_a_failed_switch_changes_nothing():
    controller = KLController("fixed", kl_coef=0.1)
    with pytest.raises(ValueError, match="needs a target"):
        controller.switch("adaptive", kl_coef=0.3)
    assert controller.kind == "fixed" and controller.value == 0.1


def test_state_survives_json():
    controller = KLController("adaptive", kl_coef=0.1, target=0.05, horizon=77)
    controller.update(0.07, 13)
    restored = KLController("none")
    restored.load_state_dict(json.loads(json.dumps(controller.state_dict())))
    for each in (controller, restored):
        each.update(0.01, 5)
    assert restored.value == controller.value and repr(restored) == repr(controller)


@pytest.mark.parametrize(
    ("kind", "settings", "message"),
    [
        ("adaptve", {}, "Did you mean 'adaptive'"),
        ("adaptive", {"kl_coef": 0.1}, "needs a target"),
        ("adaptive", {"target": 0.1}, "kl_coef above 0"),
        ("fixed", {"kl_coef": -1.0}, "not negative"),
        ("fixed", {"kl_coef": math.nan}, "finite"),
        ("adaptive", {"kl_coef": 0.1, "target": 0.0}, "target must be above 0"),
        ("adaptive", {"kl_coef": 0.1, "target": 0.1, "horizon": 0}, "horizon"),
    ],
)
def test_wrong_settings(kind: str, settings: dict[str, float], message: str):
    with pytest.raises(ValueError, match=message):
        KLController(kind, **settings)


def test_a_broken_kl_is_an_error():
    with pytest.raises(ValueError, match="observed KL is nan"):
        KLController("adaptive", kl_coef=0.1, target=0.05).update(math.nan, 1)
