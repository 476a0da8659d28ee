"""Out of memory is said with role, phase, figures and settings in order of effect."""

import pytest
import torch

from podium.controller.dispatch import dispatch
from podium.controller.executors.local import LocalExecutor
from podium.controller.memory import OutOfMemory


class Hungry:
    def __init__(self, context):
        self.context = context

    @dispatch("broadcast")
    def update(self):
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 3.5 GiB.")

    @dispatch("broadcast")
    def generate_sequences(self):
        torch.empty(1 << 60, dtype=torch.uint8)

    @dispatch("broadcast")
    def other(self):
        raise RuntimeError("something else")


@pytest.mark.parametrize(
    ("method", "first"), [("update", "batch.microbatch_tokens: half"), ("generate_sequences", "rollout.max_concurrent: half")]
)
def test_out_of_memory_says_whose_and_what_to_change(method, first):
    role = LocalExecutor().launch({"critic": Hungry})["critic"]
    with pytest.raises(OutOfMemory) as caught:
        getattr(role, method)()
    text = str(caught.value)
    assert f"role 'critic', rank 0 of 1, pool 'local': out of memory in '{method}'" in text
    assert text.split("in order of effect:")[1].strip().startswith(first) and "GB are available" in text


def test_while_building_and_what_is_no_lack_of_memory():
    def build(context):
        raise MemoryError

    with pytest.raises(OutOfMemory, match=r"out of memory in 'build'[\s\S]*backend: fsdp"):
        LocalExecutor().launch({"actor": build})
    with pytest.raises(RuntimeError, match="something else"):
        LocalExecutor().launch({"critic": Hungry})["critic"].other()
