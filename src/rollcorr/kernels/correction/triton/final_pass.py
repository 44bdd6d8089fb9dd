"""The last pass merges sets of rows into one, and applies the decisions for sequences to their tokens.

The first programs merge: each adds the sets in order, for a few rows of every kind. The next programs spread: each
updates the tokens that it had in the token pass.
"""

from __future__ import annotations

import triton
import triton.language as tl

from rollcorr.kernels.correction.triton.token_pass import BLOCK, COUNTED, KEPT, share_of, tokens_at

ROWS = tl.constexpr(16)
SETS = tl.constexpr(32)


@triton.jit
def _merge_rows(all_rows, merged, sets, PLAN: tl.constexpr):
    """Merge the sums, moments and extremes whose index belongs to this program."""
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    K: tl.constexpr = len(PLAN.moments)
    MOMENTS: tl.constexpr = len(PLAN.sums)
    EXTREMES: tl.constexpr = MOMENTS + 3 * K
    total = tl.zeros([ROWS], dtype=tl.float64)
    n, weighted, low = total, total, total + float("inf")
    high = -low
    for start in range(0, sets, SETS):
        at = start + tl.arange(0, SETS)
        exists = (at < sets)[:, None]
        place = all_rows + at[:, None].to(tl.int64) * PLAN.width + row[None, :]
        total += tl.sum(tl.load(place, mask=exists & (row < len(PLAN.sums))[None, :], other=0.0), axis=0)
        moment = place + MOMENTS + 2 * row[None, :]
        counts = tl.load(moment, mask=exists & (row < K)[None, :], other=0.0)
        n += tl.sum(counts, axis=0)
        weighted += tl.sum(counts * tl.load(moment + 1, mask=exists & (row < K)[None, :], other=0.0), axis=0)
        extreme = place + EXTREMES + row[None, :]
        ends = exists & (row < len(PLAN.extremes))[None, :]
        low = tl.minimum(low, tl.min(tl.load(extreme, mask=ends, other=float("inf")), axis=0))
        high = tl.maximum(high, tl.max(tl.load(extreme + 1, mask=ends, other=float("-inf")), axis=0))
    # A second pass sums the deviations from the mean of all sets, as Chan's update does.
    mean = weighted / tl.maximum(n, 1.0)
    m2 = tl.zeros([ROWS], dtype=tl.float64)
    for start in range(0, sets, SETS):
        at = start + tl.arange(0, SETS)
        exists = (at < sets)[:, None] & (row < K)[None, :]
        moment = all_rows + at[:, None].to(tl.int64) * PLAN.width + MOMENTS + 3 * row[None, :]
        counts = tl.load(moment, mask=exists, other=0.0)
        spread = tl.load(moment + 1, mask=exists, other=0.0) - mean[None, :]
        m2 += tl.sum(tl.load(moment + 2, mask=exists, other=0.0) + counts * spread * spread, axis=0)
    tl.store(merged + row, total, mask=row < len(PLAN.sums))
    tl.store(merged + MOMENTS + 3 * row, n, mask=row < K)
    tl.store(merged + MOMENTS + 3 * row + 1, mean, mask=row < K)
    tl.store(merged + MOMENTS + 3 * row + 2, m2, mask=row < K)
    tl.store(merged + EXTREMES + 2 * row, low, mask=row < len(PLAN.extremes))
    tl.store(merged + EXTREMES + 2 * row + 1, high, mask=row < len(PLAN.extremes))


@triton.jit
def _write_sequence_weights(
    program, cu_seqlens, sequence_weight, alive, weights, loss_mask, T, splits,
    PLAN: tl.constexpr, PACKED: tl.constexpr, ALIGN: tl.constexpr, LANES: tl.constexpr,
):  # fmt: skip
    """Write a sequence's weight to the tokens of one share, and remove tokens of a rejected sequence from the mask."""
    start, end, begin, stop = share_of(program, cu_seqlens, T, splits, PACKED, ALIGN)
    keep = tl.load(alive + program // splits)
    if PLAN.level == "token" or PLAN.level == "none":
        if keep == 0:
            for at in range(begin, stop, BLOCK):
                local, inside = tokens_at(at, start, end, BLOCK // (4 * LANES), LANES, ALIGN)
                tl.store(loss_mask + at + local, (local * 0).to(tl.uint8), mask=inside)
    else:
        weight = tl.load(sequence_weight + program // splits)
        for at in range(begin, stop, BLOCK):
            local, inside = tokens_at(at, start, end, BLOCK // (4 * LANES), LANES, ALIGN)
            bits = tl.load(loss_mask + at + local, mask=inside, other=0)
            tl.store(weights + at + local, tl.where((bits & COUNTED) != 0, weight, 0.0), mask=inside)
            tl.store(loss_mask + at + local, bits & KEPT & keep, mask=inside)


@triton.jit
def finish(
    all_rows, merged, cu_seqlens, sequence_weight, alive, weights, loss_mask, sets, T, splits,
    PLAN: tl.constexpr, PACKED: tl.constexpr, ALIGN: tl.constexpr, LANES: tl.constexpr,
):  # fmt: skip
    """Merge in ⌈sums / 16⌉ programs; then spread in one program per sequence and split, if any decision needs it."""
    MERGERS: tl.constexpr = (len(PLAN.sums) + ROWS - 1) // ROWS
    program = tl.program_id(0)
    if program < MERGERS:
        _merge_rows(all_rows, merged, sets, PLAN)
    elif PLAN.spreads:
        _write_sequence_weights(
            (program - MERGERS).to(tl.int64), cu_seqlens, sequence_weight, alive, weights, loss_mask, T, splits,
            PLAN, PACKED, ALIGN, LANES,
        )  # fmt: skip
