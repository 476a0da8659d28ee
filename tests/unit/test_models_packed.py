"""How rows are laid out: a prompt that rows share stands once."""

from __future__ import annotations

from podium.core.batch import Batch
from podium.models.packed import pack

A, B, C = [11, 12, 13], [21, 22], [31]


def test_distinct_prompts_lie_as_they_come() -> None:
    packed = pack(Batch({"prompt_ids": [A, B, C], "response_ids": [[1, 2], [], [3]]}))
    assert packed.ids.tolist() == [11, 12, 13, 1, 2, 21, 22, 31, 3]
    assert packed.positions.tolist() == [0, 1, 2, 3, 4, 0, 1, 0, 1]
    assert packed.lengths.tolist() == [5, 2, 2]
    assert packed.parents.tolist() == [-1, -1, -1]
    assert packed.predict_index.tolist() == [2, 3, 7]
    assert packed.targets.tolist() == [1, 2, 3]
    assert packed.last_index.tolist() == [4, 6, 8]


def test_a_shared_prompt_stands_once_before_its_responses() -> None:
    rows = {"prompt_ids": [A, B, A, A, C, C], "response_ids": [[1, 2], [3], [], [4, 5, 6], [7], [8, 9]]}
    packed = pack(Batch(rows))
    assert packed.ids.tolist() == [11, 12, 13, 1, 2, 4, 5, 6, 21, 22, 3, 31, 7, 8, 9]
    assert packed.positions.tolist() == [0, 1, 2, 3, 4, 3, 4, 5, 0, 1, 2, 0, 1, 1, 2]
    assert packed.lengths.tolist() == [3, 2, 3, 3, 1, 1, 2]
    assert packed.parents.tolist() == [-1, 0, 0, -1, -1, 4, 4]
    # In the order of the rows, each first token predicted at the end of its prompt.
    assert packed.predict_index.tolist() == [2, 3, 9, 2, 5, 6, 11, 11, 13]
    assert packed.targets.tolist() == [1, 2, 3, 4, 5, 6, 7, 8, 9]
    assert packed.last_index.tolist() == [4, 10, 2, 7, 12, 14]


def test_a_prompt_with_one_response_that_is_not_empty_is_one_sequence() -> None:
    packed = pack(Batch({"prompt_ids": [A, A, B, B], "response_ids": [[], [1], [], []]}))
    assert packed.ids.tolist() == [11, 12, 13, 1, 21, 22]
    assert packed.lengths.tolist() == [4, 2]
    assert packed.parents.tolist() == [-1, -1]
    assert packed.last_index.tolist() == [2, 3, 5, 5]
