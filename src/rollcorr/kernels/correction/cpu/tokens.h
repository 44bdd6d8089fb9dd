/* The tokens of one sequence, 512 at a time: d, ρ, k3 and their sums, token-level weights and rejections.

   A block is summed in float32, blocks in float64. ρ − 1 and k3 = ρ − 1 − d come from the series of one exponential,
   never from a difference of near-equal numbers. Spreads are taken around the block's own mean. Counts are integers.
   Every bound on a ratio or a divergence arrives as a bound on d, so a decision is one comparison. Values are
   classified by their bits: float classification becomes fast only with -ffast-math, which is wrong about NaN. A block
   whose values float32 sums cannot hold (densities above e^46, sentinels like -1e30) has its mismatch summed again in
   float64, one by one. */

#ifndef ROLLCORR_TOKENS_H
#define ROLLCORR_TOKENS_H

#include "sequences.h"
#include "vectors.h"

#define BLOCK 512
#define VECTORS (BLOCK / LANES)
#define EACH_VECTOR(v, block) for (int v = 0; v < (block)->vectors; v++)
#define INLINE static inline __attribute__((always_inline))

#define FLOAT_CAP ((float)CAP)
#define EXPM1_OF_CAP 485165194.4f
#define EXP_DOMAIN 87.0f /* nats; e^±87 is a normal float32 */
#define HOLDS 1e5        /* largest Σ |d| and |Σ log μ| of a block that float32 sums hold to what exp makes of them */
#define HOLDS_DIFFERENCE 1e20 /* the same for Σ |π − μ|, which e^87 bounds */
#define NEAR 0.34        /* nats; largest |d| that the series of `tail` takes as it is */

enum { REACH_NEAR, REACH_CAP, REACH_FAR };

typedef struct {
    const Job *job;
    int tokens, vectors;
    const float *train, *rollout; /* readable to the end of the last vector */
    double n_valid, n_measured, n_zero, n_counted, n_missing;
    int plain; /* every lane is measured: masks need no looking at */
    int reach; /* how far d goes: to NEAR, to CAP, or beyond */
    int wide;  /* float32 sums do not hold it */
    const vi *valid, *measured, *zero, *counted; /* classes of tokens: the arrays below, or EVERY and NONE */
    vi classes[4][VECTORS], kept[VECTORS];
    vf d[VECTORS], rho[VECTORS], expm1[VECTORS], k2[VECTORS], k3[VECTORS], weight[VECTORS], less_one[VECTORS];
    float train_copy[BLOCK], rollout_copy[BLOCK];
} Block;

static const int32_t EVERY[BLOCK] __attribute__((aligned(64))) = {[0 ... BLOCK - 1] = -1};
static const int32_t NONE[BLOCK] __attribute__((aligned(64)));

/* The tokens of a block as float32: in place if they are and fill their vectors, else copied and padded with 0. */
static const float *read_log_probs(const char *row, int type, int64_t start, const Block *block, float *copy) {
    int tokens = block->tokens;
    if (type == FLOAT32 && tokens % LANES == 0) return (const float *)row + start;
    if (type == FLOAT32) {
        memcpy(copy, (const float *)row + start, (size_t)tokens * sizeof(float));
    } else {
        const uint16_t *halves = (const uint16_t *)row + start;
        uint32_t *bits = (uint32_t *)(void *)copy;
        for (int i = 0; i < tokens; i++) bits[i] = (uint32_t)halves[i] << 16;
    }
    for (int i = tokens; i < block->vectors * LANES; i++) copy[i] = 0.0f;
    return copy;
}

/* Whether a byte mask is 1 throughout (1), 0 throughout (0), or neither (-1), without spreading it over lanes. */
static int uniform(const uint8_t *mask, int tokens) {
    uint8_t not_one = 0, not_zero = 0;
    for (int i = 0; i < tokens; i++) {
        not_one |= mask[i] ^ 1;
        not_zero |= mask[i];
    }
    return not_zero == 0 ? 0 : not_one == 0 ? 1 : -1;
}

/* Spread a mask over the lanes of `valid`, -1 or 0; return how many tokens are valid. */
static int read_mask(const char *row, int type, int64_t start, Block *block) {
    int32_t *valid = (int32_t *)block->classes[0], found = 0;
    int tokens = block->tokens, lanes = block->vectors * LANES;
#define READ(kind)                                                                   \
    {                                                                                \
        const kind *mask = (const kind *)row + start;                                \
        for (int i = 0; i < tokens; i++) valid[i] = -(int32_t)(mask[i] != (kind)0); \
        break;                                                                       \
    }
    switch (type) {
        case MASK_INT32: READ(int32_t)
        case MASK_INT64: READ(int64_t)
        case MASK_FLOAT32: READ(float)
        default: READ(uint8_t)
    }
    for (int i = tokens; i < lanes; i++) valid[i] = 0;
    for (int i = 0; i < lanes; i++) found -= valid[i];
    block->valid = block->classes[0];
    block->n_valid = found;
    return found;
}

/* Every lane is measured. */
static void set_plain(Block *block) {
    block->plain = 1;
    block->valid = block->measured = block->counted = (const vi *)EVERY;
    block->zero = (const vi *)NONE;
    block->n_valid = block->n_measured = block->n_counted = block->tokens;
    block->n_zero = block->n_missing = 0;
}

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
    if (n == 0) return (Sample){0, 0};
    return block->plain ? sample_as(block, x, mask, n, rough, 1) : sample_as(block, x, mask, n, rough, 0);
}

static void add_sample(Moments *moments, double n, double sum, double m2) {
    if (n > 0) add_moments(moments, n, sum / n, m2);
}

typedef struct { /* sums of one block that go to its sequence or to the batch */
    double d, m2, magnitude, train, rollout, expm1, k3, chi2, difference, most_difference;
    Extremes log_ratio;
} Mismatch;

/* d and its sums. A plain block is one that is valid throughout; if a value is not finite, neither is Σ |d|. */
INLINE void subtract_as(Block *block, Mismatch *sums, const int plain) {
    const vf inf = splat(INFINITY);
    const vi every = (vi){0} - 1;
    vf sum_d = {0}, lost = {0}, sum_magnitude = {0}, sum_train = {0}, sum_rollout = {0}, least = inf, most = -inf;
    EACH_VECTOR(v, block) {
        vi measured = plain ? every : block->measured[v];
        vf train = where(measured, load(block->train + v * LANES));
        vf rollout = where(measured, load(block->rollout + v * LANES));
        vf d = train - rollout;
        block->d[v] = d;
        vf before = sum_d, part;
        sum_d += d;
        part = sum_d - before;
        lost += (before - (sum_d - part)) + (d - part); /* Knuth: what rounding took, for Σ d is exponentiated */
        lost += rounded_off(train, rollout, d);
        sum_magnitude += magnitude(d);
        sum_train += train; /* not Σ log μ + Σ d, where a huge log μ leaves no digits of log π */
        sum_rollout += rollout;
        least = smaller(least, choose(measured, d, inf));
        most = larger(most, choose(measured, d, -inf));
    }
    *sums = (Mismatch){.d = exact_total(sum_d) + exact_total(lost), .magnitude = total(sum_magnitude)};
    sums->train = total(sum_train);
    sums->rollout = total(sum_rollout);
    sums->log_ratio = (Extremes){smallest(least), largest(most)};
}

static void subtract(Block *block, Mismatch *sums) {
    if (block->plain) subtract_as(block, sums, 1);
    else subtract_as(block, sums, 0);
    double least = sums->log_ratio.min, most = sums->log_ratio.max; /* infinite where nothing is measured */
    block->wide = !(sums->magnitude < HOLDS && fabs(sums->rollout) < HOLDS);
    block->reach = least < -CAP || most > CAP ? REACH_FAR : REACH_CAP;
    if (!(least < -NEAR) && !(most > NEAR)) block->reach = REACH_NEAR;
}

/* Have the next block come from memory during this one's arithmetic. Past the end of the data it does nothing. */
static inline void fetch_ahead(const float *x) { __builtin_prefetch((const void *)((uintptr_t)x + BLOCK * sizeof *x)); }

/* What is built on e^d: ρ, ρ − 1, k3, chi² and |π − μ|, their sums, and the vectors that later steps read. */
INLINE void exponentiate_as(Block *block, Mismatch *sums, const int plain, const int reach) {
    vf sum_expm1 = {0}, sum_k3 = {0}, sum_chi2 = {0}, sum_difference = {0}, most_difference = {0};
    EACH_VECTOR(v, block) {
        fetch_ahead(block->train + v * LANES);
        fetch_ahead(block->rollout + v * LANES);
        vf d = block->d[v], from = load(block->rollout + v * LANES), part = {0};
        Exponential e;
        if (reach != REACH_NEAR) { /* d is rounded to up to 1e-6, and e^d by as much of itself */
            part = rounded_off(load(block->train + v * LANES), from, d);
            if (!plain) part = where(block->measured[v], part);
            if (reach == REACH_FAR) part = where(magnitude(d) < EXP_DOMAIN, part);
        }
        if (reach == REACH_NEAR) {
            e.k3 = tail(d);
            e.expm1 = d + e.k3;
            e.exp = e.expm1 + 1.0f;
        } else if (reach == REACH_CAP) {
            e = exponential(d);
        } else {
            vf inside = smaller(larger(d, splat(-EXP_DOMAIN)), splat(EXP_DOMAIN));
            e = exponential(inside);
            e.k3 = smaller(e.k3 + (inside - smaller(d, inside)), splat(EXPM1_OF_CAP - FLOAT_CAP));
        }
        if (reach != REACH_NEAR) {
            e.k3 += where(d <= FLOAT_CAP, part * e.expm1);
            e.expm1 += part * e.exp;
            e.exp += part * e.exp;
        }
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
        sum_difference += difference;
        most_difference = larger(most_difference, difference);
    }
    sums->expm1 = total(sum_expm1);
    sums->k3 = total(sum_k3);
    sums->chi2 = total(sum_chi2);
    sums->difference = total(sum_difference);
    sums->most_difference = largest(most_difference);
}

static void exponentiate(Block *block, Mismatch *sums) {
    if (block->reach == REACH_NEAR && block->plain) exponentiate_as(block, sums, 1, REACH_NEAR);
    else if (block->reach != REACH_FAR && block->plain) exponentiate_as(block, sums, 1, REACH_CAP);
    else if (block->reach != REACH_FAR) exponentiate_as(block, sums, 0, REACH_CAP);
    else exponentiate_as(block, sums, 0, REACH_FAR);
    if (!(sums->difference < HOLDS_DIFFERENCE)) block->wide = 1;
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
        wide.difference += difference;
        if (difference > wide.most_difference) wide.most_difference = difference;
        if (zero[i]) continue;
        double d = train - rollout, capped = d < CAP ? d : CAP;
        wide.d += d;
        wide.magnitude += fabs(d);
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

/* How many d lie outside a band that contains 0; most blocks lie inside, which their extremes tell. */
static double count_outside(const Block *block, const Mismatch *sums, float lower, float upper) {
    if (sums->log_ratio.min >= lower && sums->log_ratio.max <= upper) return 0;
    vi found = {0};
    EACH_VECTOR(v, block) found += (block->d[v] < lower) | (block->d[v] > upper);
    return count(found);
}

/* The same for a band without a hair: d as float64 has it. Blocks that stay inside, and that is most, are not read. */
static double count_beyond(const Block *block, const Mismatch *sums, double lower, double upper) {
    const int32_t *measured = (const int32_t *)block->measured;
    int found = 0;
    if (sums->log_ratio.min > lower && sums->log_ratio.max < upper) return 0;
    for (int i = 0; i < block->tokens; i++) {
        double d = (double)block->train[i] - (double)block->rollout[i];
        found += measured[i] != 0 && (d < lower || d > upper);
    }
    return found;
}

/* How far apart the policies are, whatever is done about it. `sums` holds what `subtract` found. */
static void measure(Block *block, Mismatch *sums, Sequence *s, Rows *rows) {
    const Band ten = block->job->ten_percent;
    exponentiate(block, sums);
    if (block->wide) sum_wide(block, sums);
    else sums->m2 = sample(block, block->d, block->measured, block->n_measured, sums->d).m2;

    s->valid += block->n_valid;
    s->measured += block->n_measured;
    s->zero += block->n_zero;
    s->log_ratio += sums->d;
    s->train += sums->train;
    s->rollout += sums->rollout;
    s->k3 += sums->k3;
    add_extremes(&s->range, sums->log_ratio.min, sums->log_ratio.max);
    add_sample(&rows->moments[MOMENTS_log_ratio], block->n_measured, sums->d, sums->m2);
    rows->sums[SUM_abs_log_ratio] += sums->magnitude;
    rows->sums[SUM_chi2_token] += sums->chi2;
    rows->sums[SUM_prob_diff_abs] += sums->difference;
    rows->sums[SUM_ratio_outside_10pct] += count_outside(block, sums, ten.lower, ten.upper);
    rows->sums[SUM_capped] += count_beyond(block, sums, -CAP, CAP);
    add_extremes(&rows->extremes[EXTREMES_prob_diff_abs], 0, sums->most_difference); /* no metric reads the minimum */
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
