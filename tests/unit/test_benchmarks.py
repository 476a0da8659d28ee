"""The benchmarks' scripts run: their smallest shape, on the CPU."""

from __future__ import annotations

import sys
from argparse import Namespace
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parents[2] / "benchmarks"))

import grpo_step
import roofline
import update
from models import SHAPES, lognormal_lengths

from podium.profiling.kernels import kind_of


@pytest.fixture
def run() -> update.Run:
    return update.Run("tiny", "cpu", 1e11, 1, None)


def test_lengths_add_up_and_are_the_same_each_time():
    lengths = lognormal_lengths(32_768)
    assert sum(lengths) == 32_768 and lengths == lognormal_lengths(32_768)
    assert sorted(lengths)[len(lengths) // 2] == pytest.approx(768, rel=0.1)


def test_attention_s_operations():
    shape = SHAPES["0.5b"]
    # Forward and twice that backward, causal: for one layer and head 3 x (2 + 2) x n^2 / 2 x width.
    assert update.attention_flops(shape, [10, 4]) == 24 * 14 * 64 * (6 * 100 + 6 * 16)


@pytest.mark.parametrize("part", ["speed", "shared", "long"])
def test_parts_of_an_update(run: update.Run, part: str):
    with run.engine() as engine:
        report = update.ENGINE_PARTS[part](run, engine)
    rows = report.values() if part == "long" else [report]
    assert all(row["tokens_per_second"] > 0 for row in rows)
    if part == "long":  # recomputation never changes the gradient
        assert len(report) == 3


def test_every_technique_can_be_switched_and_is_switched_back(run: update.Run):
    with run.engine() as engine:
        table = update.techniques.table(run, engine)
        assert engine.model.recompute == "none" and engine.model.packs
        assert engine.microbatch_tokens == run.microbatch
    assert all(row["seconds"] > 0 for row in table.values())


def test_a_whole_step(tmp_path: Path):
    args = Namespace(
        device="cpu", size="tiny", prompts=2, group=2, prompt_tokens=4, new_tokens=6, microbatch_tokens=64, steps=2
    )
    seconds, shares = grpo_step.podium_steps(args, SHAPES["tiny"], str(tmp_path))
    assert len(seconds) == 2 and shares["time/rollout"] > 0


def test_ratios_are_of_the_fastest_and_of_the_default():
    report = {"seconds": {"default": 12.0, "no checkpointing": 9.0}}
    assert grpo_step.ratios("trl-vllm", report, 2.0) == {"ratio_to_trl_vllm": 4.5, "ratio_to_trl_vllm_default": 6.0}
    assert grpo_step.ratios("trl-vllm", {"error": "it ended with status 1"}, 2.0) == {}


def test_the_roofline_s_stages_add_up():
    stages = roofline.step(SHAPES["1.5b"], roofline.Machine(7.87e14, 4.23e12), 128, 8, 512, 512)
    assert stages["step"] == pytest.approx(sum(v for name, v in stages.items() if name != "step"))


@pytest.mark.parametrize(
    ("name", "kind"),
    [
        ("void cudnn_generated_fort_native_sdpa_sm90_flash_bprop", "attention"),
        ("nvjet_tst_256x128_64x4_1x2_h_bz_coopA_TNT", "matrix products"),
        ("_norm_backward", "norms"),
        ("_swiglu_backward", "activation"),
        ("_statistics", "log-probs"),
        ("void at::native::multi_tensor_apply_kernel<FusedAdamMathFunctor>", "optimizer"),
        ("_own_kernel", "attention"),
        ("ncclDevKernel_AllReduce_Sum_bf16_RING_LL", "communication"),
        ("Memcpy DtoD (Device -> Device)", "copies and fills"),
        ("aten::mm", "matrix products"),
        ("what nobody knows", "other"),
    ],
)
def test_kinds_of_kernels(name: str, kind: str):
    assert kind_of(name) == kind
