"""The token pass: one read of log-probs and mask; token-level weights and masks out, and columns for each sequence.

A program reads a share of one sequence, in blocks of 512 tokens laid out as 128 lanes of four. A lane adds in float32
over at most 128 tokens, then lanes are added in float64. Up to four counts share an integer, a byte for each.

Loads test a range and nothing else, and values are selected afterwards: a load masked element by element would not be
vectorised.
"""

from __future__ import annotations

import triton
import triton.language as tl

from rollcorr.kernels.correction.triton.arithmetic import (
    add_deviations,
    exponential_parts,
    rounded_off,
    shifted_sums,
)
from rollcorr.kernels.correction.triton.columns import add_count, add_extremes, add_lanes, add_moments, byte_of

LANES = tl.constexpr(128)
BLOCK = tl.constexpr(512)
CHUNK = tl.constexpr(32 * 512)  # tokens between two additions in float64: a byte counts the 128 of a lane
CAP = tl.constexpr(20.0)
LARGEST = tl.constexpr(1e16)  # |d| beyond is read as this: its square still adds up in float32
SHRINK = tl.constexpr(2.0**-14)  # a chunk's log-probs are added as this much of themselves: their sum fits in float32
LARGEST_EXPONENT = tl.constexpr(60.0)  # of μ, beside ρ ≤ e^20
KEPT = tl.constexpr(1)
COUNTED = tl.constexpr(2)


@triton.jit
def share_of(program, cu_seqlens, T, splits, PACKED: tl.constexpr, ALIGN: tl.constexpr):
    """A program's tokens: (first and last + 1 of its sequence, first and last + 1 of its share)."""
    row = program // splits
    if PACKED:
        start = tl.load(cu_seqlens + row).to(tl.int64)
        end = tl.load(cu_seqlens + row + 1).to(tl.int64)
    else:
        start = row * T
        end = start + T
    aligned = start // ALIGN * ALIGN if ALIGN > 1 else start
    share = tl.cdiv(tl.cdiv(end - aligned, BLOCK), splits) * BLOCK
    begin = aligned + (program % splits) * share
    return start, end, begin, tl.minimum(begin + share, end)


@triton.jit
def within_block(distance):
    """A distance in tokens as 32 bits: 0 and the block's end stand for whatever lies beyond, were it 2³¹ tokens off."""
    return tl.minimum(tl.maximum(distance, 0), BLOCK).to(tl.int32)


@triton.jit
def tokens_at(at, start, end, ALIGN: tl.constexpr):
    """Offsets of a block's tokens from its first, (128, 4), and which of them the sequence holds."""
    local = tl.arange(0, LANES)[:, None] * 4 + tl.arange(0, 4)[None, :]
    inside = local >= 0
    if ALIGN > 0:
        inside = local < within_block(end - at)
    if ALIGN > 1:
        inside = inside & (local >= within_block(start - at))
    return local, inside


@triton.jit
def _bytes(a, b, c, d):
    """Four conditions as counts in the bytes of one integer, added over each lane."""
    word = a.to(tl.int32) + (b.to(tl.int32) << 8) + (c.to(tl.int32) << 16) + (d.to(tl.int32) << 24)
    return tl.sum(word, axis=1)


@triton.jit
def _clamped(x, low, high):
    return tl.minimum(tl.maximum(x, low), high)


@triton.jit
def _beyond(d, lost, low, high):
    """Where d + lost is below and above a band that no hair widens. Near an end the difference is exact."""
    return (d < low) | ((d == low) & (lost < 0.0)), (d > high) | ((d == high) & (lost > 0.0))


@triton.jit
def _mismatch(state, pi, mu, log_mu, measured, d, lost, rho_1, k3, PLAN: tl.constexpr):
    """Add a block to what is collected whatever is done about it; `rho_1` is ρ − 1, and `log_mu` has zeros' log μ."""
    total, shift, first, second, low, high, train, rollout, absolute, k3s, chi2, difference, largest, k2 = state
    shift, first, second, low, high = _described((shift, first, second, low, high), d, measured)
    total += tl.sum(d.to(tl.float64), axis=1) + tl.sum(lost, axis=1)  # it is exponentiated
    train += tl.sum(pi * SHRINK, axis=1)
    rollout += tl.sum(mu * SHRINK, axis=1)
    absolute += tl.sum(tl.abs(d), axis=1)
    k3s += tl.sum(k3, axis=1)
    chi2 += tl.sum(rho_1 * (rho_1 + 2.0), axis=1)
    # |π − μ| = μ |ρ − 1|; where ρ is capped, μ is taken to be π e^−20.
    gap = tl.exp(tl.minimum(log_mu, LARGEST_EXPONENT)) * tl.abs(rho_1)
    difference += tl.sum(gap, axis=1)
    largest = tl.maximum(largest, tl.max(gap, axis=1))
    if PLAN.k2:
        k2 += tl.sum(d * d * 0.5, axis=1)
    return total, shift, first, second, low, high, train, rollout, absolute, k3s, chi2, difference, largest, k2


@triton.jit
def _applied_shift(shift, limits, PLAN: tl.constexpr):
    """What weights are summed around, once bounded: the bounded shift of the raw ones."""
    if PLAN.mode == "truncate":
        shift = tl.minimum(shift, limits[PLAN.limits["ceiling"]])
    if PLAN.mode == "icepop":
        inside = (shift >= limits[PLAN.limits["floor"]]) & (shift <= limits[PLAN.limits["ceiling"]])
        shift = tl.where(inside, shift, 0.0)
    return shift


@triton.jit
def _weigh(state, limits, counted, positive, d, lost, scale, rest, PLAN: tl.constexpr):
    """Token-level weights of a block, 0 where nothing is counted; which of them IcePop sets to 0; and their sums."""
    shift, raw_first, raw_second, first, second, low, high = state
    bound = limits[PLAN.limits["safety_bound"]]
    if PLAN.own_bound:
        scale, rest, _ = exponential_parts(_clamped(d, -bound, bound))
        rest += tl.where(tl.abs(d) <= bound, lost, 0.0) * (1.0 + rest)
    raw = tl.where(positive, scale + scale * rest, 0.0)
    raw_1 = tl.where(positive, (scale - 1.0) + scale * rest, -1.0)
    shift = tl.where(shift == 0.0, tl.max(raw, axis=1), shift)
    # Around a shift near 1, deviations are taken from w − 1, which has digits that w has not.
    near = (shift > 0.5) & (shift < 2.0)
    own = tl.where(near, shift - 1.0, shift)[:, None]
    filled = tl.where(counted, tl.where(near[:, None], raw_1, raw), own)
    raw_first, raw_second = add_deviations(raw_first, raw_second, filled - own)
    weight, outside = raw, counted & ~counted
    if PLAN.mode == "truncate":
        ceiling = limits[PLAN.limits["ceiling"]]
        weight = tl.minimum(raw, ceiling)
        highest = tl.where(near, ceiling - 1.0, ceiling)[:, None]
        first, second = add_deviations(first, second, tl.minimum(filled, highest) - tl.minimum(own, highest))
    if PLAN.mode == "icepop":
        bounded = _clamped(d, -bound, bound)
        beyond = (bounded > limits[PLAN.limits["band_high"]]) | (bounded < limits[PLAN.limits["band_low"]])
        weight = tl.where(beyond, 0.0, raw)
        nothing = tl.where(near, -1.0, 0.0)[:, None]
        applied = _applied_shift(shift, limits, PLAN)
        own = tl.where(near, applied - 1.0, applied)[:, None]
        taken = tl.where(counted, tl.where(beyond, nothing, filled), own)
        first, second = add_deviations(first, second, taken - own)
        outside = counted & (weight == 0.0)
        low = tl.minimum(low, tl.min(tl.where(counted, weight, float("inf")), axis=1))
        high = tl.maximum(high, tl.max(tl.where(counted, weight, float("-inf")), axis=1))
    return weight, outside, (shift, raw_first, raw_second, first, second, low, high)


@triton.jit
def _kinds(limits, measured, zero, counted, d, k3, PLAN: tl.constexpr):
    """For every token criterion: which tokens are below and above its bounds. Unused ones are never true."""
    no_token = counted & (d != d)
    k1_low, k1_high, k2_high, k3_high = no_token, no_token, no_token, no_token
    positive = counted & ~zero
    for i in tl.static_range(len(PLAN.criteria)):
        if PLAN.criteria[i].scope == "token":
            upper = limits[PLAN.criteria[i].limit + 1]
            if PLAN.criteria[i].kind == "k1":
                lower = limits[PLAN.criteria[i].limit]
                k1_low = positive & (d < lower)
                if PLAN.criteria[i].bounded_below:
                    k1_low = k1_low | zero
                k1_high = positive & (d > upper)
            if PLAN.criteria[i].kind == "k2":
                k2_high = (measured & (d * d * 0.5 > upper)) | zero
            if PLAN.criteria[i].kind == "k3":
                k3_high = (measured & (k3 > upper)) | zero
    return k1_low, k1_high, k2_high, k3_high


@triton.jit
def _described(state, values, measured):
    """Moments and extremes of a value of measured tokens, with a block added."""
    shift, first, second, low, high = state
    high_here = tl.max(tl.where(measured, values, float("-inf")), axis=1)
    shift = tl.where(shift == float("-inf"), high_here, shift)  # a lane's first value: a common mean cancels nothing
    started = shift > float("-inf")
    own = tl.where(started, shift, 0.0)[:, None]
    filled = tl.where(measured, values, own)
    first, second = add_deviations(first, second, filled - own)
    low = tl.where(started, tl.minimum(low, tl.min(filled, axis=1)), low)
    return shift, first, second, low, tl.maximum(high, high_here)


@triton.jit
def _reject(state, limits, valid, measured, zero, counted, d, k3, weight, PLAN: tl.constexpr):
    """The tokens of a block that stay, and what the token criteria leave behind."""
    bounds, alone, keeps, k2s, k3s, kept_weight = state
    k1_low, k1_high, k2_high, k3_high = _kinds(limits, measured, zero, counted, d, k3, PLAN)
    rejectors = (k1_low | k1_high).to(tl.int32) + k2_high.to(tl.int32) + k3_high.to(tl.int32)
    if PLAN.nonfinite == "reject_token":
        rejectors += (valid & ~measured & ~zero).to(tl.int32)
    kept, rejected_once = valid & (rejectors == 0), rejectors == 1
    bounds += _bytes(k1_low, k1_high, k2_high, k3_high)
    alone += _bytes((k1_low | k1_high) & rejected_once, k2_high & rejected_once, k3_high & rejected_once, rejected_once)
    keeps += tl.sum(kept.to(tl.int32), axis=1)
    if PLAN.level == "token":
        kept_weight += tl.sum(tl.where(kept, weight, 0.0), axis=1)
    for i in tl.static_range(len(PLAN.criteria)):
        if PLAN.criteria[i].scope == "token" and PLAN.criteria[i].kind == "k2":
            k2s = _described(k2s, d * d * 0.5, measured)
        if PLAN.criteria[i].scope == "token" and PLAN.criteria[i].kind == "k3":
            k3s = _described(k3s, k3, measured)
    return kept, (bounds, alone, keeps, k2s, k3s, kept_weight)


@triton.jit
def read_block(counts, state, weigh, reject, limits, pi, mu, valid, PLAN: tl.constexpr):
    """One block: the lanes with it added, its weights, the tokens that are kept and those that are counted."""
    in_float64: tl.constexpr = pi.dtype == tl.float64 or mu.dtype == tl.float64
    if in_float64:
        exact = pi.to(tl.float64) - mu.to(tl.float64)
        log_ratio = exact.to(tl.float32)
    else:
        log_ratio = pi.to(tl.float32) - mu.to(tl.float32)
    pi, raw_mu = pi.to(tl.float32), mu.to(tl.float32)
    # A difference is finite iff both are; −inf is probability zero unless it comes from an infinite rollout log-prob.
    measured = valid & (tl.abs(log_ratio) < float("inf"))
    zero = valid & (log_ratio == float("-inf")) & (raw_mu < float("inf"))
    compared = measured | zero
    counted = valid if PLAN.nonfinite == "neutral" else compared
    # Selected once, what is not measured is 0 everywhere below: no NaN and no infinity is computed with.
    log_ratio = tl.where(measured, log_ratio, 0.0)
    pi, mu = tl.where(measured, pi, 0.0), tl.where(measured, raw_mu, 0.0)
    d = _clamped(log_ratio, -LARGEST, LARGEST)
    # What rounding takes from d, up to 1e-6, is that much of e^d.
    if in_float64:
        lost = tl.where(measured, (exact - log_ratio.to(tl.float64)).to(tl.float32), 0.0)
    else:
        lost = rounded_off(pi, mu, log_ratio)
    lost = tl.where(tl.abs(d) < LARGEST, lost, 0.0)
    log_mu = tl.where(zero, raw_mu, tl.maximum(mu, pi - CAP))
    part = tl.where(tl.abs(d) <= CAP, lost, 0.0)
    capped = tl.minimum(d, CAP)
    scale, rest, tail = exponential_parts(tl.maximum(capped, -CAP))
    tail += part * rest
    rest += part * (1.0 + rest)
    em1 = (scale - 1.0) + scale * rest
    k3 = tl.where(scale == 1.0, tail, em1 - capped - part)
    state = _mismatch(state, pi, mu, log_mu, measured, d, lost, tl.where(zero, -1.0, em1), k3, PLAN)
    outside = (d > limits[PLAN.limits["outside_high"]]) | (d < limits[PLAN.limits["outside_low"]])
    first, second, third = counts
    first += _bytes(valid, measured, zero, outside)
    below, above, catastrophic, outside = zero, zero, zero, zero
    weight = d
    if PLAN.level == "token":
        positive = (valid & ~zero) if PLAN.nonfinite == "neutral" else measured
        below = positive & (d < limits[PLAN.limits["band_low"]])
        above = positive & (d > limits[PLAN.limits["band_high"]])
        weight, outside, weigh = _weigh(weigh, limits, counted, positive, d, lost, scale, rest, PLAN)
    low, high = _beyond(d, lost, -CAP, CAP)
    second += _bytes(low, high, below, above)
    if PLAN.own_bound or PLAN.veto or PLAN.mode == "icepop":
        bound = limits[PLAN.limits["safety_bound"]]
        catastrophic = zero | (counted & (d < limits[PLAN.limits["veto"]]))
        low, high = _beyond(d, lost, -bound, bound)
        third += _bytes(low, high, catastrophic, outside)
    kept = compared if PLAN.nonfinite == "reject_token" else valid
    if PLAN.token_criteria:
        kept, reject = _reject(reject, limits, valid, measured, zero, counted, d, k3, weight, PLAN)
    return (first, second, third), state, weigh, reject, weight, kept, counted


@triton.jit
def _add_mismatch(cell, again, counts, state, PLAN: tl.constexpr):
    """Add a chunk's lanes to the columns that every configuration has."""
    total, shift, first, second, low, high, train, rollout, absolute, k3s, chi2, difference, largest, k2 = state
    measured = byte_of(counts[0], 1)
    before = tl.load(cell + PLAN.columns["measured"], mask=again, other=0.0)
    shift = tl.where(measured > 0, shift, 0.0)
    add_moments(cell, again, before, PLAN.columns["log_ratio_mean"], measured, total, shift, first, second)
    for i in tl.static_range(4):
        add_count(cell, again, PLAN.columns["valid"] + i, counts[0], i)
    add_count(cell, again, PLAN.columns["capped_low"], counts[1], 0)
    add_count(cell, again, PLAN.columns["capped_high"], counts[1], 1)
    add_extremes(cell, again, PLAN.columns["log_ratio_min"], low, high)
    lanes = (train, rollout, absolute, k3s, chi2, difference)
    for i in tl.static_range(6):
        add_lanes(cell, again, PLAN.columns["train"] + i, lanes[i])
    place = cell + PLAN.columns["difference_max"]
    tl.store(place, tl.maximum(tl.load(place, mask=again, other=0.0), tl.max(largest, axis=0).to(tl.float64)))
    if PLAN.k2:
        add_lanes(cell, again, PLAN.columns["k2"], k2)
    if PLAN.veto:
        add_count(cell, again, PLAN.columns["catastrophic"], counts[2], 2)


@triton.jit
def _add_weights(cell, again, counts, state, limits, PLAN: tl.constexpr):
    """Add a chunk's lanes to the columns of token-level weights."""
    shift, raw_first, raw_second, first, second, low, high = state
    counted = byte_of(counts[0], 0) if PLAN.nonfinite == "neutral" else byte_of(counts[0], 1) + byte_of(counts[0], 2)
    before = tl.load(cell + PLAN.columns["counted"], mask=again, other=0.0)
    sums = shifted_sums(counted, shift, raw_first)
    add_moments(cell, again, before, PLAN.columns["raw_mean"], counted, sums, shift, raw_first, raw_second)
    if PLAN.mode != "none":
        shift = _applied_shift(shift, limits, PLAN)
        sums = shifted_sums(counted, shift, first)
        add_moments(cell, again, before, PLAN.columns["weight_mean"], counted, sums, shift, first, second)
    add_lanes(cell, again, PLAN.columns["counted"], counted)
    add_count(cell, again, PLAN.columns["is_low"], counts[1], 2)
    add_count(cell, again, PLAN.columns["is_high"], counts[1], 3)
    if PLAN.own_bound:
        add_count(cell, again, PLAN.columns["saturated_low"], counts[2], 0)
        add_count(cell, again, PLAN.columns["saturated_high"], counts[2], 1)
    if PLAN.mode == "icepop":
        add_count(cell, again, PLAN.columns["outside_band"], counts[2], 3)
        add_extremes(cell, again, PLAN.columns["weight_min"], low, high)


@triton.jit
def _add_rejections(cell, again, counts, state, PLAN: tl.constexpr):
    """Add a chunk's lanes to the columns of token criteria; before `measured` is added to."""
    bounds, alone, keeps, k2s, k3s, kept_weight = state
    add_lanes(cell, again, PLAN.columns["kept"], keeps)
    add_count(cell, again, PLAN.columns["rejected_once"], alone, 3)
    if PLAN.level == "token":
        add_lanes(cell, again, PLAN.columns["kept_weight"], kept_weight)
    for i in tl.static_range(len(PLAN.criteria)):
        if PLAN.criteria[i].scope == "token":
            if PLAN.criteria[i].kind == "k1":
                add_count(cell, again, PLAN.columns["k1_low"], bounds, 0)
                add_count(cell, again, PLAN.columns["k1_high"], bounds, 1)
                add_count(cell, again, PLAN.columns["k1_alone"], alone, 0)
            if PLAN.criteria[i].kind == "k2":
                add_count(cell, again, PLAN.columns["k2_high"], bounds, 2)
                add_count(cell, again, PLAN.columns["k2_alone"], alone, 1)
                _add_described(cell, again, PLAN.columns["k2_mean"], counts, k2s, PLAN)
            if PLAN.criteria[i].kind == "k3":
                add_count(cell, again, PLAN.columns["k3_high"], bounds, 3)
                add_count(cell, again, PLAN.columns["k3_alone"], alone, 2)
                _add_described(cell, again, PLAN.columns["k3_mean"], counts, k3s, PLAN)


@triton.jit
def _add_described(cell, again, FIRST: tl.constexpr, counts, state, PLAN: tl.constexpr):
    """Four columns: mean, M2, min, max."""
    shift, first, second, low, high = state
    measured = byte_of(counts[0], 1)
    before = tl.load(cell + PLAN.columns["measured"], mask=again, other=0.0)
    shift = tl.where(measured > 0, shift, 0.0)
    add_moments(cell, again, before, FIRST, measured, shifted_sums(measured, shift, first), shift, first, second)
    add_extremes(cell, again, FIRST + 2, low, high)


@triton.jit
def read_tokens(
    train, rollout, mask, cu_seqlens, weights, loss_mask, table, limits, T, tokens, splits,
    PLAN: tl.constexpr, PACKED: tl.constexpr, ALIGN: tl.constexpr,
):  # fmt: skip
    """One program for each sequence and split. The mask holds two bits where sequences are still to be decided."""
    program = tl.program_id(0).to(tl.int64)
    start, end, begin, stop = share_of(program, cu_seqlens, T, splits, PACKED, ALIGN)
    cell = table + program * len(PLAN.columns)
    for chunk in range(begin, tl.maximum(stop, begin + 1), CHUNK):
        n, x = tl.zeros([LANES], dtype=tl.int32), tl.zeros([LANES], dtype=tl.float32)
        low, high = x + float("inf"), x + float("-inf")
        total = tl.zeros([LANES], dtype=tl.float64)
        counts, state = (n, n, n), (total, high, x, x, low, high, x, x, x, x, x, x, x, x)
        weigh, reject = (x, x, x, x, x, low, high), (n, n, n, (high, x, x, low, high), (high, x, x, low, high), x)
        for at in range(chunk, tl.minimum(chunk + CHUNK, stop), BLOCK):
            local, inside = tokens_at(at, start, end, ALIGN)
            readable = inside if ALIGN <= 1 else local < within_block(tokens - at)
            pi = tl.load(train + at + local, mask=readable, other=0.0)
            mu = tl.load(rollout + at + local, mask=readable, other=0.0)
            valid = inside & (tl.load(mask + at + local, mask=readable, other=0) != 0)
            counts, state, weigh, reject, weight, kept, counted = read_block(
                counts, state, weigh, reject, limits, pi, mu, valid, PLAN
            )
            bits = kept.to(tl.uint8)
            if PLAN.level == "token":
                tl.store(weights + at + local, weight, mask=inside)
            elif PLAN.level != "none":
                bits = bits * KEPT + counted.to(tl.uint8) * COUNTED
            tl.store(loss_mask + at + local, bits, mask=inside)
        again = chunk > begin
        if PLAN.token_criteria:
            _add_rejections(cell, again, counts, reject, PLAN)
        if PLAN.level == "token":
            _add_weights(cell, again, counts, weigh, limits, PLAN)
        _add_mismatch(cell, again, counts, state, PLAN)
        tl.debug_barrier()
