"""What does not divide is refused from the config alone, with the values that would do."""

from __future__ import annotations

import pytest
import torch
from transformers import LlamaConfig

from podium.core.errors import ConfigError
from podium.core.ranks import Ranks, WorkerContext
from podium.engines.train import create_train_engine
from podium.engines.train.loss_scale import LossScale
from podium.engines.train.sharded import ShardedEngine
from podium.engines.train.single import SingleDeviceEngine
from podium.engines.train.tensor_parallel import check_divides
from podium.models.heads import ActorModel
from tests.tiny import tiny_model


def config(heads: int = 12, kv: int = 4, width: int = 96) -> LlamaConfig:
    return LlamaConfig(num_attention_heads=heads, num_key_value_heads=kv, intermediate_size=width, hidden_size=heads * 8)


@pytest.mark.parametrize(
    "sizes", [{"tensor": 2}, {"tensor": 4}, {"sequence": 4}, {"sequence": 12}, {"tensor": 2, "sequence": 2}]
)
def test_what_divides_is_allowed(sizes: dict[str, int]) -> None:
    check_divides(config(), Ranks(**sizes))
    check_divides(config(), Ranks(data=3, shard=5))


def test_heads_that_do_not_divide_are_refused_with_values_that_would() -> None:
    with pytest.raises(ConfigError, match=r"4 key/value heads do not divide by tensor=3\n.*one of \[1, 2, 4\]"):
        check_divides(config(), Ranks(tensor=3))
    with pytest.raises(ConfigError, match=r"14 attention heads and 2 key/value heads do not divide by tensor=4"):
        check_divides(config(14, 2), Ranks(tensor=4))
    with pytest.raises(ConfigError, match=r"90 intermediate size do not divide by tensor=4\n.*one of \[1, 2\]"):
        check_divides(config(width=90), Ranks(tensor=4))
    with pytest.raises(ConfigError, match=r"12 attention and 4 key/value heads do not divide by sequence=6\n.*\[1, 2, 4, 12\]"):
        check_divides(config(), Ranks(sequence=6))
    with pytest.raises(ConfigError, match=r"on each of 2 tensor ranks do not divide by sequence=4"):
        check_divides(config(), Ranks(tensor=2, sequence=4))


def test_a_process_group_of_another_size_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"shard=2.* makes 2 ranks; the process group has 0"):
        ShardedEngine(ActorModel(tiny_model("llama")), context=WorkerContext(ranks=Ranks(shard=2)))


@pytest.mark.parametrize("backend", ["fsdp", "tensor_parallel", "sequence_parallel", "ddp", "single"])
def test_with_one_worker_any_backend_is_one_device(backend: str) -> None:
    engine = create_train_engine(backend, ActorModel(tiny_model("llama")), context=WorkerContext())
    assert type(engine) is SingleDeviceEngine


def test_loss_scale_halves_on_overflow_and_doubles_after_good_updates() -> None:
    scale = LossScale(8.0, growth_interval=2)
    for applied, want in [(True, 8), (True, 16), (False, 8), (True, 8), (True, 16)]:
        scale.update(applied)
        assert scale.value == want
    again = LossScale()
    again.load_state_dict(scale.state_dict())
    assert again.state_dict() == {"value": 16.0, "good": 0}
    for _ in range(10):
        scale.update(False)
    assert scale.value == 1


def test_fp16_trains_with_a_scaled_loss_on_one_device() -> None:
    from podium.algorithms import supervised_loss
    from podium.core.settings import OptimizerSettings
    from tests.properties.test_train_invariance import shared_rows

    runs = []
    for dtype in (torch.float32, torch.float16):
        model = ActorModel(tiny_model("llama", dtype=dtype))
        engine = SingleDeviceEngine(model, optimizer=OptimizerSettings(lr=1e-3))
        metrics = engine.update(shared_rows(), supervised_loss())
        assert metrics.mean("skipped_updates") == 0
        runs.append((metrics.mean("loss"), metrics.mean("grad_norm")))
        assert ("loss_scale" in engine.state_dict()["optimizer"]) == (dtype == torch.float16)
    assert runs[1] == pytest.approx(runs[0], rel=1e-2)
