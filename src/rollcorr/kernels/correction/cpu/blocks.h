/* A block: up to 512 tokens of one sequence, what is known about them, and what they add to the statistics. One that may
   be quiet (regular.h) may be long, because nothing of it is kept. */

#ifndef ROLLCORR_BLOCKS_H
#define ROLLCORR_BLOCKS_H

#include "sequences.h"
#include "vectors.h"

#define BLOCK 512
#define LONG_BLOCK (128 * LANES) /* float32 sums of that many numbers in a lane are good to 1e-6 */
#define CALM 4 /* quiet blocks in a row, or one at the start, after which a long one is tried: if it fails, it was read for nothing */
#define VECTORS (BLOCK / LANES)
#define EACH_VECTOR(v, block) for (int v = 0; v < (block)->vectors; v++)
#define INLINE static inline __attribute__((always_inline))

#define FLOAT_CAP ((float)CAP)
#define EXPM1_OF_CAP 485165194.4f
#define EXP_DOMAIN 87.0f /* nats; e^±87 is a normal float32 */
#define HOLDS 1e5        /* largest Σ |d| and |Σ log μ| of a block that float32 sums hold to what exp makes of them */
#define HOLDS_DIFFERENCE 1e20 /* the same for Σ |π − μ|, which e^87 bounds */
#define SHORTEST 64      /* tokens; a shorter run of equal mask values does not get a block of its own */

enum { REACH_CAP, REACH_FAR };

/* Σ d, what rounding took from it, Σ log μ, Σ d², Σ k3 and Σ (ρ − 1)²; then the sums that only become rows. */
enum { TOTAL_d, TOTAL_rest, TOTAL_rollout, TOTAL_squares, TOTAL_k3, TOTAL_expm1_squares, TOKEN_SUMS(AS_TOTAL) N_TOTALS };
#define FOURS ((N_TOTALS + 3) / 4)

typedef struct { /* totals of one block, or of all quiet ones of a sequence */
    union {
        v4d four[FOURS];
        double of[4 * FOURS];
    };
    v4f most; /* largest −d, d, |log μ|, |π − μ| */
} Totals;

typedef struct {
    const Job *job;
    int expected; /* what a block is taken for at first, after what the one before it in its sequence was */
    int calm;     /* quiet blocks since one that was not */
    int bad_mask; /* a value of the task's mask was negative or not finite */
    int64_t quiet_tokens;
    Totals quiet; /* of the sequence's quiet blocks so far */
    int tokens, vectors;
    const float *train, *rollout; /* readable to the end of the last vector */
    double n_valid, n_measured, n_zero, n_counted, n_missing;
    int plain;   /* every lane is measured: masks need no looking at */
    int regular; /* plain, and as regular.h says */
    int summed;  /* and its sums and vectors are there */
    int reach;   /* elsewhere: how far d goes: to CAP, or beyond */
    int wide;    /* float32 sums do not hold it */
    const vi *valid, *measured, *zero, *counted; /* classes of tokens: the arrays below, or EVERY and NONE */
    vi classes[4][VECTORS], kept[VECTORS];
    vf d[VECTORS], rho[VECTORS], expm1[VECTORS], k2[VECTORS], k3[VECTORS], weight[VECTORS], less_one[VECTORS];
    float train_copy[LONG_BLOCK], rollout_copy[LONG_BLOCK];
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

static void set_tokens(Block *block, int64_t tokens, int most) {
    block->tokens = tokens < most ? (int)tokens : most;
    block->vectors = (block->tokens + LANES - 1) / LANES;
}

/* How many bytes are like the first. Those that a later block begins with come from memory while the log-probs of this
   one are summed. */
static int leading_run(const uint8_t *mask, int tokens) {
    const vi like = (vi){0} + (int32_t)(mask[0] * 0x01010101u);
    int run = 0;
    for (; run + (int)sizeof like <= tokens; run += (int)sizeof like) {
        __builtin_prefetch((const void *)((uintptr_t)mask + (uintptr_t)(run + LONG_BLOCK)));
        if (!same_bits(mask + run, like)) break;
    }
    while (run < tokens && mask[run] == mask[0]) run++;
    return run;
}

/* How many bytes at the end are 0. */
static int trailing_zeros(const uint8_t *mask, int tokens) {
    uint64_t word;
    int end = tokens;
    for (; end >= 8; end -= 8) {
        memcpy(&word, mask + end - 8, sizeof word);
        if (word != 0) break;
    }
    while (end > 0 && mask[end - 1] == 0) end--;
    return tokens - end;
}

enum { PADDING, VALID, MIXED };

/* End a block where its mask changes, if a long run of valid tokens or of others comes before; tell which it is. Valid
   tokens are whole vectors then. */
static int end_at_change(Block *block, const uint8_t *mask) {
    int tokens = block->tokens, value = mask[0], run = leading_run(mask, tokens);
    if (value == 1) run -= run % LANES;
    if (value > 1 || (run < tokens && run < SHORTEST)) {
        if (tokens > BLOCK) tokens = BLOCK;
        set_tokens(block, tokens - trailing_zeros(mask, tokens), BLOCK); /* what follows belongs to the padding */
        return MIXED;
    }
    set_tokens(block, run, LONG_BLOCK);
    return value == 1 ? VALID : PADDING;
}

typedef uint32_t __attribute__((may_alias)) float_bits;

/* Spread a mask over the lanes of `valid`, -1 or 0; return how many tokens are valid. A value that is negative or not
   finite sets a sign bit, and so does -0: Python looks again. */
static int read_mask(const char *row, int type, int64_t start, Block *block) {
    int32_t *valid = (int32_t *)block->classes[0], found = 0;
    int tokens = block->tokens, lanes = block->vectors * LANES;
    int64_t signs = 0;
#define READ(kind, is_set, sign)                      \
    {                                                 \
        const kind *mask = (const kind *)row + start; \
        for (int i = 0; i < tokens; i++) {            \
            kind x = mask[i];                         \
            valid[i] = -(int32_t)(is_set);            \
            signs |= (sign);                          \
        }                                             \
        break;                                        \
    }
    switch (type) {
        case MASK_INT32: READ(int32_t, x != 0, x)
        case MASK_INT64: READ(int64_t, x != 0, x)
        case MASK_FLOAT32: READ(float_bits, x << 1 != 0, (int32_t)(x | (x + 0x00800000u)))
        default: READ(uint8_t, x != 0, 0)
    }
    block->bad_mask |= signs < 0;
    for (int i = tokens; i < lanes; i++) valid[i] = 0;
    for (int i = 0; i < lanes; i++) found -= valid[i];
    block->valid = block->classes[0];
    block->n_valid = found;
    return found;
}

/* Every lane is measured. */
static void set_plain(Block *block) {
    block->plain = 1;
    block->wide = 0;
    block->valid = block->measured = block->counted = (const vi *)EVERY;
    block->zero = (const vi *)NONE;
    block->n_valid = block->n_measured = block->n_counted = block->tokens;
    block->n_zero = block->n_missing = 0;
}

/* Have the next block come from memory during this one's arithmetic. Past the end of the data it does nothing. */
static inline void fetch_ahead(const float *x) { __builtin_prefetch((const void *)((uintptr_t)x + BLOCK * sizeof *x)); }

typedef struct { /* sums of one block that go to its sequence or to the batch */
    double d, squares, m2, train, rollout, expm1, expm1_squares, k3, chi2, most_difference;
    TOKEN_SUMS(AS_FIELD)
    Extremes log_ratio;
} Mismatch;

/* Σ (x − mean)² of n values from Σ x and Σ x². */
static inline double spread(double n, double sum, double squares) {
    double m2 = squares - sum * sum / n;
    return m2 > 0 ? m2 : 0;
}

/* How many ratios lie more than 10 % from 1. Most blocks have none, which the range of d tells. */
static void count_ten_percent(const Block *block, Extremes range, Rows *rows) {
    const float lower = block->job->ten_percent.lower, upper = block->job->ten_percent.upper;
    if (range.min >= lower && range.max <= upper) return;
    vi found = {0};
    EACH_VECTOR(v, block) {
        vf d; /* a quiet block keeps none, and may have more than fit */
        if (block->plain) d = load(block->train + v * LANES) - load(block->rollout + v * LANES);
        else d = block->d[v];
        found += (d < lower) | (d > upper);
    }
    rows->sums[SUM_ratio_outside_10pct] += count(found);
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

/* How far apart the policies are, whatever is done about it. */
static void add_mismatch(const Block *block, const Mismatch *sums, Sequence *s, Rows *rows) {
    double n = block->n_measured;
    s->valid += block->n_valid;
    s->measured += n;
    s->zero += block->n_zero;
    s->log_ratio += sums->d;
    s->train += sums->train;
    s->rollout += sums->rollout;
    s->k3 += sums->k3;
    add_extremes(&s->range, sums->log_ratio.min, sums->log_ratio.max);
    if (n > 0) add_moments(&rows->moments[MOMENTS_log_ratio], n, sums->d / n, sums->m2);
    rows->sums[SUM_chi2_token] += sums->chi2;
#define ADD_TO_ROW(name, ...) rows->sums[SUM_##name] += sums->name;
    TOKEN_SUMS(ADD_TO_ROW)
    add_extremes(&rows->extremes[EXTREMES_prob_diff_abs], 0, sums->most_difference); /* no metric reads the minimum */
}

#endif
