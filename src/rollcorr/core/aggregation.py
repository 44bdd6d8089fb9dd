"""Aggregation: reduce per-token losses to one number, so that any split of the batch gives the same gradient.

Every mode is a plain sum over tokens, scaled by totals of the full optimizer step. Given those totals
(`Denominators`), the losses of micro-batches and ranks add up to the loss of the undivided batch. By default, each
call is treated as the full step. Trainers whose gradients are averaged over R ranks (DDP) multiply by R.

`rollcorr.correction.denominators` sums denominators over process groups, and documents the count of each normalizer.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from rollcorr.core.boundary import check_floating, check_mask_values, check_shape, check_tensors
from rollcorr.core.layout import check_layout, expand, token_count


@dataclass(frozen=True, eq=False)
class Denominators:
    """Divisors of a loss: numbers of tokens and of sequences, summed over one optimizer step.

    Attributes:
        tokens: a float, or a 0-d tensor to avoid a GPU sync.
        sequences: the same, for the seq-mean modes.
    """

    tokens: Tensor | float
    sequences: Tensor | float

    def __add__(self, other: Denominators) -> Denominators:
        """Return the denominators of two micro-batches (or ranks) combined."""
        return Denominators(self.tokens + other.tokens, self.sequences + other.sequences)


def denominators_of_lengths(lengths: Tensor, weight_sums: Tensor | None = None) -> Denominators:
    """Compute tokens = Σ_i k_i, sequences = #{i: k_i > 0}; with weights, tokens = Σ_i W_i, sequences = Σ_i W_i / k_i.

    W_i / k_i is the mean kept weight of sequence i. Weights of 1 give the plain counts; a loss that is
    constant before weighting aggregates to that constant.

    Args:
        lengths: k_i, the counted tokens of each full sequence, (B,).
        weight_sums: W_i, the sum of the sequence's token weights, (B,) float64; optional, weights of 1 by default.

    Returns:
        0-d float64 tensors.
    """
    if weight_sums is None:
        return Denominators(lengths.sum(dtype=torch.float64), (lengths > 0).sum(dtype=torch.float64))
    return Denominators(weight_sums.sum(), (weight_sums / lengths.clamp(min=1)).sum())


def token_mean(
    loss: Tensor, mask: Tensor, denominators: Denominators | None = None, *, cu_seqlens: Tensor | None = None
) -> Tensor:
    """Compute Σ_it loss / tokens: every token counts equally, so long sequences count more.

    Args:
        loss: per-token loss, (B, T), or (N,) when packed. Never read outside `mask`.
        mask: tokens in the loss, same shape; read as ≠ 0.
        denominators: totals of the full optimizer step. Defaults to the counts of `mask`.
        cu_seqlens: (B + 1,) token offsets, only when packed.

    Returns:
        0-d, in the loss's dtype. A zero denominator gives 0, still connected to the graph.

    Raises:
        TypeError: an argument is not a tensor.
        ValueError: shapes or devices differ or do not fit the layout, or the loss is not floating-point.
    """
    masked = _zero_outside_mask(loss, mask, cu_seqlens)
    denominators = denominators or denominators_of_lengths(token_count(mask != 0, cu_seqlens=cu_seqlens))
    return masked.sum() * _inverse_or_zero(denominators.tokens, masked)


def token_sum(loss: Tensor, mask: Tensor, *, cu_seqlens: Tensor | None = None) -> Tensor:
    """Compute Σ_it loss: no denominator, so the step size grows with the batch. Arguments are as in `token_mean`."""
    return _zero_outside_mask(loss, mask, cu_seqlens).sum()


def seq_mean_token_sum(
    loss: Tensor, mask: Tensor, denominators: Denominators | None = None, *, cu_seqlens: Tensor | None = None
) -> Tensor:
    """Compute Σ_i (Σ_t loss) / sequences: the Σ_t of the policy-gradient theorem, averaged over trajectories.

    Arguments, Returns and Raises are as in `token_mean`.
    """
    masked = _zero_outside_mask(loss, mask, cu_seqlens)
    denominators = denominators or denominators_of_lengths(token_count(mask != 0, cu_seqlens=cu_seqlens))
    return masked.sum() * _inverse_or_zero(denominators.sequences, masked)


def seq_mean_token_mean(
    loss: Tensor,
    mask: Tensor,
    denominators: Denominators | None = None,
    *,
    lengths: Tensor | None = None,
    cu_seqlens: Tensor | None = None,
) -> Tensor:
    """Compute Σ_i (Σ_t loss / length_i) / sequences: every sequence counts equally, independent of its length.

    Args:
        loss: per-token loss, (B, T), or (N,) when packed. Never read outside `mask`.
        mask: tokens in the loss, same shape; read as ≠ 0.
        denominators: totals of the full optimizer step. Defaults to the counts of `mask`.
        lengths: divisor of each row, (B,): the original lengths c_i for the normalizer "original". Defaults to the kept
            lengths k_i, for "kept" and for "weights". (Dividing a row by its weight sum would cancel a sequence-level
            weight. The mean weights in the denominator normalize it instead.)
        cu_seqlens: (B + 1,) token offsets, only when packed.

    Returns:
        0-d, in the loss's dtype. A zero length or denominator gives 0, still connected to the graph.

    Raises:
        TypeError: an argument is not a tensor.
        ValueError: shapes or devices differ or do not fit the layout, or the loss is not floating-point.
    """
    masked = _zero_outside_mask(loss, mask, cu_seqlens)
    kept_lengths = token_count(mask != 0, cu_seqlens=cu_seqlens)
    denominators = denominators or denominators_of_lengths(kept_lengths)

    lengths = kept_lengths if lengths is None else lengths
    check_tensors(loss=loss, lengths=lengths)
    check_shape("lengths", lengths, kept_lengths.shape, "one per sequence")

    # Scale each token before the sum, so that one reduction serves both padded and packed batches.
    row_scale = expand(_inverse_tensor(lengths, masked), masked, cu_seqlens=cu_seqlens)
    return (masked * row_scale).sum() * _inverse_or_zero(denominators.sequences, masked)


def seq_mean_token_sum_norm(
    loss: Tensor,
    mask: Tensor,
    denominators: Denominators | None = None,
    *,
    scale: float,
    cu_seqlens: Tensor | None = None,
) -> Tensor:
    """Compute Σ_i (Σ_t loss) / (sequences × scale): a constant in place of the length, as in Dr. GRPO.

    Arguments, Returns and Raises are as in `token_mean`. `scale` is a finite constant > 0, usually the longest response
    allowed. It has no default: the padded length would make the gradient depend on padding.

    Source: Liu et al. (2025), "Understanding R1-Zero-Like Training", arXiv:2503.20783.
    """
    if not 0 < scale < float("inf"):
        raise ValueError(f"scale must be finite and > 0, got {scale}; use the longest response length")
    return seq_mean_token_sum(loss, mask, denominators, cu_seqlens=cu_seqlens) / scale


def _zero_outside_mask(loss: Tensor, mask: Tensor, cu_seqlens: Tensor | None) -> Tensor:
    check_layout(loss=loss, mask=mask, cu_seqlens=cu_seqlens)
    check_floating(loss=loss)
    check_mask_values(mask)
    return loss.masked_fill(mask == 0, 0.0)


def _inverse_or_zero(amount: Tensor | float, like: Tensor) -> Tensor | float:
    """Return 1 / amount, or 0 if amount is 0."""
    # A tensor with more than one entry would broadcast, and silently produce a loss per row.
    if isinstance(amount, Tensor):
        check_shape("a denominator", amount, (), "a number or a 0-d tensor")
        return _inverse_tensor(amount, like)
    return 1 / amount if amount else 0.0


def _inverse_tensor(amount: Tensor, like: Tensor) -> Tensor:
    """Return 1 / amount per entry, or 0 where amount is 0, in the dtype of `like`."""
    # Compute the reciprocal in float64, and round once, to the dtype of the loss.
    empty = amount == 0
    inverse = amount.to(torch.float64).masked_fill(empty, 1.0).reciprocal()
    return inverse.masked_fill(empty, 0.0).to(like.dtype)
