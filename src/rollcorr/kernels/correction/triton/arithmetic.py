"""Arithmetic that the Triton kernels share: accurate exponentials, and moments that merge.

The functions `add_…` add values of a program's lanes to its cells of the table, one float64 for each column. A program
that reads several chunks adds to its earlier values (`again`); the first chunk overwrites.
"""

from __future__ import annotations

import triton
import triton.language as tl

LOG2_E = tl.constexpr(1.4426950408889634)
LN2_HIGH = tl.constexpr(0.693359375)  # ten bits: its product with a small integer is exact
LN2_LOW = tl.constexpr(-2.1219444005469057e-4)
ROUND = tl.constexpr(12582912.0)  # 1.5 · 2²³: adding it to a float32 rounds to an integer in the lowest bits
ONE_BITS = tl.constexpr(0x3F800000)


@triton.jit
def exponential_series(x):
    """Compute (eˣ − 1 − x) / x² for |x| ≤ 0.35: the Taylor series, to the precision of float32."""
    s = x * (1.0 / 40320.0) + (1.0 / 5040.0)
    s = s * x + (1.0 / 720.0)
    s = s * x + (1.0 / 120.0)
    s = s * x + (1.0 / 24.0)
    s = s * x + (1.0 / 6.0)
    return s * x + 0.5


@triton.jit
def exponential_parts(x):
    """Split float32 x into (2ᵏ, eʳ − 1, eʳ − 1 − r) with eˣ = 2ᵏ eʳ and |r| ≤ ½ ln 2. |x| ≤ 80."""
    rounded = x * LOG2_E + ROUND
    k = rounded - ROUND
    r = (x - k * LN2_HIGH) - k * LN2_LOW
    scale = ((rounded.to(tl.int32, bitcast=True) << 23) + ONE_BITS).to(tl.float32, bitcast=True)
    tail = r * r * exponential_series(r)
    return scale, r + tail, tail


@triton.jit
def near_exponential(x):
    """Compute (eˣ, eˣ − 1, eˣ − 1 − x) of float32 x, |x| ≤ 2.75, from h = e^½ˣ − 1: eˣ = (1 + h)².

    The polynomial is (e^½ˣ − 1 − ½x) / x² with the smallest relative error, 6e-8.
    """
    s = x * 5.4314397e-09 + 1.00828295e-07
    s = s * x + 1.5509844e-06
    s = s * x + 2.1684224e-05
    s = s * x + 2.604117e-04
    s = s * x + 2.6041877e-03
    s = s * x + 0.020833338
    s = s * x + 0.125
    tail = x * x * s
    h = x * 0.5 + tail
    k3 = h * h + (tail + tail)
    root = h + 1.0
    return root * root, x + k3, k3


@triton.jit
def rounded_off(a, b, difference):
    """Return the rounding error of difference = a − b (Knuth), for finite numbers: difference + error is exact."""
    part = a - difference
    return (part - b) + (a - (difference + part))


@triton.jit
def k3_of(d):
    """Compute eᵈ − 1 − d with d ≤ 20, float64: near 0 by the series, because the difference has no digits there."""
    capped = tl.minimum(d, 20.0)
    small = tl.minimum(tl.maximum(capped, -0.03), 0.03)
    series = small * small * exponential_series(small)
    return tl.where(tl.abs(capped) < 0.03, series, tl.exp(capped) - 1.0 - capped)


@triton.jit
def lane_sum(x):
    """Return each lane's sum over its tokens: (groups, lanes, 4) → (lanes,)."""
    return tl.sum(tl.sum(x, axis=2), axis=0)


@triton.jit
def lane_min(x):
    """Return each lane's smallest value."""
    return tl.min(tl.min(x, axis=2), axis=0)


@triton.jit
def lane_max(x):
    """Return each lane's largest value."""
    return tl.max(tl.max(x, axis=2), axis=0)


@triton.jit
def add_deviations(first, second, deviation):
    """Add a block to Σ x and Σ x² of each lane."""
    return first + lane_sum(deviation), second + lane_sum(deviation * deviation)


@triton.jit
def shifted_sums(n, shift, first):
    """Compute Σ x of each lane, float64, from Σ (x − shift)."""
    return n.to(tl.float64) * shift.to(tl.float64) + first.to(tl.float64)


@triton.jit
def byte_of(words, BYTE: tl.constexpr):
    """Return one of the four counts in the bytes of an integer."""
    return (words >> (8 * BYTE)) & 255


@triton.jit
def add_lanes(cell, again, COLUMN: tl.constexpr, lanes):
    """Add the sum of float lanes to a column."""
    place = cell + COLUMN
    tl.store(place, tl.load(place, mask=again, other=0.0) + tl.sum(lanes, axis=0).to(tl.float64))


@triton.jit
def add_count(cell, again, COLUMN: tl.constexpr, words, BYTE: tl.constexpr):
    """Add the sum of one byte of the lanes' integers to a column."""
    place = cell + COLUMN
    count = tl.sum(byte_of(words, BYTE), axis=0)
    tl.store(place, tl.load(place, mask=again, other=0.0) + count.to(tl.float64))


@triton.jit
def add_extremes(cell, again, LOW: tl.constexpr, low, high):
    """Extend a range, (min, max) in two columns, by the lanes' smallest and largest values."""
    at_low, at_high = cell + LOW, cell + LOW + 1
    lowest, highest = tl.min(low, axis=0).to(tl.float64), tl.max(high, axis=0).to(tl.float64)
    tl.store(at_low, tl.minimum(tl.load(at_low, mask=again, other=float("inf")), lowest))
    tl.store(at_high, tl.maximum(tl.load(at_high, mask=again, other=float("-inf")), highest))


@triton.jit
def add_moments(cell, again, before, MEAN: tl.constexpr, n, sums, shift, first, second):
    """Merge the moments of lanes into (mean, M2) of the `before` values so far.

    A lane has (n, Σ x, shift, Σ (x − shift), Σ (x − shift)²).
    """
    at_mean, at_m2 = cell + MEAN, cell + MEAN + 1
    before_mean, before_m2 = tl.load(at_mean, mask=again, other=0.0), tl.load(at_m2, mask=again, other=0.0)

    # Merge all lanes, in float64.
    total = tl.sum(n, axis=0).to(tl.float64)
    mean = tl.sum(sums, axis=0) / tl.maximum(total, 1.0)
    offset = first.to(tl.float64) / tl.maximum(n, 1).to(tl.float64)
    spread = shift.to(tl.float64) + offset - mean
    m2s = tl.maximum(second.to(tl.float64) - first.to(tl.float64) * offset, 0.0) + n.to(tl.float64) * spread * spread
    m2 = tl.sum(m2s, axis=0)

    # Merge two samples (Chan, Golub & LeVeque, 1983).
    share = total / tl.maximum(before + total, 1.0)
    gap = mean - before_mean
    tl.store(at_mean, before_mean + gap * share)
    tl.store(at_m2, before_m2 + m2 + gap * gap * before * share)
