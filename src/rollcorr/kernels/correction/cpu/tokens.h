/* Any block that is not quiet: d, ρ, k3 and their sums, token-level weights and rejections.

   A block is summed in float32, blocks in float64. ρ − 1 and k3 = ρ − 1 − d come from the series of one exponential,
   never from a difference of near-equal numbers. Spreads are taken around the block's own mean. Counts are integers.
   Every bound on a ratio or a divergence arrives as a bound on d, so a decision is one comparison. Values are
   classified by their bits: float classification becomes fast only with -ffast-math, which is wrong about NaN. A block
   whose values float32 sums cannot hold (densities above e^46, sentinels like -1e30) has its mismatch summed again in
   float64, one by one. */

#ifndef ROLLCORR_TOKENS_H
#define ROLLCORR_TOKENS_H

#include "regular.h"

/* Sort valid tokens by their bits: measured (both finite), zero (log π = −inf under a finite log μ), missing. */
static void classify(Block *block) {
    const vi infinite = (vi){0} + 0x7f800000;
    vi all = (vi){0} - (block->job->nonfinite == NEUTRAL), measured_count = {0}, zero_count = {0};
    EACH_VECTOR(v, block) {
        vi train = (vi)load(block->train + v * LANES), rollout = (vi)load(block->rollout + v * LANES);
        vi usable = ((rollout & 0x7fffffff) < infinite) & block->valid[v];
        vi measured = ((train & 0x7fffffff) < infinite) & usable;
        vi zero = (train == (vi){0} + (int32_t)0xff800000) & usable;
        block->classes[1][v] = measured;
        block->classes[2][v] = zero;
        block->classes[3][v] = measured | zero | (block->valid[v] & all);
        measured_count += measured;
        zero_count += zero;
    }
    block->plain = 0;
    block->measured = block->classes[1];
    block->zero = block->classes[2];
    block->counted = block->classes[3];
    block->n_measured = count(measured_count);
    block->n_zero = count(zero_count);
    block->n_missing = block->n_valid - block->n_measured - block->n_zero;
    block->n_counted = block->job->nonfinite == NEUTRAL ? block->n_valid : block->n_valid - block->n_missing;
}

typedef struct {
    double sum, m2;
} Sample;

/* Σ x and Σ (x − mean)² over a mask, n values in all, from a rough Σ x: deviations from the rough mean are small, so
   float32 sums of them are good to the last digit, and what they say about the mean is put right. */
INLINE Sample sample_as(const Block *block, const vf *x, const vi *mask, double n, double rough, const int plain) {
    const float center = (float)(rough / n);
    const vi every = (vi){0} - 1;
    vf sum = {0}, squares = {0};
    EACH_VECTOR(v, block) {
        vi present = plain ? every : mask[v];
        vf deviation = where(present, x[v] - center);
        sum += deviation;
        squares += deviation * deviation;
    }
    double shift = total(sum), m2 = total(squares) - shift * shift / n;
    return (Sample){n * (double)center + shift, m2 > 0 ? m2 : 0};
}

static Sample sample(const Block *block, const vf *x, const vi *mask, double n, double rough) {
    if (n == 0) return (Sample){0};
    return block->plain ? sample_as(block, x, mask, n, rough, 1) : sample_as(block, x, mask, n, rough, 0);
}

static void add_sample(Moments *moments, double n, double sum, double m2) {
    if (n > 0) add_moments(moments, n, sum / n, m2);
}

/* Knuth: add, and keep what rounding took. */
INLINE void add_with_rest(vf *sum, vf *rest, vf x) {
    vf before = *sum, part;
    *sum += x;
    part = *sum - before;
    *rest += (before - (*sum - part)) + (x - part);
}

/* d and its sums. A plain block is one that is valid throughout; if a value is not finite, neither is Σ |d|. */
INLINE void subtract_as(Block *block, Mismatch *sums, const int plain) {
    const vf inf = splat(INFINITY);
    const vi every = (vi){0} - 1;
    vf sum_d = {0}, lost = {0}, sum_rollout = {0}, lost_rollout = {0}, least = inf, most = -inf;
    SUMS_OF_D(AS_VECTOR)
    EACH_VECTOR(v, block) {
        vi measured = plain ? every : block->measured[v];
        vf train = where(measured, load(block->train + v * LANES));
        vf rollout = where(measured, load(block->rollout + v * LANES));
        vf d = train - rollout, size = magnitude(d);
        block->d[v] = d;
        add_with_rest(&sum_d, &lost, d); /* Σ d is exponentiated */
        lost += rounded_off(train, rollout, d);
        SUMS_OF_D(ADD_VECTOR)
        add_with_rest(&sum_rollout, &lost_rollout, rollout); /* a loss compares it with a sum in float64 */
        least = smaller(least, choose(measured, d, inf));
        most = larger(most, choose(measured, d, -inf));
    }
#define TOTAL_IN_BLOCK(name, ...) sums->name = total(sum_of_##name);
    *sums = (Mismatch){.d = exact_total(sum_d) + exact_total(lost)};
    SUMS_OF_D(TOTAL_IN_BLOCK)
    sums->rollout = exact_total(sum_rollout) + exact_total(lost_rollout);
    sums->train = sums->rollout + sums->d; /* `sum_wide` sums it by itself where a huge log μ leaves it no digits */
    sums->log_ratio = (Extremes){smallest(least), largest(most)};
}

static void subtract(Block *block, Mismatch *sums) {
    if (block->plain) subtract_as(block, sums, 1);
    else subtract_as(block, sums, 0);
    double least = sums->log_ratio.min, most = sums->log_ratio.max; /* infinite where nothing is measured */
    block->wide = !(sums->abs_log_ratio < HOLDS && fabs(sums->rollout) < HOLDS);
    block->reach = least < -CAP || most > CAP ? REACH_FAR : REACH_CAP;
}

/* What is built on e^d: ρ, ρ − 1, k3, chi² and |π − μ|, their sums, and the vectors that later steps read. */
INLINE void exponentiate_as(Block *block, Mismatch *sums, const int plain, const int reach) {
    vf sum_expm1 = {0}, sum_k3 = {0}, sum_chi2 = {0}, most_difference = {0};
    SUMS_OF_RATIO(AS_VECTOR)
    EACH_VECTOR(v, block) {
        fetch_ahead(block->train + v * LANES);
        fetch_ahead(block->rollout + v * LANES);
        /* d is rounded to up to 1e-6, and e^d by as much of itself. */
        vf d = block->d[v], from = load(block->rollout + v * LANES);
        vf part = rounded_off(load(block->train + v * LANES), from, d);
        if (!plain) part = where(block->measured[v], part);
        Exponential e;
        if (reach == REACH_CAP) {
            e = exponential(d);
        } else {
            part = where(magnitude(d) < EXP_DOMAIN, part);
            vf inside = smaller(larger(d, splat(-EXP_DOMAIN)), splat(EXP_DOMAIN));
            e = exponential(inside);
            e.k3 = smaller(e.k3 + (inside - smaller(d, inside)), splat(EXPM1_OF_CAP - FLOAT_CAP));
        }
        e.k3 += where(d <= FLOAT_CAP, part * e.expm1);
        e.expm1 += part * e.exp;
        e.exp += part * e.exp;
        block->rho[v] = e.exp;
        block->expm1[v] = e.expm1;
        block->k3[v] = e.k3;
        sum_expm1 += e.expm1;
        sum_k3 += e.k3;
        vf capped = reach == REACH_FAR ? smaller(e.expm1, splat(EXPM1_OF_CAP)) : e.expm1;
        sum_chi2 += capped * (capped + 2.0f); /* ρ² − 1 = (ρ − 1)(ρ + 1) */
        /* |π − μ| = μ |ρ − 1|, or π where ρ is capped, or μ where π is 0; 0 where nothing is compared, as d is 0. */
        vf factor = magnitude(capped);
        if (reach == REACH_FAR) {
            vi above = d > FLOAT_CAP;
            from = choose(above, load(block->train + v * LANES), from);
            factor = choose(above, splat(1.0f), factor);
        }
        if (!plain) {
            from = where(block->measured[v] | block->zero[v], from);
            factor = choose(block->zero[v], splat(1.0f), factor);
        }
        vf difference = exp_of(from) * factor;
        SUMS_OF_RATIO(ADD_VECTOR)
        most_difference = larger(most_difference, difference);
    }
    sums->expm1 = total(sum_expm1);
    sums->k3 = total(sum_k3);
    sums->chi2 = total(sum_chi2);
    SUMS_OF_RATIO(TOTAL_IN_BLOCK)
    sums->most_difference = largest(most_difference);
}

static void exponentiate(Block *block, Mismatch *sums) {
    if (block->reach == REACH_FAR) exponentiate_as(block, sums, 0, REACH_FAR);
    else if (block->plain) exponentiate_as(block, sums, 1, REACH_CAP);
    else exponentiate_as(block, sums, 0, REACH_CAP);
    if (!(sums->prob_diff_abs < HOLDS_DIFFERENCE)) block->wide = 1;
}

/* The sums that float32 might not hold, in float64, at the cost of libm. */
static void sum_wide(const Block *block, Mismatch *sums) {
    const int32_t *measured = (const int32_t *)block->measured, *zero = (const int32_t *)block->zero;
    Mismatch wide = {.expm1 = sums->expm1, .chi2 = sums->chi2, .log_ratio = {INFINITY, -INFINITY}};
    for (int i = 0; i < block->tokens; i++) {
        if (!measured[i] && !zero[i]) continue;
        double train = (double)block->train[i], rollout = (double)block->rollout[i];
        double difference = fabs(exp(train) - exp(rollout));
        if (difference != difference) difference = 0; /* ∞ − ∞ of two densities, as in core/divergence.py */
        double d = measured[i] ? train - rollout : 0, size = fabs(d), capped = d < CAP ? d : CAP;
        TOKEN_SUMS(ADD_SCALAR)
        if (difference > wide.most_difference) wide.most_difference = difference;
        if (zero[i]) continue;
        wide.d += d;
        wide.train += train;
        wide.rollout += rollout;
        wide.k3 += expm1(capped) - capped;
        add_extremes(&wide.log_ratio, d, d);
    }
    double mean = block->n_measured > 0 ? wide.d / block->n_measured : 0;
    for (int i = 0; i < block->tokens; i++) {
        double deviation = measured[i] ? (double)block->train[i] - (double)block->rollout[i] - mean : 0;
        wide.m2 += deviation * deviation;
    }
    *sums = wide;
}

/* The mismatch of a block that is not quiet. `sums` holds what `sum_as` or `subtract` found. */
static void measure(Block *block, Mismatch *sums, Sequence *s, Rows *rows) {
    if (!block->regular) {
        exponentiate(block, sums);
    } else if (!block->summed) {
        Totals totals;
        sum_as(block, &totals, 0, TO_BLOCK);
        name_sums(&totals, sums);
    }
    if (block->wide) sum_wide(block, sums);
    else sums->m2 = sample(block, block->d, block->measured, block->n_measured, sums->d).m2;
    add_mismatch(block, sums, s, rows);
    count_ten_percent(block, sums->log_ratio, rows);
    rows->sums[SUM_capped] += count_beyond(block, sums, -CAP, CAP);
}

/* Moments of weights, from w − 1 where they are near 1 and from w where they are near 0: each is exact there. */
static double add_weights(const Block *block, Moments *moments, const vf *w, const vf *less_one, vf sum, vf sum_less_one) {
    double n = block->n_counted, rough = total(sum), one = rough < n / 2 ? 0 : 1;
    Sample of = one ? sample(block, less_one, block->counted, n, total(sum_less_one))
                    : sample(block, w, block->counted, n, rough);
    add_sample(moments, n, of.sum + n * one, of.m2);
    return of.sum + n * one;
}

/* Clamp, truncate or cut weights; their statistics. */
INLINE void weigh_tokens_as(Block *block, Sequence *s, Rows *rows, const int icepop) {
    const Job *job = block->job;
    const vf inf = splat(INFINITY), minus_one = splat(-1.0f), cap = splat(job->cap), least_weight = splat(job->least);
    const vf floor = splat(job->floor), ceiling = splat(job->ceiling);
    vf raw_sum = {0}, raw_sum_less_one = {0}, sum = {0}, sum_less_one = {0}, least = inf, most = -inf;
    vi high = {0}, low = {0}, outside = {0};
    EACH_VECTOR(v, block) {
        vi counted = block->counted[v], positive = counted & ~block->zero[v], present = positive;
        vf d = block->d[v];
        vi above = (d > job->band.upper) & positive, below = (d < job->band.lower) & positive;
        if (icepop) present &= (d <= job->weighted.upper) & (d >= job->weighted.lower);
        vf raw = where(positive, smaller(larger(block->rho[v], floor), ceiling));
        vf excess = smaller(larger(block->expm1[v], floor - 1.0f), ceiling - 1.0f);
        vf raw_less_one = where(counted, choose(positive, excess, minus_one));
        vf bounded = larger(smaller(excess, cap - 1.0f), least_weight - 1.0f);
        vf less_one = where(counted, choose(present, bounded, minus_one));
        vf weight = where(present, larger(smaller(raw, cap), least_weight));
        block->rho[v] = raw;
        block->expm1[v] = raw_less_one;
        block->less_one[v] = less_one;
        block->weight[v] = weight;
        raw_sum += raw;
        raw_sum_less_one += raw_less_one;
        sum += weight;
        sum_less_one += less_one;
        high += above;
        low += below;
        if (icepop) { /* elsewhere the extremes follow from those of d */
            outside += counted & ~present;
            least = smaller(least, choose(counted, weight, inf));
            most = larger(most, choose(counted, weight, -inf));
        }
    }
    rows->sums[SUM_is_high] += count(high);
    rows->sums[SUM_is_low] += count(low);
    rows->sums[SUM_is_outside] += count(outside);
    if (icepop) add_extremes(&rows->extremes[EXTREMES_weight], smallest(least), largest(most));
    Moments *raw = &rows->moments[MOMENTS_weight_raw], *applied = &rows->moments[MOMENTS_weight];
    s->raw_weight += add_weights(block, raw, block->rho, block->expm1, raw_sum, raw_sum_less_one);
    s->weight += add_weights(block, applied, block->weight, block->less_one, sum, sum_less_one);
}

/* Token-level weights; returns where they are. */
static const vf *weigh_tokens(Block *block, const Mismatch *sums, Sequence *s, Rows *rows) {
    const Job *job = block->job;
    double least = sums->log_ratio.min, most = sums->log_ratio.max, n = block->n_counted;
    int near_one = sums->expm1 >= -n / 2; /* on average; what is near 0 has no digits in w − 1 */
    if (block->plain && job->mode != ICEPOP && near_one && least >= job->untouched.lower && most <= job->untouched.upper) {
        /* No bound is met, so w = ρ. That is most blocks when the policies are close. */
        Sample less_one = sample(block, block->expm1, block->counted, n, sums->expm1);
        add_sample(&rows->moments[MOMENTS_weight_raw], n, n + less_one.sum, less_one.m2);
        add_sample(&rows->moments[MOMENTS_weight], n, n + less_one.sum, less_one.m2);
        s->raw_weight += n + less_one.sum;
        s->weight += n + less_one.sum;
        return block->rho;
    }
    if (job->mode == ICEPOP) weigh_tokens_as(block, s, rows, 1);
    else weigh_tokens_as(block, s, rows, 0);
    rows->sums[SUM_saturated_high] += count_beyond(block, sums, -INFINITY, job->bound);
    rows->sums[SUM_saturated_low] += count_beyond(block, sums, -job->bound, INFINITY);
    return block->weight;
}

/* --- Criteria ----------------------------------------------------------------------------------------------------- */

/* Sum, moments and extremes of k2 or k3 over the measured tokens of a block that float32 sums do not hold. */
static double describe_wide(const Block *block, int kind, Moments *moments, Extremes *extremes) {
    const int32_t *measured = (const int32_t *)block->measured;
    double sum = 0;
    for (int i = 0; i < block->tokens; i++) {
        if (!measured[i]) continue;
        double value = divergence(kind, (double)block->train[i] - (double)block->rollout[i]);
        sum += value;
        add_moments(moments, 1, value, 0);
        add_extremes(extremes, value, value);
    }
    return sum;
}

/* Σ k2 or Σ k3; with a token-level criterion (`index`, else -1) moments and extremes too. */
static double describe(Block *block, int kind, int index, Rows *rows) {
    const vf inf = splat(INFINITY);
    vf sum = {0}, least = inf, most = -inf, *values = kind == K2 ? block->k2 : block->k3;
    Moments unused = {0}, *moments = index < 0 ? &unused : &rows->criterion_moments[index][OF_UNIT];
    Extremes ignored = {0}, *extremes = index < 0 ? &ignored : &rows->criterion_extremes[index][OF_UNIT];
    if (block->wide) return describe_wide(block, kind, moments, extremes);
    if (kind == K2) EACH_VECTOR(v, block) values[v] = block->d[v] * block->d[v] * 0.5f;
    EACH_VECTOR(v, block) {
        vf value = values[v];
        sum += value;
        least = smaller(least, choose(block->measured[v], value, inf));
        most = larger(most, choose(block->measured[v], value, -inf));
    }
    if (index < 0) return total(sum);
    Sample of = sample(block, values, block->measured, block->n_measured, total(sum));
    add_sample(moments, block->n_measured, of.sum, of.m2);
    add_extremes(extremes, smallest(least), largest(most));
    return of.sum;
}

/* A plain block whose d no criterion rejects. That is most blocks when the policies are close. */
static int keep_at_once(const Block *block, const Mismatch *sums, double weights, Sequence *s) {
    const Band accepted = block->job->accepted;
    if (!block->plain || sums->log_ratio.min < accepted.lower || sums->log_ratio.max > accepted.upper) return 0;
    s->kept += block->tokens;
    s->kept_weight += weights;
    return 1;
}

/* Token-level rejectors, each on the base mask: what each rejects, alone or with others, and what stays. */
static void judge(Block *block, const vf *weights, Sequence *s, Rows *rows) {
    const Job *job = block->job;
    const vi every = (vi){0} - 1, nothing = {0};
    vi used[KINDS], rejected_count[KINDS] = {{0}}, alone_count[KINDS] = {{0}}, high_count[KINDS] = {{0}};
    vi low_count[KINDS] = {{0}}, kept_count = {0}, rejected_once_count = {0}, zero_is_low = {0};
    vi rejecting = job->nonfinite == REJECT_TOKEN ? every : nothing;
    vf kept_weight = {0};
    Band bands[KINDS] = {{0, 0}};
    for (int kind = 0; kind < KINDS; kind++) {
        int index = job->token_criterion[kind];
        used[kind] = index < 0 ? nothing : every;
        if (index >= 0) bands[kind] = job->criteria[index].tokens;
        if (kind == K1 && index >= 0 && isfinite(job->criteria[index].bounds.lower)) zero_is_low = every;
    }
    EACH_VECTOR(v, block) {
        vi valid = block->valid[v], zero = block->zero[v], positive = block->counted[v] & ~zero, rejected[KINDS];
        vi rejectors = valid & ~(block->measured[v] | zero) & rejecting;
        vf d = block->d[v];
        for (int kind = 0; kind < KINDS; kind++) {
            vi high = (d > bands[kind].upper) & positive, low = (d < bands[kind].lower) & positive;
            if (kind == K1) {
                low |= zero & zero_is_low;
            } else { /* a divergence has one bound: both ends of d are "high", and so is probability zero */
                high |= low | zero;
                low = nothing;
            }
            high &= used[kind];
            low &= used[kind];
            rejected[kind] = high | low;
            rejectors += rejected[kind];
            high_count[kind] += high;
            low_count[kind] += low;
            rejected_count[kind] += rejected[kind];
        }
        vi rejected_once = rejectors == -1, kept = (rejectors == 0) & valid;
        for (int kind = 0; kind < KINDS; kind++) alone_count[kind] += rejected[kind] & rejected_once;
        kept_count += kept;
        rejected_once_count += rejected_once;
        if (weights) kept_weight += where(kept, weights[v]);
        block->kept[v] = kept;
    }
    for (int kind = 0; kind < KINDS; kind++) {
        int index = job->token_criterion[kind];
        if (index < 0) continue;
        rows->criterion_sums[index][CRITERION_high] += count(high_count[kind]);
        rows->criterion_sums[index][CRITERION_low] += count(low_count[kind]);
        s->rejected[kind] += count(rejected_count[kind]);
        s->alone[kind] += count(alone_count[kind]);
    }
    s->kept += count(kept_count);
    s->rejected_once += count(rejected_once_count);
    s->kept_weight += total(kept_weight);
}

static void count_catastrophic(const Block *block, Sequence *s) {
    vi found = {0};
    EACH_VECTOR(v, block) found += ((block->d[v] < block->job->veto.lower) & block->counted[v]) | block->zero[v];
    s->catastrophic += count(found);
}

#endif
