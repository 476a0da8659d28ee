"""Keys and values of the running sequences: one slot each, ragged lengths, grown as they are needed.

A layer's keys are `[slots, capacity, heads, width]`. The running sequences fill the slots `0..B-1` without a gap, so a
decode step reads the view `[:B, :L]`, and a token is written by one `index_copy_` at `slot * capacity + position`.
"""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

_LEAST_CAPACITY = 64


@dataclass
class Prefix:
    """A prompt kept for requests that still wait: keys and values per layer `[tokens, heads, width]`, last hidden `[H]`."""

    layers: dict[int, tuple[Tensor, Tensor]]
    hidden: Tensor


class KVCache:
    """A ragged cache. Layers are made when a layer first writes, from the shape of what it writes."""

    def __init__(self) -> None:
        self.slots = 0
        self.capacity = 0
        self._layers: dict[int, tuple[Tensor, Tensor]] = {}

    def reserve(self, rows: int, length: int, *, most_rows: int, most_length: int, used: int = 0) -> None:
        """Makes room for `rows` sequences of `length` tokens.

        Both sizes grow by doubling, up to `most_rows` and `most_length`, what can be needed at all. The first `used`
        slots are kept. One layer is copied at a time, so the peak is the new cache and one old layer.
        """
        slots = _grown(self.slots, rows, most_rows, 1)
        capacity = _grown(self.capacity, length, most_length, _LEAST_CAPACITY)
        if (slots, capacity) == (self.slots, self.capacity):
            return
        for layer, pair in self._layers.items():
            self._layers[layer] = tuple(_enlarged(old, slots, capacity, used) for old in pair)  # type: ignore[assignment]
        self.slots, self.capacity = slots, capacity

    def write(self, layer: int, places: Tensor, keys: Tensor, values: Tensor) -> tuple[Tensor, Tensor]:
        """Stores `keys`, `values` `[M, heads, width]` at `places [M]` (slot * capacity + position); the layer's tensors."""
        pair = self._layers.get(layer)
        if pair is None:
            pair = self._layers[layer] = (self._empty(keys), self._empty(values))
        pair[0].view(-1, *keys.shape[1:]).index_copy_(0, places, keys)
        pair[1].view(-1, *values.shape[1:]).index_copy_(0, places, values)
        return pair

    def move(self, moves: list[tuple[int, int]], length: int) -> None:
        """Copies slots (source, target), their first `length` tokens. No slot may be both a source and a target."""
        if not moves:
            return
        sources, targets = zip(*moves, strict=True)
        for pair in self._layers.values():
            for tensor in pair:
                tensor[list(targets), :length] = tensor[list(sources), :length]

    def permute(self, order: list[int], length: int) -> None:
        """Slot i takes what slot `order[i]` holds, for the first `len(order)` slots."""
        for pair in self._layers.values():
            for tensor in pair:
                tensor[: len(order), :length] = tensor[order, :length]

    def read_prefix(self, slot: int, length: int, hidden: Tensor) -> Prefix:
        """A copy of a slot's first `length` tokens."""
        layers = {i: (k[slot, :length].clone(), v[slot, :length].clone()) for i, (k, v) in self._layers.items()}
        return Prefix(layers, hidden.clone())

    def write_prefix(self, slots: list[int], prefix: Prefix) -> None:
        """Fills the start of each slot with the prefix."""
        for layer, saved in prefix.layers.items():
            pair = self._layers.get(layer)
            if pair is None:
                pair = self._layers[layer] = (self._empty(saved[0]), self._empty(saved[1]))
            for tensor, part in zip(pair, saved, strict=True):
                tensor[slots, : len(part)] = part

    def release(self) -> None:
        """Gives the memory back."""
        self._layers.clear()
        self.slots = self.capacity = 0

    @property
    def bytes(self) -> int:
        """Memory held, in bytes."""
        return sum(t.numel() * t.element_size() for pair in self._layers.values() for t in pair)

    def _empty(self, like: Tensor) -> Tensor:
        # Zeros, not garbage: masked places still enter a product with weight 0, and 0 * NaN is NaN.
        return like.new_zeros((self.slots, self.capacity, *like.shape[1:]))


def _grown(now: int, need: int, most: int, least: int) -> int:
    if need <= now:
        return now
    size = max(now, least)
    while size < need:
        size *= 2
    return max(min(size, most), need)


def _enlarged(old: Tensor, slots: int, capacity: int, used: int) -> Tensor:
    new = old.new_zeros((slots, capacity, *old.shape[2:]))
    length = min(capacity, old.shape[1])
    new[:used, :length] = old[:used, :length]
    return new
