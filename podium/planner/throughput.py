"""Time of a step from a roofline: each part takes as long as its bytes or its operations, whichever takes longer.

One step's parts run one after another, so their times add up. A real run reaches a share of this (`Device.train_share`,
`Device.decode_share`); the plan shows both.
"""

from __future__ import annotations

from dataclasses import dataclass

from podium.planner.devices import Device
from podium.planner.memory import RoleSpec
from podium.planner.shapes import ModelShape


@dataclass(frozen=True)
class Work:
    """Tokens of one step on one replica of a role.

    Attributes:
        sequences: rows. prompt, response: mean tokens of each. group: rows that share a prompt.
        concurrent: sequences decoded at once.
        passes: epochs. updates: optimizer updates.
    """

    sequences: float
    prompt: float
    response: float
    group: int = 1
    concurrent: int = 256
    passes: int = 1
    updates: int = 1

    @property
    def tokens(self) -> float:
        """A shared prompt is computed once."""
        return self.sequences * (self.response + self.prompt / self.group)


def attention_flops(shape: ModelShape, keys: float) -> float:
    """One query token over so many keys, all layers."""
    return 4.0 * shape.layers * shape.heads * shape.head_dim * keys


def forward_flops(shape: ModelShape, tokens: float, head_tokens: float, length: float) -> float:
    """A causal forward pass; the LM head only where a token is predicted."""
    head = 0 if shape.scores else shape.vocabulary * shape.hidden
    return 2 * shape.linear * shape.active * tokens + 2 * head * head_tokens + tokens * attention_flops(shape, length / 2)


def rate(device: Device, spec: RoleSpec) -> float:
    """FLOP/s in the role's dtype."""
    return device.flops / (device.fp32 if spec.itemsize == 4 else 1.0)


def forward_seconds(spec: RoleSpec, device: Device, work: Work) -> float:
    """Log-probs, values or scores of a step's rows, on the devices of one replica."""
    many = spec.tensor * (1 if spec.single else spec.ranks.sequence)
    flops = forward_flops(spec.shape, work.tokens, work.sequences * work.response, work.prompt + work.response)
    return max(flops / rate(device, spec), spec.itemsize * spec.shape.linear / device.bandwidth) / many


def update_seconds(spec: RoleSpec, device: Device, work: Work, *, same_node: bool = True) -> float:
    """Forward and backward passes, the optimizer, and the gradients' way between replicas."""
    factor = 4.0 if spec.recompute in ("full", "offload") else 3.0
    if spec.lora:
        factor -= 0.9  # no gradient of the frozen weights
    passes = work.passes * factor * forward_seconds(spec, device, work)
    optimizer = (22 if spec.in_fp32 else 30) * spec.trained / device.bandwidth
    if spec.offload:
        optimizer = 8 * spec.trained / device.host_link + 30 * spec.trained / 50e9
    wire = device.link if same_node else device.network
    moved = 0.0
    if not spec.single and spec.ranks.data_size > 1:
        moved = (4 if spec.shard == 1 else 2 * spec.itemsize + 4) * 2 * spec.trained * spec.shard / wire
        moved = moved / 2 if spec.shard > 1 else moved
    return passes + work.updates * (optimizer + moved)


def decode_step_seconds(spec: RoleSpec, device: Device, rows: float, context: float, tensor: int = 1) -> float:
    """One token for each of `rows` sequences: weights once, every key and value once, logits."""
    shape, b = spec.shape, spec.itemsize
    weights = shape.linear + shape.vocabulary * shape.hidden
    used = shape.linear * min(1.0, shape.active * max(1.0, rows)) + shape.vocabulary * shape.hidden
    linear = max(b * used / device.bandwidth, 2 * (weights - shape.linear * (1 - shape.active)) * rows / rate(device, spec))
    keys = rows * context
    attention = max(keys * shape.kv_bytes(b) / device.bandwidth, rows * attention_flops(shape, context) / rate(device, spec))
    return (linear + attention + 8 * rows * shape.vocabulary / device.bandwidth) / tensor


def rollout_seconds(spec: RoleSpec, device: Device, work: Work, tensor: int = 1) -> float:
    """Prefill and decode of a step's sequences, `work.concurrent` at a time."""
    prompts = work.sequences / work.group * work.prompt
    prefill = forward_flops(spec.shape, prompts, 0, work.prompt) / rate(device, spec) / tensor
    rows = min(work.sequences, work.concurrent)
    steps = work.response * max(1.0, work.sequences / rows)
    return prefill + steps * decode_step_seconds(spec, device, rows, work.prompt + work.response / 2, tensor)


def hand_over_seconds(copy_bytes: float, device: Device, *, same_node: bool = True) -> float:
    """The generation copy's bytes over the wire (none where memory is shared)."""
    return copy_bytes / (device.link if same_node else device.network)
