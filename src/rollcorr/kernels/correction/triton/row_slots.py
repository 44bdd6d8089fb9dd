"""Reads of the table in the sequence pass, and writes of its rows.

`cells` are the columns of the program's cells, (sequences, splits) each, and 0 where `there` is false: no such cell.
A set of rows contains the sums, then three numbers for each of the moments, then two for each of the extremes.
"""

from __future__ import annotations

import triton
import triton.language as tl

INFINITY = tl.constexpr(float("inf"))


@triton.jit
def column(cells, COLUMN: tl.constexpr):
    """Return a column's sums over splits: one number for each sequence."""
    return tl.sum(cells[COLUMN], axis=1)


@triton.jit
def lowest(cells, there, COLUMN: tl.constexpr):
    """Return a column's minimum over splits."""
    return tl.min(tl.where(there, cells[COLUMN], INFINITY), axis=1)


@triton.jit
def highest(cells, there, COLUMN: tl.constexpr):
    """Return a column's maximum over splits."""
    return tl.max(tl.where(there, cells[COLUMN], -INFINITY), axis=1)


@triton.jit
def product_sum(cells, COUNT: tl.constexpr, MEAN: tl.constexpr):
    """Return each sequence's n · mean, the sum behind a column of means."""
    return tl.sum(cells[COUNT] * cells[MEAN], axis=1)


@triton.jit
def put(rows, SLOT: tl.constexpr, values):
    """Write a sum over the program's sequences."""
    tl.store(rows + SLOT, tl.sum(values.to(tl.float64), axis=0))


@triton.jit
def put_moments(rows, SLOT: tl.constexpr, values, counts, PLAN: tl.constexpr):
    """Write the moments of a sample in which values[i] occurs counts[i] times."""
    n = tl.sum(counts, axis=0)
    values = tl.where(counts > 0, values, 0.0)
    mean = tl.sum(counts * values, axis=0) / tl.maximum(n, 1.0)
    spread = values - mean
    m2 = tl.sum(counts * spread * spread, axis=0)
    store_moments(rows, SLOT, n, mean, m2, PLAN)


@triton.jit
def store_moments(rows, SLOT: tl.constexpr, n, mean, m2, PLAN: tl.constexpr):
    """Write moments that are already computed."""
    place = rows + len(PLAN.sums) + 3 * SLOT
    tl.store(place, n)
    tl.store(place + 1, mean)
    tl.store(place + 2, m2)


@triton.jit
def put_token_moments(
    rows, SLOT: tl.constexpr, cells, COUNT: tl.constexpr, MEAN: tl.constexpr, sign, PLAN: tl.constexpr
):  # fmt: skip
    """Write the moments of a sample of tokens, merged over splits and sequences; `sign` −1 negates the values."""
    counts, means, m2s = cells[COUNT], cells[MEAN], cells[MEAN + 1]
    n = tl.sum(tl.sum(counts, axis=1), axis=0)
    mean = tl.sum(tl.sum(counts * means, axis=1), axis=0) / tl.maximum(n, 1.0)
    spread = means - mean
    m2 = tl.sum(tl.sum(m2s + counts * spread * spread, axis=1), axis=0)
    store_moments(rows, SLOT, n, sign * mean, m2, PLAN)


@triton.jit
def put_extremes(rows, SLOT: tl.constexpr, low, high, PLAN: tl.constexpr):
    """Write the extremes of a sample: `low` is +inf and `high` −inf where a sequence takes no part."""
    place = rows + len(PLAN.sums) + 3 * len(PLAN.moments) + 2 * SLOT
    tl.store(place, tl.min(low, axis=0))
    tl.store(place + 1, tl.max(high, axis=0))


@triton.jit
def put_range(rows, SLOT: tl.constexpr, values, mask, PLAN: tl.constexpr):
    """Write the extremes of the values where mask is true."""
    put_extremes(rows, SLOT, tl.where(mask, values, INFINITY), tl.where(mask, values, -INFINITY), PLAN)


@triton.jit
def put_sample(rows, MOMENTS: tl.constexpr, EXTREMES: tl.constexpr, values, has_counted, PLAN: tl.constexpr):
    """Write moments and extremes of a per-sequence value, over its finite values."""
    mask = has_counted & (tl.abs(values) < INFINITY)
    put_moments(rows, MOMENTS, values, mask.to(tl.float64), PLAN)
    put_range(rows, EXTREMES, values, mask, PLAN)
