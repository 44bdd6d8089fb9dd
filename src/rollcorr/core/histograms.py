"""Histograms with fixed bins: counts that add up exactly, and quantiles with a stated error.

A bin holds the values whose float32 sign, exponent and first five bits of mantissa agree. There are 32 bins per octave
for |x| from 2⁻²⁴ to 2²⁰, one around 0 for smaller values, and one at either end for larger values. No logarithm is
taken, so every device puts a value into the same bin, and there is no limit on the number of values.

A quantile is off by at most 1/65 of itself (`RELATIVE_ERROR`), or by 2⁻²⁴ near 0.
"""

from __future__ import annotations

import math
from bisect import bisect_left
from collections.abc import Sequence
from itertools import accumulate
from operator import add

import torch
from torch import Tensor

_MANTISSA_BITS = 5
_OCTAVES = (-24, 20)
_STEPS = 1 << _MANTISSA_BITS
_SIDE = (_OCTAVES[1] - _OCTAVES[0]) * _STEPS + 1
_FIRST = (_OCTAVES[0] + 127) * _STEPS - 1  # in units of float32's bits shifted right, the bin just below the smallest

BINS = 2 * _SIDE + 1
"""Entries of a histogram: the negative values from the largest down, those around 0, the positive ones."""

RELATIVE_ERROR = 1 / (2 * _STEPS + 1)
"""Largest relative error of a quantile whose absolute value lies between 2⁻²⁴ and 2²⁰."""


def histogram_of(values: Tensor, mask: Tensor) -> Tensor:
    """Count the values where mask is true in fixed bins: (BINS,) float64.

    Args:
        values: any shape, never NaN where `mask` is true; infinities go to the bins at the ends. Masked values are
            never read.
        mask: bool, same shape.
    """
    seen = values.masked_fill(~mask, 0.0).float().flatten()

    # The upper bits of a float32, exponent and start of the mantissa, number the bins of its magnitude.
    magnitude = (seen.abs().view(torch.int32) >> (23 - _MANTISSA_BITS)).sub_(_FIRST).clamp_(0, _SIDE)
    index = magnitude.mul_(seen.sign().to(torch.int32)).add_(_SIDE)
    counts = torch.zeros(BINS, dtype=torch.float64, device=values.device)
    return counts.scatter_add_(0, index.to(torch.int64), mask.flatten().to(torch.float64))


def quantile(counts: Sequence[float], q: float, *, absolute: bool = False) -> float:
    """The smallest value with a share q of the sample at or below it, up to `RELATIVE_ERROR`.

    Args:
        counts: a histogram on the host, BINS long.
        q: in [0, 1].
        absolute: of |x| rather than of x.

    Returns:
        The harmonic mean of its bin's edges; 0 for an empty sample; ±inf where the bin has no outer edge.

    Raises:
        ValueError: q is not in [0, 1].
    """
    if not 0 <= q <= 1:
        raise ValueError(f"q must be in [0, 1], got {q}")

    # For |x|, each negative bin is added to its mirror image.
    first = -_SIDE
    if absolute:
        below, above = counts[:_SIDE], counts[_SIDE + 1 :]
        counts, first = [counts[_SIDE], *map(add, reversed(below), above)], 0

    # The factor undoes rounding, so that 0.99 · 100 is the 99th of 100.
    reached = list(accumulate(counts))
    rank = max(1.0, math.ceil(q * reached[-1] * (1 - 1e-15)))
    bin_ = bisect_left(reached, rank)
    return _representative(first + bin_) if bin_ < len(reached) else 0.0


def _representative(bin_: int) -> float:
    if bin_ == 0:
        return 0.0
    step = abs(bin_) - 1
    if step == _SIDE - 1:
        return math.copysign(math.inf, bin_)
    low, high = _edge(step), _edge(step + 1)
    return math.copysign(2 * low * high / (low + high), bin_)


def _edge(step: int) -> float:
    octave, part = divmod(step, _STEPS)
    return math.ldexp(1 + part / _STEPS, _OCTAVES[0] + octave)
