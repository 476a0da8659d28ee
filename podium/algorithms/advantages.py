"""Advantage functions: how much better each answer, or each token, was than expected.

The functions here take tensors and keyword scalars. `advantage_estimators.py` gives them names for recipes.
"""

from __future__ import annotations

import torch
from torch import Tensor


def gae(token_rewards: Tensor, values: Tensor, mask: Tensor, *, gamma: float, gae_lambda: float) -> tuple[Tensor, Tensor]:
    """Generalised advantage estimation (Schulman et al. 2015, arXiv:1506.02438, eq. 16).

    delta_t = r_t + gamma * V_{t+1} - V_t,    A_t = delta_t + gamma * gae_lambda * A_{t+1},    R_t = A_t + V_t

    `t + 1` is the next token that the mask selects: tokens outside the mask (padding, or what an environment wrote inside
    a response) take no time and their values are not read. A reward that sits on such a token counts for the last
    selected token before it; one before the first selected token counts for nothing. The value after the last selected
    token is 0, also for a response that was cut off. There is no whitening in here.

    Shapes: all [B, T]; `mask` bool. Returns `(advantages, returns)` in fp32 (fp64 for fp64 inputs), 0 outside the mask,
    without gradient. Raises `ValueError` for shapes that differ.
    """
    _same_shape(token_rewards=token_rewards, values=values, mask=mask)
    mask = mask.bool()
    dtype = _at_least_fp32(token_rewards, values)
    values = values.detach().to(dtype).masked_fill(~mask, 0.0)
    rewards = token_rewards.detach().to(dtype)
    advantages = torch.zeros_like(values)
    next_value, next_advantage, carried_reward = (values.new_zeros(values.shape[0]) for _ in range(3))
    for t in reversed(range(values.shape[1])):
        here, reward = mask[:, t], rewards[:, t] + carried_reward
        delta = reward + gamma * next_value - values[:, t]
        next_advantage = torch.where(here, delta + gamma * gae_lambda * next_advantage, next_advantage)
        next_value = torch.where(here, values[:, t], next_value)
        carried_reward = torch.where(here, torch.zeros_like(reward), reward)
        advantages[:, t] = next_advantage
    advantages = advantages.masked_fill(~mask, 0.0)
    return advantages, advantages + values


def whiten(x: Tensor, mask: Tensor, *, shift_mean: bool = True, epsilon: float = 1e-8) -> Tensor:
    """`(x - mean) / sqrt(var + epsilon)` over the entries that the mask selects.

    The variance is the unbiased one (divided by n - 1). With `shift_mean=False` the mean is kept: only the scale changes.
    Fewer than two selected entries have no variance: they keep their scale. Shapes: `x` and `mask` alike, any shape.
    Returns fp32 (fp64 for fp64), 0 outside the mask. Raises `ValueError` for shapes that differ.
    """
    _same_shape(x=x, mask=mask)
    mask = mask.bool()
    x = x.to(_at_least_fp32(x)).masked_fill(~mask, 0.0)
    count = mask.sum()
    mean = x.sum() / count.clamp(min=1)
    centred = (x - mean).masked_fill(~mask, 0.0)
    variance = centred.square().sum() / (count - 1).clamp(min=1)
    scale = torch.where(count > 1, torch.rsqrt(variance + epsilon), torch.ones_like(variance))
    whitened = centred * scale
    return whitened if shift_mean else (whitened + mean).masked_fill(~mask, 0.0)


def group_relative(rewards: Tensor, group_id: Tensor, *, normalize: bool = True, epsilon: float = 1e-4) -> Tensor:
    """GRPO (Shao et al. 2024, arXiv:2402.03300, sec. 4.1.2): the reward against the others of its group.

    A_i = (r_i - mean_group) / (std_group + epsilon), or with `normalize=False` A_i = r_i - mean_group, which is Dr.GRPO
    (Liu et al. 2025, arXiv:2503.20783). The standard deviation is the unbiased one (divided by n - 1), as in TRL, verl
    and `torch.std`. A group of one, or one whose rewards are all equal, gives exactly 0: it has nothing to say.

    Shapes: `rewards` [B], `group_id` [B] (any integers, in any order). Returns [B] in fp32 (fp64 for fp64). Raises
    `ValueError` for other shapes.
    """
    group, sizes, rewards = _groups(rewards, group_id)
    centred = rewards - _group_sum(rewards, group, sizes)[group] / sizes[group]
    if normalize:
        variance = _group_sum(centred.square(), group, sizes) / (sizes - 1).clamp(min=1)
        centred = centred / (variance.sqrt()[group] + epsilon)
    return centred.masked_fill(_is_constant(rewards, group, sizes), 0.0)


def leave_one_out(rewards: Tensor, group_id: Tensor) -> Tensor:
    """RLOO (Ahmadian et al. 2024, arXiv:2402.14740, sec. 3): the reward less the mean of the others of its group.

    A_i = r_i - sum_{j != i} r_j / (n - 1) = n / (n - 1) * (r_i - mean_group). A group of one has no others and gives
    exactly 0, as does a group whose rewards are all equal.

    Shapes: `rewards` [B], `group_id` [B] (any integers, in any order). Returns [B] in fp32 (fp64 for fp64). Raises
    `ValueError` for other shapes.
    """
    group, sizes, rewards = _groups(rewards, group_id)
    size = sizes[group]
    others = (_group_sum(rewards, group, sizes)[group] - rewards) / (size - 1).clamp(min=1)
    return (rewards - others).masked_fill(_is_constant(rewards, group, sizes), 0.0)


def returns_to_go(token_rewards: Tensor, mask: Tensor, *, gamma: float = 1.0) -> Tensor:
    """What is still to come: G_t = r_t + gamma * G_{t+1} (Sutton and Barto 2018, eq. 3.9).

    `t + 1` is the next token that the mask selects, and a reward outside the mask counts as in `gae`; this is `gae` without
    values and with lambda 1.

    Shapes: both [B, T]; `mask` bool. Returns [B, T] in fp32 (fp64 for fp64), 0 outside the mask, without gradient. Raises
    `ValueError` for shapes that differ.
    """
    return gae(token_rewards, torch.zeros_like(token_rewards), mask, gamma=gamma, gae_lambda=1.0)[0]


def optimal_baseline(rewards: Tensor, group_id: Tensor, lengths: Tensor) -> Tensor:
    """OPO (Hao et al. 2025, arXiv:2505.23585): the reward less the length-weighted mean of its group.

    A_i = r_i - sum_j l_j r_j / sum_j l_j, over the rows j of the group, i included. It is the baseline of least variance when
    a response's squared gradient grows with its length. A group of one, or one whose rewards are all equal, gives exactly 0.

    Shapes: all [B]; `group_id` any integers in any order, `lengths` in trained tokens. Returns [B] in fp32 (fp64 for fp64).
    Raises `ValueError` for other shapes.
    """
    group, sizes, rewards = _groups(rewards, group_id)
    _same_shape(rewards=rewards, lengths=lengths)
    lengths = lengths.to(rewards.dtype)
    baseline = _group_sum(lengths * rewards, group, sizes) / _group_sum(lengths, group, sizes).clamp(min=1)
    return (rewards - baseline[group]).masked_fill(_is_constant(rewards, group, sizes), 0.0)


def distillation_advantages(
    teacher_log_probs: Tensor, policy_log_probs: Tensor, mask: Tensor, *, clip: float | None = None
) -> Tensor:
    """On-policy distillation (Agarwal et al. 2023, arXiv:2306.13649, with the reverse KL): how much likelier the teacher was.

    A_t = log p_teacher(y_t) - log p_policy(y_t), minus the k1 estimate of KL(policy, teacher) at the token. Ascending it as a
    policy gradient, each token paid for itself alone, descends that KL (Thinking Machines 2025, "On-policy distillation").
    `clip` holds it within +-clip nats, so that a token which the teacher thinks impossible doesn't rule the step.

    Shapes: all [B, T]; `mask` bool. Returns [B, T] in fp32 (fp64 for fp64), 0 outside the mask, without gradient. Raises
    `ValueError` for shapes that differ or a clip that is not above 0.
    """
    _same_shape(teacher_log_probs=teacher_log_probs, policy_log_probs=policy_log_probs, mask=mask)
    if clip is not None and not clip > 0:
        raise ValueError(f"clip must be above 0 (nats), or None for no clip; got {clip}.")
    dtype = _at_least_fp32(teacher_log_probs, policy_log_probs)
    advantages = teacher_log_probs.detach().to(dtype) - policy_log_probs.detach().to(dtype)
    if clip is not None:
        advantages = advantages.clamp(-clip, clip)
    return advantages.masked_fill(~mask.bool(), 0.0)


def broadcast_to_tokens(advantages: Tensor, mask: Tensor) -> Tensor:
    """Give every selected token of a response the advantage of the response: [B], [B, T] bool -> [B, T], 0 elsewhere."""
    if mask.dim() != 2 or advantages.shape != mask.shape[:1]:
        raise ValueError(f"Need [B] and [B, T]; got {list(advantages.shape)} and {list(mask.shape)}.")
    return advantages.unsqueeze(1).expand(mask.shape).masked_fill(~mask.bool(), 0.0)


def _groups(rewards: Tensor, group_id: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """(index of each row's group, size of each group, rewards in fp32 at least)."""
    if rewards.dim() != 1 or rewards.shape != group_id.shape:
        raise ValueError(f"rewards and group_id must both be [B]; got {list(rewards.shape)}, {list(group_id.shape)}.")
    _, group, sizes = torch.unique(group_id, return_inverse=True, return_counts=True)
    return group, sizes, rewards.detach().to(_at_least_fp32(rewards))


def _group_sum(x: Tensor, group: Tensor, sizes: Tensor) -> Tensor:
    return x.new_zeros(sizes.shape).index_add_(0, group, x)


def _is_constant(rewards: Tensor, group: Tensor, sizes: Tensor) -> Tensor:
    """[B] bool: whether all rewards of the row's group are equal (compared, not computed: no rounding)."""
    largest = rewards.new_zeros(sizes.shape).scatter_reduce_(0, group, rewards, "amax", include_self=False)
    smallest = rewards.new_zeros(sizes.shape).scatter_reduce_(0, group, rewards, "amin", include_self=False)
    return (largest == smallest)[group]


def _at_least_fp32(*tensors: Tensor) -> torch.dtype:
    dtype = torch.float32
    for tensor in tensors:
        dtype = torch.promote_types(dtype, tensor.dtype)
    return dtype


def _same_shape(**tensors: Tensor) -> None:
    shapes = {name: list(tensor.shape) for name, tensor in tensors.items()}
    if len({tuple(shape) for shape in shapes.values()}) > 1:
        raise ValueError(f"Shapes must be equal; got {shapes}.")
