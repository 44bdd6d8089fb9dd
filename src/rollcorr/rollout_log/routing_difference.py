"""The column `routing_difference`, from the experts that sampler and trainer used."""

from __future__ import annotations

import torch
from torch import Tensor


def routing_difference(rollout_experts: Tensor, train_experts: Tensor) -> Tensor:
    """Share of the layers whose sets of experts differ: mean over layers of [K_rollout ≠ K_train], for each token.

    Args:
        rollout_experts: ids of the experts that the sampler used, (…, L, K) integers: K in each of L layers, in any
            order. A token with a negative id is one whose experts were not recorded.
        train_experts: those of the trainer, same shape.

    Returns:
        (…,) float32, 0 to 1; NaN where experts were not recorded.

    Raises:
        ValueError: the shapes differ, or are not (…, L, K).

    Example:
        >>> routing_difference(torch.tensor([[3, 1], [0, 2]]), torch.tensor([[1, 3], [0, 4]]))
        tensor(0.5000)
    """
    if rollout_experts.shape != train_experts.shape or rollout_experts.dim() < 2:
        shapes = f"{tuple(rollout_experts.shape)} and {tuple(train_experts.shape)}"
        raise ValueError(f"experts of the two sides have the shapes {shapes}; give (…, L, K) for both")
    one, two = (experts.sort(dim=-1).values for experts in (rollout_experts, train_experts))
    share = (one != two).any(-1).float().mean(-1)
    unknown = ((one < 0) | (two < 0)).any(-1).any(-1)
    return share.masked_fill(unknown, torch.nan)
