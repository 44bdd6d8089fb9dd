"""Advantages: GRPO, Dr. GRPO, RLOO and GAE, optionally without rejected rows.

A rejected row was sampled by a policy far from the trainer's, so its reward carries little information about the
trainer's policy. With `keep`, such a row does not move its group's baseline: its reward is never read, and its
advantage is 0.

Group estimators take one reward per sequence, (B,), and are independent of the layout. GAE works on tokens, padded or
packed. Arithmetic is in float64. The result has the dtype of the rewards, and at least float32. No function reads
tensor values.
"""

from __future__ import annotations

import torch
from torch import Tensor

from rollcorr.core.boundary import bounded_offsets, check_integers, check_shape, check_tensors, truth
from rollcorr.core.layout import add_at, check_layout, expand, sequence_count, token_count


def grpo_advantages(rewards: Tensor, group_ids: Tensor, *, keep: Tensor | None = None, epsilon: float = 1e-6) -> Tensor:
    """Compute (r − mean of the group) / (standard deviation of the group + epsilon), deviation with n − 1.

    Args:
        rewards: one per sequence, (B,).
        group_ids: the prompt of each sequence, (B,), any integers in any order.
        keep: (B,) bool; false excludes a row from mean and deviation. Defaults to all true.
        epsilon: added to the deviation, in units of reward; > 0. Groups of equal rewards divide rounding noise by it.

    Returns:
        (B,), no unit. 0 for excluded rows, and in groups with one kept row or with equal rewards.

    Raises:
        ValueError: shapes differ, group ids are not integers, or epsilon is not positive.

    Source: Shao et al. (2024), "DeepSeekMath", arXiv:2402.03300; n − 1 as in the common implementations.
    """
    if not epsilon > 0:
        raise ValueError(f"epsilon must be > 0, got {epsilon}")
    centered, count, group = _center_by_group(rewards, group_ids, keep)
    variance = _sum_by_group(centered.square(), group) / (count - 1).clamp(min=1)
    deviation = variance.sqrt() + epsilon
    return (centered / deviation[group]).to(_result_dtype(rewards))


def dr_grpo_advantages(rewards: Tensor, group_ids: Tensor, *, keep: Tensor | None = None) -> Tensor:
    """Compute r − mean of the group: GRPO without the division, which favors groups with nearly equal rewards.

    Args:
        rewards: one per sequence, (B,).
        group_ids: the prompt of each sequence, (B,), any integers in any order.
        keep: (B,) bool; false excludes a row from the mean. Defaults to all true.

    Returns:
        (B,), in units of the reward. 0 for excluded rows, and in groups with one kept row.

    Raises:
        ValueError: shapes differ, or group ids are not integers.

    Source: Liu et al. (2025), "Understanding R1-Zero-Like Training", arXiv:2503.20783.
    """
    centered, _, _ = _center_by_group(rewards, group_ids, keep)
    return centered.to(_result_dtype(rewards))


def rloo_advantages(rewards: Tensor, group_ids: Tensor, *, keep: Tensor | None = None) -> Tensor:
    """Compute r − mean of the group's n − 1 other rows = n / (n − 1) · (r − mean of all n rows).

    Args:
        rewards: one per sequence, (B,).
        group_ids: the prompt of each sequence, (B,), any integers in any order.
        keep: (B,) bool; false excludes a row from the mean. Defaults to all true.

    Returns:
        (B,), in units of the reward. 0 for excluded rows, and in groups with one kept row.

    Raises:
        ValueError: shapes differ, or group ids are not integers.

    Source: Kool et al. (2019), "Buy 4 REINFORCE Samples, Get a Baseline for Free!"; Ahmadian et al. (2024),
    arXiv:2402.14740.
    """
    centered, count, group = _center_by_group(rewards, group_ids, keep)
    return (centered * (count / (count - 1).clamp(min=1))[group]).to(_result_dtype(rewards))


def gae_advantages(
    rewards: Tensor,
    values: Tensor,
    response_mask: Tensor,
    *,
    gamma: float = 1.0,
    lam: float = 1.0,
    keep: Tensor | None = None,
    cu_seqlens: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Compute A_t = δ_t + γλ A_{t'}, δ_t = r_t + γ V_{t'} − V_t; t' is the next response token, V = 0 after the last.

    Observation tokens in the middle of a response (holes in the mask) are skipped: they apply no discount, and their
    rewards and values are never read.

    Args:
        rewards: per token, (B, T), or (N,) when packed. `terminal_rewards` places one reward per sequence.
        values: the critic's V_t before the token, same shape; detached here.
        response_mask: tokens that the policy sampled, same shape; read as ≠ 0.
        gamma: discount per response token, in [0, 1].
        lam: λ, in [0, 1]: 0 is one-step, 1 is Monte Carlo.
        keep: (B,) bool; rows where it is false get advantage and return 0. Defaults to all true.
        cu_seqlens: (B + 1,) token offsets, only when packed.

    Returns:
        Advantages and returns (A + V, the critic's target), in the shape of `rewards`; 0 outside the mask.

    Raises:
        ValueError: shapes differ, or gamma or lam is outside [0, 1].

    Source: Schulman et al. (2016), arXiv:1506.02438.
    """
    for name, number in (("gamma", gamma), ("lam", lam)):
        if not 0 <= number <= 1:
            raise ValueError(f"{name} must be in [0, 1], got {number}")
    check_layout(rewards=rewards, values=values, response_mask=response_mask, cu_seqlens=cu_seqlens)

    mask = truth(response_mask, "response_mask")
    if keep is not None:
        check_tensors(rewards=rewards, keep=keep)
        check_shape("keep", keep, (sequence_count(mask, cu_seqlens=cu_seqlens),), "one per sequence")
        mask = mask & expand(truth(keep, "keep"), mask, cu_seqlens=cu_seqlens)
    reward = rewards.detach().to(torch.float64).masked_fill(~mask, 0.0)
    value = values.detach().to(torch.float64).masked_fill(~mask, 0.0)

    # V_{t'}: copy the value of the next response token into each hole before it, so that t' is always t + 1.
    final = _mark_last_positions(mask, cu_seqlens)
    hole = (~mask).to(torch.float64)
    value_from_here = _linear_recurrence(value, hole.masked_fill(final, 0.0))
    next_value = _shift_left(value_from_here).masked_fill(final, 0.0)
    delta = (reward + gamma * next_value - value).masked_fill(~mask, 0.0)

    # Holes copy advantages the same way, with factor 1. Advantages never cross a sequence boundary.
    decay = hole.masked_fill(mask, gamma * lam).masked_fill(final, 0.0)
    advantages = _linear_recurrence(delta, decay).masked_fill(~mask, 0.0)
    dtype = _result_dtype(rewards)
    return advantages.to(dtype), (advantages + value).to(dtype)


def terminal_rewards(rewards: Tensor, response_mask: Tensor, *, cu_seqlens: Tensor | None = None) -> Tensor:
    """Place each sequence's reward on its last response token; 0 elsewhere.

    Args:
        rewards: one per sequence, (B,).
        response_mask: (B, T), or (N,) when packed; may have holes; read as ≠ 0.
        cu_seqlens: (B + 1,) token offsets, only when packed.

    Returns:
        The shape of `response_mask`. The reward of a sequence without response tokens is dropped, because no token can
        carry it.

    Raises:
        ValueError: shapes differ or do not fit the layout.

    Source: this library.
    """
    check_layout(response_mask=response_mask, cu_seqlens=cu_seqlens)
    check_tensors(response_mask=response_mask, rewards=rewards)
    mask = truth(response_mask, "response_mask")
    final_count = token_count(mask, cu_seqlens=cu_seqlens)
    check_shape("rewards", rewards, final_count.shape, "one per sequence")

    # At the last response token, the running count of its row (packed: of the batch) reaches its final value.
    if cu_seqlens is not None:
        final_count = final_count.cumsum(0)
    is_last = mask & (mask.cumsum(-1) == expand(final_count, mask, cu_seqlens=cu_seqlens))
    return expand(rewards, mask, cu_seqlens=cu_seqlens).masked_fill(~is_last, 0).to(_result_dtype(rewards))


def _center_by_group(rewards: Tensor, group_ids: Tensor, keep: Tensor | None) -> tuple[Tensor, Tensor, Tensor]:
    """Return r − the mean of its group's kept rewards (0 if excluded), each group's kept rows, and each row's group."""
    check_tensors(rewards=rewards, group_ids=group_ids, keep=keep)
    if rewards.dim() != 1:
        raise ValueError(f"rewards must be one per sequence, (B,); got {tuple(rewards.shape)}")
    check_integers(group_ids=group_ids)
    keep = torch.ones_like(rewards, dtype=torch.bool) if keep is None else truth(keep, "keep")
    for name, tensor in (("group_ids", group_ids), ("keep", keep)):
        if tensor.shape != rewards.shape:
            raise ValueError(f"rewards {tuple(rewards.shape)} and {name} {tuple(tensor.shape)} differ")

    group = _index_groups(group_ids.to(torch.int64))
    kept_rewards = rewards.detach().to(torch.float64).masked_fill(~keep, 0.0)
    count = _sum_by_group(keep.to(torch.float64), group)
    mean = _sum_by_group(kept_rewards, group) / count.clamp(min=1)
    return (kept_rewards - mean[group]).masked_fill(~keep, 0.0), count, group


def _index_groups(group_ids: Tensor) -> Tensor:
    """Renumber integers as 0 … B − 1, equal ones alike: (B,). Unlike in `torch.unique`, sizes don't depend on data."""
    ordered, order = group_ids.sort()
    number = torch.zeros_like(order)
    number[1:] = (ordered[1:] != ordered[:-1]).cumsum(0)
    return torch.empty_like(number).scatter_(0, order, number)


def _sum_by_group(values: Tensor, group: Tensor) -> Tensor:
    return add_at(torch.zeros_like(values), group, values)


def _linear_recurrence(addend: Tensor, factor: Tensor) -> Tensor:
    """Compute x_t = addend_t + factor_t · x_{t+1} along the last dimension, in log₂ T passes over the tensor.

    Source: Hillis & Steele (1986), "Data Parallel Algorithms"; Blelloch (1990) for linear recurrences.
    """
    step, length = 1, addend.shape[-1]
    while step < length:
        addend = addend + factor * _shift_left(addend, step)
        factor = factor * _shift_left(factor, step)
        step *= 2
    return addend


def _shift_left(x: Tensor, step: int = 1) -> Tensor:
    """Return x_{t+step} along the last dimension; 0 beyond the end."""
    return torch.nn.functional.pad(x[..., step:], (0, min(step, x.shape[-1])))


def _mark_last_positions(mask: Tensor, cu_seqlens: Tensor | None) -> Tensor:
    """Return true on the last position of each sequence, in the mask or not."""
    if cu_seqlens is None:
        return torch.zeros_like(mask).index_fill(-1, torch.arange(mask.shape[-1], device=mask.device)[-1:], True)
    # An empty sequence marks its predecessor's last token, which is already marked. One extra slot at the front takes
    # the marks of empty sequences before the first token.
    slots = mask.new_zeros(mask.numel() + 1).index_fill(0, bounded_offsets(cu_seqlens, mask.numel())[1:], True)
    return slots[1:]


def _result_dtype(rewards: Tensor) -> torch.dtype:
    return torch.promote_types(rewards.dtype, torch.float32)
