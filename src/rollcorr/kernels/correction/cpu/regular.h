/* Blocks that are valid throughout, with log-probs of ordinary size and small log-ratios. That is most of them when the
   policies are close. Nothing has to be masked, capped or summed twice there, and one polynomial gives e^d.

   A *quiet* block is one where no bound on a token acts either. One loop does all that it needs: its weights go straight
   to memory, and nothing is kept. The same loop tells whether the block was quiet; if not, it is read again. What the next
   block of the sequence is taken for follows from that, so the results of a sequence depend on nothing but its tokens. */

#ifndef ROLLCORR_REGULAR_H
#define ROLLCORR_REGULAR_H

#include "blocks.h"

#define QUIET_REACH 1.0    /* nats; largest |d| of a quiet block */
#define REGULAR_REACH 2.75 /* nats; largest |d| of a regular block */
#define ORDINARY 15.0      /* nats; largest |log μ| of both: few tokens are sampled at e^-15 */
#define ANCHOR (48.0f * VECTORS) /* of exact sums: half as large again as a power of two, so that no lane leaves its binade */

enum { TO_NOBODY, TO_MEMORY, PAST_CACHE, TO_BLOCK }; /* where weights go; the last keeps all vectors, of regular blocks */

/* Everything that is summed over such a block. */
INLINE void sum_as(Block *block, Mismatch *sums, float *weights, const int destination) {
    const float *train_at = block->train, *rollout_at = block->rollout;
    const int vectors = block->vectors;
    Exact train_sum = {splat(ANCHOR), {0}}, rollout_sum = train_sum;
    vf sum_magnitude = {0}, squares = {0}, sum_k3 = {0}, expm1_squares = {0}, sum_difference = {0}, most_difference = {0};
    vf least = splat(INFINITY), most = -least, farthest = {0};
    for (int v = 0; v < vectors; v++) {
        fetch_ahead(train_at + v * LANES);
        fetch_ahead(rollout_at + v * LANES);
        vf train = load(train_at + v * LANES), rollout = load(rollout_at + v * LANES), d = train - rollout;
        Exponential e = destination == TO_BLOCK ? exponential_regular(d) : exponential_quiet(d);
        vf difference = exp_of_ordinary(rollout) * magnitude(e.expm1); /* |π − μ| = μ |ρ − 1| */
        if (destination == TO_MEMORY) store(weights + v * LANES, e.exp);
        if (destination == PAST_CACHE) store_past_cache(weights + v * LANES, e.exp);
        if (destination == TO_BLOCK) {
            block->d[v] = d;
            block->rho[v] = e.exp;
            block->expm1[v] = e.expm1;
            block->k3[v] = e.k3;
        }
        add_exactly(&train_sum, train);
        add_exactly(&rollout_sum, rollout);
        sum_magnitude += magnitude(d);
        squares += d * d;
        sum_k3 += e.k3;
        expm1_squares += e.expm1 * e.expm1;
        sum_difference += difference;
        most_difference = larger(most_difference, difference);
        least = smaller(least, d);
        most = larger(most, d);
        farthest = larger(farthest, magnitude(rollout));
    }
    double train_high = total(train_sum.high - ANCHOR), rollout_high = total(rollout_sum.high - ANCHOR);
    double train_low = total(train_sum.low), rollout_low = total(rollout_sum.low);
    v4f most_of = largest_of_each(-least, most, farthest, most_difference);
    sums->train = train_high + train_low;
    sums->rollout = rollout_high + rollout_low;
    sums->d = (train_high - rollout_high) + (train_low - rollout_low); /* exponentiated, so it must not be rounded */
    sums->magnitude = total(sum_magnitude);
    sums->squares = total(squares);
    sums->k3 = total(sum_k3);
    sums->expm1 = sums->d + sums->k3;
    sums->expm1_squares = total(expm1_squares);
    sums->chi2 = sums->expm1_squares + 2 * sums->expm1; /* ρ² − 1 = (ρ − 1)² + 2 (ρ − 1) */
    sums->difference = total(sum_difference);
    sums->log_ratio = (Extremes){-(double)most_of[0], (double)most_of[1]};
    sums->farthest = (double)most_of[2];
    sums->most_difference = (double)most_of[3];
}

/* Whether a block is regular; an upper limit on |d|. Extremes pass over a NaN, but Σ d² is NaN too. */
static inline int is_within(const Mismatch *sums, double reach) {
    return sums->squares < HOLDS && sums->log_ratio.min >= -reach && sums->log_ratio.max <= reach &&
           sums->farthest <= ORDINARY;
}

/* Whether nothing is decided about single tokens, and sums of squares say how far values spread: the mean is not large
   beside them. Then Σ (x − mean)² = Σ x² − n mean² cancels no digits, neither of d nor of ρ − 1. */
static inline int is_quiet(const Job *job, const Mismatch *sums, double n) {
    double least = sums->log_ratio.min, most = sums->log_ratio.max;
    return is_within(sums, QUIET_REACH) && least >= job->quiet.lower && most <= job->quiet.upper &&
           4 * sums->d * sums->d <= n * sums->squares;
}

enum { EXPECT_QUIET, EXPECT_REGULAR, EXPECT_OTHER };

static void expect_first(Block *block) {
    const Band quiet = block->job->quiet;
    block->expected = quiet.lower <= quiet.upper ? EXPECT_QUIET : EXPECT_REGULAR;
}

/* Sum a block that is valid throughout as the quiet or regular one that it is expected to be. If it is neither,
   its extremes and Σ d² say so, and nothing else of the sums is read. */
static void sum_expected(Block *block, Mismatch *sums, float *weights) {
    block->summed = block->expected == EXPECT_REGULAR;
    if (block->summed) sum_as(block, sums, weights, TO_BLOCK);
    else if (!weights) sum_as(block, sums, weights, TO_NOBODY);
    else if (can_pass_cache(weights)) sum_as(block, sums, weights, PAST_CACHE);
    else sum_as(block, sums, weights, TO_MEMORY);
}

/* The rows of a quiet block; `weighing` if there are weights, which are its ratios. */
static void add_quiet(const Block *block, Mismatch *sums, int weighing, Sequence *s, Rows *rows) {
    const Job *job = block->job;
    double n = block->tokens;
    sums->m2 = spread(n, sums->d, sums->squares);
    add_mismatch(block, sums, s, rows);
    if (job->needs_k2) s->k2 += sums->squares / 2;
    s->kept += n;
    if (!weighing) return;
    if (job->mode == ICEPOP)
        add_extremes(&rows->extremes[EXTREMES_weight], exp(sums->log_ratio.min), exp(sums->log_ratio.max));
    double weight = n + sums->expm1, m2 = spread(n, sums->expm1, sums->expm1_squares);
    add_moments(&rows->moments[MOMENTS_weight_raw], n, weight / n, m2);
    add_moments(&rows->moments[MOMENTS_weight], n, weight / n, m2);
    s->raw_weight += weight;
    s->weight += weight;
    s->kept_weight += weight;
}

#endif
