/* Tiles of a sequence's log-ratios: a thread's memory for them, how they are turned, and the sums of their segments. */

#ifndef ROLLCORR_TILES_H
#define ROLLCORR_TILES_H

#include "tokens.h"
#include "turning.h"

#define STEP (HALF > 4 ? HALF : 4) /* lengths of segments are multiples */
#define NEAR 1.0f                  /* nats; largest |d| and |sum| of a segment in a near tile */

typedef struct { /* a thread's memory, with room for the longest sequence */
    double powers[BLOCK / LANES + 1]; /* of λ */
    float near_powers[BLOCK / LANES + 1];
    double *turned;   /* d, tile by tile */
    double *earlier;  /* of each segment: Σ λ^(distance to its end) d */
    double *later;    /* of each segment: Σ λ^(distance to its start) d, then ℓ's part from the segments after it */
    float *train, *rollout, *weights; /* of sequences that are not one run of float32 tokens */
    uint8_t *counted, *near; /* of a token; of a tile, if its d are turned in float32 */
} Workspace;

static int64_t turned_room(int64_t tokens) { return (tokens + LANES * STEP + 7) / 8 * 8; }
static int64_t segment_room(int64_t tokens) { return (tokens / BLOCK + 1) * LANES; }

/* Bytes of a workspace for sequences of up to so many tokens: a multiple of 64. */
static int64_t workspace_size(int64_t tokens) {
    int64_t doubles = turned_room(tokens) + 2 * segment_room(tokens), floats = 3 * tokens;
    int64_t bytes = tokens + tokens / BLOCK + 1;
    return (doubles * (int64_t)sizeof(double) + floats * (int64_t)sizeof(float) + bytes + 63) / 64 * 64;
}

static void set_up(Workspace *space, char *memory, int64_t tokens, double decay) {
    space->turned = (double *)(void *)memory;
    space->earlier = space->turned + turned_room(tokens);
    space->later = space->earlier + segment_room(tokens);
    space->train = (float *)(space->later + segment_room(tokens));
    space->rollout = space->train + tokens;
    space->weights = space->rollout + tokens;
    space->counted = (uint8_t *)(space->weights + tokens);
    space->near = space->counted + tokens;
    space->powers[0] = space->near_powers[0] = 1;
    for (int k = 0; k < BLOCK / LANES; k++) {
        space->powers[k + 1] = space->powers[k] * decay;
        space->near_powers[k + 1] = (float)space->powers[k + 1];
    }
}

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

/* The same for a full tile in float32, where log-ratios are small; returns 0 where they are not. */
static int turn_near_tile(const float *powers, const float *train, const float *rollout, float *turned, double *earlier,
                          double *later) {
    const int steps = BLOCK / LANES;
    const vf decay = splat(powers[1]);
    vf before = {0}, after = {0}, most = {0};
    for (int k = 0; k < steps; k += LANES) {
        vf d[LANES];
#pragma GCC unroll 16
        for (int i = 0; i < LANES; i++) d[i] = load(train + i * steps + k) - load(rollout + i * steps + k);
        turn_floats(d);
#pragma GCC unroll 16
        for (int i = 0; i < LANES; i++) {
            before = decay * before + d[i];
            after += powers[k + i] * d[i];
            most = farther(most, d[i]);
            store(turned + (k + i) * LANES, d[i]);
        }
    }
    if (!(largest(farther(farther(most, before), after)) <= (double)NEAR)) return 0;
    store_doubles(earlier, low_doubles(before));
    store_doubles(earlier + HALF, high_doubles(before));
    store_doubles(later, low_doubles(after));
    store_doubles(later + HALF, high_doubles(after));
    return 1;
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
