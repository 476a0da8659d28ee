"""What a profile counts: operations by hand, memory by owner, kernels by kind; and that it leaves nothing behind."""

from __future__ import annotations

import json
import random
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

from podium.cli.main import main
from podium.core.batch import Batch
from podium.core.errors import ConfigError
from podium.core.settings import OptimizerSettings
from podium.engines.train.offload import OffloadedAdamW
from podium.engines.train.optim import MasterAdamW
from podium.models.heads import ActorModel
from podium.profiling.flops import ModelCost, Rows
from podium.profiling.kernels import by_kind, kernel_times
from podium.profiling.memory import Standing, gradients_of, largest_rise
from podium.profiling.report import as_plain, draw, kernel_rows, memory_rows, stage_rows
from podium.profiling.run import OUTSIDE, Profile, profile_run
from podium.recipes import build, load
from tests.tiny import tiny_model, tiny_tokenizer

# ------------------------------------------------------------------ operations


def rows_of(prompts: list[list[int]], responses: list[int], *, shared: bool = True) -> Rows:
    batch = Batch({"prompt_ids": prompts, "response_ids": [[1] * n for n in responses]})
    return Rows.of(batch, shared=shared)


def test_a_shared_prompt_s_tokens_count_once_where_it_runs_once():
    prompts = [[5, 6, 7], [5, 6, 7], [8, 9]]
    assert rows_of(prompts, [4, 2, 1]).tokens == 3 + 2 + 4 + 2 + 1
    assert rows_of(prompts, [4, 2, 1], shared=False).tokens == 7 + 5 + 3


def test_operations_of_passes():
    """2 layers of 4 heads of 16: a pair of query and key takes 4 x 64 operations a layer, and a row has n^2 / 2 pairs."""
    cost = ModelCost(ActorModel(tiny_model()))
    one = rows_of([[5, 6, 7]], [4])
    attention = 2 * 4 * 64 * 7**2 / 2
    assert cost.parameters == cost.trained > 0 and cost.unknown is None
    assert cost.attention(one) == attention
    assert cost.forward(one) == 2 * cost.parameters * 7 + attention
    assert cost.update(one) == 6 * cost.parameters * 7 + 3 * attention


def test_attention_of_answers_that_share_a_prompt():
    """The prompt's own pairs once, then each answer's with it and with itself."""
    cost = ModelCost(ActorModel(tiny_model()))
    shared = cost.attention(rows_of([[5, 6, 7]] * 2, [4, 4]))
    assert shared == 2 * 4 * 64 * (3**2 + 2 * (7**2 - 3**2)) / 2
    assert cost.attention(rows_of([[5, 6, 7]] * 2, [4, 4], shared=False)) == 2 * 4 * 64 * 2 * 7**2 / 2


def test_frozen_parameters_get_no_gradient():
    model = ActorModel(tiny_model())
    for parameter in list(model.parameters())[1:]:
        parameter.requires_grad_(False)
    cost, one = ModelCost(model), rows_of([[5, 6, 7]], [4])
    first = next(model.parameters()).numel()
    assert cost.trained == first
    assert cost.update(one) == (4 * cost.parameters + 2 * first) * 7 + 3 * cost.attention(one)


def test_what_is_not_counted_is_said():
    cost = ModelCost(nn.Linear(3, 3))
    assert "attention" in (cost.unknown or "")
    assert cost.forward(rows_of([[1]], [1])) == 2 * 12 * 2


# ------------------------------------------------------------------ memory and kernels


def test_storage_that_roles_share_counts_once():
    layer = nn.Linear(10, 10, bias=False)
    standing = Standing(torch.device("cpu"))
    standing.add_role("actor", SimpleNamespace(model=layer, _optimizer=None))
    standing.add_role("reference", SimpleNamespace(model=layer, _optimizer=None))
    standing.add_role("reward", SimpleNamespace())
    assert [(h.owner, h.role, h.bytes) for h in standing.holdings] == [("weights", "actor", 400), ("weights", "reward", None)]
    assert standing.total == 400


@pytest.mark.parametrize(("kind", "fresh"), [(MasterAdamW, 12), (OffloadedAdamW, 28)])
def test_gradients_that_an_update_allocates(kind: type[MasterAdamW], fresh: int):
    """On a CPU the sum of a 16-bit parameter's gradients is kept; an fp32 parameter's own gradient is new each time."""
    low, own = nn.Parameter(torch.zeros(4, dtype=torch.bfloat16)), nn.Parameter(torch.zeros(3))
    optimizer = kind([("low", low), ("own", own)], OptimizerSettings())
    optimizer.backward(low.float().sum() + own.sum())
    assert gradients_of(optimizer) == (16 + 12, fresh)
    assert gradients_of(SimpleNamespace()) is None


def record(run: Any) -> Any:
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU], profile_memory=True) as recorded:
        run()
    return recorded


def test_the_largest_rise_of_memory():
    def run() -> None:
        a = torch.zeros(1000)
        b = torch.zeros(500)
        del a
        torch.zeros(200).add_(b.sum())

    assert 6000 <= largest_rise(record(run)) < 6400


def test_kernels_of_a_cpu_are_its_operators():
    a = torch.randn(64, 64)
    kernels = kernel_times(record(lambda: torch.nn.functional.silu(a @ a)), "cpu")
    kinds = by_kind(kernels)
    assert {"matrix products", "activation"} <= set(kinds)
    assert list(kinds.values()) == sorted(kinds.values(), reverse=True)
    assert {k.name: k.calls for k in kernels}["aten::mm"] == 1


# ------------------------------------------------------------------ a run


def by_length(completions: list[str], **columns: Any) -> list[float]:
    return [float(len(c) % 5) for c in completions]


def trainer_of(dtype: torch.dtype = torch.float32, **changes: Any) -> Any:
    values: dict[str, Any] = {
        "algorithm": "grpo",
        "batch": {"prompts_per_step": 2, "group_size": 2, "microbatch_tokens": 256},
        "rollout": {"max_new_tokens": 4},
        "rewards": [{"function": by_length}],
        "run": {"steps": 9, "trackers": [], "progress": False, "device": "cpu"},
    }
    rows = [{"prompt": f"What is {a} plus 3?"} for a in range(8)]
    settings = load(values=values | changes)
    return build(settings, models={"actor": tiny_model(dtype=dtype)}, tokenizer=tiny_tokenizer(), data=rows)


@pytest.fixture(scope="module")
def grpo() -> tuple[Any, Profile]:
    trainer = trainer_of()
    return trainer, profile_run(trainer, steps=2, warmup=1)


def test_stages_of_a_run(grpo: tuple[Any, Profile]):
    trainer, profile = grpo
    by_name = {s.name: s for s in profile.stages}
    assert [s.name for s in profile.stages] == [stage.label for stage in trainer.graph.order]
    assert profile.steps == len(profile.seconds) == 2
    assert sum(s.seconds for s in profile.stages) <= profile.step_seconds
    rollout, update = by_name["rollout"], by_name["update_actor"]
    assert 4 <= rollout.generated <= 16
    # Both run each prompt once; the update's operations are three times a forward pass's.
    assert update.tokens == rollout.tokens and update.flops == pytest.approx(3 * rollout.flops)
    assert by_name["reward"].tokens == 0 and profile.mfu_of(by_name["reward"]) is None
    assert (profile.mfu or 0) > 0 and profile.mfu_of(update)
    assert update.kernels["matrix products"] > 0 and OUTSIDE["cpu"] in update.kernels


def test_memory_of_a_run(grpo: tuple[Any, Profile]):
    trainer, profile = grpo
    held = {h.owner: h.bytes for h in profile.memory}
    weights = 4 * sum(p.numel() for p in trainer.roles["actor"].workers[0].engine.model.parameters())
    assert held["weights"] == pytest.approx(weights, rel=0.01)
    assert held["gradients"] == weights
    assert held["AdamW's moments"] == pytest.approx(2 * weights, rel=0.01)
    assert held["activations and scratch, at most"] and held["KV cache, at most"]
    assert any("CPU" in line for line in profile.notes)


def test_a_profile_leaves_the_roles_as_they_were(grpo: tuple[Any, Profile]):
    worker = grpo[0].roles["actor"].workers[0]
    assert not {"compute", "update"} & set(vars(worker.engine))
    assert "generate_sequences" not in vars(worker) and "step" not in vars(worker.engine._optimizer)


def test_tables_plain_values_and_picture(grpo: tuple[Any, Profile], tmp_path: Any):
    _, profile = grpo
    plain = as_plain(profile)
    assert sum(s["share"] for s in plain["stages"]) <= 1.0 and plain["tokens_per_second"] > 0
    assert len(stage_rows(profile)) == len(profile.stages) + 1
    names, rows = kernel_rows(profile)
    assert "update_actor" in names and all(len(row) == len(names) + 1 for row in rows)
    assert len(memory_rows(profile)) == len(profile.memory)
    assert draw(profile, tmp_path / "profile.png", "grpo").read_bytes()[:4] == b"\x89PNG"


def test_several_roles_and_16_bits():
    """PPO: a critic that trains too; the actor in bf16 has masters, and gradients in fp32."""
    profile = profile_run(trainer_of(torch.bfloat16, algorithm="ppo"), steps=1, warmup=0)
    owners = {(h.owner, h.role): h.bytes for h in profile.memory}
    assert owners["gradients", "actor"] == owners["fp32 masters", "actor"]
    assert owners["fp32 masters", "actor"] == pytest.approx(2 * (owners["weights", "actor"] or 0), rel=0.01)  # and buffers
    assert ("weights", "critic") in owners and ("gradients", "critic") in owners
    assert {"values", "update_critic"} <= {s.name for s in profile.stages if s.flops}


@pytest.mark.parametrize(("algorithm", "outer"), [("dapo", "dynamic_sampling"), ("remax", "baseline")])
def test_a_stage_that_runs_others_inside_itself(algorithm: str, outer: str):
    """What those compute is the outer one's, and its recording does not end with theirs."""
    profile = profile_run(trainer_of(algorithm=algorithm), steps=1, warmup=0)
    stage = next(s for s in profile.stages if s.name == outer)
    assert stage.tokens and stage.generated and stage.flops
    assert stage.kernels["matrix products"] > 0  # of a rollout, which the reward comes after


def test_an_optimizer_in_the_host_s_memory():
    """On a CPU both are one; but the second copy of the weights shows."""
    profile = profile_run(trainer_of(optimizer={"offload": True}), steps=1, warmup=0)
    held = {h.owner: h.bytes for h in profile.memory}
    assert held["fp32 masters"] == held["gradients"] == pytest.approx(held["weights"], rel=0.01)


def test_other_processes_are_refused():
    trainer = SimpleNamespace(settings=SimpleNamespace(executor=SimpleNamespace(kind="ray")))
    with pytest.raises(ConfigError, match="is ray, and a profile"):
        profile_run(trainer)


# ------------------------------------------------------------------ the command


@pytest.fixture
def quickstart(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The quick start's recipe, with its model and problems."""
    from podium.quickstart import model, task
    from podium.quickstart.run import RECIPES

    monkeypatch.chdir(tmp_path)
    problems = task.distinct(task.problems(random.Random(0), held_out=False), 40)
    model.save(tmp_path / "base", [p.prompt + p.answer for p in problems], 0)
    rows = [{"prompt": p.prompt, "answer": p.answer} for p in problems]
    Path("problems.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    small = ["batch.prompts_per_step=4", "batch.group_size=4", "batch.minibatch_sequences=8", "--steps", "1", "--warmup", "0"]
    return ["profile", str(RECIPES / "grpo.yaml"), "model.path=base", "data.path=problems.jsonl", *small]


def podium(*arguments: str) -> int:
    with pytest.raises(SystemExit) as ended:
        main(arguments)
    return int(ended.value.code or 0)


def test_the_command_on_the_quick_start_s_recipe(quickstart: list[str], capsys: pytest.CaptureFixture[str]):
    assert podium(*quickstart) == 0
    said = capsys.readouterr().out
    for part in ("Time of a step by stage", "update_actor", "matrix products", "KV cache", "tokens/s", "MFU", "note: "):
        assert part in said
    (folder,) = Path("runs").glob("profile-grpo-*")
    assert (folder / "profile.png").is_file() and (folder / "settings.yaml").is_file()
    written = json.loads((folder / "profile.json").read_text())
    assert written["device"] == "cpu" and len(written["all_step_seconds"]) == 1
    assert podium("train", "--resume") == 2  # nothing is resumed from it


def test_a_folder_stands_for_its_settings_and_json_is_all_of_stdout(
    grpo: tuple[Any, Profile], quickstart: list[str], capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr("podium.profiling.run.profile_run", lambda trainer, **given: grpo[1])
    assert podium(*quickstart, "run.folder=elsewhere") == 0
    (folder,) = Path("elsewhere").iterdir()
    capsys.readouterr()
    assert podium("profile", str(folder), "--json") == 0
    plain = json.loads(capsys.readouterr().out)
    assert Path(plain["folder"]).parent == folder.parent and plain["folder"] != str(folder) and plain["mfu"] > 0


def test_what_the_command_refuses(quickstart: list[str], capsys: pytest.CaptureFixture[str]):
    assert podium("profile", "steps=3") == 2
    assert podium(*quickstart, "executor.kind=ray") == 2
    assert podium(*quickstart, "batch.grup_size=3") == 2
    said = capsys.readouterr().err
    assert "executor.kind=local" in said and "group_size" in said
    assert not Path("runs").exists()


def test_where_it_writes_is_tried_before_the_steps(
    quickstart: list[str], capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
):
    Path("a_file").touch()
    ran: list[Any] = []
    monkeypatch.setattr("podium.profiling.run.profile_run", lambda trainer, **given: ran.append(given))
    assert podium(*quickstart, "run.folder=a_file") == 2
    assert "cannot make a run folder in 'a_file'" in capsys.readouterr().err and not ran
