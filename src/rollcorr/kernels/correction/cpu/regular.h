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
#define ANCHOR 12288.0f    /* of exact sums: 1.5 · 2^13 */
_Static_assert((ORDINARY + REGULAR_REACH) * LONG_BLOCK / LANES < 4096, "a sum would leave the binade of its anchor");
_Static_assert(LONG_BLOCK >= BLOCK, "no block is longer than a long one");

enum { TO_NOBODY, TO_MEMORY, PAST_CACHE, TO_BLOCK }; /* where weights go; the last keeps all vectors, of regular blocks */

/* Everything that is summed over such a block. */
INLINE void sum_as(Block *block, Totals *totals, float *weights, const int destination) {
    const float *train_at = block->train, *rollout_at = block->rollout;
    const int vectors = block->vectors;
    Exact train_sum = {splat(ANCHOR), {0}}, rollout_sum = train_sum;
    vf sum_squares = {0}, sum_k3 = {0}, expm1_squares = {0}, most_difference = {0};
    TOKEN_SUMS(AS_VECTOR)
    vf least = splat(INFINITY), most = -least, farthest = {0};
    for (int v = 0; v < vectors; v++) {
        fetch_ahead(train_at + v * LANES);
        fetch_ahead(rollout_at + v * LANES);
        vf train = load(train_at + v * LANES), rollout = load(rollout_at + v * LANES), d = train - rollout;
        vf probability = exp_of_ordinary(rollout);
        Exponential e = destination == TO_BLOCK ? exponential_regular(d) : exponential_quiet(d);
        vf gap = probability * e.expm1, sign = sign_of(d); /* π − μ = μ (ρ − 1), which has the sign of d */
        vf size = d * sign, difference = gap * sign;
        if (destination == TO_MEMORY) store(weights + v * LANES, e.exp);
        if (destination == PAST_CACHE) store_past_cache(weights + v * LANES, e.exp);
        if (destination == TO_BLOCK) {
            block->d[v] = d;
            block->rho[v] = e.exp;
            block->expm1[v] = e.expm1;
            block->k3[v] = e.k3;
        }
        vf square = d * d;
        add_exactly(&train_sum, train);
        add_exactly(&rollout_sum, rollout);
        sum_squares += square;
        sum_k3 += e.k3;
        expm1_squares += e.expm1 * e.expm1;
        TOKEN_SUMS(ADD_VECTOR)
        most_difference = farther(most_difference, gap);
        least = smaller(least, d);
        most = larger(most, d);
        farthest = farther(farthest, rollout);
    }

    /* Σ d is exponentiated: it stays good to 1e-9, though each d is rounded to 1e-8. The high parts differ exactly. */
    vf d_high = train_sum.high - rollout_sum.high, d_low = train_sum.low - rollout_sum.low;
    vf sum_rollout = (rollout_sum.high - ANCHOR) + rollout_sum.low;
#define AT_TOTAL(name, ...) [TOTAL_##name] = sum_of_##name,
    vf sums[4 * FOURS] = {d_high, d_low, sum_rollout, sum_squares, sum_k3, expm1_squares, TOKEN_SUMS(AT_TOTAL)};
#pragma GCC unroll 16
    for (int i = 0; i < FOURS; i++) {
        const vf *four = sums + 4 * i;
        totals_of_each(&totals->four[i], four[0], four[1], four[2], four[3]);
    }
    totals->most = largest_of_each(-least, most, farthest, most_difference);
}

static inline double sum_of_d(const Totals *totals) { return totals->of[TOTAL_d] + totals->of[TOTAL_rest]; }

static Extremes range_of(const Totals *totals) { return (Extremes){-(double)totals->most[0], (double)totals->most[1]}; }

/* The same by name, and what follows from it. */
static void name_sums(const Totals *totals, Mismatch *sums) {
    sums->d = sum_of_d(totals);
    sums->squares = totals->of[TOTAL_squares];
    sums->k3 = totals->of[TOTAL_k3];
    sums->expm1 = sums->d + sums->k3;
    sums->expm1_squares = totals->of[TOTAL_expm1_squares];
    sums->chi2 = sums->expm1_squares + 2 * sums->expm1; /* ρ² − 1 = (ρ − 1)² + 2 (ρ − 1) */
#define NAME_TOTAL(name, ...) sums->name = totals->of[TOTAL_##name];
    TOKEN_SUMS(NAME_TOTAL)
    sums->rollout = totals->of[TOTAL_rollout];
    sums->train = sums->rollout + sums->d;
    sums->log_ratio = range_of(totals);
    sums->most_difference = (double)totals->most[3];
}

/* Whether a block is regular; an upper limit on |d|. Extremes may pass over a NaN, but Σ d² is NaN too. */
static inline int is_within(const Totals *totals, float reach) {
    v4f most = totals->most;
    return totals->of[TOTAL_squares] < HOLDS && most[0] <= reach && most[1] <= reach && most[2] <= ORDINARY;
}

/* Whether nothing is decided about single tokens, and sums of squares say how far values spread: the mean is not large
   beside them. Then Σ (x − mean)² = Σ x² − n mean² cancels no digits, neither of d nor of ρ − 1. What holds for some
   blocks holds for all of them together (Cauchy and Schwarz). */
static inline int is_quiet(const Job *job, const Totals *totals, double n) {
    double d = sum_of_d(totals);
    return is_within(totals, QUIET_REACH) && -totals->most[0] >= job->quiet.lower &&
           totals->most[1] <= job->quiet.upper && 4 * d * d <= n * totals->of[TOTAL_squares];
}

enum { EXPECT_QUIET, EXPECT_REGULAR, EXPECT_OTHER };

static void start_sequence(Block *block) {
    const Band quiet = block->job->quiet;
    block->expected = quiet.lower <= quiet.upper ? EXPECT_QUIET : EXPECT_REGULAR;
    block->calm = CALM - 1;
    block->quiet_tokens = 0;
    block->quiet = (Totals){.most = {-INFINITY, -INFINITY}};
}

/* Sum a block that is valid throughout as the quiet or regular one that it is expected to be. If it is neither,
   its extremes and Σ d² say so, and nothing else of the sums is read. */
static void sum_expected(Block *block, Totals *totals, float *weights) {
    block->summed = block->expected == EXPECT_REGULAR;
    if (block->summed) sum_as(block, totals, weights, TO_BLOCK);
    else if (!weights) sum_as(block, totals, weights, TO_NOBODY);
    else if (can_pass_cache(weights)) sum_as(block, totals, weights, PAST_CACHE);
    else sum_as(block, totals, weights, TO_MEMORY);
}

/* A quiet block joins those before it. Their rows are made once, at the end of the sequence. */
static void join_quiet(Block *block, const Totals *totals, Rows *rows) {
    block->calm++;
    block->quiet_tokens += block->tokens;
    for (int i = 0; i < FOURS; i++) block->quiet.four[i] += totals->four[i];
    block->quiet.most = larger_of_four(block->quiet.most, totals->most);
    count_ten_percent(block, range_of(totals), rows);
}

/* The rows of a sequence's quiet blocks; `weighing` if there are weights, which are the ratios. */
static void add_quiet(Block *block, int weighing, Sequence *s, Rows *rows) {
    const Job *job = block->job;
    double n = block->n_valid = block->n_measured = (double)block->quiet_tokens;
    Mismatch sums;
    if (n == 0) return;
    name_sums(&block->quiet, &sums);
    sums.m2 = spread(n, sums.d, sums.squares);
    block->n_zero = 0;
    add_mismatch(block, &sums, s, rows);
    if (job->needs_k2) s->k2 += sums.squares / 2;
    s->kept += n;
    if (!weighing) return;
    if (job->mode == ICEPOP)
        add_extremes(&rows->extremes[EXTREMES_weight], exp(sums.log_ratio.min), exp(sums.log_ratio.max));
    double weight = n + sums.expm1, m2 = spread(n, sums.expm1, sums.expm1_squares);
    add_moments(&rows->moments[MOMENTS_weight_raw], n, weight / n, m2);
    add_moments(&rows->moments[MOMENTS_weight], n, weight / n, m2);
    s->raw_weight += weight;
    s->weight += weight;
    s->kept_weight += weight;
}

#endif
