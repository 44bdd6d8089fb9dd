"""Which aggregation a configuration means, and what its denominators count."""

from __future__ import annotations

from typing import TYPE_CHECKING

from torch import Tensor

from rollcorr.config import LossAggMode, LossConfig, Normalizer, RolloutCorrectionConfig
from rollcorr.core.aggregation import (
    Denominators,
    seq_mean_token_mean,
    seq_mean_token_sum,
    seq_mean_token_sum_norm,
    token_mean,
    token_sum,
)
from rollcorr.core.layout import check_layout
from rollcorr.correction.process_groups import global_denominators

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup


def aggregation_mode(config: RolloutCorrectionConfig | None, loss: LossConfig) -> LossAggMode:
    """The mode asked for; by default token-mean for PPO, and for REINFORCE the Σ_t that its theorem means."""
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
    """One number from per-token losses, by the function of `rollcorr.core.aggregation` that `mode` names.

    Args:
        per_token: (B, T), or (N,) when packed. Never read outside `mask`.
        mask: tokens in the loss, same shape.
        mode: "token-mean", "token-sum", "seq-mean-token-sum", "seq-mean-token-mean" or "seq-mean-token-sum-norm".
        denominators: of the whole optimizer step; None counts `mask`.
        lengths: (B,), what seq-mean-token-mean divides rows by; None for the lengths of `mask`.
        scale: the constant of seq-mean-token-sum-norm, tokens.
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
    if scale is None:
        raise ValueError(
            "seq-mean-token-sum-norm divides by a constant: set loss_scale_factor, e.g. to the longest response allowed"
        )
    return seq_mean_token_sum_norm(per_token, mask, denominators, scale=scale, cu_seqlens=cu_seqlens)


def normalizer_counts(
    normalizer: Normalizer,
    loss_mask: Tensor,
    response_mask: Tensor,
    weights: Tensor | None,
    *,
    cu_seqlens: Tensor | None = None,
    context_group: ProcessGroup | None = None,
) -> Denominators:
    """What these tokens add to the denominators: their number kept, their number sampled, or their kept weight.

    Args:
        normalizer: "kept", "original" or "weights".
        loss_mask: tokens in the loss. (B, T), or (N,) when packed.
        response_mask: tokens that the policy sampled, same shape.
        weights: what the loss applies; None (all 1) makes "weights" the same as "kept".
        cu_seqlens: (B + 1,) token offsets, only when packed.
        context_group: ranks that hold other tokens of the same sequences; these counts are then those of all.

    Raises:
        TypeError: an argument is no tensor.
        ValueError: shapes or devices differ or do not fit the layout.
    """
    check_layout(cu_seqlens=cu_seqlens, loss_mask=loss_mask, response_mask=response_mask)
    return global_denominators(
        response_mask if normalizer == "original" else loss_mask,
        weights=weights if normalizer == "weights" else None,
        cu_seqlens=cu_seqlens,
        context_group=context_group,
    )
