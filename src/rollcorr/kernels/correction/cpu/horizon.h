/* Weights with a horizon: ℓ_t = Σ_s λ^|t−s| d_s over the valid tokens of a sequence, a twin of core/horizon.py.

   The tokens of a sequence are measured first, as for weights of sequences; then they are read again, while they are in
   cache. Two recurrences, over earlier and over later tokens, would each wait for the token before. So a tile of tokens
   is cut into one segment for each lane, and turned: a vector has token k of every segment. First each segment is summed
   as if it were alone. The sums of the segments around it then start the recurrences inside. Sums are float64, but for near
   tiles: there small log-ratios keep float32 sums good to 1e-6. */

#ifndef ROLLCORR_HORIZON_H
#define ROLLCORR_HORIZON_H

#include "tiles.h"

#define LONGEST_NEAR 0.95          /* λ; float32 sums over more tokens are not good to 1e-6 */
#define NEAR_SUM 2.0f              /* nats; largest |sum| inside of a near tile */
#define FARTHEST 1e30              /* nats; |ℓ| beyond it counts as that, and has a weight at the safety bound */

typedef struct { /* the valid tokens of one sequence, next to each other */
    const float *train, *rollout;
    const uint8_t *counted; /* NULL: all are */
    float *weights;
    int64_t tokens;
    int64_t next_train, next_rollout; /* tokens to the next sequence, which comes from memory during this one's arithmetic */
} Run;

/* Of each slot of a tile: the sum over later tokens, without the own one. */
static void sum_backward(int steps, const double *powers, const double *turned, const double *later, const float *ahead[2],
                         double *sums) {
    const vd decay = splat_double(powers[1]);
    vd low = load_doubles(later), high = load_doubles(later + HALF);
    for (int k = steps - 1; k >= 0; k--) {
        for (int i = 0; i < 2; i++) __builtin_prefetch((const void *)((uintptr_t)ahead[i] + (uintptr_t)k * sizeof(vf)), 0, 2);
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

/* What the weights of a tile add to the statistics where no bound acts: from the range of ℓ, Σ (w − 1) and Σ (w − 1)².
   Returns 0, and adds nothing, where |ℓ| exceeds QUIET_REACH or a bound, or where the sums do not tell the spread. */
INLINE int add_calm(Block *block, vf least, vf most, vf less_one, vf squares, Sequence *s, Rows *rows) {
    const Job *job = block->job;
    double low = smallest(least), high = largest(most), n = block->tokens, of_one = total(less_one), m2 = total(squares);
    if (!(low >= -QUIET_REACH && high <= QUIET_REACH && 10 * of_one * of_one <= 9 * n * m2)) return 0;
    if (low < job->untouched.lower || high > job->untouched.upper) return 0;
    m2 = spread(n, of_one, m2);
    add_extremes(&rows->extremes[EXTREMES_log_weight], low, high);
    add_sample(&rows->moments[MOMENTS_weight_raw], n, n + of_one, m2);
    add_sample(&rows->moments[MOMENTS_weight], n, n + of_one, m2);
    s->raw_weight += n + of_one;
    s->weight += n + of_one;
    return 1;
}

/* Weights of a near tile, to `block->rho`; returns 0 where `add_calm` does, or where float32 sums are not good enough. */
static int weigh_near_tile(Block *block, const Workspace *space, const float *turned, const double *earlier,
                           const double *later, const float *ahead[2], Sequence *s, Rows *rows) {
    const int steps = BLOCK / LANES;
    const vf decay = splat(space->near_powers[1]);
    vf after[BLOCK / LANES], sum = floats(load_doubles(later), load_doubles(later + HALF)), most_sum = {0};
    for (int k = steps - 1; k >= 0; k--) {
        for (int i = 0; i < 2; i++) __builtin_prefetch((const void *)((uintptr_t)ahead[i] + (uintptr_t)k * sizeof(vf)), 0, 2);
        after[k] = sum;
        most_sum = farther(most_sum, sum);
        sum = decay * sum + load(turned + k * LANES);
    }
    sum = floats(load_doubles(earlier), load_doubles(earlier + HALF));
    vf least = splat(INFINITY), most = -least, less_one = {0}, squares = {0};
    for (int k = 0; k < steps; k++) {
        sum = decay * sum + load(turned + k * LANES);
        most_sum = farther(most_sum, sum);
        vf log_weight = decay * after[k] + sum;
        Exponential e = exponential_quiet(log_weight);
        block->rho[k] = e.exp;
        less_one += e.expm1;
        squares += e.expm1 * e.expm1;
        least = smaller(least, log_weight);
        most = larger(most, log_weight);
    }
    return largest(most_sum) <= (double)NEAR_SUM && add_calm(block, least, most, less_one, squares, s, rows);
}

/* Weights where no bound acts, to `block->rho`; returns 0 where `add_calm` does. */
static int weigh_calm_tile(Block *block, Forward sum, const double *turned, const double *later, Sequence *s, Rows *rows) {
    vf least = splat(INFINITY), most = -least, less_one = {0}, squares = {0};
    EACH_VECTOR(k, block) {
        vd low, high;
        step_forward(&sum, turned + k * LANES, later + k * LANES, &low, &high);
        vf log_weight = floats(low, high);
        Exponential e = exponential_quiet(log_weight);
        block->rho[k] = e.exp;
        less_one += e.expm1;
        squares += e.expm1 * e.expm1;
        least = smaller(least, log_weight);
        most = larger(most, log_weight);
    }
    return add_calm(block, least, most, less_one, squares, s, rows);
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

/* Weigh the tokens of a run, tile by tile. */
static void weigh_run(Block *block, const Workspace *space, const Run *run, Sequence *s, Rows *rows) {
    const double *powers = space->powers;
    double *turned = space->turned, *earlier = space->earlier, *later = space->later, before = 0, after = 0;
    int near_run = powers[1] <= LONGEST_NEAR && !run->counted && block->job->mode != ICEPOP;
    int64_t start = 0;
    for (; start < run->tokens; start += BLOCK, earlier += LANES, later += LANES) {
        int64_t left = run->tokens - start;
        int steps = steps_of(left), slots = steps * LANES;
        const float *train = read_tile(run->train + start, left, slots, block->train_copy);
        const float *rollout = read_tile(run->rollout + start, left, slots, block->rollout_copy);
        int is_near = left >= BLOCK && near_run &&
                      turn_near_tile(space->near_powers, train, rollout, (float *)(turned + start), earlier, later);
        if (!is_near) turn_tile(powers, train, rollout, steps, turned + start, earlier, later);
        space->near[start / BLOCK] = (uint8_t)is_near;
        before = pass_forward(earlier, powers[steps], before);
    }
    while (start > 0) { /* what later tiles pass on is known from the end */
        start -= BLOCK;
        later -= LANES;
        after = pass_backward(later, powers[steps_of(run->tokens - start)], after);
    }
    for (earlier = space->earlier; start < run->tokens; start += BLOCK, earlier += LANES, later += LANES) {
        int64_t left = run->tokens - start;
        double sums[BLOCK] __attribute__((aligned(64)));
        block->vectors = steps_of(left);
        block->tokens = block->vectors * LANES;
        sort_tile(block, run->counted ? run->counted + start : 0, left);
        const float *ahead[] = {run->train + start + run->next_train, run->rollout + start + run->next_rollout};
        int is_near = space->near[start / BLOCK];
        if (is_near && !weigh_near_tile(block, space, (const float *)(turned + start), earlier, later, ahead, s, rows)) {
            double unused[2][LANES] __attribute__((aligned(64))); /* what the segments pass on is known */
            const float *train = run->train + start, *rollout = run->rollout + start;
            turn_tile(powers, train, rollout, block->vectors, turned + start, unused[0], unused[1]);
            is_near = 0;
        }
        const vf *weights = block->rho;
        if (!is_near) {
            sum_backward(block->vectors, powers, turned + start, later, ahead, sums);
            Forward forward = start_forward(powers, earlier);
            int may_be_calm = block->plain && block->job->mode != ICEPOP;
            int is_calm = may_be_calm && weigh_calm_tile(block, forward, turned + start, sums, s, rows);
            if (!is_calm) weights = weigh_tile(block, forward, turned + start, sums, s, rows);
        }

        int is_full = left >= block->tokens;
        turn_back(weights, block->vectors, is_full ? run->weights + start : (float *)block->k2);
        if (!is_full) memcpy(run->weights + start, block->k2, (size_t)left * sizeof(float));
    }
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
    return (Run){space->train, space->rollout, space->counted, space->weights, found, 0, 0};
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

/* A token of probability zero gives its whole sequence weight 0. */
static void weigh_impossible(const Job *job, const Row *data, const Derived *derived, Rows *rows) {
    double n = derived->counted;
    memset(data->weights, 0, (size_t)data->length * sizeof(float));
    add_moments(&rows->moments[MOMENTS_weight_raw], n, 0, 0);
    add_moments(&rows->moments[MOMENTS_weight], n, 0, 0);
    if (job->banded_below) rows->sums[SUM_is_low] += n;
    if (job->mode != ICEPOP) return;
    rows->sums[SUM_is_outside] += n;
    add_extremes(&rows->extremes[EXTREMES_weight], 0, 0);
}

/* Where the valid tokens of a sequence begin, if they are one run of float32 without a missing one; else −1. */
static int64_t start_of_run(const Job *job, const Row *data, const Sequence *s, const Derived *derived) {
    const uint8_t *mask = (const uint8_t *)data->mask;
    if (job->mask_type != MASK_BYTE || job->train_type != FLOAT32 || job->rollout_type != FLOAT32) return -1;
    if (derived->missing > 0) return -1;
    int64_t start = 0, run = (int64_t)s->valid;
    while (start < data->length && mask[start] == 0) start++;
    return start + run <= data->length && leading_run(mask + start, (int)run) == run ? start : -1;
}

/* The weights of a sequence whose tokens have been measured, and their rows. */
static void weigh_with_horizon(Block *block, const Row *data, const Workspace *space, const Derived *derived, Sequence *s,
                               Rows *rows) {
    const Job *job = block->job;
    const int32_t *of = job->token_criterion;
    if (data->length == 0) return;
    if (s->zero > 0) {
        weigh_impossible(job, data, derived, rows);
        return;
    }
    int64_t start = s->valid > 0 ? start_of_run(job, data, s, derived) : 0, end = start + (int64_t)s->valid;
    if (start >= 0) {
        float *weights = data->weights + start;
        int64_t next_train = job->offsets ? data->length : job->train_stride;
        int64_t next_rollout = job->offsets ? data->length : job->rollout_stride;
        Run run = {(const float *)data->train + start, (const float *)data->rollout + start, 0, weights, end - start,
                   next_train, next_rollout};
        memset(data->weights, 0, (size_t)start * sizeof(float));
        weigh_run(block, space, &run, s, rows);
        memset(data->weights + end, 0, (size_t)(data->length - end) * sizeof(float));
    } else {
        Run run = collect_tokens(block, data, space);
        weigh_run(block, space, &run, s, rows);
        for (int64_t t = 0; t < run.tokens; t++) run.weights[t] = run.counted[t] ? run.weights[t] : 0.0f;
        spread_weights(block, data, &run);
    }
    if (of[K1] < 0 && of[K2] < 0 && of[K3] < 0) return; /* all that are counted are kept */
    for (int64_t t = 0; t < data->length; t++) s->kept_weight += data->loss_mask[t] ? (double)data->weights[t] : 0;
}

#endif
