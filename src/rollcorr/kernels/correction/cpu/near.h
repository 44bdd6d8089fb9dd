/* Near tiles of a sequence: small log-ratios, whose sums float32 keeps good to 1e-6.

   Tokens are read in blocks of four vectors. Turned by fours, lane i of vector j has token j of segment i, and a segment
   has four tokens. Its own sums cost a step per token. The segments then pass sums on in log2(LANES) steps: each doubles
   the segments that a sum covers. Blocks pass theirs on in float64. */

#ifndef ROLLCORR_NEAR_H
#define ROLLCORR_NEAR_H

#include "tokens.h"
#include "turning.h"

#define LONGEST_NEAR 0.95 /* λ; float32 sums over more tokens are not good to 1e-6 */
#define NEAR_SUM 2.0f     /* nats; largest |sum| inside of a near tile */
#define FOUR (4 * LANES)  /* tokens of a block */
#define DOUBLINGS (LANES == 16 ? 4 : LANES == 8 ? 3 : 2)

enum { EARLIER, LATER, SIDES };

typedef struct { /* powers of λ, for each lane or for all, and whose sum a lane gets in each doubling */
    vf reached[SIDES], reach[SIDES][DOUBLINGS];
    vi others[SIDES], from[SIDES][DOUBLINGS]; /* others: lanes that get a sum at all */
    float token[5];
    double block;
} NearPowers;

typedef struct { /* sums of a tile as if it were alone: of each token, over its segment; of each segment, over the others
                    of its block; of each block, at its end and at its start */
    vf within[BLOCK / LANES], others[SIDES][BLOCK / FOUR];
    float of_block[SIDES][BLOCK / FOUR];
    int is_near;
} NearTile;

/* The segment of a lane after `turn_by_fours`, in the order of the tokens; segments have the lanes that this returns. */
static int segment_of(int lane) { return lane % 4 * (LANES / 4) + lane / 4; }
static int lane_of(int segment) { return segment % (LANES / 4) * 4 + segment / (LANES / 4); }

static void set_near_powers(NearPowers *near, double decay) {
    for (int i = 0; i < 5; i++) near->token[i] = (float)pow(decay, i);
    near->block = pow(decay, FOUR);
    for (int lane = 0; lane < LANES; lane++) {
        for (int side = 0; side < SIDES; side++) {
            int segment = segment_of(lane), before = side == EARLIER ? segment : LANES - 1 - segment;
            near->reached[side][lane] = (float)pow(decay, 4 * before);
            near->others[side][lane] = -(before > 0);
            for (int k = 0; k < DOUBLINGS; k++) {
                int from = segment + (side == EARLIER ? -1 : 1) * (1 << k);
                near->from[side][k][lane] = lane_of((from + LANES) % LANES);
                near->reach[side][k][lane] = before > 1 << k ? (float)pow(decay, 4 << k) : 0.0f;
            }
        }
    }
}

/* Lane i gets lane from[i]. */
static inline vf permute(vf x, vi from) {
#if defined(__AVX512F__)
    return (vf)_mm512_permutexvar_ps((__m512i)from, (__m512)x);
#elif defined(__AVX2__)
    return (vf)_mm256_permutevar8x32_ps((__m256)x, (__m256i)from);
#else
    vf out;
    for (int i = 0; i < LANES; i++) out[i] = x[from[i]];
    return out;
#endif
}

/* Turn squares of four numbers, one in each quarter of four vectors. Twice is nothing. */
static inline void turn_by_fours(vf row[4]) {
#if defined(__AVX512F__)
    typedef __m512d wide;
    __m512 a = _mm512_unpacklo_ps((__m512)row[0], (__m512)row[1]), b = _mm512_unpackhi_ps((__m512)row[0], (__m512)row[1]);
    __m512 c = _mm512_unpacklo_ps((__m512)row[2], (__m512)row[3]), d = _mm512_unpackhi_ps((__m512)row[2], (__m512)row[3]);
    row[0] = (vf)_mm512_unpacklo_pd((wide)a, (wide)c), row[1] = (vf)_mm512_unpackhi_pd((wide)a, (wide)c);
    row[2] = (vf)_mm512_unpacklo_pd((wide)b, (wide)d), row[3] = (vf)_mm512_unpackhi_pd((wide)b, (wide)d);
#elif defined(__AVX2__)
    typedef __m256d wide;
    __m256 a = _mm256_unpacklo_ps((__m256)row[0], (__m256)row[1]), b = _mm256_unpackhi_ps((__m256)row[0], (__m256)row[1]);
    __m256 c = _mm256_unpacklo_ps((__m256)row[2], (__m256)row[3]), d = _mm256_unpackhi_ps((__m256)row[2], (__m256)row[3]);
    row[0] = (vf)_mm256_unpacklo_pd((wide)a, (wide)c), row[1] = (vf)_mm256_unpackhi_pd((wide)a, (wide)c);
    row[2] = (vf)_mm256_unpacklo_pd((wide)b, (wide)d), row[3] = (vf)_mm256_unpackhi_pd((wide)b, (wide)d);
#else
    transpose((v4f *)row);
#endif
}

/* The sums that the segments of a block get from others, by what each one has. */
INLINE vf pass_on(const NearPowers *near, vf own, const int side) {
    vf sum = (vf)((vi)permute(own, near->from[side][0]) & near->others[side]);
#pragma GCC unroll 4
    for (int k = 0; k < DOUBLINGS; k++) sum += permute(sum, near->from[side][k]) * near->reach[side][k];
    return sum;
}

/* Sum a tile as if it were alone; `ahead` is the same tile of the next sequence. `is_bounded`: no sum can exceed NEAR_SUM. */
static void sum_near_tile(const NearPowers *powers, const float *train, const float *rollout, int tokens, const float *ahead[2],
                          int is_bounded, NearTile *tile) {
    const NearPowers own = *powers, *near = &own; /* in registers: the compiler cannot tell that a tile is no part of it */
    const vf decay = splat(near->token[1]), segment = splat(near->token[4]);
    const int blocks = tokens / FOUR;
    vf most = {0};

    /* Of each token: the sums over itself and earlier tokens of its segment, and over later ones. */
    for (int b = 0; b < blocks; b++) {
        vf d[4], rest, sum, *within = tile->within + 4 * b;
#pragma GCC unroll 4
        for (int j = 0; j < 4; j++) {
            int at = b * FOUR + j * LANES;
            __builtin_prefetch((const char *)ahead[0] + 4 * at, 0, 2);
            __builtin_prefetch((const char *)ahead[1] + 4 * at, 0, 2);
            d[j] = load(train + at) - load(rollout + at);
        }
        turn_by_fours(d);
        vf rests[4] = {[3] = d[3]};
#pragma GCC unroll 4
        for (int j = 2; j >= 0; j--) rests[j] = decay * rests[j + 1] + d[j];
        rest = within[0] = rests[0];
        sum = d[0];
#pragma GCC unroll 4
        for (int j = 1; j < 4; j++) {
            sum = decay * sum + d[j];
            within[j] = sum;
            if (j < 3) within[j] += decay * rests[j + 1];
        }
        vf earlier = pass_on(near, sum, EARLIER), later = pass_on(near, rest, LATER);
        if (!is_bounded) most = farther(farther(most, sum), rest);
        tile->of_block[EARLIER][b] = permute(segment * earlier + sum, (vi){0} + (LANES - 1))[0];
        tile->of_block[LATER][b] = (segment * later + rest)[0];
        tile->others[EARLIER][b] = earlier;
        tile->others[LATER][b] = later;
    }
    tile->is_near = largest(most) <= (double)NEAR_SUM;
}

/* Σ λ^(distance to its start) d of a tile. */
static double sum_of_near_tile(const NearPowers *near, const NearTile *tile, int tokens) {
    double sum = 0;
    for (int b = tokens / FOUR - 1; b >= 0; b--) sum = near->block * sum + (double)tile->of_block[LATER][b];
    return sum;
}

/* Weights where no bound acts: the range of ℓ, Σ (w − 1) and Σ (w − 1)². */
typedef struct {
    vf least, most, less_one, squares;
} Calm;

static inline Calm no_weights(void) { return (Calm){splat(INFINITY), splat(-INFINITY), {0}, {0}}; }

/* The weights of a vector of ℓ. */
INLINE vf add_to_calm(Calm *calm, vf log_weight) {
    Exponential e = exponential_quiet(log_weight);
    calm->less_one += e.expm1;
    calm->squares += e.expm1 * e.expm1;
    calm->least = smaller(calm->least, log_weight);
    calm->most = larger(calm->most, log_weight);
    return e.exp;
}

/* The same where only some are tokens. */
INLINE vf add_counted_to_calm(Calm *calm, vf log_weight, vi counted) {
    Exponential e = exponential_quiet(log_weight);
    vf expm1 = where(counted, e.expm1);
    calm->less_one += expm1;
    calm->squares += expm1 * expm1;
    calm->least = smaller(calm->least, choose(counted, log_weight, splat(INFINITY)));
    calm->most = larger(calm->most, choose(counted, log_weight, splat(-INFINITY)));
    return e.exp;
}

/* How weights reach memory; in the last of these, the last slots are no tokens. */
enum { THROUGH_CACHE, PAST_CACHE_WHOLE, PAST_CACHE_CUT, SOME_SLOTS };

/* Weights of a near tile, to memory; `before` and `after` are the sums over earlier and later tokens. Returns the largest
   |sum| that a segment gets. */
INLINE double weigh_near_tile(const NearPowers *powers, const NearTile *tile, int tokens, double before, double after, float *out,
                              int is_bounded, Calm *sums, const int way) {
    const int blocks = (tokens + FOUR - 1) / FOUR;
    float carry[SIDES][BLOCK / FOUR];
    const NearPowers own = *powers, *near = &own;
    vf most = {0};
    for (int b = 0; b < blocks; b++) {
        carry[EARLIER][b] = (float)before;
        before = near->block * before + (double)tile->of_block[EARLIER][b];
    }
    for (int b = blocks - 1; b >= 0; b--) {
        carry[LATER][b] = (float)after;
        after = near->block * after + (double)tile->of_block[LATER][b];
    }

    /* Lanes before the first cache line, where vectors are cut. */
    const int head = (int)((0 - (uintptr_t)out / sizeof *out) % LANES);
    vi from = {0};
    vf last = {0};
    vi slot = {0}; /* of each lane, before turning back */
    for (int lane = 0; lane < LANES; lane++) from[lane] = lane + head, slot[lane] = 4 * segment_of(lane);

    Calm calm = no_weights();
    for (int b = 0; b < blocks; b++) {
        vf earlier = splat(carry[EARLIER][b]) * near->reached[EARLIER] + tile->others[EARLIER][b];
        vf later = splat(carry[LATER][b]) * near->reached[LATER] + tile->others[LATER][b], weight[4];
        if (!is_bounded) most = farther(farther(most, earlier), later);
#pragma GCC unroll 4
        for (int j = 0; j < 4; j++) {
            vf log_weight = splat(near->token[j + 1]) * earlier + tile->within[4 * b + j];
            log_weight = splat(near->token[4 - j]) * later + log_weight;
            if (way == SOME_SLOTS) weight[j] = add_counted_to_calm(&calm, log_weight, slot + (b * FOUR + j) < tokens);
            else weight[j] = add_to_calm(&calm, log_weight);
        }
        turn_by_fours(weight);
#pragma GCC unroll 4
        for (int j = 0; j < 4; j++) {
            float *at = out + b * FOUR + j * LANES;
            if (way == PAST_CACHE_WHOLE) store_past_cache(at, weight[j]);
            else if (way != PAST_CACHE_CUT) store(at, weight[j]);
            else if (j > 0 || b > 0) store_past_cache(at - LANES + head, cut(last, weight[j], from));
            else store_first(at, weight[j], head);
            last = weight[j];
        }
    }
    if (way == PAST_CACHE_CUT) store_first(out + tokens - LANES + head, cut(last, last, from), LANES - head);
    *sums = calm;
    return largest(most);
}

#endif
