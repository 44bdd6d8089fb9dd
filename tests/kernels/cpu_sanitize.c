/* Runs the compiled correction on batches of every shape and kind under the address and undefined-behavior sanitizers.
   Buffers are as small as they may be, so a read or a write beyond them is caught; numbers are compared in Python. */

#include "correction.c"

#include <stdlib.h>

static uint32_t state = 1;

static uint32_t draw(uint32_t below) {
    state = state * 1664525u + 1013904223u;
    return (uint32_t)(((uint64_t)state * below) >> 32);
}

static float log_prob(void) {
    static const float special[] = {INFINITY, -INFINITY, NAN, -1e30f, 3.4e38f, -3.4e38f, 1000.0f, 0.0f};
    return draw(50) ? -(float)draw(1000) / 500.0f : special[draw(8)];
}

static Job job_for(int64_t sequences, int64_t tokens) {
    static const float bound = 20.0f;
    Job job = {.sequences = sequences, .length = sequences ? tokens / sequences : 0, .threads = 1 + draw(3)};
    job.train_stride = job.rollout_stride = job.mask_stride = job.length;
    job.sequences_per_task = 1 + draw(3);
    job.tasks = (sequences + job.sequences_per_task - 1) / job.sequences_per_task;
    job.tasks += job.tasks == 0;
    job.train_type = (int32_t)draw(2), job.rollout_type = (int32_t)draw(2), job.mask_type = (int32_t)draw(4);
    job.level = (int32_t)draw(4), job.mode = (int32_t)draw(3), job.nonfinite = (int32_t)draw(3);
    job.normalization = (int32_t)draw(3), job.vetoing = (int32_t)draw(2), job.needs_k2 = 1, job.banded_below = 1;
    job.cap = job.mode == TRUNCATE ? 2.0f : INFINITY, job.bound = bound;
    job.least = job.mode == TRUNCATE && job.level != NO_WEIGHTS ? 0.5f : 0.0f;
    job.floor = expf(-bound), job.ceiling = expf(bound);
    job.band = job.untouched = job.accepted = (Band){-0.7f, 0.7f};
    job.quiet = (Band){-0.3f, 0.7f};
    job.ten_percent = (Band){-0.1f, 0.1f}, job.veto = (Band){-5.0f, INFINITY};
    job.wide_band = (WideBand){-0.7, 0.7}, job.low_weight = (WideBand){-0.7, INFINITY};
    job.criteria_count = MAX_CRITERIA;
    for (int kind = 0; kind < KINDS; kind++) job.token_criterion[kind] = -1;
    for (int c = 0; c < MAX_CRITERIA; c++) {
        int scope = c < 3 && draw(2) ? SCOPE_TOKEN : 1 + c % 3, kind = scope == SCOPE_SEQ_MAX ? K2 + c % 2 : c % 3;
        job.criteria[c] = (Criterion){scope, kind, {-0.7, 0.7}, {-0.7f, 0.7f}};
        if (scope == SCOPE_TOKEN) job.token_criterion[kind] = c;
    }
    return job;
}

static void *copy_of(const void *data, size_t bytes) {
    void *copy = malloc(bytes ? bytes : 1);
    if (bytes) memcpy(copy, data, bytes);
    return copy;
}

static void run_one(int64_t sequences, int64_t tokens, int packed) {
    Job job = job_for(sequences, tokens);
    int64_t *offsets = calloc((size_t)sequences + 1, sizeof *offsets);
    offsets[sequences] = tokens;
    for (int64_t i = 1; packed && i < sequences; i++) offsets[i] = offsets[i - 1] + draw((uint32_t)(tokens - offsets[i - 1]) + 1);
    size_t n = (size_t)tokens;
    float *train = malloc(n * 4 + 4), *rollout = malloc(n * 4 + 4);
    int64_t *mask = malloc(n * 8 + 8);
    int close = (int)draw(2); /* policies with few odd tokens: blocks get as long as they can */
    for (size_t i = 0; i < n; i++) {
        train[i] = log_prob(), rollout[i] = log_prob();
        int valid = draw(10) != 0;
        if (close && draw(3000)) {
            rollout[i] = -(float)draw(1000) / 500.0f, train[i] = rollout[i] + (float)draw(1000) / 2000.0f - 0.25f;
            valid = draw(3000) != 0;
        }
        if (job.mask_type == MASK_INT64) mask[i] = valid;
        else if (job.mask_type == MASK_BYTE) ((uint8_t *)mask)[i] = (uint8_t)valid;
        else if (job.mask_type == MASK_INT32) ((int32_t *)mask)[i] = valid;
        else ((float *)mask)[i] = (float)valid;
    }
    for (size_t i = 0; job.train_type == BFLOAT16 && i < n; i++) memcpy((uint16_t *)train + i, (char *)(train + i) + 2, 2);
    for (size_t i = 0; job.rollout_type == BFLOAT16 && i < n; i++)
        memcpy((uint16_t *)rollout + i, (char *)(rollout + i) + 2, 2);
    job.train = copy_of(train, n * (size_t)width(job.train_type));
    job.rollout = copy_of(rollout, n * (size_t)width(job.rollout_type));
    job.mask = copy_of(mask, n * (size_t)mask_width(job.mask_type));
    job.offsets = packed ? offsets : 0;
    job.weights = job.level == NO_WEIGHTS ? 0 : malloc(n * 4 + !n);
    job.loss_mask = malloc(n + !n), job.sequence_kept = malloc((size_t)sequences + !sequences);
    job.policy_sums = malloc((4 * (size_t)sequences + !sequences) * sizeof(double));
    if (!rollcorr_correct(&job)) abort();
    Seen *seen = calloc((size_t)threads_of(&job), sizeof *seen);
    double *sums = malloc((size_t)sequences * 3 * sizeof *sums + !sequences);
    for (int64_t i = 0; i < threads_of(&job) * TOP; i++) seen[i / TOP].worst[i % TOP].sequence = -1;
    rollcorr_detail(&job, seen, sums);
    free(seen), free(sums), free(train), free(rollout), free(mask), free(offsets), free(job.weights), free(job.loss_mask);
    free(job.policy_sums), free(job.sequence_kept), free((void *)job.train), free((void *)job.rollout), free((void *)job.mask);
}

int main(void) {
    static const int64_t lengths[] = {0, 1, 3, 15, 16, 17, 33, 511, 512, 513, 1030, 2049, 5003};
    for (int round = 0; round < 6; round++)
        for (int i = 0; i < 13; i++) {
            run_one(4, 4 * lengths[i], 0);
            run_one(5, lengths[i], 1);
            run_one(0, 0, i % 2);
        }
    return 0;
}
