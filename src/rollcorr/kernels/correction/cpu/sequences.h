/* Decisions about whole sequences, from the sums of their tokens: a twin of decide.py, one sequence at a time. */

#ifndef ROLLCORR_SEQUENCES_H
#define ROLLCORR_SEQUENCES_H

#include "job.h"

typedef struct { /* sums over one sequence; counts are whole numbers */
    double valid, measured, zero, log_ratio, train, rollout, k2, k3, raw_weight, weight;
    double kept_weight, kept, rejected_once; /* by token-level rejectors: kept by all of them, taken by one */
    double catastrophic;
    double rejected[KINDS], alone[KINDS]; /* by token-level criteria */
    Extremes range;                       /* of d */
} Sequence;

typedef struct {
    double missing, counted, product; /* S_i; −inf with a token of probability zero */
    int has_counted;                     /* has a counted token */
} Derived;

static inline double at_least_one(double count) { return count > 1 ? count : 1; }

static inline Derived derive(const Job *job, const Sequence *s) {
    double compared = s->measured + s->zero, counted = job->nonfinite == NEUTRAL ? s->valid : compared;
    return (Derived){s->valid - compared, counted, s->zero > 0 ? -INFINITY : s->log_ratio, counted > 0};
}

/* A value of one sequence joins a sample, if it is finite. */
static inline void add_value(Moments *moments, Extremes *extremes, double value) {
    if (!isfinite(value)) return;
    add_moments(moments, 1, value, 0);
    add_extremes(extremes, value, value);
}

static inline double clamp(double x, double bound) { return x < -bound ? -bound : x > bound ? bound : x; }

static void describe_sequence(const Sequence *s, const Derived *derived, Rows *rows) {
    double *sums = rows->sums;
    sums[SUM_tokens] += s->valid;
    sums[SUM_sequences] += s->valid > 0;
    sums[SUM_nonfinite] += derived->missing;
    sums[SUM_zero_probability] += s->zero;
    sums[SUM_tokens_measured] += s->measured;
    sums[SUM_tokens_compared] += s->measured + s->zero;
    sums[SUM_tokens_counted] += derived->counted;
    sums[SUM_k3] += s->k3;
    sums[SUM_chi2_token] -= s->zero; /* ρ² − 1 = −1 at probability zero */
    sums[SUM_ratio_outside_10pct] += s->zero;
    add_extremes(&rows->extremes[EXTREMES_log_ratio], s->range.min, s->range.max);
    if (s->measured > 0) {
        double train = -s->train / s->measured, rollout = -s->rollout / s->measured;
        double difference = -s->log_ratio / s->measured;
        sums[SUM_sequences_measured] += 1;
        sums[SUM_train_log_ppl] += train;
        sums[SUM_train_ppl] += exp(train);
        sums[SUM_rollout_log_ppl] += rollout;
        sums[SUM_rollout_ppl] += exp(rollout);
        sums[SUM_log_ppl_diff] += difference;
        sums[SUM_log_ppl_abs_diff] += fabs(difference);
        sums[SUM_ppl_ratio] += exp(difference);
        add_extremes(&rows->extremes[EXTREMES_log_ppl_diff], difference, difference);
    }
    if (derived->has_counted) {
        sums[SUM_sequences_counted] += 1;
        sums[SUM_chi2_seq] += expm1(2 * clamp(derived->product, CAP));
        sums[SUM_capped_sequences] += isfinite(derived->product) && fabs(s->log_ratio) > CAP;
    }
}

/* k2 or k3 of one d. */
static double divergence(int kind, double d) {
    double capped = d < CAP ? d : CAP;
    return kind == K2 ? d * d / 2 : expm1(capped) - capped;
}

/* A criterion's divergence for a sequence; a token criterion's averaged over it. */
static double statistic(const Criterion *criterion, const Sequence *s, const Derived *derived) {
    if (s->zero > 0) return INFINITY;
    if (criterion->scope == SCOPE_SEQ_MAX) { /* k2 and k3 are convex: their maximum lies at one end of the range of d */
        if (s->measured == 0) return 0;
        return fmax(divergence(criterion->kind, s->range.min), divergence(criterion->kind, s->range.max));
    }
    double sum = criterion->kind == K1 ? -s->log_ratio : criterion->kind == K2 ? s->k2 : s->k3;
    return criterion->scope == SCOPE_SEQ_SUM ? sum : sum / at_least_one(derived->counted);
}

/* Describe a criterion's statistic; returns whether the sequence is beyond its bound. */
static int judge_sequence(const Criterion *criterion, int index, const Sequence *s, const Derived *derived, Rows *rows) {
    if (!derived->has_counted) return 0;
    double value = statistic(criterion, s, derived), *sums = rows->criterion_sums[index];
    int high = value > criterion->bounds.upper, low = 0, sample = criterion->scope == SCOPE_TOKEN ? OF_SEQUENCES : OF_UNIT;
    if (criterion->kind == K1) {
        high = -value > criterion->bounds.upper;
        low = -value < criterion->bounds.lower;
    }
    add_value(&rows->criterion_moments[index][sample], &rows->criterion_extremes[index][sample], value);
    sums[criterion->scope == SCOPE_TOKEN ? CRITERION_seq_high : CRITERION_high] += high;
    sums[criterion->scope == SCOPE_TOKEN ? CRITERION_seq_low : CRITERION_low] += low;
    return high || low;
}

/* Whether every sequence-level rejector keeps it; how many tokens and sequences each rejector takes, alone or not. */
static int reject_sequence(const Job *job, const Sequence *s, const Derived *derived, Rows *rows) {
    double *sums = rows->sums;
    int rejected[MAX_CRITERIA], rejectors = 0, touching = 0;
    for (int c = 0; c < job->criteria_count; c++) {
        const Criterion *criterion = &job->criteria[c];
        rejected[c] = judge_sequence(criterion, c, s, derived, rows);
        if (criterion->scope == SCOPE_TOKEN) rejected[c] = s->rejected[criterion->kind] > 0;
        if (criterion->scope == SCOPE_TOKEN) touching += rejected[c];
        else rejectors += rejected[c];
    }
    if (job->vetoing) {
        sums[SUM_catastrophic_tokens] += s->catastrophic;
        sums[SUM_vetoed_sequences] += s->catastrophic > 0;
        rejectors += s->catastrophic > 0;
    }
    if (job->nonfinite == REJECT_SEQUENCE) rejectors += derived->missing > 0;
    if (job->nonfinite == REJECT_TOKEN) touching += derived->missing > 0;
    touching += rejectors;
    int kept = rejectors == 0;
    double taken_again = s->valid - s->kept - s->rejected_once; /* by more than one token-level rejector */
    sums[SUM_tokens_kept] += kept ? s->kept : 0;
    sums[SUM_sequences_kept] += kept && s->kept > 0;
    sums[SUM_sequences_touched] += touching > 0;
    sums[SUM_rejected_by_several] += kept ? taken_again : rejectors == 1 ? s->rejected_once + taken_again : s->valid;
    sums[SUM_sequences_rejected_by_several] += touching > 1;
    for (int c = 0; c < job->criteria_count; c++) {
        const Criterion *criterion = &job->criteria[c];
        int by_token = criterion->scope == SCOPE_TOKEN;
        double *of = rows->criterion_sums[c];
        if (!rejected[c]) continue;
        of[CRITERION_tokens] += by_token ? s->rejected[criterion->kind] : s->valid;
        of[CRITERION_sequences] += 1;
        of[CRITERION_sequences_alone] += touching == 1;
        if (by_token && kept) of[CRITERION_tokens_alone] += s->alone[criterion->kind];
        if (!by_token && rejectors == 1) of[CRITERION_tokens_alone] += s->kept;
    }
    return kept;
}

/* A raw weight between floor and ceiling; that of a ratio of 0 stays 0. Only TRUNCATE has either. */
static inline double between(const Job *job, double raw) {
    return raw > 0 ? fmax(fmin(raw, (double)job->cap), (double)job->least) : raw;
}

/* The weight of a whole sequence from its log, and the rows that only such weights have. */
static double weigh_sequence(const Job *job, double level, const Derived *derived, Rows *rows) {
    double bound = job->bound, raw = level == -INFINITY ? 0 : exp(clamp(level, bound));
    double weight = between(job, raw), *sums = rows->sums;
    if (job->mode == ICEPOP && (level < job->wide_weighted.lower || level > job->wide_weighted.upper)) weight = 0;
    if (!derived->has_counted) return weight;
    sums[SUM_units] += 1;
    sums[SUM_saturated_low] += isfinite(level) && level < -bound;
    sums[SUM_saturated_high] += level > bound;
    sums[SUM_is_high] += level > job->wide_band.upper;
    sums[SUM_is_low] += level < job->wide_band.lower;
    if (job->mode == ICEPOP && weight == 0) sums[SUM_is_outside] += derived->counted;
    if (isfinite(level)) add_extremes(&rows->extremes[EXTREMES_log_weight], level, level);
    add_moments(&rows->moments[MOMENTS_weight], derived->counted, weight, 0);
    add_moments(&rows->moments[MOMENTS_weight_raw], derived->counted, raw, 0);
    add_extremes(&rows->extremes[EXTREMES_weight], weight, weight);
    add_extremes(&rows->extremes[EXTREMES_weight_raw], raw, raw);
    return weight;
}

/* Whether each token has a weight of its own. */
static inline int weighs_tokens(const Job *job) { return job->level == TOKEN_WEIGHTS || job->level == HORIZON_WEIGHTS; }

/* The rows of weights at every level; returns the weight of a sequence-level configuration. */
static double weigh(const Job *job, const Sequence *s, const Derived *derived, int kept, Rows *rows) {
    double *sums = rows->sums, weight = 0, mean_weight, kept_weight, level, counted = at_least_one(derived->counted);
    if (weighs_tokens(job)) {
        sums[SUM_units] += derived->counted;
        mean_weight = s->weight / counted;
        level = log(s->raw_weight / counted);
        kept_weight = kept ? s->kept_weight : 0;
    } else {
        level = job->level == SEQUENCE_WEIGHTS ? derived->product : derived->product / counted;
        mean_weight = weight = weigh_sequence(job, level, derived, rows);
        if (level != -INFINITY) level = clamp(level, (double)job->bound);  /* the log of the raw weight */
        kept_weight = kept ? weight * s->kept : 0;
    }
    sums[SUM_kept_weight] += kept_weight;
    sums[SUM_kept_sequence_weight] += kept_weight / at_least_one(s->kept);
    if (!derived->has_counted) return weight;
    add_value(&rows->moments[MOMENTS_sequence_weight], &rows->extremes[EXTREMES_sequence_weight], mean_weight);
    sums[SUM_is_seq_high] += level > job->wide_band.upper;
    sums[SUM_is_seq_low] += level < job->wide_band.lower;
    sums[SUM_is_low_weight] += derived->product < job->low_weight.lower;
    return weight;
}

/* Extremes of token-level weights from those of ℓ, as exp is monotone; zero and neutral tokens join with 0 and 1. */
static void finish_weight_extremes(const Job *job, Rows *rows) {
    const double *sums = rows->sums;
    int is_token = job->level == TOKEN_WEIGHTS;
    Extremes raw = {INFINITY, -INFINITY}, *range = &rows->extremes[is_token ? EXTREMES_log_ratio : EXTREMES_log_weight];
    if (range->min <= range->max) {
        double bound = job->bound;
        add_extremes(&raw, exp(clamp(range->min, bound)), exp(clamp(range->max, bound)));
    }
    if (sums[SUM_zero_probability] > 0) add_extremes(&raw, 0, 0);
    if (is_token && sums[SUM_units] > sums[SUM_tokens_compared]) add_extremes(&raw, 1, 1);
    rows->extremes[EXTREMES_weight_raw] = raw;
    if (job->mode == ICEPOP) return;
    if (sums[SUM_units] == 0) rows->extremes[EXTREMES_weight] = raw;
    else rows->extremes[EXTREMES_weight] = (Extremes){between(job, raw.min), between(job, raw.max)};
}

/* Rows of the batch that follow from others. */
static void finish_rows(const Job *job, Rows *rows) {
    double *sums = rows->sums;
    int token_level = weighs_tokens(job), k1 = job->token_criterion[K1];
    rows->extremes[EXTREMES_safety_bound] = (Extremes){job->bound, job->bound};
    if (sums[SUM_tokens_compared] == 0) rows->extremes[EXTREMES_prob_diff_abs] = (Extremes){INFINITY, -INFINITY};
    if (token_level) {
        finish_weight_extremes(job, rows);
        if (job->banded_below && job->level == TOKEN_WEIGHTS) sums[SUM_is_low] += sums[SUM_zero_probability];
    }
    Moments *unit = &rows->moments[token_level ? MOMENTS_weight : MOMENTS_sequence_weight];
    rows->moments[MOMENTS_unit_weight] = *unit;
    if (job->normalization == OVER_VALID) {
        sums[SUM_norm_weight] = unit->n * unit->mean;
        sums[SUM_norm_units] = unit->n;
    } else {
        sums[SUM_norm_weight] = sums[token_level ? SUM_kept_weight : SUM_kept_sequence_weight];
        sums[SUM_norm_units] = sums[token_level ? SUM_tokens_kept : SUM_sequences_kept];
    }
    if (k1 >= 0) { /* k1 = −d */
        Moments of = rows->moments[MOMENTS_log_ratio];
        Extremes range = rows->extremes[EXTREMES_log_ratio];
        rows->criterion_moments[k1][OF_UNIT] = (Moments){of.n, -of.mean, of.m2};
        rows->criterion_extremes[k1][OF_UNIT] = (Extremes){-range.max, -range.min};
    }
}

#endif
