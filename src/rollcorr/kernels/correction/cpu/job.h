/* What Python asks of the compiled correction, and the rows that it gets back. job.py has the same structures. */

#ifndef ROLLCORR_JOB_H
#define ROLLCORR_JOB_H

#include <math.h>
#include <stdint.h>
#include <string.h>

#include "token_sums.h"

#define ABI 11 /* raise with every change of what a field or a name means; library.py compares it, and sizes */
#define MAX_CRITERIA 11
#define CAP 20.0 /* nats; largest d in k3 and chi², as rollcorr.core.divergence.SAFETY_BOUND */

/* --- Rows. THE list is rows.py, which says what each row is. Python reads these names, so any order will do. --------- */

#define SUMS(X)                                                                                                    \
    TOKEN_SUMS(X) X(tokens) X(sequences) X(nonfinite) X(zero_probability) X(tokens_measured) X(tokens_compared)    \
    X(tokens_counted) X(k3) X(capped) X(chi2_token) X(ratio_outside_10pct)                                         \
    X(sequences_measured) X(train_log_ppl) X(train_ppl) X(rollout_log_ppl) X(rollout_ppl) X(log_ppl_diff)          \
    X(log_ppl_abs_diff) X(ppl_ratio) X(sequences_counted) X(chi2_seq) X(capped_sequences) X(tokens_kept)          \
    X(sequences_kept) X(sequences_touched) X(rejected_by_several) X(sequences_rejected_by_several)                 \
    X(catastrophic_tokens) X(vetoed_sequences) X(units) X(saturated_low) X(saturated_high) X(is_high) X(is_low)    \
    X(is_seq_high) X(is_seq_low) X(is_low_weight) X(is_outside) X(kept_weight) X(kept_sequence_weight)             \
    X(norm_weight) X(norm_units)
#define CRITERION_SUMS(X) /* of each criterion: rs/{criterion}/… */                                               \
    X(high) X(low) X(seq_high) X(seq_low) X(tokens) X(sequences) X(tokens_alone) X(sequences_alone)
#define MOMENTS(X) X(log_ratio) X(weight) X(weight_raw) X(sequence_weight) X(unit_weight)
#define EXTREMES(X)                                                                                                \
    X(log_ratio) X(safety_bound) X(prob_diff_abs) X(log_ppl_diff) X(weight) X(weight_raw) X(sequence_weight)       \
    X(log_weight)
enum { OF_UNIT, OF_SEQUENCES, SAMPLES }; /* a criterion's moments and extremes: rs/{criterion}, rs/{criterion}/seq */

#define AS_SUM(name, ...) SUM_##name,
#define AS_CRITERION_SUM(name) CRITERION_##name,
#define AS_MOMENTS(name) MOMENTS_##name,
#define AS_EXTREMES(name) EXTREMES_##name,
#define AS_TEXT(name, ...) #name " "
enum { SUMS(AS_SUM) N_SUMS };
enum { CRITERION_SUMS(AS_CRITERION_SUM) N_CRITERION_SUMS };
enum { MOMENTS(AS_MOMENTS) N_MOMENTS };
enum { EXTREMES(AS_EXTREMES) N_EXTREMES };

typedef struct {
    double n, mean, m2;
} Moments;

typedef struct {
    double min, max;
} Extremes;

typedef struct {
    double sums[N_SUMS], criterion_sums[MAX_CRITERIA][N_CRITERION_SUMS];
    Moments moments[N_MOMENTS], criterion_moments[MAX_CRITERIA][SAMPLES];
    Extremes extremes[N_EXTREMES], criterion_extremes[MAX_CRITERIA][SAMPLES];
} Rows;

/* --- The job -------------------------------------------------------------------------------------------------------- */

enum { FLOAT32, BFLOAT16 };                               /* type of log-probs */
enum { MASK_BYTE, MASK_INT32, MASK_INT64, MASK_FLOAT32 }; /* type of the mask */
enum { NO_WEIGHTS, TOKEN_WEIGHTS, SEQUENCE_WEIGHTS, GEOMETRIC_WEIGHTS, HORIZON_WEIGHTS };
enum { UNBOUNDED, TRUNCATE, ICEPOP };
enum { REJECT_TOKEN, REJECT_SEQUENCE, NEUTRAL };          /* what becomes of missing log-probs */
enum { NO_NORMALIZATION, OVER_VALID, OVER_KEPT };
enum { SCOPE_TOKEN, SCOPE_SEQ_SUM, SCOPE_SEQ_MEAN, SCOPE_SEQ_MAX };
enum { K1, K2, K3, KINDS };

typedef struct { /* on d, rounded so that a float32 is outside exactly when it is outside of the float64 bounds */
    float lower, upper;
} Band;

typedef struct {
    double lower, upper;
} WideBand;

typedef struct {
    int32_t scope, kind;
    WideBand bounds; /* k1: on the log-ratio; k2, k3: upper only, on the divergence */
    Band tokens;     /* scope token: the d that it accepts */
} Criterion;

typedef struct {
    const char *train, *rollout, *mask; /* tokens of a row lie next to each other; rows need not */
    const int64_t *offsets;             /* packed: first token of each sequence, then the token count; else NULL */
    float *weights;                     /* contiguous; NULL without importance sampling */
    uint8_t *loss_mask, *sequence_kept; /* contiguous */
    const int64_t *places;              /* which numbers of the rows the configuration has */
    double *numbers;                    /* they go here */
    double *policy_sums;                /* valid tokens of each sequence, measured ones, Σ log π, Σ log μ: four columns */
    int64_t sequences, length, sequences_per_task, tasks, threads, number_count;
    int64_t train_stride, rollout_stride, mask_stride; /* tokens from row to row */
    int32_t train_type, rollout_type, mask_type, level, mode, nonfinite, normalization;
    int32_t needs_k2, vetoing, banded_below, per_turn; /* flags; per_turn: of HORIZON_WEIGHTS */
    int32_t criteria_count;
    Criterion criteria[MAX_CRITERIA];
    int32_t token_criterion[KINDS]; /* index of the token-level criterion of a kind, or -1 */
    float cap, least, floor, ceiling; /* largest weight or +inf, smallest of a ratio above 0, or 0; e^-b, e^b */
    Band band, veto, ten_percent;
    Band weighted; /* outside, IcePop gives no weight */
    Band untouched, accepted; /* inside, no bound on a weight is met; no token-level criterion rejects */
    Band quiet;               /* inside, nothing at all is decided about single tokens; empty where that is always done */
    WideBand wide_band, wide_weighted, low_weight;
    double bound; /* the safety bound, nats */
    double decay; /* λ of HORIZON_WEIGHTS */
} Job;

/* --- Small sums ----------------------------------------------------------------------------------------------------- */

static inline void add_extremes(Extremes *extremes, double low, double high) {
    if (low < extremes->min) extremes->min = low;
    if (high > extremes->max) extremes->max = high;
}

/* Chan, Golub & LeVeque (1983). */
static inline void add_moments(Moments *moments, double n, double mean, double m2) {
    if (n == 0) return;
    double all = moments->n + n, gap = mean - moments->mean;
    moments->m2 += m2 + gap * gap * moments->n * (n / all);
    moments->mean += gap * (n / all);
    moments->n = all;
}

static inline void clear_rows(Rows *rows) {
    memset(rows, 0, sizeof *rows);
    const Extremes nothing = {INFINITY, -INFINITY};
    for (int i = 0; i < N_EXTREMES; i++) rows->extremes[i] = nothing;
    for (int c = 0; c < MAX_CRITERIA; c++)
        for (int i = 0; i < SAMPLES; i++) rows->criterion_extremes[c][i] = nothing;
}

static inline void merge_rows(Rows *rows, const Rows *other, int criteria) {
    const Moments *moments = other->moments;
    const Extremes *extremes = other->extremes;
    for (int i = 0; i < N_SUMS; i++) rows->sums[i] += other->sums[i];
    for (int i = 0; i < N_MOMENTS; i++) add_moments(&rows->moments[i], moments[i].n, moments[i].mean, moments[i].m2);
    for (int i = 0; i < N_EXTREMES; i++) add_extremes(&rows->extremes[i], extremes[i].min, extremes[i].max);
    for (int c = 0; c < criteria; c++) {
        for (int i = 0; i < N_CRITERION_SUMS; i++) rows->criterion_sums[c][i] += other->criterion_sums[c][i];
        for (int i = 0; i < SAMPLES; i++) {
            moments = &other->criterion_moments[c][i];
            extremes = &other->criterion_extremes[c][i];
            add_moments(&rows->criterion_moments[c][i], moments->n, moments->mean, moments->m2);
            add_extremes(&rows->criterion_extremes[c][i], extremes->min, extremes->max);
        }
    }
}

#endif
