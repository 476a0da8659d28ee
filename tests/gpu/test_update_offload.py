"""Masters and moments in the CPU's memory, with the model on a GPU: the same training, and the memory that is left."""

from __future__ import annotations

import gc
from unittest.mock import patch

import pytest
import torch

from podium.core.settings import OptimizerSettings
from podium.engines.train import SingleDeviceEngine, offload
from podium.models.heads import ActorModel
from tests.properties.test_train_invariance import CASES, rows
from tests.tiny import tiny_model

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU"),
]

# At the default eps gradients of pure rounding would become whole steps, and two right runs would part.
SETTINGS = OptimizerSettings(lr=1e-3, eps=1e-5, weight_decay=0.1, max_grad_norm=0.5)


@pytest.mark.parametrize("bucket", [5_000, 1 << 25])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_same_training_as_on_the_device(dtype: torch.dtype, bucket: int) -> None:
    """Masters after five updates: the kernels of the two sides may round the last bit otherwise, and no more."""
    masters = []
    for offloaded in (False, True):
        with patch.object(offload, "_BUCKET", bucket):
            model = ActorModel(tiny_model("qwen2", dtype=dtype).cuda())
            engine = SingleDeviceEngine(model, optimizer=SETTINGS, microbatch_tokens=60, offload_optimizer=offloaded)
            metrics = [engine.update(rows(), CASES["supervised"][1]).means()["loss"] for _ in range(5)]
        assert metrics[-1] < metrics[0]
        optimizer = engine._optimizer
        assert optimizer is not None
        if offloaded:
            assert all(m.device.type == "cpu" for m in optimizer._masters.values())
            assert all(s.device.type == "cpu" for state in optimizer._adamw.state.values() for s in state.values())
            for name, parameter in model.named_parameters():
                assert torch.equal(parameter.detach().cpu(), optimizer._masters[name].detach().to(dtype))
        masters.append(torch.cat([m.detach().cpu().flatten() for m in optimizer._masters.values()]))
    tolerance = 1e-5 if dtype == torch.float32 else 1e-3  # a weight's last bit in bf16 changes what comes after
    assert float((masters[0] - masters[1]).norm() / masters[0].norm()) < tolerance


def test_what_stays_on_the_device() -> None:
    """Weights alone, 2 bytes each, between updates; without it 14."""
    held = []
    for offloaded in (False, True):
        gc.collect()
        torch.cuda.synchronize()
        before = torch.cuda.memory_allocated()
        model = ActorModel(tiny_model("llama", dtype=torch.bfloat16, hidden_size=512, intermediate_size=2048).cuda())
        engine = SingleDeviceEngine(model, optimizer=SETTINGS, microbatch_tokens=60, offload_optimizer=offloaded)
        engine.update(rows(), CASES["supervised"][1])
        torch.cuda.synchronize()
        held.append((torch.cuda.memory_allocated() - before) / sum(p.numel() for p in model.parameters()))
        del model, engine
    assert held[0] > 13.9 and held[1] < 4.5  # with cuBLAS's workspace
