/* Vectors of float64, half as many as lanes of float32, and the turning of square blocks of numbers: rows to columns. */

#ifndef ROLLCORR_TURNING_H
#define ROLLCORR_TURNING_H

#include "vectors.h"

#define HALF (LANES / 2)

typedef double vd __attribute__((vector_size(8 * HALF), may_alias));
typedef float half_vf __attribute__((vector_size(4 * HALF), may_alias));

static inline vd splat_double(double x) { return x - (vd){0}; }
static inline vd load_doubles(const double *x) { return *(const vd *)x; } /* aligned */
static inline void store_doubles(double *out, vd x) { *(vd *)out = x; }

#if defined(__AVX512F__)
#define AS_WIDE(x) ((vd)_mm512_cvtps_pd((__m256)(x)))
#define AS_NARROW(x) ((half_vf)_mm512_cvtpd_ps((__m512d)(x)))
static inline vd limit(vd x, double bound) {
    __m512d high = _mm512_set1_pd(bound), low = _mm512_set1_pd(-bound);
    return (vd)_mm512_max_pd(_mm512_min_pd((__m512d)x, high), low);
}
#elif defined(__AVX2__)
#define AS_WIDE(x) ((vd)_mm256_cvtps_pd((__m128)(x)))
#define AS_NARROW(x) ((half_vf)_mm256_cvtpd_ps((__m256d)(x)))
static inline vd limit(vd x, double bound) {
    __m256d high = _mm256_set1_pd(bound), low = _mm256_set1_pd(-bound);
    return (vd)_mm256_max_pd(_mm256_min_pd((__m256d)x, high), low);
}
#else
#define AS_WIDE(x) __builtin_convertvector(x, vd)
#define AS_NARROW(x) __builtin_convertvector(x, half_vf)
static inline vd limit(vd x, double bound) {
    for (int i = 0; i < HALF; i++) x[i] = x[i] > bound ? bound : x[i] < -bound ? -bound : x[i];
    return x;
}
#endif

/* Half as many floats as lanes, as doubles. */
static inline vd doubles(const float *x) {
    half_vf part;
    memcpy(&part, x, sizeof part);
    return AS_WIDE(part);
}

static inline vd low_doubles(vf x) {
    half_vf part;
    memcpy(&part, &x, sizeof part);
    return AS_WIDE(part);
}

static inline vd high_doubles(vf x) {
    half_vf part;
    memcpy(&part, (const char *)&x + sizeof part, sizeof part);
    return AS_WIDE(part);
}

static inline vf floats(vd low, vd high) {
#if defined(__AVX512F__)
    return (vf)_mm512_insertf32x8(_mm512_castps256_ps512((__m256)AS_NARROW(low)), (__m256)AS_NARROW(high), 1);
#elif defined(__AVX2__)
    return (vf)_mm256_insertf128_ps(_mm256_castps128_ps256((__m128)AS_NARROW(low)), (__m128)AS_NARROW(high), 1);
#else
    half_vf parts[2] = {AS_NARROW(low), AS_NARROW(high)};
    vf out;
    memcpy(&out, parts, sizeof out);
    return out;
#endif
}

/* Turn a square of doubles. */
static inline void turn_doubles(vd row[HALF]) {
#if defined(__AVX512F__)
    __m512d pair[8], four[8];
#pragma GCC unroll 8 /* -O2 keeps arrays in memory that a loop indexes */
    for (int i = 0; i < 8; i += 2) {
        pair[i] = _mm512_unpacklo_pd((__m512d)row[i], (__m512d)row[i + 1]);
        pair[i + 1] = _mm512_unpackhi_pd((__m512d)row[i], (__m512d)row[i + 1]);
    }
#pragma GCC unroll 8
    for (int i = 0; i < 8; i += 4)
#pragma GCC unroll 8
        for (int j = 0; j < 2; j++) {
            four[i + j] = _mm512_shuffle_f64x2(pair[i + j], pair[i + j + 2], 0x88);     /* columns j, j + 4 */
            four[i + j + 2] = _mm512_shuffle_f64x2(pair[i + j], pair[i + j + 2], 0xdd); /* columns j + 2, j + 6 */
        }
#pragma GCC unroll 8
    for (int i = 0; i < 4; i++) {
        row[i] = (vd)_mm512_shuffle_f64x2(four[i], four[i + 4], 0x88);
        row[i + 4] = (vd)_mm512_shuffle_f64x2(four[i], four[i + 4], 0xdd);
    }
#elif defined(__AVX2__)
    __m256d pair[4];
#pragma GCC unroll 8
    for (int i = 0; i < 4; i += 2) {
        pair[i] = _mm256_unpacklo_pd((__m256d)row[i], (__m256d)row[i + 1]);
        pair[i + 1] = _mm256_unpackhi_pd((__m256d)row[i], (__m256d)row[i + 1]);
    }
#pragma GCC unroll 8
    for (int i = 0; i < 2; i++) {
        row[i] = (vd)_mm256_permute2f128_pd(pair[i], pair[i + 2], 0x20);
        row[i + 2] = (vd)_mm256_permute2f128_pd(pair[i], pair[i + 2], 0x31);
    }
#else
    for (int i = 0; i < HALF; i++)
        for (int j = 0; j < i; j++) {
            double above = row[j][i];
            row[j][i] = row[i][j];
            row[i][j] = above;
        }
#endif
}

/* Turn a square of floats, as many as lanes. */
static inline void turn_floats(vf row[LANES]) {
#if defined(__AVX512F__)
    __m512 pair[16], four[16], eight[16];
#pragma GCC unroll 16
    for (int i = 0; i < 16; i += 2) { /* of two rows: columns 0, 1 and 2, 3 of every quarter */
        pair[i] = _mm512_unpacklo_ps((__m512)row[i], (__m512)row[i + 1]);
        pair[i + 1] = _mm512_unpackhi_ps((__m512)row[i], (__m512)row[i + 1]);
    }
#pragma GCC unroll 16
    for (int i = 0; i < 16; i += 4) { /* of four rows: column j of every quarter */
#pragma GCC unroll 2
        for (int j = 0; j < 2; j++) {
            __m512d low = (__m512d)pair[i + j], high = (__m512d)pair[i + j + 2];
            four[i + 2 * j] = (__m512)_mm512_unpacklo_pd(low, high);
            four[i + 2 * j + 1] = (__m512)_mm512_unpackhi_pd(low, high);
        }
    }
#pragma GCC unroll 16
    for (int i = 0; i < 16; i += 8) { /* of eight rows: quarters 0, 2 and 1, 3 */
#pragma GCC unroll 4
        for (int j = 0; j < 4; j++) {
            eight[i + j] = _mm512_shuffle_f32x4(four[i + j], four[i + j + 4], 0x88);
            eight[i + j + 4] = _mm512_shuffle_f32x4(four[i + j], four[i + j + 4], 0xdd);
        }
    }
#pragma GCC unroll 8
    for (int i = 0; i < 8; i++) {
        row[i] = (vf)_mm512_shuffle_f32x4(eight[i], eight[i + 8], 0x88);
        row[i + 8] = (vf)_mm512_shuffle_f32x4(eight[i], eight[i + 8], 0xdd);
    }
#elif defined(__AVX2__)
    __m256 pair[8], four[8];
#pragma GCC unroll 8
    for (int i = 0; i < 8; i += 2) {
        pair[i] = _mm256_unpacklo_ps((__m256)row[i], (__m256)row[i + 1]);
        pair[i + 1] = _mm256_unpackhi_ps((__m256)row[i], (__m256)row[i + 1]);
    }
#pragma GCC unroll 8
    for (int i = 0; i < 8; i += 4) {
#pragma GCC unroll 2
        for (int j = 0; j < 2; j++) {
            __m256d low = (__m256d)pair[i + j], high = (__m256d)pair[i + j + 2];
            four[i + 2 * j] = (__m256)_mm256_unpacklo_pd(low, high);
            four[i + 2 * j + 1] = (__m256)_mm256_unpackhi_pd(low, high);
        }
    }
#pragma GCC unroll 4
    for (int i = 0; i < 4; i++) {
        row[i] = (vf)_mm256_permute2f128_ps(four[i], four[i + 4], 0x20);
        row[i + 4] = (vf)_mm256_permute2f128_ps(four[i], four[i + 4], 0x31);
    }
#else
    transpose((v4f *)row);
#endif
}

/* Turn vectors of a tile back: lane i of vector k becomes number i · steps + k. Rows of whole cache lines go past it. */
static void turn_back(const vf *turned, int steps, float *out) {
    int k = 0, past_cache = steps % LANES == 0 && can_pass_cache(out);
    for (; k + LANES <= steps; k += LANES) {
        vf row[LANES];
#pragma GCC unroll 16
        for (int i = 0; i < LANES; i++) row[i] = turned[k + i];
        turn_floats(row);
        if (past_cache)
            for (int i = 0; i < LANES; i++) store_past_cache(out + i * steps + k, row[i]);
        else
            for (int i = 0; i < LANES; i++) store(out + i * steps + k, row[i]);
    }
    for (; k < steps; k++)
        for (int i = 0; i < LANES; i++) out[i * steps + k] = turned[k][i];
}

#endif
