"""Denominators of a loss: counts of one optimizer step, over all of its micro-batches and ranks.

A normalizer names the counted quantity. Sequence i has c_i response tokens, k_i of them kept, and W_i is the sum of the
weights that the loss applies to its kept tokens:

    kept        tokens = Σ k_i    sequences = #{i: k_i > 0}    count_denominators(loss_mask)
    original    tokens = Σ c_i    sequences = #{i: c_i > 0}    count_denominators(response_mask)
    weights     tokens = Σ W_i    sequences = Σ W_i / k_i      count_denominators(loss_mask, weights=weights)

`loss_denominators` maps the normalizer's name to one of these three calls. `Correction.denominators` returns the same
numbers if one correction is one optimizer step. docs/guides/losses.md lists the number that each aggregation mode uses.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

import torch
from torch import Tensor

from rollcorr.config import LossAggMode, LossConfig, Normalizer, RolloutCorrectionConfig
from rollcorr.core.aggregation import (
    Denominators,
    denominators_of_lengths,
    seq_mean_token_mean,
    seq_mean_token_sum,
    seq_mean_token_sum_norm,
    token_mean,
    token_sum,
)
from rollcorr.core.boundary import check_mask_values, truth
from rollcorr.core.layout import check_layout, sequence_sum, token_count
from rollcorr.correction.process_groups import sum_over

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup


class Averaged(NamedTuple):
    """The denominators of a loss, with which `TrainingStep` averages over the optimizer step instead.

    Attributes:
        mode: the aggregation mode.
        policy_gradient: the denominators of the policy gradient.
        regularization: the denominators of the KL and entropy terms.
        response_mask: the tokens that the policy sampled, in the loss's shape.
        cu_seqlens: (B + 1,) token offsets; `None` when padded.
    """

    mode: LossAggMode
    policy_gradient: Denominators
    regularization: Denominators
    response_mask: Tensor
    cu_seqlens: Tensor | None = None


def count_denominators(
    mask: Tensor,
    *,
    weights: Tensor | None = None,
    cu_seqlens: Tensor | None = None,
    group: ProcessGroup | None = None,
    context_group: ProcessGroup | None = None,
) -> Denominators:
    """Count the tokens in a mask and the sequences with one; with weights, sum token weights and mean sequence weights.

    Both are 0-d float64. With groups, all ranks are counted. Every sequence counts once, even if several ranks have a
    slice of it.

    Args:
        mask: this rank's tokens of the optimizer step, (B, T), or (N,) when packed; read as ≠ 0. The loss mask; the
            response mask for "original".
        weights: the weights that the loss applies, for the normalizer "weights". Same shape; never read outside the
            mask. By default, tokens and sequences are counted.
        cu_seqlens: (B + 1,) token offsets, only when packed.
        group: the data-parallel group.
        context_group: ranks with other slices of the same sequences.

    Raises:
        TypeError: an argument is not a tensor.
        ValueError: shapes or devices differ or do not fit the layout.
    """
    check_layout(cu_seqlens=cu_seqlens, mask=mask, **({} if weights is None else {"weights": weights}))

    # Add the slices of each sequence first: its token count and its mean weight depend on all slices.
    lengths = sequence_lengths(mask, cu_seqlens=cu_seqlens, context_group=context_group)
    weight_sums = None
    if weights is not None:
        weight_sums = sequence_sum(weights.detach().double(), truth(mask), cu_seqlens=cu_seqlens)
        weight_sums = sum_over(weight_sums, context_group)

    return sum_denominators(denominators_of_lengths(lengths, weight_sums), group)


def loss_denominators(
    normalizer: Normalizer,
    loss_mask: Tensor,
    response_mask: Tensor,
    weights: Tensor | None,
    *,
    cu_seqlens: Tensor | None = None,
    group: ProcessGroup | None = None,
    context_group: ProcessGroup | None = None,
) -> Denominators:
    """Compute the denominators that a normalizer names, by `count_denominators`.

    Args:
        normalizer: "kept", "original" or "weights".
        loss_mask: tokens in the loss. (B, T), or (N,) when packed.
        response_mask: tokens that the policy sampled, same shape.
        weights: the weights that the loss applies. Without weights (all are 1), "weights" equals "kept".
        cu_seqlens: (B + 1,) token offsets, only when packed.
        group: the data-parallel group.
        context_group: ranks with other slices of the same sequences.

    Raises:
        TypeError: an argument is not a tensor.
        ValueError: shapes or devices differ or do not fit the layout.
    """
    check_layout(cu_seqlens=cu_seqlens, loss_mask=loss_mask, response_mask=response_mask)
    check_mask_values(loss_mask, "loss_mask")
    check_mask_values(response_mask, "response_mask")
    counted = response_mask if normalizer == "original" else loss_mask
    counted_weights = weights if normalizer == "weights" else None
    return count_denominators(
        counted, weights=counted_weights, cu_seqlens=cu_seqlens, group=group, context_group=context_group
    )


def sum_denominators(own: Denominators, group: ProcessGroup | None) -> Denominators:
    """Compute the sum of all ranks' denominators, bitwise equal on each rank: 0-d float64 tensors.

    Args:
        own: this rank's denominators, e.g. the sum over its micro-batches. A rank without data passes 0 and 0.
        group: the process group; defaults to this process.
    """
    return Denominators(*sum_over(torch.stack([_double(own.tokens), _double(own.sequences)]), group))


def sequence_lengths(
    mask: Tensor, *, cu_seqlens: Tensor | None = None, context_group: ProcessGroup | None = None
) -> Tensor:
    """Count the tokens of each sequence where mask is not 0, over all of its slices: (B,) float64.

    Arguments are as in `count_denominators`.
    """
    check_layout(mask=mask, cu_seqlens=cu_seqlens)
    return sum_over(token_count(truth(mask), cu_seqlens=cu_seqlens).double(), context_group)


def rescaling(original: Tensor | float, kept: Tensor | float) -> Tensor:
    """Compute original / kept: the factor from a loss over the original count to one over the kept count.

    Returns:
        0-d float64, on the device of `kept`; 0 if no token was kept.
    """
    kept = _double(kept)
    original = _double(original, kept.device)

    # Without a kept token the policy gradient is 0, and 0 times a finite factor stays 0.
    return torch.where(kept > 0, original / kept.clamp(min=1e-300), 0.0)


def amount_of(mode: LossAggMode, denominators: Denominators, device: torch.device | None = None) -> Tensor:
    """Return the count that a mode divides by, 0-d float64 on a device; 1 for token-sum."""
    if mode == "token-sum":
        return _double(1.0, device)
    return _double(denominators.tokens if mode == "token-mean" else denominators.sequences, device)


def aggregation_mode(config: RolloutCorrectionConfig | None, loss: LossConfig) -> LossAggMode:
    """Return the configured aggregation mode. The default is token-mean for PPO, and Σ_t for REINFORCE.

    Args:
        config: the correction; its `loss_type` selects the default. `None` for no correction.
        loss: the options of the loss; its `loss_agg_mode` overrides the default.
    """
    reinforce = config is not None and config.loss_type == "reinforce"
    return loss.loss_agg_mode or ("seq-mean-token-sum" if reinforce else "token-mean")


def aggregate(
    per_token: Tensor,
    mask: Tensor,
    mode: LossAggMode,
    denominators: Denominators | None = None,
    *,
    lengths: Tensor | None = None,
    scale: float | None = None,
    cu_seqlens: Tensor | None = None,
) -> Tensor:
    """Aggregate per-token losses to a scalar, by the function of `rollcorr.core.aggregation` that `mode` names.

    Args:
        per_token: (B, T), or (N,) when packed. Never read outside `mask`.
        mask: tokens in the loss, same shape.
        mode: "token-mean", "token-sum", "seq-mean-token-sum", "seq-mean-token-mean" or "seq-mean-token-sum-norm".
        denominators: denominators of the optimizer step; defaults to the counts of `mask`.
        lengths: row denominators of seq-mean-token-mean, (B,); defaults to the lengths of `mask`.
        scale: the constant of seq-mean-token-sum-norm, in tokens.
        cu_seqlens: (B + 1,) token offsets, only when packed.

    Raises:
        ValueError: the mode is unknown, its scale is missing, or shapes differ.
    """
    if mode == "token-mean":
        return token_mean(per_token, mask, denominators, cu_seqlens=cu_seqlens)
    if mode == "token-sum":
        return token_sum(per_token, mask, cu_seqlens=cu_seqlens)
    if mode == "seq-mean-token-sum":
        return seq_mean_token_sum(per_token, mask, denominators, cu_seqlens=cu_seqlens)
    if mode == "seq-mean-token-mean":
        return seq_mean_token_mean(per_token, mask, denominators, lengths=lengths, cu_seqlens=cu_seqlens)
    if mode != "seq-mean-token-sum-norm":
        raise ValueError(f"unknown loss_agg_mode {mode!r}")

    # The padded length would be a bad default: more padding would make the gradient smaller.
    if scale is None:
        raise ValueError(
            "seq-mean-token-sum-norm divides by a constant: set loss_scale_factor, e.g. to the longest response allowed"
        )
    return seq_mean_token_sum_norm(per_token, mask, denominators, scale=scale, cu_seqlens=cu_seqlens)


def _double(amount: Tensor | float, device: torch.device | None = None) -> Tensor:
    """Return an amount as a 0-d float64 tensor, on its own device or on `device`."""
    if isinstance(amount, Tensor):
        return amount.to(torch.float64) if device is None else amount.to(device, torch.float64)

    # Fill, because a copy from pageable host memory would synchronize the GPU.
    return torch.full((), float(amount), dtype=torch.float64, device="cpu" if device is None else device)
