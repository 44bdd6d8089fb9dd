/* Tiles of a sequence's log-ratios: a thread's memory for them, how they are turned, and the sums of their segments. */

#ifndef ROLLCORR_TILES_H
#define ROLLCORR_TILES_H

#include "near.h"

#define STEP (HALF > 4 ? HALF : 4) /* lengths of segments are multiples */

typedef struct { /* of a sequence, where no bound acts: Σ (w − 1), Σ (w − 1)²; −ℓ and ℓ at most */
    double count;
    v4d sums;
    v4f ends;
} CalmTokens;

typedef struct { /* a thread's memory, with room for the longest sequence */
    NearPowers near;
    CalmTokens calm;
    int is_bounded; /* Σ λ^|k| of the largest |d| is below NEAR_SUM */
    double powers[BLOCK / LANES + 1]; /* of λ */
    double turned[BLOCK] __attribute__((aligned(64))); /* d of a tile */
    /* Of each segment: Σ λ^(distance to its end) d, then the sum over the tokens before. */
    double earlier[LANES] __attribute__((aligned(64)));
    double later[LANES] __attribute__((aligned(64))); /* Σ λ^(distance to its start) d, then the sum over the tokens after */
    NearTile tiles[2];
    double *after;                    /* of each tile: the sum over later tokens */
    float *train, *rollout, *weights; /* of sequences that are not one run of float32 tokens */
    uint8_t *counted;
} Workspace;

static int64_t tiles_room(int64_t tokens) { return tokens / BLOCK + 1; }

/* Bytes of a workspace for sequences of up to so many tokens: a multiple of 64. */
static int64_t workspace_size(int64_t tokens) {
    int64_t doubles = tiles_room(tokens), floats = 3 * tokens, bytes = tokens;
    return (doubles * (int64_t)sizeof(double) + floats * (int64_t)sizeof(float) + bytes + 63) / 64 * 64;
}

static void set_up(Workspace *space, char *memory, int64_t tokens, double decay) {
    space->after = (double *)(void *)memory;
    space->train = (float *)(space->after + tiles_room(tokens));
    space->rollout = space->train + tokens;
    space->weights = space->rollout + tokens;
    space->counted = (uint8_t *)(space->weights + tokens);
    space->powers[0] = 1;
    for (int k = 0; k < BLOCK / LANES; k++) space->powers[k + 1] = space->powers[k] * decay;
    set_near_powers(&space->near, decay);
}

/* Tokens of the next tile, and of the blocks that a near tile needs for them: only the last one is not full. */
static int tokens_of_tile(int64_t left) { return (int)(left < BLOCK ? left : BLOCK); }
static int slots_of_tile(int tokens) { return (tokens + FOUR - 1) / FOUR * FOUR; }

/* Tokens of a segment in the tile with so many tokens left: short sequences have short segments. */
static int steps_of(int64_t left) {
    if (left >= BLOCK) return BLOCK / LANES;
    return (int)((left + LANES * STEP - 1) / (LANES * STEP)) * STEP;
}

/* The tokens of a tile, in place if it is full, else copied: d is 0 after the last one. */
static const float *read_tile(const float *tokens, int64_t left, int slots, float *copy) {
    if (left >= slots) return tokens;
    memcpy(copy, tokens, (size_t)left * sizeof(float));
    memset(copy + left, 0, (size_t)(slots - left) * sizeof(float));
    return copy;
}

/* Turn d of a tile, and sum each segment as if it were alone. */
static void turn_tile(const double *powers, const float *train, const float *rollout, int steps, double *turned,
                      double *earlier, double *later) {
    const vd decay = splat_double(powers[1]);
    for (int half = 0; half < LANES; half += HALF) {
        vd before = {0}, after = {0};
        for (int k = 0; k < steps; k += HALF) {
            vd d[HALF];
#pragma GCC unroll 8
            for (int i = 0; i < HALF; i++) {
                int at = (half + i) * steps + k;
                d[i] = doubles(train + at) - doubles(rollout + at);
            }
            turn_doubles(d);
#pragma GCC unroll 8
            for (int i = 0; i < HALF; i++) {
                before = decay * before + d[i];
                after += powers[k + i] * d[i];
                store_doubles(turned + (k + i) * LANES + half, d[i]);
            }
        }
        store_doubles(earlier + half, before);
        store_doubles(later + half, after);
    }
}

/* Σ λ^(distance to its start) d of a tile. */
static double sum_tile(const double *powers, const float *train, const float *rollout, int slots) {
    const vd decay = splat_double(powers[HALF]);
    vd sum = {0};
    for (int k = slots - HALF; k >= 0; k -= HALF) sum = decay * sum + (doubles(train + k) - doubles(rollout + k));
    double found = 0;
    for (int i = HALF - 1; i >= 0; i--) found = powers[1] * found + sum[i];
    return found;
}

/* Pass sums on from segment to segment of a tile, in order: each gets that of the segments before it. Returns the sum that
   leaves the tile. */
static double pass_forward(double *sums, double power, double carry) {
    for (int i = 0; i < LANES; i++) {
        double own = sums[i];
        sums[i] = carry;
        carry = power * carry + own;
    }
    return carry;
}

static double pass_backward(double *sums, double power, double carry) {
    for (int i = LANES - 1; i >= 0; i--) {
        double own = sums[i];
        sums[i] = carry;
        carry = power * carry + own;
    }
    return carry;
}

#endif
