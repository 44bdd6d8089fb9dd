/* Regular blocks, which are most of them when the policies are close: every token is valid, log-probs are numbers of
   ordinary size, and no log-ratio is beyond ±2.75. Nothing has to be masked, capped or summed twice there.

   A first loop over a block finds out whether it is regular; a second one does what it needs. Of a *quiet* block the
   sums alone are needed, because no bound on a token acts: its weights go straight to memory, and no vector is kept. */

#ifndef ROLLCORR_REGULAR_H
#define ROLLCORR_REGULAR_H

#include "blocks.h"

#define REACH 2.75f    /* nats; largest |d| of a regular block */
#define NEAREST 0.3f   /* nats; largest |d| that a shorter polynomial takes */
#define ORDINARY 60.0f /* nats; largest |log μ| of a regular block */
#define ANCHOR (192.0f * VECTORS) /* of exact sums: half as large again as a power of two above what a lane can hold */

/* Whether a block that is valid throughout is regular. Finds the extremes of d, Σ d² and a rough Σ d. */
static int survey(Block *block, Mismatch *sums) {
    vf sum = {0}, squares = {0}, least = splat(INFINITY), most = -least, farthest = {0};
    EACH_VECTOR(v, block) {
        vf rollout = load(block->rollout + v * LANES), d = load(block->train + v * LANES) - rollout;
        sum += d;
        squares += d * d;
        least = smaller(least, d);
        most = larger(most, d);
        farthest = larger(farthest, magnitude(rollout));
    }
    *sums = (Mismatch){.d = total(sum), .squares = total(squares), .log_ratio = {smallest(least), largest(most)}};
    double reach = fmax(-sums->log_ratio.min, sums->log_ratio.max);
    block->nearest = reach <= NEAREST;
    /* Extremes pass over a NaN, but Σ d² is NaN too. */
    return sums->squares < HOLDS && reach <= REACH && largest(farthest) <= ORDINARY;
}

/* Whether nothing is decided about single tokens, and the sums of squares are those of spreads: the mean is not large
   beside them. Then Σ (x − mean)² = Σ x² − n mean² cancels no digits, of d nor of ρ − 1 >= d. */
static int is_quiet(const Block *block, const Mismatch *sums) {
    const Job *job = block->job;
    double least = sums->log_ratio.min, most = sums->log_ratio.max, n = block->tokens;
    if (job->level == TOKEN_WEIGHTS) {
        if (job->mode == ICEPOP || least < job->untouched.lower || most > job->untouched.upper) return 0;
    }
    if (job->token_criterion[K2] >= 0 || job->token_criterion[K3] >= 0) return 0; /* these are described in detail */
    if (least < job->accepted.lower || most > job->accepted.upper) return 0;
    if (job->vetoing && least < job->veto.lower) return 0;
    return 4 * sums->d * sums->d <= n * sums->squares && 2 * sums->d >= -n;
}

enum { TO_NOBODY, TO_MEMORY, PAST_CACHE, TO_BLOCK }; /* where the weights go; with the last one, all the other vectors too */

/* Everything that is summed over a regular block. */
INLINE void sum_regular_as(Block *block, Mismatch *sums, float *weights, const int nearest, const int destination) {
    Exact train_sum = {splat(ANCHOR), {0}}, rollout_sum = train_sum;
    vf sum_magnitude = {0}, sum_k3 = {0}, squares = {0}, sum_difference = {0}, most_difference = {0};
    EACH_VECTOR(v, block) {
        fetch_ahead(block->train + v * LANES);
        fetch_ahead(block->rollout + v * LANES);
        vf train = load(block->train + v * LANES), rollout = load(block->rollout + v * LANES), d = train - rollout;
        Exponential e = exponential_near(d, nearest);
        vf difference = exp_of_ordinary(rollout) * magnitude(e.expm1); /* |π − μ| = μ |ρ − 1| */
        add_exactly(&train_sum, train);
        add_exactly(&rollout_sum, rollout);
        sum_magnitude += magnitude(d);
        sum_k3 += e.k3;
        squares += e.expm1 * e.expm1;
        sum_difference += difference;
        most_difference = larger(most_difference, difference);
        if (destination == TO_MEMORY) store(weights + v * LANES, e.exp);
        if (destination == PAST_CACHE) store_past_cache(weights + v * LANES, e.exp);
        if (destination == TO_BLOCK) {
            block->d[v] = d;
            block->rho[v] = e.exp;
            block->expm1[v] = e.expm1;
            block->k3[v] = e.k3;
        }
    }
    double train_high = total(train_sum.high - ANCHOR), rollout_high = total(rollout_sum.high - ANCHOR);
    double train_low = total(train_sum.low), rollout_low = total(rollout_sum.low);
    sums->train = train_high + train_low;
    sums->rollout = rollout_high + rollout_low;
    sums->d = (train_high - rollout_high) + (train_low - rollout_low); /* exponentiated, so it must not be rounded */
    sums->magnitude = total(sum_magnitude);
    sums->k3 = total(sum_k3);
    sums->expm1 = sums->d + sums->k3;
    sums->expm1_squares = total(squares);
    sums->chi2 = sums->expm1_squares + 2 * sums->expm1; /* ρ² − 1 = (ρ − 1)² + 2 (ρ − 1) */
    sums->difference = total(sum_difference);
    sums->most_difference = largest(most_difference);
}

static void sum_regular(Block *block, Mismatch *sums, float *weights, int destination) {
#define SUM(nearest, where) sum_regular_as(block, sums, weights, nearest, where); break
    switch (2 * destination + block->nearest) {
        case 2 * TO_NOBODY: SUM(0, TO_NOBODY);
        case 2 * TO_NOBODY + 1: SUM(1, TO_NOBODY);
        case 2 * TO_MEMORY: SUM(0, TO_MEMORY);
        case 2 * TO_MEMORY + 1: SUM(1, TO_MEMORY);
        case 2 * PAST_CACHE: SUM(0, PAST_CACHE);
        case 2 * PAST_CACHE + 1: SUM(1, PAST_CACHE);
        default: SUM(0, TO_BLOCK);
    }
}

/* The rows of a quiet block. Its weights are ratios, and every token is kept. */
static void pass_quiet(Block *block, Mismatch *sums, float *weights, Sequence *s, Rows *rows) {
    const Job *job = block->job;
    double n = block->tokens;
    sum_regular(block, sums, weights, !weights ? TO_NOBODY : can_pass_cache(weights) ? PAST_CACHE : TO_MEMORY);
    sums->m2 = spread(n, sums->d, sums->squares);
    add_mismatch(block, sums, s, rows);
    if (job->needs_k2) s->k2 += sums->squares / 2;
    s->kept += n;
    if (!weights) return;
    double weight = n + sums->expm1, m2 = spread(n, sums->expm1, sums->expm1_squares);
    add_moments(&rows->moments[MOMENTS_weight_raw], n, weight / n, m2);
    add_moments(&rows->moments[MOMENTS_weight], n, weight / n, m2);
    s->raw_weight += weight;
    s->weight += weight;
    s->kept_weight += weight;
}

#endif
