"""Sharded roles read from a folder in parts: the same weights as loading whole, and no rank ever holds them all."""

from __future__ import annotations

import weakref
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from podium.algorithms import supervised_loss, value_loss
from podium.engines.train.sharded import ShardedEngine
from podium.models.heads import ActorModel, CriticModel
from podium.models.loading import load_causal_lm
from podium.models.parts import base_in_parts, causal_lm_in_parts, parts_in
from tests.parallel.processes import context_of, on_ranks, once
from tests.parallel.test_hand_over import update
from tests.parallel.test_sharded_training import OPTIMIZER, rows_of
from tests.tiny import tiny_model, tiny_tokenizer

pytestmark = pytest.mark.timeout(900)  # of the test that waits for the processes, on a busy machine

WIDE = {"hidden_size": 256, "intermediate_size": 1024, "num_hidden_layers": 4, "vocab_size": 512, "tie_word_embeddings": False}
SIZES: list[dict[str, int]] = [{"shard": 2}, {"tensor": 2}]


class Peak(TorchDispatchMode):
    """The most bytes of CPU memory that tensors held at one time while it was on."""

    def __init__(self) -> None:
        super().__init__()
        self.now = self.most = 0
        self._seen: set[int] = set()

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = function(*args, **(kwargs or {}))
        for leaf in tree_leaves((args, kwargs, out)):
            if isinstance(leaf, Tensor) and leaf.device.type == "cpu" and type(leaf) is Tensor:
                self._count(leaf)
        return out

    def _count(self, tensor: Tensor) -> None:
        storage = tensor.untyped_storage()
        key, size = storage._cdata, storage.nbytes()
        if key in self._seen:
            return
        self._seen.add(key)
        self.now += size
        self.most = max(self.most, self.now)
        weakref.finalize(storage, self._gone, key, size)

    def _gone(self, key: int, size: int) -> None:
        self._seen.discard(key)
        self.now -= size


def two_ranks(rank: int, folder: str) -> dict[str, Any]:
    out: dict[str, Any] = {}
    for sizes in SIZES:
        for family in ("qwen3", "gemma2", "wide"):
            states = [state_of(rank, f"{folder}/{family}", sizes, load) for load in (causal_lm_in_parts, load_causal_lm)]
            out[f"{family} {sizes}"] = states[0].keys() == states[1].keys() and all(
                torch.equal(value, states[1][name]) for name, value in states[0].items()
            )
        out[f"peak {sizes}"] = peak(rank, f"{folder}/wide", sizes)
    out["critic"] = critics(rank, f"{folder}/qwen3")
    out["bf16"] = in_16_bits(rank, f"{folder}/qwen3")
    return out


def state_of(rank: int, folder: str, sizes: dict[str, int], load: Any) -> dict[str, Tensor]:
    engine = ShardedEngine(ActorModel(load(folder, dtype="float32")), context=context_of(rank, **sizes), optimizer=OPTIMIZER)
    update(engine)
    return engine.state_dict()["model"]


def peak(rank: int, folder: str, sizes: dict[str, int]) -> tuple[int, int, int]:
    """Bytes that were held at most: while parts were read; while it was loaded whole; of the whole model."""
    most = []
    for load in (causal_lm_in_parts, load_causal_lm):
        with Peak() as counted:
            model = load(folder, dtype="float32")
            engine = ShardedEngine(ActorModel(model), context=context_of(rank, **sizes))
            most.append(counted.most)
        del engine, model
    return most[0], most[1], sum(p.numel() * 4 for p in tiny_model("llama", **WIDE).parameters())


def critics(rank: int, folder: str) -> bool:
    """A new value head on a base that is read in parts."""
    states = []
    for parts in (True, False):
        torch.manual_seed(5)
        model = (causal_lm_in_parts if parts else load_causal_lm)(folder, dtype="float32")
        critic = CriticModel(base_in_parts(model)) if parts else CriticModel.from_causal_lm(model)
        engine = ShardedEngine(critic, context=context_of(rank, shard=2), optimizer=OPTIMIZER)
        engine.update(rows_of(rank, 2), value_loss(clip=0.2))
        states.append(engine.state_dict()["model"])
    return all(torch.equal(value, states[1][name]) for name, value in states[0].items())


def in_16_bits(rank: int, folder: str) -> list[float]:
    """A file in fp32, a role in bf16: the masters are the rounded weights, as when it is loaded so."""
    out = []
    for load in (causal_lm_in_parts, load_causal_lm):
        engine = ShardedEngine(
            ActorModel(load(folder, dtype="bfloat16")), context=context_of(rank, shard=2), optimizer=OPTIMIZER
        )
        out.append(engine.update(rows_of(rank, 2), supervised_loss()).means()["loss"])
    return out


@pytest.fixture(scope="module")
def two(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    def make(folder: Path) -> Any:
        for family in ("qwen3", "gemma2"):
            tiny_model(family).save_pretrained(folder / family)
        tiny_model("llama", **WIDE).save_pretrained(folder / "wide", max_shard_size="2MB")  # several files
        return on_ranks(two_ranks, 2, str(folder), timeout=280)

    return once(tmp_path_factory, "in-parts", make)[1]


@pytest.mark.parametrize("sizes", SIZES, ids=str)
def test_the_weights_are_those_of_the_folder(sizes: dict[str, int], two: list[dict[str, Any]]) -> None:
    for family in ("qwen3", "gemma2", "wide"):
        assert two[0][f"{family} {sizes}"], family


def test_a_critics_base_is_read_in_parts_too(two: list[dict[str, Any]]) -> None:
    assert two[0]["critic"]


def test_a_file_of_another_dtype(two: list[dict[str, Any]]) -> None:
    assert two[0]["bf16"][0] == two[0]["bf16"][1]


@pytest.mark.parametrize("sizes", SIZES, ids=str)
def test_no_rank_ever_holds_the_whole_model(sizes: dict[str, int], two: list[dict[str, Any]]) -> None:
    for ranks in two:
        parts, whole, model = ranks[f"peak {sizes}"]
        assert parts < 0.75 * model <= 0.75 * whole  # its half, one more tensor, the small model that is tried


def test_what_cannot_be_read_in_parts_is_loaded_whole(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    assert causal_lm_in_parts("owner/name") is None
    model = tiny_model("llama")
    model.save_pretrained(tmp_path)
    (tmp_path / "model.safetensors").rename(tmp_path / "other.safetensors")
    assert causal_lm_in_parts(tmp_path) is None and "no safetensors" in caplog.text
    tiny_model("llama", hidden_size=32).save_pretrained(tmp_path / "narrow")
    (tmp_path / "narrow" / "config.json").write_text((tmp_path / "config.json").read_text())
    assert causal_lm_in_parts(tmp_path / "narrow") is None and "another shape in its file" in caplog.text


def test_without_numbers_it_is_the_same_model_otherwise(tmp_path: Path) -> None:
    model = tiny_model("gemma3")
    model.generation_config.eos_token_id = [2, 7]
    model.save_pretrained(tmp_path)
    tiny_tokenizer().save_pretrained(tmp_path)
    parts, whole = causal_lm_in_parts(tmp_path, dtype="float32"), load_causal_lm(tmp_path, dtype="float32")
    assert parts is not None and all(p.is_meta for p in parts.parameters())
    assert parts.generation_config.eos_token_id == [2, 7] and not parts.training
    assert dict(parts.named_buffers()).keys() == dict(whole.named_buffers()).keys()
    for name, buffer in whole.named_buffers():
        assert torch.equal(parts.get_buffer(name), buffer), name
    (places,) = parts_in(parts).values()
    for name, parameter in whole.named_parameters():
        assert torch.equal(places.read(name), parameter)
        assert torch.equal(places.read(name, [slice(0, 2)]), parameter[:2])
