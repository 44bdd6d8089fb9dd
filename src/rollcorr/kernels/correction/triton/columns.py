"""How a Triton program adds what its lanes hold to its cells of the table, one float64 for each column.

A program that reads several chunks adds to what it left before (`again`); the first chunk overwrites.
"""

from __future__ import annotations

import triton
import triton.language as tl

from rollcorr.kernels.correction.triton.arithmetic import lanes_to_moments, merge_two


@triton.jit
def byte_of(words, BYTE: tl.constexpr):
    """One of the four counts that an integer holds."""
    return (words >> (8 * BYTE)) & 255


@triton.jit
def add_lanes(cell, again, COLUMN: tl.constexpr, lanes):
    """Add the sum of float lanes."""
    place = cell + COLUMN
    tl.store(place, tl.load(place, mask=again, other=0.0) + tl.sum(lanes, axis=0).to(tl.float64))


@triton.jit
def add_count(cell, again, COLUMN: tl.constexpr, words, BYTE: tl.constexpr):
    """Add the sum of one byte of the lanes' integers."""
    place = cell + COLUMN
    count = tl.sum(byte_of(words, BYTE), axis=0)
    tl.store(place, tl.load(place, mask=again, other=0.0) + count.to(tl.float64))


@triton.jit
def add_extremes(cell, again, LOW: tl.constexpr, low, high):
    """Widen a range, (min, max) in two columns, by the lanes' smallest and largest value."""
    at_low, at_high = cell + LOW, cell + LOW + 1
    lowest, highest = tl.min(low, axis=0).to(tl.float64), tl.max(high, axis=0).to(tl.float64)
    tl.store(at_low, tl.minimum(tl.load(at_low, mask=again, other=float("inf")), lowest))
    tl.store(at_high, tl.maximum(tl.load(at_high, mask=again, other=float("-inf")), highest))


@triton.jit
def add_moments(cell, again, before, MEAN: tl.constexpr, n, sums, shift, first, second):
    """Merge the lanes' moments into (mean, M2), which `before` values stand behind."""
    at_mean, at_m2 = cell + MEAN, cell + MEAN + 1
    before_mean, before_m2 = tl.load(at_mean, mask=again, other=0.0), tl.load(at_m2, mask=again, other=0.0)
    total, mean, m2 = lanes_to_moments(n, sums, shift, first, second)
    mean, m2 = merge_two(before, before_mean, before_m2, total, mean, m2)
    tl.store(at_mean, mean)
    tl.store(at_m2, m2)
