"""Aggregation: how per-token losses become one number, so that any split of the batch gives the same gradient.

Every mode is a plain sum over tokens, scaled by numbers that belong to the whole optimizer step. Given those numbers
(`Denominators`), the losses of micro-batches and ranks add up to the loss of the undivided batch; without them, the
call at hand is taken to be the whole step. Trainers whose gradients are averaged over R ranks (DDP) multiply by R.

Three normalisers say what the denominators count (c_i response tokens and k_i kept tokens of sequence i, w weights):

    kept        tokens = Σ k_i          sequences = #{i: k_i > 0}         count_denominators(loss_mask)
    original    tokens = Σ c_i          sequences = #{i: c_i > 0}         count_denominators(response_mask)
    weights     tokens = Σ_kept w       sequences = Σ_i mean_kept,i w     weight_denominators(loss_mask, weights)
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from rollcorr.core.boundary import check_floating, check_shape, check_tensors
from rollcorr.core.layout import check_layout, expand, sequence_mean, token_count


@dataclass(frozen=True, eq=False)
class Denominators:
    """What a loss is divided by: amounts of tokens and of sequences, summed over everything in one optimizer step.

    Attributes:
        tokens: a float, or a 0-d tensor when it must not wait for the GPU.
        sequences: the same, for the seq-mean modes.
    """

    tokens: Tensor | float
    sequences: Tensor | float

    def __add__(self, other: Denominators) -> Denominators:
        """Those of two micro-batches (or ranks) together."""
        return Denominators(self.tokens + other.tokens, self.sequences + other.sequences)


def count_denominators(mask: Tensor, *, cu_seqlens: Tensor | None = None) -> Denominators:
    """tokens = Σ_i k_i, sequences = #{i: k_i > 0}: 0-d float64 tensors.

    Args:
        mask: the loss mask for "kept", the response mask for "original". (B, T), or (N,) when packed; read as ≠ 0.
        cu_seqlens: (B + 1,) token offsets, only when packed.

    Raises:
        TypeError: the mask or `cu_seqlens` is no tensor.
        ValueError: the mask does not fit the layout.
    """
    check_layout(mask=mask, cu_seqlens=cu_seqlens)
    count = token_count(mask != 0, cu_seqlens=cu_seqlens)
    return Denominators(count.sum(dtype=torch.float64), (count > 0).sum(dtype=torch.float64))


def weight_denominators(loss_mask: Tensor, weights: Tensor, *, cu_seqlens: Tensor | None = None) -> Denominators:
    """tokens = Σ_kept w, sequences = Σ_i q_i with q_i the mean kept weight of sequence i: self-normalised IS.

    A sequence-level weight w_i is its own mean, so both counts reduce to `count_denominators` when every weight is 1,
    and a per-token loss that is the same constant everywhere aggregates to that constant.

    Args:
        loss_mask: kept tokens. (B, T), or (N,) when packed; read as ≠ 0.
        weights: the weights that the loss applies, same shape. Never read outside `loss_mask`.
        cu_seqlens: (B + 1,) token offsets, only when packed.

    Returns:
        0-d float64 tensors without gradient.
    """
    check_layout(loss_mask=loss_mask, weights=weights, cu_seqlens=cu_seqlens)
    kept, weights = loss_mask != 0, weights.detach().to(torch.float64)
    tokens = weights.masked_fill(~kept, 0.0).sum()
    return Denominators(tokens, sequence_mean(weights, kept, cu_seqlens=cu_seqlens).sum())


def token_mean(
    loss: Tensor, mask: Tensor, denominators: Denominators | None = None, *, cu_seqlens: Tensor | None = None
) -> Tensor:
    """Σ_it loss / tokens: every token counts the same, so long sequences count more.

    Args:
        loss: per-token loss, (B, T), or (N,) when packed. Never read outside `mask`.
        mask: tokens in the loss, same shape; read as ≠ 0.
        denominators: of the whole optimizer step; None counts `mask`.
        cu_seqlens: (B + 1,) token offsets, only when packed.

    Returns:
        0-d, in the loss's dtype. A zero denominator gives 0, still connected to the graph.

    Raises:
        TypeError: an argument is no tensor.
        ValueError: shapes or devices differ or do not fit the layout, or the loss is not floating-point.
    """
    masked = _masked(loss, mask, cu_seqlens)
    if denominators is None:
        denominators = count_denominators(mask, cu_seqlens=cu_seqlens)
    return masked.sum() * _inverse(denominators.tokens, masked)


def token_sum(loss: Tensor, mask: Tensor, *, cu_seqlens: Tensor | None = None) -> Tensor:
    """Σ_it loss: no denominator; the step size grows with the batch. Arguments as in `token_mean`."""
    return _masked(loss, mask, cu_seqlens).sum()


def seq_mean_token_sum(
    loss: Tensor, mask: Tensor, denominators: Denominators | None = None, *, cu_seqlens: Tensor | None = None
) -> Tensor:
    """Σ_i (Σ_t loss) / sequences: the Σ_t of the policy-gradient theorem, averaged over trajectories.

    Arguments, Returns and Raises are as in `token_mean`.
    """
    masked = _masked(loss, mask, cu_seqlens)
    if denominators is None:
        denominators = count_denominators(mask, cu_seqlens=cu_seqlens)
    return masked.sum() * _inverse(denominators.sequences, masked)


def seq_mean_token_mean(
    loss: Tensor,
    mask: Tensor,
    denominators: Denominators | None = None,
    *,
    lengths: Tensor | None = None,
    cu_seqlens: Tensor | None = None,
) -> Tensor:
    """Σ_i (Σ_t loss / length_i) / sequences: every sequence counts the same, whatever its length.

    Args:
        loss: per-token loss, (B, T), or (N,) when packed. Never read outside `mask`.
        mask: tokens in the loss, same shape; read as ≠ 0.
        denominators: of the whole optimizer step; None counts `mask`.
        lengths: what each row is divided by, (B,): the original lengths c_i for the normaliser "original". None: the
            kept lengths k_i, for "kept" and for "weights" (dividing by a row's weight sum would cancel a
            sequence-level weight; Σ_i q_i in the denominator normalises it instead).
        cu_seqlens: (B + 1,) token offsets, only when packed.

    Returns:
        0-d, in the loss's dtype. A zero length or denominator gives 0, still connected to the graph.

    Raises:
        TypeError: an argument is no tensor.
        ValueError: shapes or devices differ or do not fit the layout, or the loss is not floating-point.
    """
    masked = _masked(loss, mask, cu_seqlens)
    kept_lengths = token_count(mask != 0, cu_seqlens=cu_seqlens)
    lengths = kept_lengths if lengths is None else lengths
    check_tensors(loss=loss, lengths=lengths)
    check_shape("lengths", lengths, kept_lengths.shape, "one per sequence")
    if denominators is None:
        denominators = count_denominators(mask, cu_seqlens=cu_seqlens)
    row_scale = _inverse_tensor(lengths, masked)
    return (masked * expand(row_scale, masked, cu_seqlens=cu_seqlens)).sum() * _inverse(denominators.sequences, masked)


def seq_mean_token_sum_norm(
    loss: Tensor,
    mask: Tensor,
    denominators: Denominators | None = None,
    *,
    scale: float,
    cu_seqlens: Tensor | None = None,
) -> Tensor:
    """Σ_i (Σ_t loss) / (sequences × scale): a constant in place of the length, as in Dr. GRPO.

    Arguments, Returns and Raises are as in `token_mean`; `scale` is a finite constant > 0, usually the longest response
    allowed. The padded length is no default: padding would change the gradient.

    Source: Liu et al. (2025), "Understanding R1-Zero-Like Training", arXiv:2503.20783.
    """
    if not 0 < scale < float("inf"):
        raise ValueError(f"scale must be finite and > 0, got {scale}; use the longest response length")
    return seq_mean_token_sum(loss, mask, denominators, cu_seqlens=cu_seqlens) / scale


def _masked(loss: Tensor, mask: Tensor, cu_seqlens: Tensor | None) -> Tensor:
    check_layout(loss=loss, mask=mask, cu_seqlens=cu_seqlens)
    check_floating(loss=loss)
    return loss.masked_fill(mask == 0, 0.0)


def _inverse(amount: Tensor | float, like: Tensor) -> Tensor | float:
    """1 / amount, or 0 when there is nothing to divide by."""
    if isinstance(amount, Tensor):
        check_shape("a denominator", amount, (), "a number or a 0-d tensor")
        return _inverse_tensor(amount, like)
    return 1 / amount if amount else 0.0


def _inverse_tensor(amount: Tensor, like: Tensor) -> Tensor:
    """The same entry by entry, in the dtype of `like`."""
    empty = amount == 0
    inverse = amount.to(torch.float64).masked_fill(empty, 1.0).reciprocal()
    return inverse.masked_fill(empty, 0.0).to(like.dtype)
