"""The token pass: read log-probs and mask once; write token-level weights and masks, and columns per sequence.

A program is one warp. It reads a share of one sequence, in blocks of 512 tokens: (groups, lanes, 4), where a lane is a
thread. A lane adds in float32 over at most 128 tokens, then lanes are added in float64. Up to four counts share an
integer, a byte for each.

One reduction over the warp selects the code for a block. In a *regular* block every token is valid, both log-probs are
numbers of ordinary size, and no log-ratio is beyond ±2.75: no value needs a selection or a cap, and one polynomial
computes eᵈ, eᵈ − 1 and k3. A regular block is *quiet* if no weight is beyond its bounds either. Every other block is
read in full, or only cleared if it has no valid token.

Loads only test a range, and values are selected afterwards: a load masked element by element would not be vectorised.
"""

from __future__ import annotations

import triton
import triton.language as tl

from rollcorr.config.correction_options import SAFETY_BOUND
from rollcorr.kernels.correction.triton.arithmetic import (
    add_count,
    add_deviations,
    add_extremes,
    add_lanes,
    add_moments,
    byte_of,
    exponential_parts,
    lane_max,
    lane_min,
    lane_sum,
    near_exponential,
    rounded_off,
    shifted_sums,
)

BLOCK = tl.constexpr(512)
MOST_OF_LANE = tl.constexpr(128)  # tokens that a lane adds before lanes are added in float64: a byte counts them
REACH = tl.constexpr(2.75)  # of d in a regular block
ORDINARY = tl.constexpr(60.0)  # of |log μ| in a regular block
CAP = tl.constexpr(SAFETY_BOUND)
LARGEST = tl.constexpr(1e16)  # limit of |d|, by clamping: its square still adds up in float32
LARGEST_EXPONENT = tl.constexpr(60.0)  # of μ, in a product with ρ ≤ e^20
KEPT = tl.constexpr(1)
COUNTED = tl.constexpr(2)


@triton.jit
def share_of(program, cu_seqlens, T, splits, PACKED: tl.constexpr, ALIGN: tl.constexpr):
    """Return a program's tokens: (first and last + 1 of its sequence, first and last + 1 of its share)."""
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
    """Convert a distance in tokens to 32 bits, clamped to 0 and the block's end: it may be 2³¹ tokens long."""
    return tl.minimum(tl.maximum(distance, 0), BLOCK).to(tl.int32)


@triton.jit
def tokens_at(at, start, end, GROUPS: tl.constexpr, LANES: tl.constexpr, ALIGN: tl.constexpr):
    """Return token offsets from the first, (groups, lanes, 4), at most a block, and which are in the sequence."""
    group = tl.arange(0, GROUPS)[:, None, None]
    local = group * (4 * LANES) + tl.arange(0, LANES)[None, :, None] * 4 + tl.arange(0, 4)[None, None, :]
    # Triton assigns threads to the axes in the order of their contiguity. Lanes and groups both have contiguity 1. With
    # a hint of 2 for lanes, each lane is one thread, in every version and for every load.
    local = tl.max_contiguous(local, [1, 2, 4])
    inside = local >= 0
    if ALIGN > 0:
        inside = local < within_block(end - at)
    if ALIGN > 1:
        inside = inside & (local >= within_block(start - at))
    return local, inside


@triton.jit
def of_lane(x):
    """Broadcast a lane's number to each of its tokens."""
    return x[None, :, None]


@triton.jit
def _pack_counts(a, b, c, d):
    """Pack four conditions as counts in the bytes of one integer, added over each lane."""
    return lane_sum(a.to(tl.int32) + (b.to(tl.int32) << 8) + (c.to(tl.int32) << 16) + (d.to(tl.int32) << 24))


@triton.jit
def _clamp(x, low, high):
    return tl.minimum(tl.maximum(x, low), high)


@triton.jit
def _outside_band(d, lost, low, high):
    """Return where d + lost is below and above a band without tolerance. Near an end the difference is exact."""
    return (d < low) | ((d == low) & (lost < 0.0)), (d > high) | ((d == high) & (lost > 0.0))


@triton.jit
def add_token_sums(sums, d, k3, chi2, gap):
    """Add a block to the sums of `TOKEN_SUMS`, in that order.

    Tokens have d, 0 where unmeasured, and |π − μ| in `gap`; `k3` and `chi2` are already sums of the lanes.
    """
    return (
        sums[0] + lane_sum(tl.abs(d)),
        sums[1] + k3,
        sums[2] + chi2,
        sums[3] + lane_sum(gap),
    )


@triton.jit
def _add_mismatch_sums(state, pi, mu, log_mu, measured, d, lost, rho_1, k3, PLAN: tl.constexpr, REGULAR: tl.constexpr):
    """Add a block to the sums independent of the correction; `rho_1` is ρ − 1, `log_mu` has log μ also at π = 0.

    For a regular block also return each lane's Σ (ρ − 1).
    """
    total, train, rollout, shift, second, low, high, sums, largest, k2 = state
    shift, _, second, low, high = _add_moments((shift, shift, second, low, high), d, measured, REGULAR)

    # exp is applied to Σ d: it is exact but for the last digit of float64.
    of_train, of_rollout = lane_sum(pi.to(tl.float64)), lane_sum(mu.to(tl.float64))
    k3_here = lane_sum(k3)
    sum_1 = k3_here
    if REGULAR:
        total_here = of_train - of_rollout
        # ρ² − 1 = (ρ − 1)² + 2 (ρ − 1), and ρ − 1 = d + k3.
        sum_1 += total_here.to(tl.float32)
        chi2 = lane_sum(rho_1 * rho_1) + 2.0 * sum_1
    else:
        total_here = lane_sum(d.to(tl.float64)) + lane_sum(lost).to(tl.float64)
        chi2 = lane_sum(rho_1 * (rho_1 + 2.0))
    total, train, rollout = total + total_here, train + of_train, rollout + of_rollout

    # |π − μ| = μ |ρ − 1|; where ρ is capped, replace μ by π e^−20.
    if not REGULAR:
        log_mu = tl.minimum(log_mu, LARGEST_EXPONENT)
    gap = tl.exp(log_mu) * tl.abs(rho_1)
    sums = add_token_sums(sums, d, k3_here, chi2, gap)
    largest = tl.maximum(largest, lane_max(gap))
    if PLAN.k2:
        k2 += lane_sum(d * d * 0.5)
    return (total, train, rollout, shift, second, low, high, sums, largest, k2), sum_1


@triton.jit
def _bound_shift(shift, limits, PLAN: tl.constexpr):
    """Return the shift for sums of applied weights: the bounded shift of the raw weights."""
    if PLAN.mode == "truncate":
        shift = tl.minimum(shift, limits[PLAN.limits["ceiling"]])
    if PLAN.mode == "icepop":
        inside = (shift >= limits[PLAN.limits["floor"]]) & (shift <= limits[PLAN.limits["ceiling"]])
        shift = tl.where(inside, shift, 0.0)
    return shift


@triton.jit
def _weigh(state, limits, counted, positive, d, rho, rho_1, PLAN: tl.constexpr, REGULAR: tl.constexpr):
    """Compute a block's token-level weights, 0 on tokens not counted; where IcePop sets them to 0; and their sums.

    `rho` is the weight before every bound except the safety bound; `rho_1` is `rho` − 1.
    """
    shift, raw_first, raw_second, first, second, low, high = state
    raw, raw_1 = tl.where(positive, rho, 0.0), tl.where(positive, rho_1, -1.0)
    # With a shift near 1, deviations are taken from w − 1, which has more digits than w. The weights of a regular block
    # are all near enough.
    if REGULAR:
        near = tl.full(shift.shape, 1, tl.int1)
    else:
        shift = tl.where(shift == 0.0, lane_max(raw), shift)
        near = (shift > 0.5) & (shift < 2.0)
    own = of_lane(tl.where(near, shift - 1.0, shift))
    filled = tl.where(counted, tl.where(of_lane(near), raw_1, raw), own)
    raw_first, raw_second = add_deviations(raw_first, raw_second, filled - own)
    weight, outside = raw, counted & ~counted
    if PLAN.mode == "truncate":
        ceiling = limits[PLAN.limits["ceiling"]]
        weight = tl.minimum(raw, ceiling)
        highest = of_lane(tl.where(near, ceiling - 1.0, ceiling))
        first, second = add_deviations(first, second, tl.minimum(filled, highest) - tl.minimum(own, highest))
    if PLAN.mode == "icepop":
        bound = limits[PLAN.limits["safety_bound"]]
        bounded = d if REGULAR else _clamp(d, -bound, bound)
        beyond = (bounded > limits[PLAN.limits["band_high"]]) | (bounded < limits[PLAN.limits["band_low"]])
        weight = tl.where(beyond, 0.0, raw)
        nothing = of_lane(tl.where(near, -1.0, 0.0))
        applied = _bound_shift(shift, limits, PLAN)
        own = of_lane(tl.where(near, applied - 1.0, applied))
        taken = tl.where(counted, tl.where(beyond, nothing, filled), own)
        first, second = add_deviations(first, second, taken - own)
        outside = counted & (weight == 0.0)
        low = tl.minimum(low, lane_min(tl.where(counted, weight, float("inf"))))
        high = tl.maximum(high, lane_max(tl.where(counted, weight, float("-inf"))))
    return weight, outside, (shift, raw_first, raw_second, first, second, low, high)


@triton.jit
def _exceed_criteria(limits, measured, zero, counted, d, k3, PLAN: tl.constexpr):
    """Return which tokens are below and above the bounds of each token criterion; false without such a criterion."""
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
def _add_moments(state, values, measured, REGULAR: tl.constexpr):
    """Add a block to the moments and extremes of a value of measured tokens."""
    shift, first, second, low, high = state
    high_here = lane_max(tl.where(measured, values, float("-inf")))
    shift = tl.where(shift == float("-inf"), high_here, shift)  # the first maximum: avoids large-mean cancellation
    if REGULAR:
        first, second = add_deviations(first, second, values - of_lane(shift))
        low = tl.minimum(low, lane_min(values))
    else:
        started = shift > float("-inf")
        own = of_lane(tl.where(started, shift, 0.0))
        filled = tl.where(measured, values, own)
        first, second = add_deviations(first, second, filled - own)
        low = tl.where(started, tl.minimum(low, lane_min(filled)), low)
    return shift, first, second, low, tl.maximum(high, high_here)


@triton.jit
def _reject(
    state, limits, valid, measured, zero, counted, d, k3, weight, PLAN: tl.constexpr, REGULAR: tl.constexpr
):  # fmt: skip
    """Return the tokens of a block that stay, and update the sums of the token criteria."""
    bounds, alone, keeps, k2s, k3s, kept_weight = state
    k1_low, k1_high, k2_high, k3_high = _exceed_criteria(limits, measured, zero, counted, d, k3, PLAN)
    rejectors = (k1_low | k1_high).to(tl.int32) + k2_high.to(tl.int32) + k3_high.to(tl.int32)
    if PLAN.nonfinite == "reject_token":
        rejectors += (valid & ~measured & ~zero).to(tl.int32)
    kept, rejected_once = valid & (rejectors == 0), rejectors == 1
    bounds += _pack_counts(k1_low, k1_high, k2_high, k3_high)
    alone += _pack_counts(
        (k1_low | k1_high) & rejected_once, k2_high & rejected_once, k3_high & rejected_once, rejected_once
    )
    keeps += lane_sum(kept.to(tl.int32))
    if PLAN.level == "token":
        kept_weight += lane_sum(tl.where(kept, weight, 0.0))
    for i in tl.static_range(len(PLAN.criteria)):
        if PLAN.criteria[i].scope == "token" and PLAN.criteria[i].kind == "k2":
            k2s = _add_moments(k2s, d * d * 0.5, measured, REGULAR)
        if PLAN.criteria[i].scope == "token" and PLAN.criteria[i].kind == "k3":
            k3s = _add_moments(k3s, k3, measured, REGULAR)
    return kept, (bounds, alone, keeps, k2s, k3s, kept_weight)


@triton.jit
def _weigh_regular(state, counts, limits, d, rho, rho_1, sum_1, PLAN: tl.constexpr, QUIET: tl.constexpr):
    """Compute token-level weights of a regular block; `sum_1` is each lane's Σ (ρ − 1)."""
    shift, raw_first, raw_second, first, second, low, high = state
    OF_LANE: tl.constexpr = d.shape[0] * d.shape[2]
    shift = tl.where(shift == 0.0, sum_1 * (1.0 / OF_LANE) + 1.0, shift)
    weight = rho
    if QUIET:
        own = shift - 1.0
        deviation = rho_1 - of_lane(own)
        of_first, of_second = sum_1 - own * OF_LANE, lane_sum(deviation * deviation)
        raw_first, raw_second = raw_first + of_first, raw_second + of_second
        if PLAN.mode != "none":
            weight = tl.minimum(rho, limits[PLAN.limits["ceiling"]])  # rho may exceed the ceiling by the tolerance
            first, second = first + of_first, second + of_second
        if PLAN.mode == "icepop":
            low, high = tl.minimum(low, lane_min(weight)), tl.maximum(high, lane_max(weight))
        state = shift, raw_first, raw_second, first, second, low, high
    else:
        yes, no = tl.full(d.shape, 1, tl.int1), tl.full(d.shape, 0, tl.int1)
        state = shift, raw_first, raw_second, first, second, low, high
        weight, banned, state = _weigh(state, limits, yes, yes, d, rho, rho_1, PLAN, True)
        below, above = d < limits[PLAN.limits["band_low"]], d > limits[PLAN.limits["band_high"]]
        counts = counts[0] + _pack_counts(no, no, no, banned), counts[1] + _pack_counts(no, below, above, no), counts[2]
    return weight, counts, state


@triton.jit
def read_regular(counts, state, weigh, reject, limits, pi, mu, PLAN: tl.constexpr, QUIET: tl.constexpr):
    """Read one regular block; return the same results as `read_block`."""
    yes, no = tl.full(pi.shape, 1, tl.int1), tl.full(pi.shape, 0, tl.int1)
    pi, mu = pi.to(tl.float32), mu.to(tl.float32)
    d = pi - mu
    rho, rho_1, k3 = near_exponential(d)
    state, sum_1 = _add_mismatch_sums(state, pi, mu, mu, yes, d, d, rho_1, k3, PLAN, True)
    outside = (d > limits[PLAN.limits["outside_high"]]) | (d < limits[PLAN.limits["outside_low"]])
    catastrophic = no
    if PLAN.veto:
        catastrophic = d < limits[PLAN.limits["veto"]]
    counts = (
        counts[0] + _pack_counts(yes, yes, no, no),
        counts[1] + _pack_counts(outside, no, no, catastrophic),
        counts[2],
    )
    weight, kept = rho, yes
    if PLAN.level == "token":
        weight, counts, weigh = _weigh_regular(weigh, counts, limits, d, rho, rho_1, sum_1, PLAN, QUIET)
    if PLAN.token_criteria:
        kept, reject = _reject(reject, limits, yes, yes, no, yes, d, k3, weight, PLAN, True)
    return counts, state, weigh, reject, weight, kept, yes


@triton.jit
def read_block(counts, state, weigh, reject, limits, pi, mu, valid, PLAN: tl.constexpr):
    """Read any block: return the updated lanes, its weights, and which tokens are kept and counted."""
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
    # Replace unmeasured values by 0 once: no NaN and no infinity enters the arithmetic below.
    log_ratio = tl.where(measured, log_ratio, 0.0)
    pi, mu = tl.where(measured, pi, 0.0), tl.where(measured, raw_mu, 0.0)
    d = _clamp(log_ratio, -LARGEST, LARGEST)
    # The rounding error of d, up to 1e-6, is the relative error of e^d.
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
    state, _ = _add_mismatch_sums(state, pi, mu, log_mu, measured, d, lost, tl.where(zero, -1.0, em1), k3, PLAN, False)
    outside = (d > limits[PLAN.limits["outside_high"]]) | (d < limits[PLAN.limits["outside_low"]])
    below, above, catastrophic, banned = zero, zero, zero, zero
    bound = limits[PLAN.limits["safety_bound"]]
    weight = d
    if PLAN.level == "token":
        positive = (valid & ~zero) if PLAN.nonfinite == "neutral" else measured
        below = positive & (d < limits[PLAN.limits["band_low"]])
        above = positive & (d > limits[PLAN.limits["band_high"]])
        if PLAN.own_bound:
            scale, rest, _ = exponential_parts(_clamp(d, -bound, bound))
            rest += tl.where(tl.abs(d) <= bound, lost, 0.0) * (1.0 + rest)
        rho, rho_1 = scale + scale * rest, (scale - 1.0) + scale * rest
        weight, banned, weigh = _weigh(weigh, limits, counted, positive, d, rho, rho_1, PLAN, False)
    if PLAN.veto:
        catastrophic = zero | (counted & (d < limits[PLAN.limits["veto"]]))
    low, high = _outside_band(d, lost, -CAP, CAP)
    low_of_own, high_of_own = low, high
    if PLAN.own_bound:
        low_of_own, high_of_own = _outside_band(d, lost, -bound, bound)
    first, second, third = counts
    first += _pack_counts(valid, measured, zero, banned)
    second += _pack_counts(outside, below, above, catastrophic)
    third += _pack_counts(low, high, low_of_own, high_of_own)
    kept = compared if PLAN.nonfinite == "reject_token" else valid
    if PLAN.token_criteria:
        kept, reject = _reject(reject, limits, valid, measured, zero, counted, d, k3, weight, PLAN, False)
    return (first, second, third), state, weigh, reject, weight, kept, counted


@triton.jit
def _regularity(pi, mu, bits, shift, limits, PLAN: tl.constexpr):
    """Return 2 for a quiet block, 1 for a regular but not quiet one, else 0. `shift` is the lanes' shift of weights.

    A NaN on either side propagates to Σ |d|, and then fails the comparison.
    """
    mu = mu.to(tl.float32)
    d = pi.to(tl.float32) - mu
    low, high = lane_min(d), lane_max(d)
    reach = REACH + 0.0 * limits[PLAN.limits["safety_bound"]]
    if PLAN.own_bound:
        reach = tl.minimum(reach, limits[PLAN.limits["safety_bound"]])
    near = (low >= -reach) & (high <= reach) & (lane_sum(tl.abs(d)) < LARGEST)
    regular = near & (lane_max(tl.abs(mu)) <= ORDINARY) & (lane_min(bits) > 0)
    quiet = regular
    if PLAN.level == "token":
        quiet = quiet & (low >= limits[PLAN.limits["band_low"]]) & (high <= limits[PLAN.limits["band_high"]])
        if PLAN.mode != "none":
            quiet = quiet & (shift <= limits[PLAN.limits["ceiling"]])
        if PLAN.mode == "icepop":
            quiet = quiet & ((shift >= limits[PLAN.limits["floor"]]) | (shift == 0.0))
    return tl.min(regular.to(tl.int32) + quiet.to(tl.int32), axis=0)


@triton.jit
def _add_mismatch(cell, again, counts, state, PLAN: tl.constexpr):
    """Add a chunk's lanes to the columns that every configuration has."""
    total, train, rollout, shift, second, low, high, sums, largest, k2 = state
    measured = byte_of(counts[0], 1)
    before = tl.load(cell + PLAN.columns["measured"], mask=again, other=0.0)
    shift = tl.where(measured > 0, shift, 0.0)
    first = total - measured.to(tl.float64) * shift.to(tl.float64)
    add_moments(cell, again, before, PLAN.columns["log_ratio_mean"], measured, total, shift, first, second)
    for i in tl.static_range(3):
        add_count(cell, again, PLAN.columns["valid"] + i, counts[0], i)
    add_count(cell, again, PLAN.columns["outside"], counts[1], 0)
    add_count(cell, again, PLAN.columns["capped_low"], counts[2], 0)
    add_count(cell, again, PLAN.columns["capped_high"], counts[2], 1)
    add_extremes(cell, again, PLAN.columns["log_ratio_min"], low, high)
    lanes = (train, rollout) + sums  # noqa: RUF005 (Triton unpacks none)
    for i in tl.static_range(2 + len(PLAN.token_sums)):
        add_lanes(cell, again, PLAN.columns["train"] + i, lanes[i])
    place = cell + PLAN.columns["difference_max"]
    tl.store(place, tl.maximum(tl.load(place, mask=again, other=0.0), tl.max(largest, axis=0).to(tl.float64)))
    if PLAN.k2:
        add_lanes(cell, again, PLAN.columns["k2"], k2)
    if PLAN.veto:
        add_count(cell, again, PLAN.columns["catastrophic"], counts[1], 3)


@triton.jit
def _add_weights(cell, again, counts, state, limits, PLAN: tl.constexpr):
    """Add a chunk's lanes to the columns of token-level weights."""
    shift, raw_first, raw_second, first, second, low, high = state
    counted = byte_of(counts[0], 0) if PLAN.nonfinite == "neutral" else byte_of(counts[0], 1) + byte_of(counts[0], 2)
    before = tl.load(cell + PLAN.columns["counted"], mask=again, other=0.0)
    sums = shifted_sums(counted, shift, raw_first)
    add_moments(cell, again, before, PLAN.columns["raw_mean"], counted, sums, shift, raw_first, raw_second)
    if PLAN.mode != "none":
        shift = _bound_shift(shift, limits, PLAN)
        sums = shifted_sums(counted, shift, first)
        add_moments(cell, again, before, PLAN.columns["weight_mean"], counted, sums, shift, first, second)
    add_lanes(cell, again, PLAN.columns["counted"], counted)
    add_count(cell, again, PLAN.columns["is_low"], counts[1], 1)
    add_count(cell, again, PLAN.columns["is_high"], counts[1], 2)
    if PLAN.own_bound:
        add_count(cell, again, PLAN.columns["saturated_low"], counts[2], 2)
        add_count(cell, again, PLAN.columns["saturated_high"], counts[2], 3)
    if PLAN.mode == "icepop":
        add_count(cell, again, PLAN.columns["outside_band"], counts[0], 3)
        add_extremes(cell, again, PLAN.columns["weight_min"], low, high)


@triton.jit
def _add_token_criteria(cell, again, counts, state, PLAN: tl.constexpr):
    """Add a chunk's lanes to the columns of token criteria. Call it before `measured` is updated."""
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
                _flush_moments(cell, again, PLAN.columns["k2_mean"], counts, k2s, PLAN)
            if PLAN.criteria[i].kind == "k3":
                add_count(cell, again, PLAN.columns["k3_high"], bounds, 3)
                add_count(cell, again, PLAN.columns["k3_alone"], alone, 2)
                _flush_moments(cell, again, PLAN.columns["k3_mean"], counts, k3s, PLAN)


@triton.jit
def _flush_moments(cell, again, FIRST: tl.constexpr, counts, state, PLAN: tl.constexpr):
    """Add a chunk's lanes to four columns: mean, M2, min, max."""
    shift, first, second, low, high = state
    measured = byte_of(counts[0], 1)
    before = tl.load(cell + PLAN.columns["measured"], mask=again, other=0.0)
    shift = tl.where(measured > 0, shift, 0.0)
    add_moments(cell, again, before, FIRST, measured, shifted_sums(measured, shift, first), shift, first, second)
    add_extremes(cell, again, FIRST + 2, low, high)


@triton.jit
def _store(weights, loss_mask, at, local, inside, weight, kept, counted, PLAN: tl.constexpr):
    """Write a block's outputs. The mask has two bits if sequences are still to be decided."""
    bits = kept.to(tl.uint8)
    if PLAN.level == "token":
        tl.store(weights + at + local, weight, mask=inside)
    elif PLAN.level != "none":
        bits = bits * KEPT + counted.to(tl.uint8) * COUNTED
    tl.store(loss_mask + at + local, bits, mask=inside)


@triton.jit
def _load(
    train, rollout, mask, at, start, end, tokens, GROUPS: tl.constexpr, LANES: tl.constexpr, ALIGN: tl.constexpr
):  # fmt: skip
    """Load tokens from a position on: their offsets, which are in the sequence, log-probs and mask."""
    local, inside = tokens_at(at, start, end, GROUPS, LANES, ALIGN)
    readable = inside if ALIGN <= 1 else local < within_block(tokens - at)
    pi = tl.load(train + at + local, mask=readable, other=0.0)
    mu = tl.load(rollout + at + local, mask=readable, other=0.0)
    return local, inside, pi, mu, tl.load(mask + at + local, mask=readable, other=0)


@triton.jit
def _read_irregular_block(
    counts, state, weigh, reject, train, rollout, mask, weights, loss_mask, limits, at, after, start, end, tokens,
    PLAN: tl.constexpr, LANES: tl.constexpr, ALIGN: tl.constexpr,
):  # fmt: skip
    """Read a block that is not regular, from `at` to `after`, four tokens of a lane at a time.

    That keeps the number of registers low: rare blocks should not reduce the number of resident programs.
    """
    for some in range(at, after, 4 * LANES):
        local, inside, pi, mu, bits = _load(train, rollout, mask, some, start, end, tokens, 1, LANES, ALIGN)
        valid = inside & (bits != 0)
        if tl.max(lane_max(valid.to(tl.int32)), axis=0) == 1:
            counts, state, weigh, reject, weight, kept, counted = read_block(
                counts, state, weigh, reject, limits, pi, mu, valid, PLAN
            )
            _store(weights, loss_mask, some, local, inside, weight, kept, counted, PLAN)
        else:
            _store(weights, loss_mask, some, local, inside, local * 0.0, valid, valid, PLAN)
    return counts, state, weigh, reject


@triton.jit
def read_tokens(
    train, rollout, mask, cu_seqlens, weights, loss_mask, table, limits, T, tokens, splits,
    PLAN: tl.constexpr, PACKED: tl.constexpr, ALIGN: tl.constexpr, LANES: tl.constexpr,
):  # fmt: skip
    """Read the tokens of one sequence and split in each program."""
    program = tl.program_id(0).to(tl.int64)
    start, end, begin, stop = share_of(program, cu_seqlens, T, splits, PACKED, ALIGN)
    cell = table + program * len(PLAN.columns)
    CHUNK: tl.constexpr = LANES * MOST_OF_LANE
    # Token criteria need additional registers.
    AT_ONCE: tl.constexpr = BLOCK // 2 if PLAN.token_criteria else BLOCK
    # A difference of float64 log-probs has digits that a regular block, in float32, would lose.
    WIDE: tl.constexpr = train.dtype.element_ty == tl.float64 or rollout.dtype.element_ty == tl.float64
    for chunk in range(begin, tl.maximum(stop, begin + 1), CHUNK):
        n, x = tl.zeros([LANES], dtype=tl.int32), tl.zeros([LANES], dtype=tl.float32)
        low, high = x + float("inf"), x + float("-inf")
        total = tl.zeros([LANES], dtype=tl.float64)
        counts, state = (n, n, n), (total, total, total, high, x, low, high, (x,) * len(PLAN.token_sums), x, x)
        weigh, reject = (x, x, x, x, x, low, high), (n, n, n, (high, x, x, low, high), (high, x, x, low, high), x)
        for at in range(chunk, tl.minimum(chunk + CHUNK, stop), AT_ONCE):
            how = 0
            if not WIDE:
                local, _, pi, mu, bits = _load(
                    train, rollout, mask, at, start, end, tokens, AT_ONCE // (4 * LANES), LANES, ALIGN
                )
                within = (at >= start) & (at + AT_ONCE <= end)
                how = within.to(tl.int32) * _regularity(pi, mu, bits, weigh[0], limits, PLAN)
            if how == 2:
                if not WIDE:
                    counts, state, weigh, reject, weight, kept, counted = read_regular(
                        counts, state, weigh, reject, limits, pi, mu, PLAN, True
                    )
                    _store(weights, loss_mask, at, local, counted, weight, kept, counted, PLAN)
            elif how == 1:
                if not WIDE and PLAN.level == "token":
                    counts, state, weigh, reject, weight, kept, counted = read_regular(
                        counts, state, weigh, reject, limits, pi, mu, PLAN, False
                    )
                    _store(weights, loss_mask, at, local, counted, weight, kept, counted, PLAN)
            else:
                counts, state, weigh, reject = _read_irregular_block(
                    counts, state, weigh, reject, train, rollout, mask, weights, loss_mask, limits, at,
                    tl.minimum(at + AT_ONCE, stop), start, end, tokens, PLAN, LANES, ALIGN,
                )  # fmt: skip
        again = chunk > begin
        if PLAN.token_criteria:
            _add_token_criteria(cell, again, counts, reject, PLAN)
        if PLAN.level == "token":
            _add_weights(cell, again, counts, weigh, limits, PLAN)
        _add_mismatch(cell, again, counts, state, PLAN)
        tl.debug_barrier()
