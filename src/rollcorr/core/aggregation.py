"""Aggregation: how per-token losses become one number, so that any split of the batch gives the same gradient.

Every mode is a plain sum over tokens, scaled by numbers that belong to the whole optimizer step. Given those numbers
(`Denominators`), the losses of micro-batches and ranks add up to the loss of the undivided batch. Without them, the
call itself is taken to be the whole step. Trainers whose gradients are averaged over R ranks (DDP) multiply by R.

`rollcorr.correction.denominators` counts denominators over process groups, and says what each normalizer counts.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from rollcorr.core.boundary import check_floating, check_mask_values, check_shape, check_tensors
from rollcorr.core.layout import check_layout, expand, token_count


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


def denominators_of_lengths(lengths: Tensor, weight_sums: Tensor | None = None) -> Denominators:
    """tokens = Σ_i k_i and sequences = #{i: k_i > 0}; with weights, tokens = Σ_i W_i and sequences = Σ_i W_i / k_i.

    W_i / k_i is the mean kept weight of sequence i. A sequence-level weight is its own mean, so weights of 1 give the
    plain counts, and a per-token loss that is the same constant everywhere aggregates to that constant.

    Args:
        lengths: k_i, the counted tokens of each whole sequence, (B,).
        weight_sums: W_i, the sum of their weights, (B,) float64. None: every weight is 1.

    Returns:
        0-d float64 tensors.
    """
    if weight_sums is None:
        return Denominators(lengths.sum(dtype=torch.float64), (lengths > 0).sum(dtype=torch.float64))
    return Denominators(weight_sums.sum(), (weight_sums / lengths.clamp(min=1)).sum())


def token_mean(
    loss: Tensor, mask: Tensor, denominators: Denominators | None = None, *, cu_seqlens: Tensor | None = None
) -> Tensor:
    """Σ_it loss / tokens: every token counts the same, so long sequences count more.

    Args:
        loss: per-token loss, (B, T), or (N,) when packed. Never read outside `mask`.
        mask: tokens in the loss, same shape; read as ≠ 0.
        denominators: of the whole optimizer step. None: `mask` is counted.
        cu_seqlens: (B + 1,) token offsets, only when packed.

    Returns:
        0-d, in the loss's dtype. A zero denominator gives 0, still connected to the graph.

    Raises:
        TypeError: an argument is no tensor.
        ValueError: shapes or devices differ or do not fit the layout, or the loss is not floating-point.
    """
    masked = _masked(loss, mask, cu_seqlens)
    denominators = denominators or denominators_of_lengths(token_count(mask != 0, cu_seqlens=cu_seqlens))
    return masked.sum() * _inverse(denominators.tokens, masked)


def token_sum(loss: Tensor, mask: Tensor, *, cu_seqlens: Tensor | None = None) -> Tensor:
    """Σ_it loss: no denominator, so the step size grows with the batch. Arguments are as in `token_mean`."""
    return _masked(loss, mask, cu_seqlens).sum()


def seq_mean_token_sum(
    loss: Tensor, mask: Tensor, denominators: Denominators | None = None, *, cu_seqlens: Tensor | None = None
) -> Tensor:
    """Σ_i (Σ_t loss) / sequences: the Σ_t of the policy-gradient theorem, averaged over trajectories.

    Arguments, Returns and Raises are as in `token_mean`.
    """
    masked = _masked(loss, mask, cu_seqlens)
    denominators = denominators or denominators_of_lengths(token_count(mask != 0, cu_seqlens=cu_seqlens))
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
        denominators: of the whole optimizer step. None: `mask` is counted.
        lengths: what each row is divided by, (B,): the original lengths c_i for the normalizer "original". None: the
            kept lengths k_i, for "kept" and for "weights". (Dividing a row by its weight sum would cancel a
            sequence-level weight. The mean weights in the denominator normalize it instead.)
        cu_seqlens: (B + 1,) token offsets, only when packed.

    Returns:
        0-d, in the loss's dtype. A zero length or denominator gives 0, still connected to the graph.

    Raises:
        TypeError: an argument is no tensor.
        ValueError: shapes or devices differ or do not fit the layout, or the loss is not floating-point.
    """
    masked = _masked(loss, mask, cu_seqlens)
    kept_lengths = token_count(mask != 0, cu_seqlens=cu_seqlens)
    denominators = denominators or denominators_of_lengths(kept_lengths)

    lengths = kept_lengths if lengths is None else lengths
    check_tensors(loss=loss, lengths=lengths)
    check_shape("lengths", lengths, kept_lengths.shape, "one per sequence")

    # Each token is scaled before the sum, so that one reduction serves padded and packed batches alike.
    row_scale = expand(_inverse_tensor(lengths, masked), masked, cu_seqlens=cu_seqlens)
    return (masked * row_scale).sum() * _inverse(denominators.sequences, masked)


def seq_mean_token_sum_norm(
    loss: Tensor,
    mask: Tensor,
    denominators: Denominators | None = None,
    *,
    scale: float,
    cu_seqlens: Tensor | None = None,
) -> Tensor:
    """Σ_i (Σ_t loss) / (sequences × scale): a constant in place of the length, as in Dr. GRPO.

    Arguments, Returns and Raises are as in `token_mean`. `scale` is a finite constant > 0, usually the longest response
    allowed. The padded length is no default, because padding would then change the gradient.

    Source: Liu et al. (2025), "Understanding R1-Zero-Like Training", arXiv:2503.20783.
    """
    if not 0 < scale < float("inf"):
        raise ValueError(f"scale must be finite and > 0, got {scale}; use the longest response length")
    return seq_mean_token_sum(loss, mask, denominators, cu_seqlens=cu_seqlens) / scale


def _masked(loss: Tensor, mask: Tensor, cu_seqlens: Tensor | None) -> Tensor:
    check_layout(loss=loss, mask=mask, cu_seqlens=cu_seqlens)
    check_floating(loss=loss)
    check_mask_values(mask)
    return loss.masked_fill(mask == 0, 0.0)


def _inverse(amount: Tensor | float, like: Tensor) -> Tensor | float:
    """1 / amount, or 0 when there is nothing to divide by."""
    # A tensor of more than one number would broadcast, and silently give a loss per row.
    if isinstance(amount, Tensor):
        check_shape("a denominator", amount, (), "a number or a 0-d tensor")
        return _inverse_tensor(amount, like)
    return 1 / amount if amount else 0.0


def _inverse_tensor(amount: Tensor, like: Tensor) -> Tensor:
    """The same for each entry, in the dtype of `like`."""
    # The reciprocal is taken in float64, and rounded once, to the dtype of the loss.
    empty = amount == 0
    inverse = amount.to(torch.float64).masked_fill(empty, 1.0).reciprocal()
    return inverse.masked_fill(empty, 0.0).to(like.dtype)
