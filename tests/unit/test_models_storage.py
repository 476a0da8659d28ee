"""The memory order of weights: the same parameters, values and files."""

from __future__ import annotations

import copy
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM

from podium.models.loading import save_pretrained
from podium.models.storage import moved_parameters, storage_fingerprint, store_by_columns
from tests.tiny import tiny_model


def test_weights_by_columns_are_the_same_parameters(tmp_path: Path) -> None:
    model = tiny_model(tie_word_embeddings=False)
    before, values = list(model.parameters()), {n: p.detach().clone() for n, p in model.named_parameters()}
    store_by_columns(model)
    assert all(a is b for a, b in zip(before, model.parameters(), strict=True))
    assert all(torch.equal(p, values[n]) for n, p in model.named_parameters())
    assert model.lm_head.weight.stride() == (1, 512)
    assert model.get_input_embeddings().weight.is_contiguous()
    save_pretrained(tmp_path / "saved", model)
    again = AutoModelForCausalLM.from_pretrained(tmp_path / "saved")
    assert all(torch.equal(p, values[n]) for n, p in again.named_parameters())
    again.load_state_dict(copy.deepcopy(model.state_dict()))
    assert all(torch.equal(p, values[n]) for n, p in again.named_parameters())


def test_a_second_time_nothing_moves() -> None:
    model = tiny_model()
    store_by_columns(model)
    places = storage_fingerprint(model)
    store_by_columns(model)
    assert not moved_parameters(places, storage_fingerprint(model))


def test_tied_weights_and_16_bits_stay_by_rows() -> None:
    tied = tiny_model()
    store_by_columns(tied)
    assert tied.lm_head.weight is tied.get_input_embeddings().weight
    assert tied.lm_head.weight.is_contiguous()
    low = tiny_model(dtype=torch.bfloat16)
    store_by_columns(low)
    assert all(p.is_contiguous() for p in low.parameters())
