/* Weights with a horizon: ℓ_t = Σ_s λ^|t−s| d_s over the valid tokens of a sequence, a twin of core/horizon.py.

   The tokens of a sequence are measured first, as for weights of sequences; then they are read again, while they are in
   cache. Two recurrences, over earlier and over later tokens, would each wait for the token before. So a tile of tokens
   is cut into one segment for each lane, and turned: a vector has token k of every segment. First each segment is summed
   as if it were alone. The sums of the segments around it then start the recurrences inside. These sums are float64.
   Small log-ratios under a short horizon have float32 sums in shorter segments: near.h. */

#ifndef ROLLCORR_HORIZON_H
#define ROLLCORR_HORIZON_H

#include "tiles.h"

#define LARGEST_NEAR 1000.0       /* nats; largest |d| of a near run */
#define FARTHEST 1e30              /* nats; |ℓ| beyond it counts as that, and has a weight at the safety bound */

typedef struct { /* the valid tokens of one sequence, next to each other */
    const float *train, *rollout;
    const uint8_t *counted; /* NULL: all are */
    float *weights;
    int64_t tokens;
    int64_t next_train, next_rollout; /* tokens to the next sequence, which comes from memory during this one's arithmetic */
    const uint8_t *next_mask;         /* of the next sequence; NULL: not bytes */
} Run;

/* Of each slot of a tile: the sum over later tokens, without the own one. */
static void sum_backward(int steps, const double *powers, const double *turned, const double *later, double *sums) {
    const vd decay = splat_double(powers[1]);
    vd low = load_doubles(later), high = load_doubles(later + HALF);
    for (int k = steps - 1; k >= 0; k--) {
        store_doubles(sums + k * LANES, low);
        store_doubles(sums + k * LANES + HALF, high);
        low = decay * low + load_doubles(turned + k * LANES);
        high = decay * high + load_doubles(turned + k * LANES + HALF);
    }
}

typedef struct { /* a recurrence over earlier tokens, and where it is */
    vd decay, low, high;
} Forward;

static inline Forward start_forward(const double *powers, const double *earlier) {
    return (Forward){splat_double(powers[1]), load_doubles(earlier), load_doubles(earlier + HALF)};
}

/* The next ℓ of each segment, from d and the sum over later tokens. */
INLINE void step_forward(Forward *sum, const double *turned, const double *later, vd *low, vd *high) {
    sum->low = sum->decay * sum->low + load_doubles(turned);
    sum->high = sum->decay * sum->high + load_doubles(turned + HALF);
    *low = sum->decay * load_doubles(later) + sum->low;
    *high = sum->decay * load_doubles(later + HALF) + sum->high;
}

/* Add the weights of a tile to those where no bound acts. Returns 0, and adds nothing, where |ℓ| exceeds QUIET_REACH or a
   bound, or where the sums do not tell the spread. What holds for some tiles holds for all of them together. */
static int add_calm(const Job *job, const Calm *calm, double n, CalmTokens *tokens) {
    v4f ends = largest_of_each(-calm->least, calm->most, (vf){0}, (vf){0});
    v4d sums;
    totals_of_each(&sums, calm->less_one, calm->squares, (vf){0}, (vf){0});
    if (!(ends[0] <= (float)QUIET_REACH && ends[1] <= (float)QUIET_REACH)) return 0;
    if (-ends[0] < job->untouched.lower || ends[1] > job->untouched.upper) return 0;
    if (!(10 * sums[0] * sums[0] <= 9 * n * sums[1])) return 0;
    tokens->count += n;
    tokens->sums += sums;
    tokens->ends = larger_of_four(tokens->ends, ends);
    return 1;
}

/* The rows of a sequence's tokens where no bound acts. */
static void add_calm_rows(const CalmTokens *tokens, Sequence *s, Rows *rows) {
    double n = tokens->count, of_one = tokens->sums[0], m2 = spread(n, of_one, tokens->sums[1]);
    if (n == 0) return;
    add_extremes(&rows->extremes[EXTREMES_log_weight], -(double)tokens->ends[0], (double)tokens->ends[1]);
    add_sample(&rows->moments[MOMENTS_weight_raw], n, n + of_one, m2);
    add_sample(&rows->moments[MOMENTS_weight], n, n + of_one, m2);
    s->raw_weight += n + of_one;
    s->weight += n + of_one;
}

/* Weights where no bound acts, to `block->rho`; returns 0 where `add_calm` does. */
static int weigh_calm_tile(Block *block, Forward sum, const double *turned, const double *later, CalmTokens *tokens) {
    Calm calm = no_weights();
    EACH_VECTOR(k, block) {
        vd low, high;
        step_forward(&sum, turned + k * LANES, later + k * LANES, &low, &high);
        block->rho[k] = add_to_calm(&calm, floats(low, high));
    }
    return add_calm(block->job, &calm, block->tokens, tokens);
}

/* Weights of any tile; returns where they are. `weigh_tokens` reads ℓ where it has d in other blocks. What float32 takes
   from ℓ is put right in its exponential. */
static const vf *weigh_tile(Block *block, Forward sum, const double *turned, const double *later, Sequence *s, Rows *rows) {
    const vf inf = splat(INFINITY);
    vf least = inf, most = -inf, less_one = {0};
    EACH_VECTOR(k, block) {
        vd low, high;
        step_forward(&sum, turned + k * LANES, later + k * LANES, &low, &high);
        low = limit(low, FARTHEST), high = limit(high, FARTHEST);
        vf log_weight = floats(low, high), inside = smaller(larger(log_weight, splat(-EXP_DOMAIN)), splat(EXP_DOMAIN));
        vf part = floats(low - low_doubles(log_weight), high - high_doubles(log_weight));
        Exponential e = exponential(inside);
        part = where(magnitude(log_weight) < EXP_DOMAIN, part);
        block->d[k] = log_weight;
        block->rho[k] = e.exp + part * e.exp;
        block->expm1[k] = e.expm1 + part * e.exp;
        less_one += where(block->counted[k], block->expm1[k]);
        least = smaller(least, choose(block->counted[k], log_weight, inf));
        most = larger(most, choose(block->counted[k], log_weight, -inf));
    }
    Mismatch sums = {.expm1 = total(less_one), .log_ratio = {smallest(least), largest(most)}};
    add_extremes(&rows->extremes[EXTREMES_log_weight], sums.log_ratio.min, sums.log_ratio.max);
    return weigh_tokens(block, &sums, s, rows);
}

/* Which slots of a turned tile are counted. */
static void sort_tile(Block *block, const uint8_t *counted, int64_t left) {
    int steps = block->vectors, found = 0;
    set_plain(block);
    block->train = (const float *)block->d;
    block->rollout = (const float *)NONE;
    if (left >= block->tokens && !counted) return;
    int32_t *slots = (int32_t *)block->classes[0];
    for (int lane = 0; lane < LANES; lane++)
        for (int k = 0; k < steps; k++) {
            int64_t at = lane * steps + k;
            int is_counted = at < left && (!counted || counted[at]);
            slots[k * LANES + lane] = -is_counted;
            found += is_counted;
        }
    block->plain = 0;
    block->measured = block->counted = block->classes[0];
    block->n_measured = block->n_counted = found;
}

/* Weigh a tile of float64 sums; `before` and `after` are those over earlier and later tokens. Returns the next `before`. */
static double weigh_wide_tile(Block *block, Workspace *space, const Run *run, int64_t start, int left, double before,
                              double after, Sequence *s, Rows *rows) {
    int steps = steps_of(left), slots = steps * LANES;
    double sums[BLOCK] __attribute__((aligned(64)));
    const float *train = read_tile(run->train + start, left, slots, block->train_copy);
    const float *rollout = read_tile(run->rollout + start, left, slots, block->rollout_copy);
    turn_tile(space->powers, train, rollout, steps, space->turned, space->earlier, space->later);
    before = pass_forward(space->earlier, space->powers[steps], before);
    pass_backward(space->later, space->powers[steps], after);

    block->vectors = steps;
    block->tokens = slots;
    sort_tile(block, run->counted ? run->counted + start : 0, left);
    sum_backward(steps, space->powers, space->turned, space->later, sums);
    Forward forward = start_forward(space->powers, space->earlier);
    int may_be_calm = block->plain && block->job->mode != ICEPOP;
    const vf *weights = block->rho;
    if (!may_be_calm || !weigh_calm_tile(block, forward, space->turned, sums, &space->calm))
        weights = weigh_tile(block, forward, space->turned, sums, s, rows);
    turn_back(weights, steps, left == slots ? run->weights + start : (float *)block->k2);
    if (left < slots) memcpy(run->weights + start, block->k2, (size_t)left * sizeof(float));
    return before;
}

/* Σ λ^(distance to its start) d of some tokens, in float64. */
static double sum_wide_tile(Block *block, const double *powers, const Run *run, int64_t start, int64_t tokens) {
    int slots = steps_of(tokens) * LANES;
    const float *train = read_tile(run->train + start, tokens, slots, block->train_copy);
    const float *rollout = read_tile(run->rollout + start, tokens, slots, block->rollout_copy);
    return sum_tile(powers, train, rollout, slots);
}

/* Weigh the tokens of any run, tile by tile. What later tokens pass on is summed before, from the end. */
static void weigh_wide_run(Block *block, Workspace *space, const Run *run, Sequence *s, Rows *rows) {
    double before = 0, after = 0, full = pow(space->powers[1], BLOCK);
    for (int64_t start = (run->tokens - 1) / BLOCK * BLOCK; start >= 0; start -= BLOCK) {
        int64_t left = run->tokens - start;
        space->after[start / BLOCK] = after;
        after = full * after + sum_wide_tile(block, space->powers, run, start, left < BLOCK ? left : BLOCK);
    }
    for (int64_t start = 0; start < run->tokens; start += BLOCK) {
        int left = (int)(run->tokens - start < BLOCK ? run->tokens - start : BLOCK);
        before = weigh_wide_tile(block, space, run, start, left, before, space->after[start / BLOCK], s, rows);
    }
}

/* Sum the tile of a near run that starts here; returns what its tokens pass on to earlier ones. A full tile passes on less
   than 1e-11 of what it gets from later ones. */
static double look_ahead(Block *block, Workspace *space, const Run *run, int64_t start, NearTile *tile) {
    int tokens = tokens_of_tile(run->tokens - start), slots = slots_of_tile(tokens);
    const float *train = run->train + start, *rollout = run->rollout + start;
    const float *ahead[] = {train + run->next_train, rollout + run->next_rollout};
    const float *in_blocks[] = {read_tile(train, tokens, slots, block->train_copy),
                                read_tile(rollout, tokens, slots, block->rollout_copy)};
    sum_near_tile(&space->near, in_blocks[0], in_blocks[1], slots, ahead, space->is_bounded, tile);
    return tile->is_near ? sum_of_near_tile(&space->near, tile, slots)
                         : sum_wide_tile(block, space->powers, run, start, tokens);
}

/* Weigh a near tile; returns 0, and adds nothing, where float32 sums are not good enough or a bound may act. */
static int weigh_if_calm(Block *block, Workspace *space, const NearTile *tile, int tokens, double before, double after,
                         float *out) {
    double most;
    int slots = slots_of_tile(tokens);
    Calm calm;
#define WEIGH(to, way) weigh_near_tile(&space->near, tile, tokens, before, after, to, space->is_bounded, &calm, way)
    if (tokens < slots) most = WEIGH((float *)block->k2, SOME_SLOTS);
    else if (can_pass_cache(out)) most = WEIGH(out, PAST_CACHE_WHOLE);
    else if (CUTS_VECTORS) most = WEIGH(out, PAST_CACHE_CUT);
    else most = WEIGH(out, THROUGH_CACHE);
    if (tokens < slots) memcpy(out, block->k2, (size_t)tokens * sizeof *out);
    return most <= (double)NEAR_SUM && add_calm(block->job, &calm, tokens, &space->calm);
}

/* Weigh the tokens of a run with a short horizon and no huge log-ratio: of each tile, the next one has all later tokens
   that matter. So tokens are read once, while the tile before is weighed. */
static void weigh_near_run(Block *block, Workspace *space, const Run *run, Sequence *s, Rows *rows) {
    NearTile *tile = space->tiles, *next = space->tiles + 1, *swap;
    double before = 0;
    look_ahead(block, space, run, 0, tile);
    for (int64_t start = 0; start < run->tokens; swap = tile, tile = next, next = swap) {
        int tokens = tokens_of_tile(run->tokens - start);
        int64_t end = start + tokens;
        for (int64_t t = start; run->next_mask && t < end; t += 64) __builtin_prefetch(run->next_mask + t, 0, 2);
        double after = end < run->tokens ? look_ahead(block, space, run, end, next) : 0;
        if (tile->is_near && weigh_if_calm(block, space, tile, tokens, before, after, run->weights + start))
            for (int b = 0; b < slots_of_tile(tokens) / FOUR; b++) before = space->near.block * before + (double)tile->of_block[EARLIER][b];
        else
            before = weigh_wide_tile(block, space, run, start, tokens, before, after, s, rows);
        start = end;
    }
}

static void weigh_run(Block *block, Workspace *space, const Run *run, Sequence *s, Rows *rows) {
    int is_near = space->powers[1] <= LONGEST_NEAR && !run->counted && block->job->mode != ICEPOP;
    is_near = is_near && s->range.min >= -LARGEST_NEAR && s->range.max <= LARGEST_NEAR;
    if (run->tokens == 0) return;
    space->calm = (CalmTokens){.ends = {-INFINITY, -INFINITY}};
    space->is_bounded = fmax(-s->range.min, s->range.max) <= 0.99 * (double)NEAR_SUM * (1 - space->powers[1]);
    if (is_near) weigh_near_run(block, space, run, s, rows);
    else weigh_wide_run(block, space, run, s, rows);
    add_calm_rows(&space->calm, s, rows);
}

/* Copy the valid tokens of a sequence next to each other; d of a missing one is 0. */
static Run collect_tokens(Block *block, const Row *data, const Workspace *space) {
    const Job *job = block->job;
    int64_t found = 0;
    for (int64_t start = 0; start < data->length; start += BLOCK) {
        set_tokens(block, data->length - start, BLOCK);
        read_mask(data->mask, job->mask_type, start, block);
        const int32_t *valid = (const int32_t *)block->valid;
        for (int t = 0; t < block->tokens; t++) {
            if (!valid[t]) continue;
            int has_ratio = is_compared(job, data, start + t);
            uint32_t train = has_ratio ? bits_of(data->train, job->train_type, start + t) : 0;
            uint32_t rollout = has_ratio ? bits_of(data->rollout, job->rollout_type, start + t) : 0;
            memcpy(space->train + found, &train, sizeof train);
            memcpy(space->rollout + found, &rollout, sizeof rollout);
            space->counted[found++] = (uint8_t)(has_ratio || job->nonfinite == NEUTRAL);
        }
    }
    return (Run){space->train, space->rollout, space->counted, space->weights, found, 0, 0, 0};
}

static void spread_weights(Block *block, const Row *data, const Run *run) {
    int64_t found = 0;
    for (int64_t start = 0; start < data->length; start += BLOCK) {
        set_tokens(block, data->length - start, BLOCK);
        read_mask(data->mask, block->job->mask_type, start, block);
        const int32_t *valid = (const int32_t *)block->valid;
        for (int t = 0; t < block->tokens; t++) data->weights[start + t] = valid[t] ? run->weights[found++] : 0.0f;
    }
}

/* The valid tokens of a sequence, or of one of its turns. */
typedef struct {
    double valid, zero, missing;
} Counts;

/* Weight 0 for all tokens that one of probability zero reaches. */
static void weigh_impossible(const Job *job, const Row *data, const Counts *counts, Rows *rows) {
    double n = job->nonfinite == NEUTRAL ? counts->valid : counts->valid - counts->missing;
    memset(data->weights, 0, (size_t)data->length * sizeof(float));
    add_moments(&rows->moments[MOMENTS_weight_raw], n, 0, 0);
    add_moments(&rows->moments[MOMENTS_weight], n, 0, 0);
    if (job->banded_below) rows->sums[SUM_is_low] += n;
    if (job->mode != ICEPOP) return;
    rows->sums[SUM_is_outside] += n;
    add_extremes(&rows->extremes[EXTREMES_weight], 0, 0);
}

/* Where the valid tokens begin, if they are one run of float32 without a missing one; else −1. */
static int64_t start_of_run(const Job *job, const Row *data, const Counts *counts) {
    const uint8_t *mask = (const uint8_t *)data->mask;
    if (job->train_type != FLOAT32 || job->rollout_type != FLOAT32) return -1;
    if (counts->missing > 0) return -1;
    int64_t start = 0, run = (int64_t)counts->valid;
    if (run == data->length) return 0;
    if (job->mask_type != MASK_BYTE) return -1;
    while (start < data->length && mask[start] == 0) start++;
    return start + run <= data->length && leading_run(mask + start, (int)run) == run ? start : -1;
}

/* The weights of tokens that nothing outside of `data` reaches. */
static void weigh_together(Block *block, const Row *data, Workspace *space, const Counts *counts, Sequence *s, Rows *rows) {
    const Job *job = block->job;
    if (counts->zero > 0) {
        weigh_impossible(job, data, counts, rows);
        return;
    }
    int64_t start = counts->valid > 0 ? start_of_run(job, data, counts) : 0, end = start + (int64_t)counts->valid;
    if (start >= 0) {
        float *weights = data->weights + start;
        int64_t next_train = job->offsets ? data->length : job->train_stride;
        int64_t next_rollout = job->offsets ? data->length : job->rollout_stride;
        const uint8_t *next_mask = (const uint8_t *)data->mask + (job->offsets ? data->length : job->mask_stride);
        Run run = {(const float *)data->train + start, (const float *)data->rollout + start, 0, weights, end - start,
                   next_train, next_rollout, job->mask_type == MASK_BYTE ? next_mask : 0};
        memset(data->weights, 0, (size_t)start * sizeof(float));
        weigh_run(block, space, &run, s, rows);
        memset(data->weights + end, 0, (size_t)(data->length - end) * sizeof(float));
    } else {
        Run run = collect_tokens(block, data, space);
        weigh_run(block, space, &run, s, rows);
        for (int64_t t = 0; t < run.tokens; t++) run.weights[t] = run.counted[t] ? run.weights[t] : 0.0f;
        spread_weights(block, data, &run);
    }
}

/* Weigh each turn as if it were a sequence: a run of valid tokens, between holes of the mask. */
static void weigh_turns(Block *block, const Row *data, Workspace *space, int is_whole, Sequence *s, Rows *rows) {
    const Job *job = block->job;
    for (int64_t start = 0, end; start < data->length; start = end) {
        end = start + 1;
        if (!is_valid(data->mask, job->mask_type, start)) {
            data->weights[start] = 0;
            continue;
        }
        while (end < data->length && is_valid(data->mask, job->mask_type, end)) end++;
        Counts counts = {.valid = (double)(end - start)};
        for (int64_t t = start; !is_whole && t < end; t++) {
            int is_missing = !is_compared(job, data, t);
            counts.missing += is_missing;
            counts.zero += !is_missing && bits_of(data->train, job->train_type, t) == 0xff800000u;
        }
        Row turn = {data->train + start * width(job->train_type), data->rollout + start * width(job->rollout_type),
                    data->mask + start * mask_width(job->mask_type), data->weights + start, data->loss_mask + start,
                    end - start};
        weigh_together(block, &turn, space, &counts, s, rows);
    }
}

/* The weights of a sequence whose tokens have been measured, and their rows. */
static void weigh_with_horizon(Block *block, const Row *data, Workspace *space, const Derived *derived, Sequence *s,
                               Rows *rows) {
    const Job *job = block->job;
    const int32_t *of = job->token_criterion;
    Counts counts = {s->valid, s->zero, derived->missing};
    if (data->length == 0) return;
    if (job->per_turn) weigh_turns(block, data, space, s->zero == 0 && derived->missing == 0, s, rows);
    else weigh_together(block, data, space, &counts, s, rows);
    if (of[K1] < 0 && of[K2] < 0 && of[K3] < 0) return; /* all that are counted are kept */
    for (int64_t t = 0; t < data->length; t++) s->kept_weight += data->loss_mask[t] ? (double)data->weights[t] : 0;
}

#endif
