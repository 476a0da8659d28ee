"""What every executor must do, whatever number of workers it has: each check gets its roles."""

from __future__ import annotations

import pytest
import torch

from podium.core.batch import Batch
from podium.core.errors import WorkerError
from tests.executors.players import Player, batch

ROLES = {"actor": Player, "critic": Player}


def check_every_worker_knows_its_place(roles):
    places = roles["actor"].place().result()
    world = len(places)
    assert [p[1] for p in places] == list(range(world)) and {p[2] for p in places} == {world}
    assert {p[0] for p in places} == {"actor"}
    assert [p[4] for p in places] == [p[4] for p in roles["critic"].place().result()]  # one process, two roles


def check_rows_come_back_in_their_order(roles):
    rows = batch()
    out = roles["actor"].lengths(rows, factor=2.0)
    assert out["scores"].tolist() == (2.0 * rows.lengths("response")).tolist()
    assert out["response_ids"].to_list() == rows["response_ids"].to_list()
    assert len(roles["actor"].lengths(rows.slice(0, 1)).result()) == 1  # fewer rows than workers
    assert len(roles["actor"].lengths(rows.slice(0, 0)).result()) == 0


def check_results_pass_on_to_another_role(roles):
    first = roles["actor"].lengths(batch())
    joined = batch().select("prompt_ids", "response_ids").union(first.result().select("scores"))
    assert roles["critic"].second_rows(joined)["scores"].tolist() == (first["scores"] + 1).tolist()


def check_prompts_are_numbered_before_they_are_cut(roles):
    out = roles["actor"].answer(batch().select("prompt_ids"), group_size=2)
    assert out["group_id"].tolist() == [i // 2 for i in range(14)]
    assert out["row_index"].tolist() == [0] * 14


def check_a_row_that_comes_twice_knows_it(roles):
    prompts = Batch({"prompt_ids": [[1], [2], [1]], "row_index": [5, 6, 5]})
    assert roles["actor"].answer(prompts)["row_index"].tolist() == [0, 0, 1]


def check_metrics_add_up_by_count(roles):
    rows = batch()
    assert roles["actor"].count(rows).result().mean("tokens") == pytest.approx(rows.lengths("response").float().mean())


def check_each_worker_its_own_argument_and_one_alone(roles):
    world = len(roles["actor"].place().result())
    assert roles["actor"].own(list(range(world))).result() == [11 * r for r in range(world)]
    assert roles["actor"].where().result() == 0
    with pytest.raises(WorkerError, match=f"has {world + 1} entries, and the role has {world} workers"):
        roles["actor"].own(list(range(world + 1)))


def check_a_step_is_one_process_s(roles):
    rows = batch()
    before = roles["actor"].weights().result()[0]
    roles["actor"].step(rows).result()
    roles["actor"].step(rows.slice(0, 1)).result()  # the other ranks have no rows, and step all the same
    after = roles["actor"].weights().result()
    assert {steps for _, steps in after} == {before[1] + 2}
    mean = float(rows.lengths("response").float().mean()) + float(rows.lengths("response")[0])
    assert [weight for weight, _ in after] == pytest.approx([before[0] + mean] * len(after))


def check_state_goes_out_and_in(roles, writes=True):
    roles["critic"].step(batch()).result()
    state = roles["critic"].state_dict().result()
    weight, _ = roles["critic"].weights().result()[0]
    if writes:
        assert isinstance(state["weight"], torch.Tensor) and float(state["weight"]) == pytest.approx(weight)
    roles["critic"].load_state_dict({"weight": torch.tensor([3.0]), "steps": 9}).result()
    assert set(roles["critic"].weights().result()) == {(3.0, 9)}


def check_a_user_s_own_protocol(roles):
    assert roles["actor"].second_rows(batch())["scores"].tolist() == [i + 1.0 for i in range(7)]


def check_another_length_is_refused(roles):
    with pytest.raises(WorkerError, match=r"rank \d was given \d rows and returned \d, not"):
        roles["actor"].drop_a_row(batch()).result()


def check_an_error_arrives_with_its_place_and_the_others_go_on(roles):
    last = len(roles["actor"].place().result()) - 1
    with pytest.raises(ValueError, match=f"no good on rank {last}") as caught:
        roles["actor"].fail_on(last).result()
    notes = "\n".join(caught.value.__notes__)
    assert f"role 'actor', rank {last}" in notes and "method 'fail_on'" in notes
    assert len(roles["actor"].place().result()) == last + 1


CHECKS = {name.removeprefix("check_"): check for name, check in globals().items() if name.startswith("check_")}
