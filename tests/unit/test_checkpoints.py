"""Checkpoints: whole or not there; damage is found and said."""

import os
import random
import resource

import numpy as np
import pytest
import torch

from podium.checkpoints.store import CheckpointStore, rng_state, set_rng_state, verify
from podium.core.errors import CheckpointError


def state(value=1.0):
    weight = torch.full((3, 2), value)
    return {"role_actor": {"weights": {"a": weight, "tied": weight}, "step": 3, "betas": [0.9, 0.95]}, "trainer": {"step": 3}}


def test_round_trip_keeps_tensors_values_and_ties(tmp_path):
    store = CheckpointStore(tmp_path)
    store.save(3, state())
    step, back = store.load()
    assert step == 3 and back["trainer"] == {"step": 3} and back["role_actor"]["betas"] == [0.9, 0.95]
    assert torch.equal(back["role_actor"]["weights"]["a"], torch.ones(3, 2))
    assert back["role_actor"]["weights"]["tied"] is back["role_actor"]["weights"]["a"]


def test_bf16_and_empty_tensors(tmp_path):
    store = CheckpointStore(tmp_path)
    store.save(1, {"x": {"b": torch.arange(4, dtype=torch.bfloat16), "none": torch.empty(0), "also_none": torch.empty(0)}})
    back = store.load()[1]["x"]
    assert back["b"].dtype is torch.bfloat16 and back["none"].numel() == 0 and back["also_none"].numel() == 0


def test_views_of_one_storage_are_not_confused(tmp_path):
    base = torch.arange(6.0)
    CheckpointStore(tmp_path).save(1, {"x": {"head": base[:3], "tail": base[3:], "t": base.view(2, 3).t()}})
    back = CheckpointStore(tmp_path).load()[1]["x"]
    assert back["head"].tolist() == [0, 1, 2] and back["tail"].tolist() == [3, 4, 5]
    assert torch.equal(back["t"], base.view(2, 3).t())


def test_only_the_newest_are_kept(tmp_path):
    store = CheckpointStore(tmp_path, keep=2)
    for step in (1, 2, 3):
        store.save(step, state(step))
    assert store.steps() == [2, 3]


@pytest.mark.parametrize("damage", ["truncate", "flip", "delete", "manifest"])
def test_a_damaged_checkpoint_is_passed_over_and_said(tmp_path, damage):
    notes = []
    store = CheckpointStore(tmp_path, keep=2, note=notes.append)
    store.save(1, state(1))
    newest = store.save(2, state(2))
    tensors = newest / "role_actor.safetensors"
    if damage == "truncate":
        tensors.write_bytes(tensors.read_bytes()[:-3])
    elif damage == "flip":
        data = bytearray(tensors.read_bytes())
        data[-1] ^= 1
        tensors.write_bytes(bytes(data))
    elif damage == "delete":
        tensors.unlink()
    else:
        (newest / "manifest.json").write_text("{")
    assert verify(newest) is not None
    step, back = store.load()
    assert step == 1 and float(back["role_actor"]["weights"]["a"][0, 0]) == 1.0 and "step_000002" in notes[0]


def test_an_interrupted_save_leaves_no_half_checkpoint(tmp_path, monkeypatch):
    store = CheckpointStore(tmp_path)
    store.save(1, state(1))
    monkeypatch.setattr("podium.checkpoints.store.os.replace", lambda *a: (_ for _ in ()).throw(OSError(28, "No space left")))
    with pytest.raises(CheckpointError, match="No space left"):
        store.save(2, state(2))
    assert store.steps() == [1] and store.load()[0] == 1 and not list(tmp_path.glob(".writing*"))


@pytest.mark.parametrize("values", [4, 100_000], ids=["manifest", "tensors"])
def test_a_full_disk_leaves_nothing_half_written(tmp_path, values):
    """Safetensors has an error of its own for it."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (100, before[1]))
    try:
        with pytest.raises(CheckpointError, match="could not write the checkpoint of step 1"):
            CheckpointStore(tmp_path).save(1, {"x": {"w": torch.zeros(values)}})
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("failing", [1, 2])
def test_saving_a_step_again_keeps_the_good_copy_until_the_new_one_is_there(tmp_path, monkeypatch, failing):
    store = CheckpointStore(tmp_path, keep=1)
    store.save(1, state(1))
    replace, calls = os.replace, []

    def fails(source, target):
        calls.append(1)
        if len(calls) == failing:
            raise OSError(5, "Input/output error")
        return replace(source, target)

    monkeypatch.setattr("podium.checkpoints.store.os.replace", fails)
    with pytest.raises(CheckpointError, match="Input/output error"):
        store.save(1, state(2))
    assert [p.name for p in tmp_path.iterdir()] == ["step_000001"]
    assert float(store.load()[1]["role_actor"]["weights"]["a"][0, 0]) == 1.0
    store.save(1, state(3))
    assert float(store.load()[1]["role_actor"]["weights"]["a"][0, 0]) == 3.0
    assert [p.name for p in tmp_path.iterdir()] == ["step_000001"]


def test_a_process_that_died_between_the_renames_loses_nothing(tmp_path):
    store = CheckpointStore(tmp_path)
    store.save(1, state(1)).rename(tmp_path / ".replaced_step_000001")
    assert store.load()[0] == 1 and store.steps() == [1]


def test_damaged_ones_do_not_count(tmp_path):
    notes = []
    store = CheckpointStore(tmp_path, keep=1, note=notes.append)
    for step in (1, 2):
        newest = CheckpointStore(tmp_path, keep=2).save(step, state(step))
    tensors = newest / "role_actor.safetensors"
    tensors.write_bytes(tensors.read_bytes()[:-3])
    assert store.steps() == [1]
    store._prune()
    assert verify(tmp_path / "step_000001") is None
    assert store.load()[0] == 1 and (tmp_path / "damaged_step_000002").is_dir() and not newest.exists()
    assert verify(store.save(2, state(2))) is None and store.steps() == [2]


def test_steps_are_in_the_order_of_numbers(tmp_path):
    store = CheckpointStore(tmp_path, keep=2)
    for step in (999_999, 1_000_000, 1_000_001):
        store.save(step, state(step))
    assert store.steps() == [1_000_000, 1_000_001] and store.load()[0] == 1_000_001


@pytest.mark.parametrize("text", ["[]", "{}", '{"format": 1}'])
def test_a_manifest_that_is_none(tmp_path, text):
    (CheckpointStore(tmp_path).save(1, state()) / "manifest.json").write_text(text)
    assert CheckpointStore(tmp_path).steps() == []


def test_nothing_to_load(tmp_path):
    with pytest.raises(CheckpointError, match="no usable checkpoint"):
        CheckpointStore(tmp_path).load()


def test_generators_continue_where_they_were(tmp_path):
    store = CheckpointStore(tmp_path)
    random.gauss(0, 1)  # leaves a cached second value behind
    np.random.standard_normal()
    store.save(1, {"rng": rng_state()})
    expected = (random.gauss(0, 1), np.random.standard_normal(), torch.rand(3))
    random.seed(9), np.random.seed(9), torch.manual_seed(9)
    set_rng_state(store.load()[1]["rng"])
    assert (random.gauss(0, 1), np.random.standard_normal()) == expected[:2] and torch.equal(torch.rand(3), expected[2])
