/* Vectors of float32 and int32 whose width follows from the compiler's flags, and the exponentials built on them. */

#ifndef ROLLCORR_VECTORS_H
#define ROLLCORR_VECTORS_H

#include <math.h>
#include <stdint.h>
#include <string.h>

#if defined(__x86_64__)
#include <immintrin.h>
#endif

#if defined(__AVX512F__)
#define LANES 16
#elif defined(__AVX2__)
#define LANES 8
#else
#define LANES 4
#endif

typedef float vf __attribute__((vector_size(4 * LANES), may_alias));
typedef int32_t vi __attribute__((vector_size(4 * LANES), may_alias)); /* as a mask: -1 or 0 in each lane */
typedef uint32_t vu __attribute__((vector_size(4 * LANES), may_alias));

static inline vf splat(float x) { return x - (vf){0}; }
static inline vf where(vi mask, vf x) { return (vf)(mask & (vi)x); }
static inline vf choose(vi mask, vf x, vf otherwise) { return (vf)((mask & (vi)x) | (~mask & (vi)otherwise)); }
static inline vf magnitude(vf x) { return (vf)((vi)x & 0x7fffffff); }
static inline vf sign_of(vf x) { return (vf)(((vi)x & INT32_MIN) | 0x3f800000); } /* 1 or −1 */

static inline vf load(const float *x) {
    vf out;
    memcpy(&out, x, sizeof out);
    return out;
}

static inline void store(float *out, vf x) { memcpy(out, &x, sizeof x); }

/* Past the cache, which spares reading the buffer first. Only where it helps, and to the address of a whole vector. */
#if defined(__AVX512F__)
static inline int can_pass_cache(const float *out) { return (uintptr_t)out % sizeof(vf) == 0; }
static inline void store_past_cache(float *out, vf x) { _mm512_stream_ps(out, (__m512)x); }
#define CUTS_VECTORS 1 /* vectors for other addresses are cut anew where cache lines begin */
/* The last lanes of one vector, then the first of the next; `from` counts from the lane where the result begins. */
static inline vf cut(vf x, vf next, vi from) {
    return (vf)_mm512_permutex2var_ps((__m512)x, (__m512i)from, (__m512)next);
}
static inline void store_first(float *out, vf x, int lanes) {
    _mm512_mask_storeu_ps(out, (__mmask16)((1 << lanes) - 1), (__m512)x);
}
#else
#define CUTS_VECTORS 0
static inline vf cut(vf x, vf next, vi from) { return 0 * next[from[0] % LANES] + x; }
static inline void store_first(float *out, vf x, int lanes) { memcpy(out, &x, (size_t)lanes * sizeof *out); }
static inline int can_pass_cache(const float *out) { return 0 * (out != 0); }
static inline void store_past_cache(float *out, vf x) { store(out, x); }
#endif

/* `farther` keeps the larger magnitude, in a vector without signs. The bits of such numbers are in their order, so AVX2
   compares them as integers while the processor adds floats elsewhere. */
#if defined(__AVX512F__)
static inline vf smaller(vf a, vf b) { return (vf)_mm512_min_ps((__m512)a, (__m512)b); }
static inline vf larger(vf a, vf b) { return (vf)_mm512_max_ps((__m512)a, (__m512)b); }
static inline vf farther(vf a, vf b) { return (vf)_mm512_range_ps((__m512)a, (__m512)b, 11); }
#elif defined(__AVX2__)
static inline vf smaller(vf a, vf b) { return (vf)_mm256_min_ps((__m256)a, (__m256)b); }
static inline vf larger(vf a, vf b) { return (vf)_mm256_max_ps((__m256)a, (__m256)b); }
static inline vf farther(vf a, vf b) { return (vf)_mm256_max_epi32((__m256i)a, (__m256i)magnitude(b)); }
#elif defined(__x86_64__)
static inline vf smaller(vf a, vf b) { return (vf)_mm_min_ps((__m128)a, (__m128)b); }
static inline vf larger(vf a, vf b) { return (vf)_mm_max_ps((__m128)a, (__m128)b); }
static inline vf farther(vf a, vf b) { return larger(a, magnitude(b)); }
#else
static inline vf smaller(vf a, vf b) { return choose(a < b, a, b); }
static inline vf larger(vf a, vf b) { return choose(a > b, a, b); }
static inline vf farther(vf a, vf b) { return larger(a, magnitude(b)); }
#endif

/* Whether memory holds the bits of a vector. */
static inline int same_bits(const void *memory, vi x) {
#if defined(__AVX512F__)
    return _mm512_cmpneq_epi32_mask(_mm512_loadu_si512(memory), (__m512i)x) == 0;
#elif defined(__AVX2__)
    return _mm256_movemask_epi8(_mm256_cmpeq_epi32(_mm256_loadu_si256(memory), (__m256i)x)) == -1;
#else
    return memcmp(memory, &x, sizeof x) == 0;
#endif
}

/* What rounding took from difference = a − b (Knuth): the two together are exact. */
static inline vf rounded_off(vf a, vf b, vf difference) {
    vf part = a - difference;
    return (part - b) + (a - (difference + part));
}

/* Reductions over the lanes, by quarters. */
typedef float v4f __attribute__((vector_size(16), may_alias));
typedef int32_t v4i __attribute__((vector_size(16), may_alias));
typedef double v4d __attribute__((vector_size(32), may_alias));

static inline v4f sum_of_quarters(vf x) {
    v4f part[LANES / 4];
    memcpy(part, &x, sizeof x);
    for (int i = 1; i < LANES / 4; i++) part[0] += part[i];
    return part[0];
}

static inline double total(vf x) {
    v4f part = sum_of_quarters(x);
    return ((double)part[0] + (double)part[1]) + ((double)part[2] + (double)part[3]);
}

#if defined(__AVX__)
#define AS_DOUBLES(x) ((v4d)_mm256_cvtps_pd((__m128)(x))) /* gcc goes by halves on its own */
#else
#define AS_DOUBLES(x) __builtin_convertvector(x, v4d)
#endif

/* Turn four rows of a 4 × 4 matrix into its columns. */
static inline void transpose(v4f row[4]) {
#if defined(__x86_64__)
    _MM_TRANSPOSE4_PS(*(__m128 *)&row[0], *(__m128 *)&row[1], *(__m128 *)&row[2], *(__m128 *)&row[3]);
#else
    for (int i = 0; i < 4; i++)
        for (int j = 0; j < i; j++) {
            float above = row[j][i];
            row[j][i] = row[i][j];
            row[i][j] = above;
        }
#endif
}

/* The totals of four vectors at once. */
static inline void totals_of_each(v4d *out, vf a, vf b, vf c, vf d) {
    v4f part[4] = {sum_of_quarters(a), sum_of_quarters(b), sum_of_quarters(c), sum_of_quarters(d)};
    transpose(part);
    *out = (AS_DOUBLES(part[0]) + AS_DOUBLES(part[1])) + (AS_DOUBLES(part[2]) + AS_DOUBLES(part[3]));
}

static inline double exact_total(vf x) {
    double sum = 0;
    for (int i = 0; i < LANES; i++) sum += (double)x[i];
    return sum;
}

static inline double count(vi minus_ones) {
    v4i part[LANES / 4];
    memcpy(part, &minus_ones, sizeof minus_ones);
    for (int i = 1; i < LANES / 4; i++) part[0] += part[i];
    return -(part[0][0] + part[0][1] + part[0][2] + part[0][3]);
}

#if defined(__x86_64__)
static inline v4f larger_of_four(v4f a, v4f b) { return (v4f)_mm_max_ps((__m128)a, (__m128)b); }
#else
static inline v4f larger_of_four(v4f a, v4f b) { return (v4f)(((a > b) & (v4i)a) | (~(a > b) & (v4i)b)); }
#endif

static inline v4f larger_quarter(vf x) {
    v4f part[LANES / 4];
    memcpy(part, &x, sizeof x);
    for (int i = 1; i < LANES / 4; i++) part[0] = larger_of_four(part[0], part[i]);
    return part[0];
}

static inline double smallest(vf x) {
    v4f part[LANES / 4];
    memcpy(part, &x, sizeof x);
    for (int i = 1; i < LANES / 4; i++) {
        v4i less = part[i] < part[0];
        part[0] = (v4f)((less & (v4i)part[i]) | (~less & (v4i)part[0]));
    }
    float a = part[0][0] < part[0][1] ? part[0][0] : part[0][1], b = part[0][2] < part[0][3] ? part[0][2] : part[0][3];
    return (double)(a < b ? a : b);
}

static inline double largest(vf x) { return -smallest(-x); }

/* The largest lanes of four vectors at once. */
static inline v4f largest_of_each(vf a, vf b, vf c, vf d) {
    v4f part[4] = {larger_quarter(a), larger_quarter(b), larger_quarter(c), larger_quarter(d)};
    transpose(part);
    return larger_of_four(larger_of_four(part[0], part[1]), larger_of_four(part[2], part[3]));
}

/* A sum in float32 with what rounding took from it (Dekker). It starts at an anchor that is larger than the whole sum, so
   that the high part keeps one exponent; less the anchor, the two together are good to 1e-9 of what was added. */
typedef struct {
    vf high, low;
} Exact;

static inline void add_exactly(Exact *sum, vf x) {
    vf before = sum->high;
    sum->high += x;
    sum->low += x - (sum->high - before);
}

/* e^r − 1 − r = r² (1/2 + r/6 + …) for |r| <= 0.35: to r^7, so within 1e-7 of itself. */
static inline vf tail(vf r) {
    vf q = splat(1.0f / 5040) * r + 1.0f / 720;
    q = q * r + 1.0f / 120;
    q = q * r + 1.0f / 24;
    q = q * r + 1.0f / 6;
    return r * r * (q * r + 0.5f);
}

typedef struct { /* x = n ln 2 + r with |r| < 0.35; scale = 2^n */
    vf n, r, scale;
} Reduced;

static inline Reduced reduce(vf x) {
    const vf round = splat(12582912.0f); /* 1.5 · 2^23: adding it rounds to an integer, kept in the low bits */
    vf shifted = x * 1.44269504f + round, n = shifted - round;
    return (Reduced){n, x - n * 0.693359375f - n * -2.12194440e-4f, (vf)(((vu)shifted << 23) + 0x3f800000u)};
}

typedef struct {
    vf exp, expm1, k3;
} Exponential;

/* e^x, e^x − 1 and e^x − 1 − x for |x| <= 87 without cancellation. With t = e^r − 1 − r they are 2^n (r + t) + 2^n,
   2^n (r + t) + (2^n − 1) and 2^n t + (2^n − 1)(1 + r) − n ln 2. */
static inline Exponential exponential(vf x) {
    Reduced e = reduce(x);
    vf t = tail(e.r), less = e.scale - 1.0f, grown = e.scale * (e.r + t);
    return (Exponential){grown + e.scale, grown + less, e.scale * t + (less * (1.0f + e.r) - e.n * 0.693147181f)};
}

/* The same for |x| <= 1, where (e^x − 1 − x) / x² is the polynomial with the least relative error, 9e-8. */
static inline Exponential exponential_quiet(vf x) {
    vf square = x * x, high = square * 2.49608154e-5f + (x * 2.03254852e-4f + 1.38913353e-3f);
    vf middle = x * 8.33093047e-3f + 0.0416665156f, low = x * 0.166666962f + 0.5f;
    vf k3 = square * (square * (square * high + middle) + low), expm1 = x + k3;
    return (Exponential){expm1 + 1.0f, expm1, k3};
}

/* The same for |x| <= 2.75, by way of h = e^½x − 1: e^x = (1 + h)². The polynomial is (e^½x − 1 − ½x) / x², to 6e-8. */
static inline Exponential exponential_regular(vf x) {
    vf s = splat(5.4314397e-9f) * x + 1.00828295e-7f;
    s = s * x + 1.5509844e-6f;
    s = s * x + 2.1684224e-5f;
    s = s * x + 2.604117e-4f;
    s = s * x + 2.6041877e-3f;
    s = s * x + 0.020833338f;
    s = s * x + 0.125f;
    vf half_tail = x * x * s, h = x * 0.5f + half_tail, k3 = h * h + (half_tail + half_tail), root = h + 1.0f;
    return (Exponential){root * root, x + k3, k3};
}

/* e^x for |x| <= 15, to 3e-7 of itself: 2^f from the polynomial with the least relative error, |f| <= 1/2, and 2^n. */
static inline vf exp_of_ordinary(vf x) {
    const vf round = splat(12582912.0f);
    vf shifted = x * 1.44269504f + round, f = x * 1.44269504f - (shifted - round);
    vf p = splat(1.3276472e-3f) * f + 9.67554148e-3f;
    p = p * f + 0.0555071327f;
    p = p * f + 0.240221197f;
    p = p * f + 0.693146967f;
    p = p * f + 1.00000007f;
    return (vf)((vu)p + ((vu)shifted << 23));
}

/* e^x alone, for a probability. */
static inline vf exp_of(vf x) {
    Reduced e = reduce(smaller(larger(x, splat(-87.0f)), splat(87.0f)));
    vf q = splat(1.0f / 720) * e.r + 1.0f / 120;
    q = q * e.r + 1.0f / 24;
    q = q * e.r + 1.0f / 6;
    q = q * e.r + 0.5f;
    q = q * e.r + 1.0f;
    return e.scale * (q * e.r + 1.0f);
}

#endif
