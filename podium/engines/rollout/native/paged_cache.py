"""The memory behind the pages, and what the device knows of each running row."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from podium.engines.rollout.native.scheduler import STOPS


class PagedCache:
    """Keys and values of all layers, `[pages, layers, 2, K, page_size, D]`: a page is one piece of memory.

    The kernels find it by `anchor` (a tensor that never moves) and `offset` (how far from there, in elements, on the
    device). So it can be given back and taken again, somewhere else and of another size, under captured graphs.
    """

    def __init__(
        self, layers: int, kv_heads: int, width: int, page_size: int, dtype: torch.dtype, device: torch.device
    ) -> None:
        self.shape = (layers, 2, kv_heads, page_size, width)
        self.kv_heads, self.width, self.page_size = kv_heads, width, page_size
        self.page_stride = layers * 2 * kv_heads * page_size * width
        self.anchor = torch.zeros(64, dtype=dtype, device=device)
        self.offset = torch.zeros(1, dtype=torch.int64, device=device)
        self.pages: Tensor | None = None

    @property
    def page_bytes(self) -> int:
        return self.page_stride * self.anchor.element_size()

    @property
    def bytes(self) -> int:
        """Memory held, in bytes."""
        return 0 if self.pages is None else len(self.pages) * self.page_bytes

    def allocate(self, pages: int) -> None:
        """Takes the memory. Raises what torch raises where there is none."""
        # Zeros on a CPU only: there masked places enter products with weight 0, and 0 * NaN is NaN.
        make = torch.empty if self.anchor.is_cuda else torch.zeros
        self.pages = make((pages, *self.shape), dtype=self.anchor.dtype, device=self.anchor.device)
        self.offset.fill_((self.pages.data_ptr() - self.anchor.data_ptr()) // self.anchor.element_size())

    def release(self) -> None:
        """Gives the memory back to the device."""
        self.pages = None
        if self.anchor.is_cuda:
            torch.cuda.empty_cache()

    def copy(self, sources: Sequence[int], targets: Sequence[int]) -> None:
        """Copies whole pages."""
        assert self.pages is not None
        self.pages[to_device(np.array(targets), self.anchor.device)] = self.pages[
            to_device(np.array(sources), self.anchor.device)
        ]


class RowState:
    """What the device needs to decode up to `slots` rows for `window` steps without the host. Its tensors never move.

    Moved on by the device: `token` (sampled last, not yet in the cache), `length` (tokens in the cache), `active`, `written`
    (tokens of this window). Set by the host: `limit` (tokens that end the row), `first` (tokens of its prompt), `seed`;
    `temperature` (0: greedy), `stops [slots, STOPS]`, `table [slots, W]` (pages). Results: `tokens_out`, `scores_out`
    `[window, slots]`.
    """

    def __init__(self, slots: int, pages: int, window: int, device: torch.device) -> None:
        self.device = device
        self.live = torch.zeros(4, slots, dtype=torch.int64, device=device)
        self.token, self.length, self.active, self.written = self.live
        self.fixed = torch.zeros(3, slots, dtype=torch.int64, device=device)
        self.limit, self.first, self.seed = self.fixed
        self.temperature = torch.zeros(slots, device=device)
        self.stops = torch.full((slots, STOPS), -1, dtype=torch.int64, device=device)
        self.table = torch.zeros(slots, pages, dtype=torch.int32, device=device)
        self.tokens_out = torch.full((window, slots), -1, dtype=torch.int64, device=device)
        self.scores_out = torch.zeros(window, slots, device=device)
        self.all_slots = torch.arange(slots, device=device)
        # The host's copies of what it sets.
        self.host_fixed = np.zeros((3, slots), dtype=np.int64)
        self.host_temperature = np.zeros(slots, dtype=np.float32)
        self.host_stops = np.full((slots, STOPS), -1, dtype=np.int64)
        self.host_table = np.zeros((slots, pages), dtype=np.int32)

    def keep(self, slots: Sequence[int]) -> None:
        """Row i becomes what row `slots[i]` was; the rows after them are empty."""
        count = len(slots)
        order = np.array(slots, dtype=np.int64)
        if count:
            self.live[:, :count] = self.live[:, to_device(order, self.device)]
        self.active[count:] = 0
        for host in (self.host_temperature, self.host_stops, self.host_table):
            host[:count] = host[order]
        self.host_fixed[:, :count] = self.host_fixed[:, order]

    def set_row(self, slot: int, limit: int, first: int, seed: int, temperature: float, stops: Sequence[int]) -> None:
        """The host's part of a new row; `upload` sends it."""
        self.host_fixed[:, slot] = limit, first, np.uint64(seed & 0xFFFFFFFFFFFFFFFF).astype(np.int64)
        self.host_temperature[slot] = temperature
        self.host_stops[slot] = [*stops, *[-1] * (STOPS - len(stops))]

    def upload(self, rows: int) -> None:
        """Sends the host's part of the first `rows` rows, without their pages."""
        self.fixed[:, :rows] = to_device(self.host_fixed[:, :rows], self.device)
        self.temperature[:rows] = to_device(self.host_temperature[:rows], self.device)
        self.stops[:rows] = to_device(self.host_stops[:rows], self.device)

    def upload_pages(self, rows: int, pages: int) -> None:
        """Sends the first `pages` pages of the first `rows` rows."""
        self.table[:rows, :pages] = to_device(self.host_table[:rows, :pages], self.device)

    def start(self, slots: Sequence[int], lengths: Sequence[int]) -> Tensor:
        """New rows whose caches hold `lengths` tokens once their next token is drawn; the slots on the device."""
        values = np.zeros((4, len(slots)), dtype=np.int64)
        values[1] = np.array(lengths) - 1
        values[2] = 1
        at = to_device(np.array(slots, dtype=np.int64), self.device)
        self.live[:, at] = to_device(values, self.device)
        return at


def to_device(array: np.ndarray, device: torch.device) -> Tensor:
    """A copy of the array on the device; the host does not wait for it."""
    tensor = torch.from_numpy(np.ascontiguousarray(array).copy())
    return tensor.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else tensor
