"""The memory behind the pages, and what the device knows of each running row."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np
import torch
from torch import Tensor

from podium.engines.rollout.native.scheduler import STOPS
from podium.engines.rollout.steering import MOST_BIASES


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
        # Decode attention's count of the parts that are there, for each row and key head; zero between its launches.
        self.arrived = torch.zeros(1 << 16, dtype=torch.int32, device=device)
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
        if not sources:
            return
        self.pages[to_device(np.array(targets), self.anchor.device)] = self.pages[
            to_device(np.array(sources), self.anchor.device)
        ]


class RowState:
    """What the device needs to decode up to `slots` rows for `window` steps without the host. Its tensors never move.

    Moved on by the device: `token` (sampled last, not yet in the cache), `length` (tokens in the cache), `active`, `written`
    (tokens of this window). Set by the host: `limit` (tokens that end the row), `first` (tokens of its prompt), `seed`;
    `temperature` (0: greedy), `top_k`, `top_p`, `min_p`, `stops [slots, STOPS]`, `table [slots, W]` (pages), and
    `bias_ids`, `bias` `[slots, MOST_BIASES]` (sent only where a row has any). Results: `tokens_out`, `scores_out`
    `[window, slots]`.
    """

    def __init__(self, slots: int, pages: int, window: int, device: torch.device) -> None:
        self.device = device
        self.live = torch.zeros(4, slots, dtype=torch.int64, device=device)
        self.token, self.length, self.active, self.written = self.live
        self.fixed = torch.zeros(3, slots, dtype=torch.int64, device=device)
        self.limit, self.first, self.seed = self.fixed
        self.draw = torch.zeros(4, slots, device=device)
        self.temperature, self.top_k, self.top_p, self.min_p = self.draw
        self.bias_ids = torch.zeros(slots, MOST_BIASES, dtype=torch.int64, device=device)
        self.bias = torch.zeros(slots, MOST_BIASES, device=device)
        self.stops = torch.full((slots, STOPS), -1, dtype=torch.int64, device=device)
        self.table = torch.zeros(slots, pages, dtype=torch.int32, device=device)
        self.tokens_out = torch.full((window, slots), -1, dtype=torch.int64, device=device)
        self.scores_out = torch.zeros(window, slots, device=device)
        self.all_slots = torch.arange(slots, device=device)
        self._biased = False  # whether any row may have a bias, here or on the device
        # The host's copies of what it sets.
        self.host_fixed = np.zeros((3, slots), dtype=np.int64)
        self.host_draw = np.zeros((4, slots), dtype=np.float32)
        self.host_bias_ids = np.zeros((slots, MOST_BIASES), dtype=np.int64)
        self.host_bias = np.zeros((slots, MOST_BIASES), dtype=np.float32)
        self.host_stops = np.full((slots, STOPS), -1, dtype=np.int64)
        self.host_table = np.zeros((slots, pages), dtype=np.int32)

    def keep(self, slots: Sequence[int]) -> None:
        """Row i becomes what row `slots[i]` was; the rows after them are empty."""
        count = len(slots)
        order = np.array(slots, dtype=np.int64)
        if count:
            self.live[:, :count] = self.live[:, to_device(order, self.device)]
        self.active[count:] = 0
        biases = (self.host_bias_ids, self.host_bias) if self._biased else ()
        for host in (self.host_stops, self.host_table, *biases):
            host[:count] = host[order]
        for host in (self.host_fixed, self.host_draw):
            host[:, :count] = host[:, order]

    def set_row(
        self, slot: int, limit: int, first: int, seed: int, draw: tuple[float, int, float, float], stops: Sequence[int]
    ) -> None:
        """The host's part of a new row, without biases; `upload` sends it. `draw`: temperature, top-k, top-p, min-p."""
        self.host_fixed[:, slot] = limit, first, np.uint64(seed & 0xFFFFFFFFFFFFFFFF).astype(np.int64)
        # Greedy rows take the likeliest token, which no truncation takes away.
        self.host_draw[:, slot] = draw if draw[0] else (0.0, 0.0, 1.0, 0.0)
        self.host_stops[slot] = [*stops, *[-1] * (STOPS - len(stops))]

        self.set_bias(slot, {})

    def set_bias(self, slot: int, bias: Mapping[int, float]) -> None:
        """What is added to the row's logits, by token."""
        if not (bias or self._biased):
            return
        self._biased = True
        self.host_bias_ids[slot], self.host_bias[slot] = 0, 0.0
        self.host_bias_ids[slot, : len(bias)] = list(bias)
        self.host_bias[slot, : len(bias)] = list(bias.values())

    def upload_bias(self, rows: int) -> None:
        """Sends the biases of the first `rows` rows. Where there are none, and none were before, nothing is sent."""
        if not self._biased:
            return
        if not self.host_bias[:rows].any():
            self.host_bias[:] = 0.0
            self.bias.zero_()
            self._biased = False
            return
        self.bias_ids[:rows] = to_device(self.host_bias_ids[:rows], self.device)
        self.bias[:rows] = to_device(self.host_bias[:rows], self.device)

    def upload(self, rows: int) -> None:
        """Sends the host's part of the first `rows` rows, without their pages."""
        self.fixed[:, :rows] = to_device(self.host_fixed[:, :rows], self.device)
        self.draw[:, :rows] = to_device(self.host_draw[:, :rows], self.device)
        self.stops[:rows] = to_device(self.host_stops[:rows], self.device)
        self.upload_bias(rows)

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
