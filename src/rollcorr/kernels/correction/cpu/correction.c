/* The correction on the CPU: log-probs and a mask in; weights, a loss mask and statistics out; one read of the tokens.

   Python loads this with ctypes; it knows nothing of Python or torch. It is compiled once for every instruction set (the
   compiler's flags set the width of a vector), and Python takes the widest that runs. A sequence is read, decided and
   written while it is in cache. Results do not depend on the number of threads: the unit of work is a fixed range of
   sequences with rows of its own, and rows merge in order. */

#include <stdlib.h>

#include "helpers.h"
#include "tokens.h"

#if defined(__linux__)
#include <sys/mman.h>
#include <unistd.h>
#endif

/* --- One sequence --------------------------------------------------------------------------------------------------- */

typedef struct {
    const char *train, *rollout, *mask;
    float *weights; /* NULL without importance sampling */
    uint8_t *loss_mask;
    int64_t length;
} Row;

static int64_t width(int type) { return type == FLOAT32 ? 4 : 2; }

static int64_t mask_width(int type) { return type == MASK_INT64 ? 8 : type == MASK_BYTE ? 1 : 4; }

static Row row_of(const Job *job, int64_t i) {
    int64_t out = job->offsets ? job->offsets[i] : i * job->length;
    int64_t train = job->offsets ? out : i * job->train_stride, rollout = job->offsets ? out : i * job->rollout_stride;
    int64_t mask = job->offsets ? out : i * job->mask_stride;
    return (Row){
        job->train + train * width(job->train_type),
        job->rollout + rollout * width(job->rollout_type),
        job->mask + mask * mask_width(job->mask_type),
        job->weights ? job->weights + out : 0,
        job->loss_mask + out,
        job->offsets ? job->offsets[i + 1] - out : job->length,
    };
}

/* Valid tokens; without those that are missing, where they are rejected. */
static void write_present(const Block *block, uint8_t *restrict out) {
    const int32_t *valid = (const int32_t *)block->valid, *measured = (const int32_t *)block->measured;
    const int32_t *zero = (const int32_t *)block->zero;
    int tokens = block->tokens, all = block->job->nonfinite == REJECT_TOKEN ? 0 : -1;
    for (int i = 0; i < tokens; i++) out[i] = (uint8_t)(valid[i] & (measured[i] | zero[i] | all) & 1);
}

static void write_kept(const Block *block, uint8_t *restrict out) {
    const int32_t *kept = (const int32_t *)block->kept;
    int tokens = block->tokens;
    for (int i = 0; i < tokens; i++) out[i] = (uint8_t)(kept[i] & 1);
}

static void write_weights(const Block *block, const vf *weights, float *out) {
    if (block->tokens % LANES == 0 && can_pass_cache(out)) EACH_VECTOR(v, block) store_past_cache(out + v * LANES, weights[v]);
    else memcpy(out, weights, (size_t)block->tokens * sizeof(float));
}

/* Load a block, which may end before `block->tokens` did; tell whether its tokens are valid. */
static int read_block(Block *block, const Row *data, int64_t start) {
    const Job *job = block->job;
    int is = job->mask_type == MASK_BYTE ? end_at_change(block, (const uint8_t *)data->mask + start) : MIXED;
    if (is == MIXED) {
        int found = read_mask(data->mask, job->mask_type, start, block);
        is = found == 0 ? PADDING : found == block->vectors * LANES ? VALID : MIXED;
    }
    if (is == PADDING) return is;
    block->train = read_log_probs(data->train, job->train_type, start, block, block->train_copy);
    block->rollout = read_log_probs(data->rollout, job->rollout_type, start, block, block->rollout_copy);
    block->regular = block->summed = block->wide = 0;
    if (is == VALID) set_plain(block);
    return is;
}

/* Find d, and which tokens have one. A block that is valid throughout was summed as what it was expected to be. */
static void sort_block(Block *block, const Row *data, int64_t start, int is, const Totals *totals, Mismatch *sums) {
    if (is == VALID) {
        block->regular = block->expected != EXPECT_OTHER && is_within(totals, REGULAR_REACH);
        if (block->regular) name_sums(totals, sums);
        else subtract(block, sums);
        int within = sums->log_ratio.min >= -REGULAR_REACH && sums->log_ratio.max <= REGULAR_REACH;
        block->expected = within ? EXPECT_REGULAR : EXPECT_OTHER;
        if (!block->wide) return;
        read_mask(data->mask, block->job->mask_type, start, block); /* not plain: something is infinite or huge */
    }
    classify(block);
    subtract(block, sums);
}

/* Sum a block that is valid throughout as what it is expected to be. If it is quiet, write what there is to write, let it
   join the quiet ones before it, and return 1: nothing is left to do. */
static int pass_if_quiet(Block *block, Totals *totals, float *weights_out, uint8_t *mask_out, Rows *rows) {
    const Job *job = block->job;
    sum_expected(block, totals, weights_out);
    if (block->tokens > BLOCK && !is_quiet(job, totals, block->tokens)) { /* its first 512 tokens are read again */
        block->calm = 0;
        set_tokens(block, BLOCK, BLOCK);
        set_plain(block);
        sum_expected(block, totals, weights_out);
    }
    if (!is_quiet(job, totals, block->tokens)) return 0;
    if (weights_out && block->summed) write_weights(block, block->rho, weights_out);
    join_quiet(block, totals, rows);
    memset(mask_out, 1, (size_t)block->tokens);
    block->expected = EXPECT_QUIET;
    return 1;
}

static void pass_block(Block *block, const Row *data, int64_t start, Sequence *s, Rows *rows) {
    const Job *job = block->job;
    float *weights_out = job->level == TOKEN_WEIGHTS ? data->weights + start : 0;
    uint8_t *mask_out = data->loss_mask + start;
    Totals totals;
    Mismatch sums;
    int is = read_block(block, data, start);
    if (is == PADDING) { /* nothing else is read */
        memset(mask_out, 0, (size_t)block->tokens);
        if (weights_out) memset(weights_out, 0, (size_t)block->tokens * sizeof(float));
        return;
    }
    int is_summed = is == VALID && block->expected != EXPECT_OTHER;
    if (is_summed && pass_if_quiet(block, &totals, weights_out, mask_out, rows)) return;

    /* Any other block: find what each token is, measure, weigh and judge it. */
    const int *of = job->token_criterion;
    int judging = of[K1] >= 0 || of[K2] >= 0 || of[K3] >= 0;
    block->calm = 0;
    sort_block(block, data, start, is, &totals, &sums);
    measure(block, &sums, s, rows);
    double weight_before = s->weight;
    const vf *weights = weights_out ? weigh_tokens(block, &sums, s, rows) : 0;
    if (weights) write_weights(block, weights, weights_out);
    if (job->needs_k2) s->k2 += describe(block, K2, of[K2], rows);
    if (of[K3] >= 0) describe(block, K3, of[K3], rows);
    if (job->vetoing) count_catastrophic(block, s);
    if (judging && !keep_at_once(block, &sums, s->weight - weight_before, s)) {
        judge(block, weights, s, rows);
        write_kept(block, mask_out);
    } else if (block->plain) {
        memset(mask_out, 1, (size_t)block->tokens);
    } else {
        write_present(block, mask_out);
    }
}

static int is_valid(const char *mask, int type, int64_t i) {
    switch (type) {
        case MASK_INT32: return ((const int32_t *)mask)[i] != 0;
        case MASK_INT64: return ((const int64_t *)mask)[i] != 0;
        case MASK_FLOAT32: return ((const float *)mask)[i] != 0;
        default: return ((const uint8_t *)mask)[i] != 0;
    }
}

static uint32_t bits_of(const char *row, int type, int64_t i) {
    uint32_t bits;
    if (type == BFLOAT16) return (uint32_t)((const uint16_t *)row)[i] << 16;
    memcpy(&bits, (const float *)row + i, sizeof bits);
    return bits;
}

/* Whether neither log-prob of a token is missing. */
static int is_compared(const Job *job, const Row *data, int64_t i) {
    uint32_t train = bits_of(data->train, job->train_type, i), rollout = bits_of(data->rollout, job->rollout_type, i);
    if ((rollout & 0x7fffffffu) >= 0x7f800000u) return 0;
    return (train & 0x7fffffffu) < 0x7f800000u || train == 0xff800000u;
}

/* Give every counted token its sequence's weight. */
static void spread_weight(Block *block, const Row *data, const Derived *derived, float weight) {
    int whole = block->job->nonfinite == NEUTRAL || derived->missing == 0;
    for (int64_t start = 0; start < data->length; start += BLOCK) {
        set_tokens(block, data->length - start, BLOCK);
        read_mask(data->mask, block->job->mask_type, start, block);
        const int32_t *valid = (const int32_t *)block->valid;
        float *out = data->weights + start;
        int tokens = block->tokens;
        for (int t = 0; t < tokens; t++) out[t] = valid[t] ? weight : 0.0f;
        for (int t = 0; !whole && t < tokens; t++)
            if (valid[t] && !is_compared(block->job, data, start + t)) out[t] = 0.0f;
    }
}

#include "horizon.h"

static void pass_sequence(Block *block, Workspace *space, int64_t i, Rows *rows) {
    const Job *job = block->job;
    Row data = row_of(job, i);
    Sequence s = {.range = {INFINITY, -INFINITY}};
    start_sequence(block);
    for (int64_t start = 0; start < data.length; start += block->tokens) {
        int may_be_long = block->expected == EXPECT_QUIET && block->calm >= CALM && job->mask_type == MASK_BYTE;
        set_tokens(block, data.length - start, may_be_long ? LONG_BLOCK : BLOCK);
        pass_block(block, &data, start, &s, rows);
    }
    add_quiet(block, job->level == TOKEN_WEIGHTS, &s, rows);
    Derived derived = derive(job, &s);
    if (job->level == HORIZON_WEIGHTS) weigh_with_horizon(block, &data, space, &derived, &s, rows);
    const int32_t *of = job->token_criterion;
    if (of[K1] < 0 && of[K2] < 0 && of[K3] < 0) { /* nothing but missing tokens is rejected one by one */
        s.rejected_once = job->nonfinite == REJECT_TOKEN ? derived.missing : 0;
        s.kept = s.valid - s.rejected_once;
        s.kept_weight = s.weight;
    }
    describe_sequence(&s, &derived, rows);
    int kept = reject_sequence(job, &s, &derived, rows);
    double weight = job->level == NO_WEIGHTS ? 0 : weigh(job, &s, &derived, kept, rows);
    if (job->level == SEQUENCE_WEIGHTS || job->level == GEOMETRIC_WEIGHTS)
        spread_weight(block, &data, &derived, (float)weight);
    if (!kept) memset(data.loss_mask, 0, (size_t)data.length);
    job->sequence_kept[i] = (kept && s.kept > 0) || s.valid == 0;
    const double of_policies[] = {s.valid, s.measured, s.train, s.rollout};
    for (int c = 0; c < 4; c++) job->policy_sums[c * job->sequences + i] = of_policies[c];
}

/* --- All of them ---------------------------------------------------------------------------------------------------- */

/* Returns whether a value of the mask was negative or not finite. */
static int pass_task(const Job *job, Workspace *space, int64_t task, Rows *rows) {
    Block block;
    block.job = job;
    block.bad_mask = 0;
    clear_rows(rows);
    int64_t first = task * job->sequences_per_task, last = first + job->sequences_per_task;
    for (int64_t i = first; i < last && i < job->sequences; i++) pass_sequence(&block, space, i, rows);
    return block.bad_mask;
}

typedef struct {
    const Job *job;
    Rows *rows; /* of each task */
    char *memory; /* NULL, or room for the workspaces of all threads */
    int64_t longest; /* tokens of a sequence */
    int64_t next, threads;
    int bad_mask;
} Tasks;

static void take_tasks(void *argument) {
    Tasks *tasks = argument;
    Workspace space;
    if (tasks->memory) {
        int64_t thread = __atomic_fetch_add(&tasks->threads, 1, __ATOMIC_RELAXED);
        set_up(&space, tasks->memory + thread * workspace_size(tasks->longest), tasks->longest, tasks->job->decay);
    }
    for (;;) {
        int64_t task = __atomic_fetch_add(&tasks->next, 1, __ATOMIC_RELAXED);
        if (task >= tasks->job->tasks) break;
        if (pass_task(tasks->job, &space, task, &tasks->rows[task])) __atomic_store_n(&tasks->bad_mask, 1, __ATOMIC_RELAXED);
    }
#if LANES == 16
    _mm_sfence(); /* stores past the cache are seen by whoever waits for this thread */
#endif
}

#include "detail.h"

/* --- What Python calls ---------------------------------------------------------------------------------------------- */

#define PUBLIC __attribute__((visibility("default")))

/* As many threads as there are tasks, and no more than torch has. */
static int64_t threads_of(const Job *job) { return job->threads < job->tasks ? job->threads : job->tasks; }

enum { NO_MEMORY, DONE, BAD_MASK };

/* Memory for the workspaces, at the level that has them; returns 0 if there is none. */
static int have_workspaces(Tasks *tasks) {
    const Job *job = tasks->job;
    if (job->level != HORIZON_WEIGHTS) return 1;
    for (int64_t i = 0; i < job->sequences; i++) {
        int64_t length = row_of(job, i).length;
        if (length > tasks->longest) tasks->longest = length;
    }
    size_t bytes = (size_t)(threads_of(job) * workspace_size(tasks->longest));
    return posix_memalign((void **)&tasks->memory, 64, bytes) == 0;
}

/* Tasks go to whichever thread is free, so a core that somebody else uses holds up nobody. Without memory for their rows
   nothing is computed; with a negative or non-finite value in the mask the numbers mean nothing. */
PUBLIC int rollcorr_correct(const Job *job) {
    Rows *rows = malloc((size_t)job->tasks * sizeof *rows);
    Tasks tasks = {.job = job, .rows = rows};
    int has_memory = rows && have_workspaces(&tasks);
    if (!has_memory) {
        free(rows);
        return NO_MEMORY;
    }
    work_together(take_tasks, &tasks, threads_of(job));
    for (int64_t task = 1; task < job->tasks; task++) merge_rows(rows, &rows[task], job->criteria_count);
    finish_rows(job, rows);
    for (int64_t i = 0; i < job->number_count; i++) job->numbers[i] = ((const double *)rows)[job->places[i]];
    free(rows);
    free(tasks.memory);
    return tasks.bad_mask ? BAD_MASK : DONE;
}

/* One `Seen` for each thread that may take part, filled with what was seen before; `sums` are three for each sequence. */
PUBLIC void rollcorr_detail(const Job *job, Seen *seen, double *sums) {
    Detail detail = {job, seen, sums, sums + job->sequences, sums + 2 * job->sequences, 0, 0};
    work_together(see_tasks, &detail, threads_of(job));
}

PUBLIC int64_t rollcorr_seen_size(void) { return (int64_t)sizeof(Seen); }
PUBLIC int64_t rollcorr_abi(void) { return ABI; }
PUBLIC int64_t rollcorr_job_size(void) { return (int64_t)sizeof(Job); }
PUBLIC const char *rollcorr_sums(void) { return SUMS(AS_TEXT); }
PUBLIC const char *rollcorr_criterion_sums(void) { return CRITERION_SUMS(AS_TEXT); }
PUBLIC const char *rollcorr_moments(void) { return MOMENTS(AS_TEXT); }
PUBLIC const char *rollcorr_extremes(void) { return EXTREMES(AS_TEXT); }

/* Offsets that rise from 0 to the token count; anything else would read beyond the data. */
PUBLIC int rollcorr_offsets_fit(const int64_t *offsets, int64_t sequences, int64_t tokens) {
    if (offsets[0] != 0 || offsets[sequences] != tokens) return 0;
    for (int64_t i = 0; i < sequences; i++)
        if (offsets[i + 1] < offsets[i]) return 0;
    return 1;
}

/* Ask for large pages under a fresh output: its first touch costs several times the copy otherwise. */
PUBLIC void rollcorr_large_pages(char *start, int64_t bytes) {
#if defined(__linux__) && defined(MADV_HUGEPAGE)
    const uintptr_t page = (uintptr_t)sysconf(_SC_PAGESIZE);
    uintptr_t from = ((uintptr_t)start + page - 1) / page * page, to = ((uintptr_t)start + (uintptr_t)bytes) / page * page;
    if (to > from) (void)madvise((void *)from, to - from, MADV_HUGEPAGE);
#else
    (void)start, (void)bytes;
#endif
}
