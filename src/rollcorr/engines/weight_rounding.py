"""Weights on a coarse grid, for a sampler that differs more from its trainer than any number format makes it."""

from __future__ import annotations

from torch import Tensor

MOST_BITS = 8


def rounded_to_bits(weight: Tensor, bits: int) -> Tensor:
    """Each row of a matrix on 2^bits − 1 evenly spaced values: s · round(w / s), s = max|w| / (2^(bits − 1) − 1).

    Args:
        weight: a parameter. Only a matrix is rounded: the scales of norms and biases are few and count for much, so
            engines that quantize leave them alone too.
        bits: 2 to `MOST_BITS`.

    Returns:
        A new tensor of the same shape and type. A row of zeros stays one.
    """
    if weight.dim() != 2:
        return weight.clone()
    largest = weight.abs().amax(dim=1, keepdim=True)
    spacing = largest / (2 ** (bits - 1) - 1)
    steps = (weight / spacing.masked_fill(largest == 0, 1.0)).round()
    return steps * spacing
