"""The sequence pass: from per-sequence columns to decisions for whole sequences, and to rows of statistics.

A program reads a few sequences, adds their splits, and writes one set of rows; `finish` merges the sets. All arithmetic
is float64. It follows `decide` row by row; that file explains the rows.
"""

from __future__ import annotations

import triton
import triton.language as tl

from rollcorr.config.correction_options import SAFETY_BOUND
from rollcorr.kernels.correction.triton.arithmetic import k3_of
from rollcorr.kernels.correction.triton.row_slots import (
    INFINITY,
    column,
    highest,
    lowest,
    product_sum,
    put,
    put_extremes,
    put_moments,
    put_range,
    put_sample,
    put_token_moments,
)

CAP = tl.constexpr(SAFETY_BOUND)


@triton.jit
def _write_mismatch_rows(rows, cells, there, valid, measured, zero, log_ratio, low, high, limits, PLAN: tl.constexpr):
    """Write the rows that compare the policies, independent of the correction."""
    compared = measured + zero
    put(rows, PLAN.sums["tokens"], valid)
    put(rows, PLAN.sums["sequences"], valid > 0)
    put(rows, PLAN.sums["nonfinite"], valid - compared)
    put(rows, PLAN.sums["zero_probability"], zero)
    put(rows, PLAN.sums["tokens_measured"], measured)
    put(rows, PLAN.sums["tokens_compared"], compared)
    put(rows, PLAN.sums["tokens_counted"], valid if PLAN.nonfinite == "neutral" else compared)
    for i in tl.static_range(len(PLAN.token_sums)):
        put(rows, PLAN.sums[PLAN.token_sums[i]], column(cells, PLAN.columns[PLAN.token_sums[i]]))
    put(
        rows,
        PLAN.sums["capped"],
        column(cells, PLAN.columns["capped_low"]) + column(cells, PLAN.columns["capped_high"]),
    )
    put(rows, PLAN.sums["ratio_outside_10pct"], column(cells, PLAN.columns["outside"]) + zero)
    # A sequence without a compared token must not affect the extremes.
    largest = tl.where(compared > 0, highest(cells, there, PLAN.columns["difference_max"]), -INFINITY)
    put_extremes(rows, PLAN.extremes["prob_diff_abs"], tl.where(compared > 0, 0.0, INFINITY), largest, PLAN)
    put_token_moments(
        rows, PLAN.moments["log_ratio"], cells, PLAN.columns["measured"], PLAN.columns["log_ratio_mean"], 1.0, PLAN
    )
    put_extremes(rows, PLAN.extremes["log_ratio"], low, high, PLAN)
    bound = limits[PLAN.limits["safety_bound"]] + 0.0 * valid
    put_extremes(rows, PLAN.extremes["safety_bound"], bound, bound, PLAN)


@triton.jit
def _write_perplexity_rows(rows, train, rollout, measured, log_ratio, product, has_counted, PLAN: tl.constexpr):
    """Write perplexities of both policies, and the rows computed from sums over sequences."""
    count, seen = tl.maximum(measured, 1.0), measured > 0
    train_log, rollout_log, difference = -train / count, -rollout / count, -log_ratio / count
    put(rows, PLAN.sums["sequences_measured"], seen)
    put(rows, PLAN.sums["train_log_ppl"], tl.where(seen, train_log, 0.0))
    put(rows, PLAN.sums["train_ppl"], tl.where(seen, tl.exp(train_log), 0.0))
    put(rows, PLAN.sums["rollout_log_ppl"], tl.where(seen, rollout_log, 0.0))
    put(rows, PLAN.sums["rollout_ppl"], tl.where(seen, tl.exp(rollout_log), 0.0))
    put(rows, PLAN.sums["log_ppl_diff"], tl.where(seen, difference, 0.0))
    put(rows, PLAN.sums["log_ppl_abs_diff"], tl.where(seen, tl.abs(difference), 0.0))
    put(rows, PLAN.sums["ppl_ratio"], tl.where(seen, tl.exp(difference), 0.0))
    put_range(rows, PLAN.extremes["log_ppl_diff"], difference, seen, PLAN)
    put(rows, PLAN.sums["sequences_counted"], has_counted)
    clamped = tl.minimum(tl.maximum(product, -CAP), CAP)
    em1 = k3_of(clamped) + clamped
    put(rows, PLAN.sums["chi2_seq"], tl.where(has_counted, em1 * (em1 + 2.0), 0.0))
    put(rows, PLAN.sums["capped_sequences"], (tl.abs(log_ratio) > CAP) & (product > -INFINITY))


@triton.jit
def _sequence_divergence(
    cells, there, counted, zero, measured, log_ratio, low, high, WHICH: tl.constexpr, PLAN: tl.constexpr
):
    """Compute a criterion's divergence of each sequence; a token criterion's mean over the sequence."""
    C: tl.constexpr = PLAN.criteria[WHICH]
    if C.scope == "seq_max":
        # k2 and k3 are convex with their minimum at 0, so their maximum is at one end of the range of d.
        first, last = tl.where(measured > 0, low, 0.0), tl.where(measured > 0, high, 0.0)
        if C.kind == "k2":
            value = tl.maximum(first * first, last * last) * 0.5
        else:
            value = tl.maximum(k3_of(first), k3_of(last))
    else:
        value = -log_ratio if C.kind == "k1" else column(cells, PLAN.columns[C.kind])
        if C.scope != "seq_sum":
            value = value / tl.maximum(counted, 1.0)
    return tl.where(zero > 0, INFINITY, value)


@triton.jit
def _apply_criterion(
    rows, cells, there, counted, zero, measured, log_ratio, low, high, limits, WHICH: tl.constexpr, PLAN: tl.constexpr
):  # fmt: skip
    """Describe a criterion; return the tokens that a token criterion rejects, or whether it rejects the sequence."""
    C: tl.constexpr = PLAN.criteria[WHICH]
    value = _sequence_divergence(cells, there, counted, zero, measured, log_ratio, low, high, WHICH, PLAN)
    has_counted = counted > 0
    if C.kind == "k1":
        # The value is −log ρ, and the limits are on log ρ.
        above, below = has_counted & (-value > limits[C.limit + 1]), has_counted & (-value < limits[C.limit])
    else:
        # A divergence has no lower limit: only NaN counts as below.
        above, below = has_counted & (value > limits[C.limit + 1]), has_counted & (value != value)
    put_sample(rows, C.moments, C.extremes, value, has_counted, PLAN)
    put(rows, C.statistic_sums, above)
    put(rows, C.statistic_sums + 1, below)
    touched = above | below
    if C.scope == "token":
        touched = _write_token_criterion_rows(rows, cells, there, low, high, WHICH, PLAN)
    return touched


@triton.jit
def _write_token_criterion_rows(rows, cells, there, low, high, WHICH: tl.constexpr, PLAN: tl.constexpr):
    """Write the rows of a token criterion's token values; return the number of rejected tokens per sequence."""
    C: tl.constexpr = PLAN.criteria[WHICH]
    N: tl.constexpr = PLAN.columns["measured"]
    above = column(cells, PLAN.columns[C.kind + "_high"])
    put(rows, C.statistic_sums + 2, above)
    if C.kind == "k1":
        below = column(cells, PLAN.columns["k1_low"])
        MEAN: tl.constexpr = PLAN.columns["log_ratio_mean"]
        put_token_moments(rows, C.moments + 1, cells, N, MEAN, -1.0, PLAN)
        put_extremes(rows, C.extremes + 1, -high, -low, PLAN)
    else:
        below = above * 0.0
        OWN: tl.constexpr = PLAN.columns[C.kind + "_mean"]
        put_token_moments(rows, C.moments + 1, cells, N, OWN, 1.0, PLAN)
        smallest = lowest(cells, there, OWN + 2)
        put_extremes(rows, C.extremes + 1, smallest, highest(cells, there, OWN + 3), PLAN)
    put(rows, C.statistic_sums + 3, below)
    return above + below


@triton.jit
def _apply_rejectors(
    rows, cells, there, valid, counted, missing, zero, measured, log_ratio, low, high, tokens_kept, rejected_once,
    limits, PLAN: tl.constexpr,
):  # fmt: skip
    """Return which sequences every sequence-level rejector keeps, and write the rows of all rejectors."""
    touched = valid.to(tl.int32) * 0  # a bit for each criterion
    rejectors, touching = touched, touched
    for i in tl.static_range(len(PLAN.criteria)):
        hit = _apply_criterion(
            rows, cells, there, counted, zero, measured, log_ratio, low, high, limits, i, PLAN
        )  # fmt: skip
        touched |= (hit > 0).to(tl.int32) << i
        touching += (hit > 0).to(tl.int32)
        if PLAN.criteria[i].scope != "token":
            rejectors += (hit > 0).to(tl.int32)
    if PLAN.veto:
        catastrophic = column(cells, PLAN.columns["catastrophic"])
        put(rows, PLAN.sums["catastrophic_tokens"], catastrophic)
        put(rows, PLAN.sums["vetoed_sequences"], catastrophic > 0)
        rejectors += (catastrophic > 0).to(tl.int32)
        touching += (catastrophic > 0).to(tl.int32)
    if PLAN.nonfinite != "neutral":
        touching += (missing > 0).to(tl.int32)
    if PLAN.nonfinite == "reject_sequence":
        rejectors += (missing > 0).to(tl.int32)
    kept = rejectors == 0

    # `rejected_once` counts tokens with one token-level rejector, `rejected_again` those with more. A rejector of the
    # sequence adds one to every token.
    rejected_again = valid - tokens_kept - rejected_once
    rejected_by_several = tl.where(
        kept, rejected_again, tl.where(rejectors == 1, rejected_once + rejected_again, valid)
    )
    put(rows, PLAN.sums["tokens_kept"], tl.where(kept, tokens_kept, 0.0))
    put(rows, PLAN.sums["sequences_kept"], kept & (tokens_kept > 0))
    put(rows, PLAN.sums["sequences_touched"], touching > 0)
    put(rows, PLAN.sums["rejected_by_several"], rejected_by_several)
    put(rows, PLAN.sums["sequences_rejected_by_several"], touching > 1)
    for i in tl.static_range(len(PLAN.criteria)):
        hit = ((touched >> i) & 1) == 1
        if PLAN.criteria[i].scope == "token":
            tokens = column(cells, PLAN.columns[PLAN.criteria[i].kind + "_high"])
            if PLAN.criteria[i].kind == "k1":
                tokens += column(cells, PLAN.columns["k1_low"])
            alone = column(cells, PLAN.columns[PLAN.criteria[i].kind + "_alone"])
            alone = tl.where(kept, alone, 0.0)
        else:
            tokens = tl.where(hit, valid, 0.0)
            alone = tl.where(hit & (rejectors == 1), tokens_kept, 0.0)
        put(rows, PLAN.criteria[i].rejection_sums, tokens)
        put(rows, PLAN.criteria[i].rejection_sums + 1, hit)
        put(rows, PLAN.criteria[i].rejection_sums + 2, alone)
        put(rows, PLAN.criteria[i].rejection_sums + 3, hit & (touching == 1))
    return kept


@triton.jit
def _weigh_sequences(rows, level, counted, has_counted, limits, PLAN: tl.constexpr):
    """Compute sequence-level weights, and write their rows. An empty sequence has weight 1."""
    bound = limits[PLAN.limits["safety_bound"]]
    low, high = limits[PLAN.limits["band_low"]], limits[PLAN.limits["band_high"]]
    finite = has_counted & (level > -INFINITY)
    bounded = tl.minimum(tl.maximum(level, -bound), bound)
    raw = tl.where(level > -INFINITY, tl.exp(bounded), 0.0)
    weight = raw
    if PLAN.mode == "truncate":
        weight = tl.minimum(raw, limits[PLAN.limits["ceiling"]])
    if PLAN.mode == "icepop":
        weight = tl.where((bounded >= low) & (bounded <= high), raw, 0.0)
    put(rows, PLAN.sums["units"], has_counted)
    put(rows, PLAN.sums["saturated_low"], finite & (level < -bound))
    put(rows, PLAN.sums["saturated_high"], has_counted & (level > bound))
    if PLAN.banded:
        put(rows, PLAN.sums["is_high"], has_counted & (level > high))
        put(rows, PLAN.sums["is_low"], has_counted & (level < low))
    if PLAN.mode == "icepop":
        put(rows, PLAN.sums["is_outside"], tl.where(weight == 0.0, counted, 0.0))
    put_range(rows, PLAN.extremes["log_weight"], level, finite, PLAN)
    put_moments(rows, PLAN.moments["weight"], weight, counted, PLAN)
    put_moments(rows, PLAN.moments["weight_raw"], raw, counted, PLAN)
    put_range(rows, PLAN.extremes["weight"], weight, has_counted, PLAN)
    put_range(rows, PLAN.extremes["weight_raw"], raw, has_counted, PLAN)
    return weight


@triton.jit
def _write_token_weight_sums(rows, cells, there, counted, zero, compared, low, high, limits, PLAN: tl.constexpr):
    """Write the rows of token-level weights."""
    bound = limits[PLAN.limits["safety_bound"]]
    N: tl.constexpr = PLAN.columns["counted"]
    RAW: tl.constexpr = PLAN.columns["raw_mean"]
    WEIGHT: tl.constexpr = PLAN.columns["weight_mean" if PLAN.mode != "none" else "raw_mean"]
    put(rows, PLAN.sums["units"], counted)
    # The column of the high side follows the column of the low side.
    LOW: tl.constexpr = PLAN.columns["saturated_low" if PLAN.own_bound else "capped_low"]
    put(rows, PLAN.sums["saturated_low"], column(cells, LOW))
    put(rows, PLAN.sums["saturated_high"], column(cells, LOW + 1))
    if PLAN.banded:
        is_low = column(cells, PLAN.columns["is_low"])
        put(rows, PLAN.sums["is_high"], column(cells, PLAN.columns["is_high"]))
        # ρ = 0 is below any lower bound; the column does not count it.
        put(rows, PLAN.sums["is_low"], is_low + zero if PLAN.banded_below else is_low)
    if PLAN.mode == "icepop":
        put(rows, PLAN.sums["is_outside"], column(cells, PLAN.columns["outside_band"]))
    put_token_moments(rows, PLAN.moments["weight"], cells, N, WEIGHT, 1.0, PLAN)
    put_token_moments(rows, PLAN.moments["weight_raw"], cells, N, RAW, 1.0, PLAN)
    put_token_moments(rows, PLAN.moments["unit_weight"], cells, N, WEIGHT, 1.0, PLAN)
    # exp is monotone: its extremes are at the extremes of d; zero tokens have weight 0, neutral ones 1.
    seen = compared - zero > 0
    smallest = tl.where(seen, tl.exp(tl.minimum(tl.maximum(low, -bound), bound)), INFINITY)
    largest = tl.where(seen, tl.exp(tl.minimum(tl.maximum(high, -bound), bound)), -INFINITY)
    neutral = counted > compared
    smallest = tl.where(neutral, tl.minimum(smallest, 1.0), smallest)
    largest = tl.where(neutral, tl.maximum(largest, 1.0), largest)
    smallest = tl.where(zero > 0, 0.0, smallest)
    largest = tl.where(zero > 0, tl.maximum(largest, 0.0), largest)
    put_extremes(rows, PLAN.extremes["weight_raw"], smallest, largest, PLAN)
    if PLAN.mode == "truncate":
        ceiling = limits[PLAN.limits["ceiling"]]
        smallest = tl.where(counted > 0, tl.minimum(smallest, ceiling), INFINITY)
        largest = tl.where(counted > 0, tl.minimum(largest, ceiling), -INFINITY)
    if PLAN.mode == "icepop":
        smallest = lowest(cells, there, PLAN.columns["weight_min"])
        largest = highest(cells, there, PLAN.columns["weight_max"])
    put_extremes(rows, PLAN.extremes["weight"], smallest, largest, PLAN)


@triton.jit
def _write_weight_rows(
    rows, mean_weight, sequence_level, product, kept_weight, tokens_kept, kept, counted, limits, PLAN: tl.constexpr
):
    """Write the rows of weights that exist at every level."""
    has_counted = counted > 0
    put_sample(rows, PLAN.moments["sequence_weight"], PLAN.extremes["sequence_weight"], mean_weight, has_counted, PLAN)
    if PLAN.level != "token":
        finite = has_counted & (tl.abs(mean_weight) < INFINITY)
        put_moments(rows, PLAN.moments["unit_weight"], mean_weight, finite.to(tl.float64), PLAN)

        # The log of the raw weight: clamped by the safety bound, but still −inf at probability zero.
        bound = limits[PLAN.limits["safety_bound"]]
        bounded = tl.minimum(tl.maximum(sequence_level, -bound), bound)
        sequence_level = tl.where(sequence_level > -INFINITY, bounded, sequence_level)
    if PLAN.banded:
        put(rows, PLAN.sums["is_seq_high"], has_counted & (sequence_level > limits[PLAN.limits["band_high"]]))
        put(rows, PLAN.sums["is_seq_low"], has_counted & (sequence_level < limits[PLAN.limits["band_low"]]))
    if PLAN.mode != "none":
        put(rows, PLAN.sums["is_low_weight"], has_counted & (product < limits[PLAN.limits["low_weight"]]))
    kept_share = kept_weight / tl.maximum(tokens_kept, 1.0)
    put(rows, PLAN.sums["kept_weight"], kept_weight)
    put(rows, PLAN.sums["kept_sequence_weight"], kept_share)
    # Σ w and the number of units, valid or kept: tokens, or sequences with such a token.
    valid_weight = tl.where(has_counted, mean_weight, 0.0)
    if PLAN.level == "token":
        valid_weight, valid_units = counted * valid_weight, counted
        units_weight, units = kept_weight, tl.where(kept, tokens_kept, 0.0)
    else:
        valid_units = has_counted
        units_weight, units = kept_share, kept & (tokens_kept > 0)
    if PLAN.normalize != "none":
        put(rows, PLAN.sums["norm_weight"], valid_weight if PLAN.normalize == "valid" else units_weight)
        put(rows, PLAN.sums["norm_units"], valid_units if PLAN.normalize == "valid" else units)


@triton.jit
def decide_sequences(
    table, all_rows, sequence_weight, alive, sequence_kept, policy_sums, limits, sequences,
    PLAN: tl.constexpr, SEQUENCES: tl.constexpr, SPLITS: tl.constexpr,
):  # fmt: skip
    """Decide `SEQUENCES` sequences in each program: write one set of rows, and the decisions for the last pass."""
    sequence = tl.program_id(0) * SEQUENCES + tl.arange(0, SEQUENCES)
    exists = sequence < sequences
    cell = sequence[:, None] * SPLITS + tl.arange(0, SPLITS)[None, :]
    there = exists[:, None] & (cell >= 0)

    # Every column of the cells. All loads come before the first store, so they run concurrently.
    place = table + cell.to(tl.int64) * len(PLAN.columns)
    cells = ()
    for i in tl.static_range(len(PLAN.columns)):
        cells = cells + (tl.load(place + i, mask=there, other=0.0),)  # type: ignore[assignment] # noqa: RUF005 (Triton unpacks none)
    rows = all_rows + tl.program_id(0) * PLAN.width
    N: tl.constexpr = PLAN.columns["measured"]
    valid = column(cells, PLAN.columns["valid"])
    measured = column(cells, N)
    zero = column(cells, PLAN.columns["zero"])
    missing = valid - measured - zero
    counted = valid if PLAN.nonfinite == "neutral" else measured + zero
    has_counted = counted > 0
    log_ratio = product_sum(cells, N, PLAN.columns["log_ratio_mean"])
    low = lowest(cells, there, PLAN.columns["log_ratio_min"])
    high = highest(cells, there, PLAN.columns["log_ratio_max"])
    product = tl.where(zero > 0, -INFINITY, log_ratio)
    train = column(cells, PLAN.columns["train"])
    rollout = column(cells, PLAN.columns["rollout"])
    _write_mismatch_rows(rows, cells, there, valid, measured, zero, log_ratio, low, high, limits, PLAN)
    _write_perplexity_rows(rows, train, rollout, measured, log_ratio, product, has_counted, PLAN)
    if PLAN.token_criteria:
        tokens_kept = column(cells, PLAN.columns["kept"])
        rejected_once = column(cells, PLAN.columns["rejected_once"])
    else:
        rejected_once = missing if PLAN.nonfinite == "reject_token" else missing * 0.0
        tokens_kept = valid - rejected_once
    kept = _apply_rejectors(
        rows, cells, there, valid, counted, missing, zero, measured, log_ratio, low, high, tokens_kept, rejected_once,
        limits, PLAN,
    )  # fmt: skip
    if PLAN.level == "token":
        _write_token_weight_sums(rows, cells, there, counted, zero, measured + zero, low, high, limits, PLAN)
        N_COUNTED: tl.constexpr = PLAN.columns["counted"]
        raw = product_sum(cells, N_COUNTED, PLAN.columns["raw_mean"])
        total = product_sum(cells, N_COUNTED, PLAN.columns["weight_mean"]) if PLAN.mode != "none" else raw
        average = tl.maximum(counted, 1.0)
        kept_weight = column(cells, PLAN.columns["kept_weight"]) if PLAN.token_criteria else total
        kept_weight = tl.where(kept, kept_weight, 0.0)
        level = tl.where(raw > 0, tl.log(raw / average), -INFINITY)
        _write_weight_rows(rows, total / average, level, product, kept_weight, tokens_kept, kept, counted, limits, PLAN)
    elif PLAN.level != "none":
        level = product if PLAN.level == "sequence" else product / tl.maximum(counted, 1.0)
        weight = _weigh_sequences(rows, level, counted, has_counted, limits, PLAN)
        tl.store(sequence_weight + sequence, weight.to(tl.float32), mask=exists)
        kept_weight = tl.where(kept, weight * tokens_kept, 0.0)
        used = tl.where(has_counted, weight, 0.0)
        _write_weight_rows(rows, used, level, product, kept_weight, tokens_kept, kept, counted, limits, PLAN)
    tl.store(alive + sequence, kept.to(tl.uint8), mask=exists)
    tl.store(sequence_kept + sequence, ((kept & (tokens_kept > 0)) | (valid == 0)).to(tl.uint8), mask=exists)

    # Four columns of `sequences` numbers, by which a loss identifies rows. No load may come after a store.
    tl.store(policy_sums + sequence, valid, mask=exists)
    tl.store(policy_sums + sequences + sequence, measured, mask=exists)
    tl.store(policy_sums + 2 * sequences + sequence, train, mask=exists)
    tl.store(policy_sums + 3 * sequences + sequence, rollout, mask=exists)
