"""Steps on a chunk of logits between two matrix products: one pass forward, one pass back."""

from __future__ import annotations

import triton
import triton.language as tl

BLOCK = tl.constexpr(2048)


@triton.jit
def absorb(
    logits, local_ids, temperature, slots, largest, total, target, weighted, columns,
    MEASURE: tl.constexpr,
):  # fmt: skip
    """Add a row's chunk to its running max z, Σ e (e = exp(z − max)), z_a and, if slot ≥ 0, Σ e (z − max)."""
    row = tl.program_id(0).to(tl.int64)
    tau = tl.load(temperature + row)
    sampled = tl.load(local_ids + row)
    high = tl.load(largest + row)
    total_e = tl.load(total + row)
    found = tl.load(target + row)
    slot = tl.full([], -1, tl.int64)
    total_ez = total_e * 0.0
    if MEASURE:
        slot = tl.load(slots + row)
        total_ez = tl.load(weighted + slot, mask=slot >= 0, other=0.0)
    for start in range(0, columns, BLOCK):
        column = start + tl.arange(0, BLOCK)
        inside = column < columns
        z = tl.load(logits + row * columns + column, mask=inside, other=float("-inf")) / tau
        found += tl.sum(tl.where(inside & (column == sampled), z, 0.0), axis=0)
        # Online softmax: rescale the sums whenever a block has a larger logit.
        higher = tl.maximum(high, tl.max(z, axis=0))
        anchor = tl.where(higher == float("-inf"), 0.0, higher)
        shift = tl.maximum(high - anchor, -1e4)
        scale = tl.exp(shift)
        below = z - anchor
        e = tl.exp(below)
        if MEASURE:
            gained = tl.sum(tl.where(e > 0.0, e * below, 0.0), axis=0)
            total_ez = scale * (total_ez + total_e * shift) + gained
        total_e = scale * total_e + tl.sum(e, axis=0)
        high = higher
    tl.store(largest + row, high)
    tl.store(total + row, total_e)
    tl.store(target + row, found)
    if MEASURE:
        tl.store(weighted + slot, total_ez, mask=slot >= 0)


@triton.jit
def to_gradient(
    logits, gradient, local_ids, temperature, log_total, of_sum, of_target, entropy, of_entropy, columns,
    MEASURED: tl.constexpr,
):  # fmt: skip
    """Replace one block of a row of logits by p · of_sum + [j = a] · of_target − p (log p + H) · of_entropy."""
    row = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = column < columns
    z = tl.load(logits + row * columns + column, mask=inside, other=float("-inf")) / tl.load(temperature + row)
    log_p = z - tl.load(log_total + row)
    p = tl.exp(log_p)
    out = p * tl.load(of_sum + row)
    if MEASURED:
        surprise = tl.where(p > 0.0, log_p + tl.load(entropy + row), 0.0)
        out -= p * surprise * tl.load(of_entropy + row)
    out += tl.where(column == tl.load(local_ids + row), tl.load(of_target + row), 0.0)
    tl.store(gradient + row * columns + column, out.to(gradient.dtype.element_ty), mask=inside)
