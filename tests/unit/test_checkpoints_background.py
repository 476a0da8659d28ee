"""Saving while the run goes on: what is written is what was, errors are loud, nothing whole is lost."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import textwrap
import threading
import time
from pathlib import Path

import pytest
import torch

from podium.checkpoints import store as store_module
from podium.checkpoints.background import BackgroundSaver, snapshot
from podium.checkpoints.store import CheckpointStore, read_part, verify
from podium.core.errors import CheckpointError


@pytest.fixture
def slow(tmp_path):
    """A store whose writing waits for `gate`."""
    gate = threading.Event()

    class Slow(CheckpointStore):
        def _write(self, *given):
            gate.wait(30)
            return super()._write(*given)

    return Slow(tmp_path), gate


def test_what_is_written_is_what_was_when_it_was_asked_for(slow):
    store, gate = slow
    weight, values = torch.ones(4), {"step": 1}
    saver = BackgroundSaver(store)
    saver.save(1, {"role": {"w": weight, "tied": weight, "view": weight[:2]}, "trainer": values})
    assert saver.busy and store.steps() == []
    weight.zero_()  # the next update
    values["step"] = 2
    gate.set()
    saver.wait()
    back = store.load()[1]
    assert back["role"]["w"].tolist() == [1] * 4 and back["role"]["tied"] is back["role"]["w"]
    assert back["role"]["view"].tolist() == [1, 1] and back["trainer"] == {"step": 1}


def test_the_next_save_waits_for_the_one_before(slow):
    store, gate = slow
    saver = BackgroundSaver(store)
    saver.save(1, {"x": {"w": torch.ones(1)}})
    threading.Timer(0.2, gate.set).start()
    saver.save(2, {"x": {"w": torch.ones(1)}})
    assert 1 in store.steps()
    saver.wait()
    assert store.steps() == [1, 2]


@pytest.mark.parametrize("look", ["check", "wait", "save"])
def test_an_error_is_raised_where_the_run_next_looks(tmp_path, monkeypatch, look):
    store = CheckpointStore(tmp_path)
    saver = BackgroundSaver(store)
    saver.save(1, {"x": {"w": torch.ones(1)}})
    saver.wait()
    monkeypatch.setattr(
        store_module, "_write_text", lambda *given: (_ for _ in ()).throw(OSError(28, "No space left on device"))
    )
    saver.save(2, {"x": {"w": torch.ones(1)}})
    while saver.busy:
        time.sleep(0.01)
    with pytest.raises(CheckpointError, match="could not write the checkpoint of step 2: No space left"):
        saver.save(3, {}) if look == "save" else getattr(saver, look)()
    saver.wait()  # said once
    assert store.load()[0] == 1


def test_in_the_foreground(tmp_path):
    saver = BackgroundSaver(CheckpointStore(tmp_path), background=False)
    saver.save(1, {"x": {"w": torch.ones(1)}})
    assert not saver.busy and saver.store.steps() == [1]


def test_a_copy_takes_no_part_of_the_original():
    weight = torch.nn.Parameter(torch.ones(2, 3).t())
    copied = snapshot({"a": [weight, (weight, 3)], "none": torch.empty(0)})
    assert copied["a"][0] is copied["a"][1][0] and not copied["a"][0].requires_grad
    assert copied["a"][0].data_ptr() != weight.data_ptr() and copied["a"][0].stride() == weight.stride()


def test_a_large_state_is_several_files(tmp_path, monkeypatch):
    monkeypatch.setattr(store_module, "SHARD_BYTES", 100)
    tensors = {f"w{i}": torch.full((10,), float(i)) for i in range(7)}
    path = CheckpointStore(tmp_path).save(1, {"role_actor": {"engine": {"model": tensors, "optimizer": {"m": torch.ones(30)}}}})
    shards = sorted(p.name for p in path.glob("role_actor*.safetensors"))
    assert shards == ["role_actor.00001.safetensors", "role_actor.00002.safetensors", "role_actor.safetensors"]
    assert set(shards) < set(json.loads((path / "manifest.json").read_text())["files"])
    assert torch.equal(CheckpointStore(tmp_path).load()[1]["role_actor"]["engine"]["model"]["w6"], tensors["w6"])
    part = read_part(path, "role_actor", "engine/model")
    assert part.keys() == tensors.keys() and torch.equal(part["w3"], tensors["w3"])
    with pytest.raises(CheckpointError, match="has no 'role_critic/model'"):
        read_part(path, "role_critic", "model")
    (path / shards[1]).unlink()
    assert verify(path) == f"{shards[1]} is missing"


@pytest.mark.parametrize("damage", ["cut", "bit", "manifest"])
def test_the_last_good_one_is_used_and_named(tmp_path, damage):
    notes = []
    store = CheckpointStore(tmp_path, keep=3, note=notes.append)
    for step in (1, 2, 3):
        store.save(step, {"x": {"w": torch.full((2,), float(step))}})
    for step in (2, 3):
        path = tmp_path / f"step_00000{step}" / ("manifest.json" if damage == "manifest" else "x.safetensors")
        data = path.read_bytes()
        path.write_bytes(data[:-5] if damage != "bit" else data[:-1] + bytes([data[-1] ^ 1]))
    assert store.load()[0] == 1
    assert [n for n in notes if "damaged" in n] and notes[-1] == "using step_000001, the newest that is whole"


def test_old_ones_are_removed_only_after_the_new_one_is_there(tmp_path, monkeypatch):
    store = CheckpointStore(tmp_path, keep=1)
    store.save(1, {"x": {"w": torch.ones(1)}})
    monkeypatch.setattr(store_module, "_sync_folder", lambda folder: (_ for _ in ()).throw(OSError(5, "Input/output error")))
    with pytest.raises(CheckpointError):
        store.save(2, {"x": {"w": torch.ones(1)}})
    assert 1 in store.steps()


def test_a_kill_in_the_middle_of_a_save_leaves_the_one_before(tmp_path):
    program = f"""
        import torch, time
        from podium.checkpoints import store
        saved = store.CheckpointStore({str(tmp_path)!r}, keep=1)
        saved.save(1, {{"x": {{"w": torch.ones(1)}}, "y": {{"a": 1}}}})
        write = store.CheckpointStore._write
        def slow(self, folder, key, value):
            if key == "y":
                time.sleep(60)
            return write(self, folder, key, value)
        store.CheckpointStore._write = slow
        saved.save(2, {{"x": {{"w": torch.ones(1)}}, "y": {{"a": 1}}}})
    """
    process = subprocess.Popen([sys.executable, "-c", textwrap.dedent(program)])
    end = time.monotonic() + 60
    while not list(Path(tmp_path).glob(".writing_step_000002*/x.safetensors")) and time.monotonic() < end:
        time.sleep(0.01)
    os.kill(process.pid, signal.SIGKILL)
    process.wait()
    assert list(tmp_path.glob(".writing_*"))
    store = CheckpointStore(tmp_path, keep=1)
    assert store.load()[0] == 1
    store.save(2, {"x": {"w": torch.ones(1)}})
    assert sorted(p.name for p in tmp_path.iterdir()) == ["step_000002"]
