"""The order of rows: exact, endless, resumable; and what is held out."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from podium.core.batch import Batch
from podium.core.errors import CheckpointError, ConfigError, DataError
from podium.data.loader import Loader
from podium.data.split import hold_out


def rows_of(n: int, unit: int = 1) -> Batch:
    columns = {"row_index": list(range(n)), "prompt": [f"p{i}" for i in range(n)]}
    if unit > 1:
        columns["pair_id"] = [i // unit for i in range(n)]
    return Batch(columns)


def take(loader: Loader, steps: int) -> list[list[int]]:
    return [loader.next_batch()["row_index"].tolist() for _ in range(steps)]


@st.composite
def cases(draw):
    unit = draw(st.sampled_from([1, 2]))
    units = draw(st.integers(1, 12))
    per_step = draw(st.integers(1, units))
    return unit, units * unit, per_step * unit, draw(st.booleans()), draw(st.integers(0, 2**40))


@settings(max_examples=60, deadline=None)
@given(case=cases(), before=st.integers(0, 12), after=st.integers(1, 12))
def test_a_resumed_loader_goes_on_with_the_same_rows(case, before, after):
    unit, rows, per_step, shuffle, seed = case
    loader = Loader(rows_of(rows, unit), per_step, shuffle=shuffle, seed=seed, unit=unit)
    take(loader, before)
    state, epoch = loader.state_dict(), loader.epoch
    expected = take(loader, after)
    resumed = Loader(rows_of(rows, unit), per_step, shuffle=shuffle, seed=seed, unit=unit)
    resumed.load_state_dict(state)
    assert resumed.epoch == epoch
    assert take(resumed, after) == expected


@settings(max_examples=60, deadline=None)
@given(case=cases(), epochs=st.integers(1, 4))
def test_every_epoch_takes_every_row_once(case, epochs):
    unit, rows, per_step, shuffle, seed = case
    loader = Loader(rows_of(rows, unit), per_step, shuffle=shuffle, seed=seed, unit=unit)
    steps = -(-epochs * rows // per_step)
    taken = take(loader, steps)
    assert all(len(step) == per_step for step in taken)
    flat = [row for step in taken for row in step]
    for epoch in range(epochs):
        assert sorted(flat[epoch * rows : (epoch + 1) * rows]) == list(range(rows))
    for at in range(0, len(flat), unit):  # pairs stay together, in order
        assert flat[at : at + unit] == [flat[at] // unit * unit + k for k in range(unit)]
    assert loader.epoch == pytest.approx(steps * per_step / rows)
    if unit > 1:  # also where a step has a pair twice: of the last epoch's end, and the next one's beginning
        for _ in range(epochs + 1):
            assert loader.next_batch()["pair_id"].bincount().tolist() == [unit] * (per_step // unit)


def test_orders_differ_by_epoch_and_seed():
    loader = Loader(rows_of(20), 20, shuffle=True, seed=1)
    first, second = take(loader, 2)
    assert first != second
    assert first == take(Loader(rows_of(20), 20, shuffle=True, seed=1), 1)[0]
    assert first != take(Loader(rows_of(20), 20, shuffle=True, seed=2), 1)[0]
    assert take(Loader(rows_of(20), 10, shuffle=False, seed=1), 3) == [[*range(10)], [*range(10, 20)], [*range(10)]]


def test_sizes_that_do_not_fit():
    with pytest.raises(ConfigError, match=r"a step takes 8 rows, the data set has 5\n.*at most 5"):
        Loader(rows_of(5), 8, shuffle=True, seed=0)
    with pytest.raises(ConfigError, match="cannot be cut into units of 2"):
        Loader(rows_of(6), 3, shuffle=True, seed=0, unit=2)
    with pytest.raises(ConfigError, match="0 rows a step"):
        Loader(rows_of(6), 0, shuffle=True, seed=0)


def test_a_checkpoint_of_other_data_is_refused():
    state = Loader(rows_of(6), 2, shuffle=True, seed=0).state_dict()
    with pytest.raises(CheckpointError, match="the data's rows is 7, the checkpoint was made with 6"):
        Loader(rows_of(7), 2, shuffle=True, seed=0).load_state_dict(state)
    with pytest.raises(CheckpointError, match="the data's seed is 1"):
        Loader(rows_of(6), 2, shuffle=True, seed=1).load_state_dict(state)


def test_hold_out_is_deterministic_and_whole():
    batch = rows_of(10)
    train, held = hold_out(batch, 3, seed=5)
    assert (len(train), len(held)) == (7, 3)
    assert sorted(train["row_index"].tolist() + held["row_index"].tolist()) == list(range(10))
    assert train["row_index"].tolist() == sorted(train["row_index"].tolist())
    assert held["row_index"].tolist() == hold_out(batch, 3, seed=5)[1]["row_index"].tolist()
    assert any(held["row_index"].tolist() != hold_out(batch, 3, seed=s)[1]["row_index"].tolist() for s in range(6, 10))
    assert len(hold_out(batch, 0, seed=5)[1]) == 0


def test_hold_out_keeps_pairs_together():
    train, held = hold_out(rows_of(10, unit=2), 2, seed=0)
    assert (len(train), len(held)) == (6, 4)
    assert not set(train["pair_id"].tolist()) & set(held["pair_id"].tolist())


def test_hold_out_leaves_something_to_train_on():
    for n in (4, 9):
        with pytest.raises(DataError, match=rf"data\.eval_samples: cannot hold out {n} of 4 examples"):
            hold_out(rows_of(4), n, seed=0)
    with pytest.raises(DataError, match="cannot hold out 2 of 2 examples"):
        hold_out(rows_of(4, unit=2), 2, seed=0)


@pytest.mark.parametrize(("column", "then"), [("label", [True, False]), ("head", [1, 0])])
def test_other_labels_or_heads_are_other_data(column, then):
    now = Loader(rows_of(2).with_columns({column: [0, 0]}), 1, shuffle=False, seed=0)
    before = Loader(rows_of(2).with_columns({column: then}), 1, shuffle=False, seed=0)
    with pytest.raises(CheckpointError, match="rows are others"):
        now.load_state_dict(before.state_dict())
