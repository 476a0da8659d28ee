"""Memory of a role on a device, in bytes: what stays, and what each phase of a step adds. Plain arithmetic on counts.

What stays follows from the engines: a 16-bit parameter that trains has a master copy in fp32 and two moments in fp32
(`engines.train.optim`); FSDP keeps what trains in fp32, cut over its ranks, and gathers a layer at a time
(`engines.train.fsdp`); tensor parallelism cuts the layers only (`engines.train.tensor_parallel`). What a layer keeps for its
backward pass is counted from its operations: `tests/unit/test_planner.py` compares it with what autograd really keeps.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field

from podium.core.ranks import Ranks
from podium.planner.shapes import ModelShape

MiB = 1 << 20
TILE = 1 << 27
"""Logits in a tile of the LM head's pass on a GPU (`algorithms.log_probs`)."""
CPU_CHUNK = 1 << 26
BUCKET = 256 * MiB
"""The largest message of a hand-over (`hybrid.transfer`); two are under way."""
STAGED = 1 << 25
"""Weights whose gradients go to the host together (`engines.train.offload`); two such parts are under way."""
PREFILL_TOKENS = {"cuda": 16384, "cpu": 4096}
# Parameters of the smallest model whose weights a CPU packs for generation (`engines.rollout.native.cpu_products`).
LEAST_PACKED = 1 << 23
LOGITS_ROWS = 256
PAGE = 64
WORKSPACE = 32 * MiB
"""What cuBLAS keeps for a stream that it works on (on Hopper; 8.5 MiB on older devices)."""
LINEARS = 7
"""Linear maps of a decoder layer of the common form."""


@dataclass(frozen=True)
class RoleSpec:
    """A role on each device of its pool.

    Attributes:
        shape: of its model, with its own head (`with_scores`).
        itemsize: bytes of a weight as it computes (2: 16 bits, 4: fp32).
        trains: it has an optimizer.
        ranks: how its workers divide its work.
        lora: rank of an adapter that trains instead of the weights; 0: none.
        quantization: "none", "4bit", "8bit": how the frozen linear maps are kept.
        shares: the role whose weights it computes with; "" has its own.
        offload: masters and moments are in the host's memory.
        moment_bytes: of the optimizer's two moments, for a weight.
        recompute: "none", "selective", "full", "offload".
        cuda: the device is a GPU.
        single: the engine of one device: nothing is cut.
    """

    role: str
    shape: ModelShape
    itemsize: int
    trains: bool
    ranks: Ranks = field(default_factory=Ranks)
    lora: int = 0
    quantization: str = "none"
    shares: str = ""
    offload: bool = False
    moment_bytes: float = 8.0
    recompute: str = "none"
    cuda: bool = True
    single: bool = True

    # ------------------------------------------------------------------ counts

    @property
    def adapter(self) -> int:
        """Parameters of the adapter, all kept in fp32."""
        return self.lora * self.shape.edges

    @property
    def full(self) -> bool:
        """All weights train."""
        return self.trains and not self.lora

    @property
    def shard(self) -> int:
        return 1 if self.single else self.ranks.shard

    @property
    def tensor(self) -> int:
        return 1 if self.single else self.ranks.tensor

    @property
    def trained(self) -> float:
        """Parameters that train and lie on this device."""
        if not self.trains:
            return 0
        return (self.adapter if self.lora else self.shape.local(self.tensor)) / self.shard

    @property
    def in_fp32(self) -> bool:
        """What trains is stored in fp32 and is its own master."""
        return self.itemsize == 4 or bool(self.lora) or self.shard > 1

    # ------------------------------------------------------------------ what stays

    @property
    def weights(self) -> float:
        """The weights, with the adapter."""
        adapter = 4 * self.adapter / self.shard if self.trains or self.shares else 0.0
        if self.shares:
            return adapter if self.trains else 0.0
        if self.quantization != "none":
            return self._quantised + adapter
        size = 4 if self.full and self.shard > 1 else self.itemsize
        return size * self.shape.local(self.tensor) / self.shard + (adapter if self.lora else 0.0) + self._small_head

    @property
    def _small_head(self) -> float:
        """A value head is in fp32 whatever the base is in."""
        return 4.0 * self.shape.scores * self.shape.hidden if self.shape.scores else 0.0

    @property
    def _quantised(self) -> float:
        shape = self.shape
        # NF4: half a byte, a byte of scale for 64, 4 bytes for 256 scales. int8: a byte, 4 bytes of scale a row.
        linear = shape.linear * (0.5 + 1 / 64 + 4 / 16384) if self.quantization == "4bit" else shape.linear + 4.0 * shape.rows
        return linear + (shape.total - shape.linear) * self.itemsize

    @property
    def masters(self) -> float:
        """fp32 copies of 16-bit weights; of all, where they lie in another memory."""
        return 0.0 if self.in_fp32 and not self.offload else 4 * self.trained

    @property
    def moments(self) -> float:
        """There after the first update."""
        return self.moment_bytes * self.trained

    @property
    def kept_gradients(self) -> float:
        """On a CPU the fp32 gradients of 16-bit weights keep their memory between updates."""
        return 4 * self.trained if not self.cuda and not self.in_fp32 and not self.offload else 0.0

    @property
    def stays(self) -> float:
        """On the device, all the time."""
        return self.weights + (0.0 if self.on_host else self.masters + self.moments) + self.kept_gradients

    @property
    def on_host(self) -> float:
        """In the host's memory, all the time: masters, moments, and (one device) what gradients and weights pass through."""
        if not self.offload or not self.cuda:
            return 0.0
        largest = min(self.trained, max(STAGED, self.shape.vocabulary * self.shape.hidden))
        return self.masters + self.moments + (2 * (4 + self.itemsize) * largest if self.single else 0.0)

    # ------------------------------------------------------------------ what a pass adds

    @property
    def gradients(self) -> float:
        """In fp32, summed over micro-batches (those that are kept anyway are counted there)."""
        return 4 * self.trained - self.kept_gradients

    @property
    def workspace(self) -> float:
        """Of the matrix products of one stream."""
        return WORKSPACE if self.cuda else 0.0

    @property
    def gathered(self) -> float:
        """FSDP: the embedding and head, and two layers, whole while they run; and the fp32 gradient of one layer."""
        if self.shard == 1:
            return 0.0
        shape = self.shape
        layer = (shape.in_layers - shape.cut + shape.cut / self.tensor) / shape.layers
        units = self.itemsize * (shape.outside + 2 * layer)
        return units + ((4 + self.itemsize) * max(layer, shape.outside) if self.trains else 0.0)

    @property
    def fused(self) -> bool:
        """The layers' training pass is Podium's own (`models.fused_layers`)."""
        return self.cuda and self.shape.common and self.shard == self.tensor == 1 and self.quantization == "none"

    @property
    def per_token(self) -> float:
        """What all layers keep of one token for the backward pass."""
        shape, b = self.shape, self.itemsize
        if self.recompute == "offload":
            return 0.0  # a layer's inputs are there while it runs
        if self.recompute == "full" or (self.recompute == "selective" and not self.fused):
            return shape.layers * (2 if self.fused else 1) * shape.hidden * b
        return shape.layers * self._layer_per_token

    @property
    def host_per_token(self) -> float:
        """What waits in the host's memory of one token: the inputs of all layers."""
        if self.recompute != "offload" or not self.trains or not self.cuda:
            return 0.0
        return self.shape.layers * (2 if self.fused else 1) * self.shape.hidden * self.itemsize

    @property
    def _layer_per_token(self) -> float:
        shape, b, t = self.shape, self.itemsize, self.tensor
        d, ff = shape.hidden, shape.ff / t
        q, kv = shape.heads * shape.head_dim / t, shape.kv_heads * shape.head_dim / t
        attention = b * (2 * q + 2 * kv) + 4 * shape.heads / t  # q, k, v, its output; the normaliser
        if self.fused:
            kept = 0.0 if self.recompute == "selective" else 2 * ff
            normed = 2 * b * (q + kv) if shape.heads_normed else 0.0
            low_rank = b * LINEARS * self.lora
            return b * (2 * d + kept) + 8 + attention + normed + low_rank
        if self.lora:
            return self._adapted_layer_per_token
        # The stream in fp32, normalised, times the norm's weight.
        norm = d * (4 + 2 * b) + 4
        heads_normed = (q + kv) * (4 + b if b == 2 else 2 * b) + 4 * (q + kv) / shape.head_dim if shape.heads_normed else 0.0
        return 2 * norm + attention + heads_normed + b * 4 * ff

    @property
    def _adapted_layer_per_token(self) -> float:
        """Frozen weights keep nothing; each adapter keeps its input (peft: a copy in fp32 for each) and A x."""
        shape, b, t = self.shape, self.itemsize, self.tensor
        d, ff = shape.hidden, shape.ff / t
        q, kv = shape.heads * shape.head_dim / t, shape.kv_heads * shape.head_dim / t
        attention = b * (2 * q + 2 * kv) + 4 * shape.heads / t
        inputs = 4 * (2 * d + ff) if b == 4 else 4 * (5 * d + q + ff)
        heads_normed = 4 * (q + kv) + 4 * (q + kv) / shape.head_dim if shape.heads_normed else 0.0
        return 2 * (4 * d + 4) + inputs + attention + heads_normed + b * 3 * ff + 4 * LINEARS * self.lora

    def _layer_transient(self, tokens: int) -> float:
        """One layer's backward pass: gradients of gate, up and the activation, of the stream; then of its weights."""
        shape, b, t = self.shape, self.itemsize, self.tensor
        of_weights = (4 + b) * (shape.in_layers / shape.layers) / t / 2 if self.full else 0.0
        kept_again = self._layer_per_token if self.recompute in ("full", "offload") else 2 * b * shape.ff / t
        again = kept_again if self.recompute != "none" else 0.0
        return tokens * (b * (4 * shape.ff / t + 4 * shape.hidden) + again) + of_weights / shape.layers

    def head_bytes(self, tokens: int, *, backward: bool, room: float = 0.0) -> float:
        """The LM head over so many response tokens; `room`: free memory that logits may wait in (half of it)."""
        shape, b = self.shape, self.itemsize
        if shape.scores:
            return float(tokens * shape.hidden * (b + 4))
        hidden = tokens * shape.hidden
        logits = tokens * shape.vocabulary
        tile = min(logits, TILE if self.cuda else CPU_CHUNK)
        block = min(logits, 1 << 21) * 12 if not self.cuda else 0
        if not backward:
            return float(b * (hidden + tile) + block)
        wait = max(tile, min(logits, 0.5 * room / b)) if self.cuda else tile
        of_weight = b * shape.vocabulary * shape.hidden if self.full else 0.0
        # A sum over chunks in fp32 where they are several (CPU); the hidden states' gradient in fp32 (GPU).
        several = 4.0 * shape.vocabulary * shape.hidden if not self.cuda and logits > CPU_CHUNK and b == 2 else 0.0
        return b * (2 * hidden + wait) + block + of_weight + several + (4 * hidden if self.cuda else 0)

    def update_bytes(self, tokens: int, responses: int, passes: int, *, room: float = 0.0) -> float:
        """The most that an update adds: micro-batches of `tokens` tokens, `responses` of them predicted, `passes` of them.

        The largest of two moments: the last layer's output is there, with all that the layers keep and the head's work (and the
        gradients, where an earlier micro-batch left them); or the backward pass has come to the first layer.
        """
        tokens = -(-tokens // (1 if self.single else self.ranks.sequence))
        keeps = tokens * self.per_token + tokens * self.shape.hidden * self.itemsize * 2
        before = self.gradients if passes > 1 else 0.0
        top = (
            keeps
            + before
            + max(
                self.head_bytes(responses, backward=True, room=max(0.0, room - keeps - before)), self._layer_transient(tokens)
            )
        )
        layers_grad = self._layer_transient(tokens) + keeps / self.shape.layers
        head_grad = self.itemsize * self.shape.vocabulary * self.shape.hidden if self.full and self.shape.tied else 0.0
        bottom = self.gradients + layers_grad + head_grad
        return max(top, bottom) + self.gathered + self.workspace

    def forward_bytes(self, tokens: int, responses: int) -> float:
        """A pass without a backward pass: a few layers' worth of intermediate results, and the head."""
        tokens = -(-tokens // (1 if self.single else self.ranks.sequence))
        shape, b = self.shape, self.itemsize
        layer = tokens * b * (2 * shape.hidden + 3 * shape.ff / self.tensor + 2 * shape.heads * shape.head_dim / self.tensor)
        norm = 4 * tokens * shape.hidden if b == 2 else 0
        head = tokens * shape.hidden * b + self.head_bytes(responses, backward=False)
        gathered = self.gathered if not self.trains else self._gathered_forward
        return max(layer + norm, head) + gathered + self.workspace

    @property
    def _gathered_forward(self) -> float:
        if self.shard == 1:
            return 0.0
        return self.itemsize * (self.shape.outside + 2 * self.shape.in_layers / self.shape.layers / self.tensor)


# ------------------------------------------------------------------ rollout


def generation_copy(spec: RoleSpec, tensor: int) -> float:
    """A second copy of the weights for generation, where the layouts differ; 0 where both sides read the same memory."""
    if spec.shard == 1 and spec.tensor == tensor:
        return 0.0
    return spec.itemsize * spec.shape.local(tensor)


def hand_over_bytes(spec: RoleSpec, tensor: int) -> float:
    """What a hand-over needs besides both copies: two messages, packed and unpacked."""
    copy = generation_copy(spec, tensor)
    return min(4.0 * BUCKET, 2 * copy) if copy else 0.0


def cache_bytes(spec: RoleSpec, rows: int, tokens: int, tensor: int = 1) -> float:
    """Keys and values of `rows` sequences of `tokens` tokens, as the engine takes them.

    On a GPU in pages of 64 tokens; on a CPU a slot a sequence, whose number and length grow by doubling up to what is needed.
    """
    each = spec.shape.kv_bytes(spec.itemsize) / tensor
    if spec.cuda:
        return rows * -(-tokens // PAGE) * PAGE * each
    return rows * max(64, tokens) * each


def packed_bytes(spec: RoleSpec) -> float:
    """A CPU's linear layers and head once more, in the order of its kernels, for as long as it generates."""
    if spec.cuda or spec.shape.total < LEAST_PACKED:
        return 0.0
    of_layers = 0.0 if spec.quantization != "none" else spec.shape.in_layers / spec.tensor
    return spec.itemsize * (of_layers + spec.shape.vocabulary * spec.shape.hidden)


def decode_bytes(spec: RoleSpec, rows: int, prompt_tokens: int) -> float:
    """Beside the cache: a prefill's intermediate results, and the logits of the rows that are decoded; packed weights.

    On a GPU decoding is recorded, on a stream of its own; what a recording works in stays its own, so both are counted.
    """
    prefill = min(PREFILL_TOKENS["cuda" if spec.cuda else "cpu"], rows * prompt_tokens)
    passes = spec.forward_bytes(prefill, 0)
    if spec.lora and not spec.fused:
        passes = max(passes, _adapted_pass(spec, prefill) + spec.workspace)
    if spec.cuda:
        return passes + rows * spec.shape.vocabulary * (spec.itemsize + 4) + spec.workspace
    logits = min(rows, LOGITS_ROWS) * spec.shape.vocabulary * 8 + rows * spec.shape.vocabulary * (spec.itemsize + 8)
    return passes + logits + packed_bytes(spec)


def _adapted_pass(spec: RoleSpec, tokens: int) -> float:
    """A layer's own modules with adapters that are not fused, at the most: in `up`, when silu(gate) is there.

    Each adapter makes its output in fp32, scaled once more; its input a copy in fp32, where it is not that already.
    """
    shape, b = spec.shape, spec.itemsize
    copied = 4 if b == 2 else 0
    return tokens * ((2 * b + 8) * shape.ff + (4 * b + copied) * shape.hidden + 4 * spec.lora)


def rows_that_fit(spec: RoleSpec, room: float, tokens: int, most: int, tensor: int = 1) -> int:
    """Sequences whose caches fit into `room`."""
    return min(most, math.floor(max(0.0, room) / cache_bytes(spec, 1, tokens, tensor)))
