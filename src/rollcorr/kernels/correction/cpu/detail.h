/* What is shown in detail: histograms of d and of the weights, the worst tokens, and the sums of each sequence. A twin of
   detail.py and core/detail_rows.py. Counts are integers and the order of entries is total, so what the threads saw
   adds up to the same whatever each of them read. */

#ifndef ROLLCORR_DETAIL_H
#define ROLLCORR_DETAIL_H

#include "job.h"

#define TOP 10
#define STEPS 32                             /* bins in an octave: exponent and five bits of the mantissa */
#define FIRST ((uint32_t)((127 - 24) * STEPS - 1)) /* the bin below the smallest magnitude that has one of its own, 2^-24 */
#define SIDE (44 * STEPS + 1)                /* to 2^20, and one beyond */
#define BINS (2 * SIDE + 1)

typedef struct { /* a token; sequence -1 where there is none */
    double value, sequence, at;
} Entry;

typedef struct { /* by one thread */
    int64_t log_ratio[BINS], weight[BINS];
    Entry worst[TOP]; /* largest |value| first, of equal ones the first token first */
} Seen;

typedef struct {
    const Job *job;
    Seen *seen;                           /* one for each thread */
    double *log_ratio, *zero, *compared; /* of each sequence: sum of d; tokens of probability zero; tokens compared */
    int64_t next, threads;
} Detail;

static float float_of(uint32_t bits) {
    float value;
    memcpy(&value, &bits, sizeof value);
    return value;
}

static int bin_of(float x) {
    uint32_t bits;
    memcpy(&bits, &x, sizeof bits);
    uint32_t step = (bits & 0x7fffffffu) >> 18;
    int magnitude = step <= FIRST ? 0 : step - FIRST > SIDE ? SIDE : (int)(step - FIRST);
    return bits >> 31 ? SIDE - magnitude : SIDE + magnitude;
}

static double size_of(const Entry *entry) { return entry->sequence < 0 ? -1 : fabs(entry->value); }

/* Put an entry in its place; returns the size that the next one has to exceed. Entries come in order, so one that equals
   another stands behind it. */
static float keep_entry(Entry *worst, double value, int64_t sequence, int64_t at) {
    int place = TOP - 1;
    for (; place > 0 && size_of(&worst[place - 1]) < fabs(value); place--) worst[place] = worst[place - 1];
    worst[place] = (Entry){value, (double)sequence, (double)at};
    return (float)size_of(&worst[TOP - 1]);
}

static void see_sequence(const Detail *detail, Seen *seen, int64_t i) {
    const Job *job = detail->job;
    const uint32_t infinite = 0x7f800000u;
    Row data = row_of(job, i);
    int neutral = job->nonfinite == NEUTRAL;
    int64_t compared = 0, zeros = 0;
    double sum = 0;
    float least = (float)size_of(&seen->worst[TOP - 1]);
    for (int64_t t = 0; t < data.length; t++) {
        if (!is_valid(data.mask, job->mask_type, t)) continue;
        uint32_t train = bits_of(data.train, job->train_type, t), rollout = bits_of(data.rollout, job->rollout_type, t);
        int usable = (rollout & 0x7fffffffu) < infinite;
        int measured = usable && (train & 0x7fffffffu) < infinite, zero = usable && train == (infinite | 0x80000000u);
        if (data.weights && (neutral || measured || zero)) seen->weight[bin_of(data.weights[t])]++;
        if (!measured && !zero) continue;

        float d = measured ? float_of(train) - float_of(rollout) : -INFINITY;
        if (measured) {
            seen->log_ratio[bin_of(d)]++;
            sum += (double)d;
        }
        compared++;
        zeros += zero;
        if (fabsf(d) > least) least = keep_entry(seen->worst, d, i, t);
    }
    detail->log_ratio[i] = sum;
    detail->zero[i] = (double)zeros;
    detail->compared[i] = (double)compared;
}

static void see_tasks(void *argument) {
    Detail *detail = argument;
    const Job *job = detail->job;
    Seen *seen = &detail->seen[__atomic_fetch_add(&detail->threads, 1, __ATOMIC_RELAXED)];
    for (;;) {
        int64_t task = __atomic_fetch_add(&detail->next, 1, __ATOMIC_RELAXED);
        if (task >= job->tasks) return;
        int64_t first = task * job->sequences_per_task, last = first + job->sequences_per_task;
        for (int64_t i = first; i < last && i < job->sequences; i++) see_sequence(detail, seen, i);
    }
}

#endif
