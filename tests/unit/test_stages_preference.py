"""KTO's reference point and the preference measures, against log-ratios worked out by hand."""

from __future__ import annotations

import pytest
import torch

from podium.controller.future import Future
from podium.core.batch import Batch
from podium.stages.base import StepContext
from podium.stages.evaluation import PairAccuracyStage
from podium.stages.preference import DesirabilityStage, PreferenceAccuracyStage, ReferencePointStage


class Role:
    """The log-prob of token t after a prompt that begins with p is `scale * p * t`; remembers what it was asked."""

    def __init__(self, scale):
        self.scale, self.asked = scale, []

    def compute_log_probs(self, batch, name):
        self.asked.append(batch)
        rows = zip(batch["prompt_ids"].to_list(), batch["response_ids"].to_list(), strict=True)
        return Future.of(Batch({name: [[self.scale * prompt[0] * t for t in response] for prompt, response in rows]}))

    def score(self, batch, name):
        return Future.of(Batch({name: [float(r[0]) for r in batch["response_ids"].to_list()]}))


def run(stage, batch, actor=0.5, reference=0.25):
    roles = {"actor": Role(actor), "reference": Role(reference), "reward": Role(1.0)}
    context = StepContext(0, roles)
    return stage.run(batch, context), context.metrics.means(), roles


def rows(prompts, responses, masks=None, **columns):
    masks = masks or [[True] * len(r) for r in responses]
    return Batch({"prompt_ids": [[p] for p in prompts], "response_ids": responses, "loss_mask": masks, **columns})


# ---------------------------------------------------------------------- KTO's reference point


def test_each_prompt_beside_the_answer_from_half_a_step_away():
    batch = rows([1, 2, 3, 4], [[10], [20, 1], [30], [40]], [[True], [True, False], [True], [True]])
    out, metrics, roles = run(ReferencePointStage(), batch)
    asked = roles["actor"].asked[0]
    assert asked["prompt_ids"].to_list() == [[1], [2], [3], [4]]
    assert asked["response_ids"].to_list() == [[30], [40], [10], [20, 1]]
    # (0.5 - 0.25) * (1*30 + 2*40 + 3*10 + 4*20) / 4; the masked token does not count.
    assert out["reference_point"].tolist() == [13.75] * 4
    assert metrics == {"kto/reference_point": 13.75}
    assert out.names == ["reference_point"]


def test_the_reference_point_is_not_below_zero():
    out, metrics, _ = run(ReferencePointStage(), rows([1, 2], [[10], [20]]), actor=-0.5)
    assert out["reference_point"].tolist() == [0.0, 0.0] and metrics["kto/reference_point"] == 0.0


def test_the_rows_of_an_odd_step_all_get_another_s_answer():
    _, _, roles = run(ReferencePointStage(), rows([1, 2, 3], [[10], [20], [30]]))
    asked = roles["actor"].asked[0]["response_ids"].to_list()
    assert sorted(asked) == [[10], [20], [30]] and all(a != [10 * (i + 1)] for i, a in enumerate(asked))


def test_every_row_s_point_is_its_own_number():
    """A minibatch may write into its rows: they are no views of one number."""
    out, _, _ = run(ReferencePointStage(), rows([1, 2], [[10], [20]]))
    assert out["reference_point"].stride() == (1,)


# ---------------------------------------------------------------------- preferences


def test_a_pair_is_right_where_the_chosen_row_moved_up_more():
    # Log-ratios 0.25 * prompt * token: 2.5, 5, -, 5 and 2.5, 7.5. Pair 9: chosen 5 over 2.5; pair 4: chosen 7.5 over 5.
    batch = rows([1, 1, 1, 1], [[20], [30], [10], [20]], pair_id=[9, 4, 9, 4], chosen=[True, True, False, False])
    _, metrics, _ = run(PreferenceAccuracyStage(), batch)
    assert metrics == {"accuracy": 1.0, "margin": pytest.approx(2.5)}
    _, metrics, _ = run(PreferenceAccuracyStage(), batch.with_columns({"chosen": [True, False, False, True]}))
    assert metrics == {"accuracy": 0.5, "margin": pytest.approx(0.0)}


def test_equal_ratios_are_not_right_and_tokens_outside_the_mask_do_not_count():
    masks = [[True, False], [True, False]]
    batch = rows([2, 2], [[10, 50], [10, 7]], masks, pair_id=[0, 0], chosen=[False, True])
    _, metrics, _ = run(PreferenceAccuracyStage(), batch)
    assert metrics == {"accuracy": 0.0, "margin": 0.0}


def test_an_untrained_policy_prefers_nothing():
    batch = rows([1, 2, 3, 4], [[5], [6], [7], [8]], pair_id=[0, 0, 1, 1], chosen=[True, False, False, True])
    _, metrics, _ = run(PreferenceAccuracyStage(), batch, reference=0.5)
    assert metrics == {"accuracy": 0.0, "margin": 0.0}


def test_desirable_and_undesirable_apart():
    batch = rows([1, 1, 2], [[4], [8, 8], [6]], label=[True, False, True])
    _, metrics, _ = run(DesirabilityStage(), batch)
    assert metrics == {"desirable_log_ratio": 2.0, "undesirable_log_ratio": 4.0}


def test_a_reward_model_s_pairs_in_any_order():
    batch = rows([1] * 4, [[3], [1], [5], [2]], pair_id=[7, 2, 2, 7], chosen=[False, True, False, True])
    _, metrics, _ = run(PairAccuracyStage(), batch)
    assert metrics == {"accuracy": 0.0, "margin": -2.5}
    assert torch.tensor(metrics["margin"]).isfinite()
