"""Tensors on their way between processes, as arrays: their memory can be shared instead of pickled."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from podium.core.ragged import as_array, as_tensor


class _Array:
    """A tensor on its way: as an array, whose memory Ray shares instead of pickling it."""

    def __init__(self, array: Any) -> None:
        self.array = array


def to_arrays(tree: Any) -> Any:
    """Tensors inside dicts, lists and tuples as arrays (batches see to themselves)."""
    if isinstance(tree, Tensor):
        return _Array(as_array(tree))
    if type(tree) is dict:
        return {key: to_arrays(value) for key, value in tree.items()}
    return type(tree)(map(to_arrays, tree)) if type(tree) in (list, tuple) else tree


def from_arrays(tree: Any) -> Any:
    """What `to_arrays` was given."""
    if isinstance(tree, _Array):
        return as_tensor(tree.array)
    if type(tree) is dict:
        return {key: from_arrays(value) for key, value in tree.items()}
    return type(tree)(map(from_arrays, tree)) if type(tree) in (list, tuple) else tree
