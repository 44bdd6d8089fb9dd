"""Kept sets: logits and sums of one token's set, its gradients, and the gradient of one row of the head.

The entries of token t are its kept ids and, if that lacks the sampled id, the sampled id after them. Entry e of it is
kept in place `offsets[t] + t + e` of what passes from launch to launch, so each token has a place to spare. A place
without an entry of this slice of the head holds the row −1.
"""

from __future__ import annotations

import triton
import triton.language as tl

ENTRIES = tl.constexpr(16)
WIDTH = tl.constexpr(128)


@triton.jit
def _entries(ids, offsets, token_ids, outside, working, t):
    """First place, number of places and entries of token t, and its sampled id. Tokens that do not work have none."""
    begin = tl.load(offsets + t)
    places = tl.load(offsets + t + 1) - begin + 1
    count = places - 1 + tl.load(outside + t).to(tl.int64)
    count = tl.where(tl.load(working + t) != 0, count, 0)
    return begin, places, count, tl.load(token_ids + t)


@triton.jit
def sum_sets(
    hidden, weight, bias, ids, offsets, token_ids, temperature, outside, working, rows, z, largest, log_sum, target,
    entropy, first_id, V, d,
    BIASED: tl.constexpr,
):  # fmt: skip
    """The logits of one token's set, and what its softmax comes down to."""
    t = tl.program_id(0).to(tl.int64)
    wide: tl.constexpr = z.dtype.element_ty
    begin, places, count, sampled = _entries(ids, offsets, token_ids, outside, working, t)
    tau = tl.load(temperature + t)
    high = tl.full([], float("-inf"), wide)
    total_e = tl.full([], 0.0, wide)
    total_ez = total_e
    found = total_e
    for start in range(0, places, ENTRIES):
        e = start + tl.arange(0, ENTRIES)
        kept = tl.load(ids + begin + e, mask=e < places - 1, other=0).to(tl.int64)
        token = tl.where(e < places - 1, kept, sampled)
        row = token - first_id
        own = (e < count) & (row >= 0) & (row < V)
        dot = tl.zeros([ENTRIES], dtype=wide)
        for at in range(0, d, WIDTH):
            column = at + tl.arange(0, WIDTH)
            h = tl.load(hidden + t * d + column, mask=column < d, other=0.0).to(wide)
            place = weight + row[:, None] * d + column[None, :]
            w = tl.load(place, mask=own[:, None] & (column < d)[None, :], other=0.0).to(wide)
            dot += tl.sum(w * h[None, :], axis=1)
        if BIASED:
            dot += tl.load(bias + row, mask=own, other=0.0).to(wide)
        logit = tl.where(own, dot / tau, float("-inf"))
        tl.store(z + begin + t + e, logit, mask=e < places)
        tl.store(rows + begin + t + e, tl.where(own, row, -1), mask=e < places)
        found += tl.sum(tl.where(own & (token == sampled), logit, 0.0), axis=0)
        higher = tl.maximum(high, tl.max(logit, axis=0))
        anchor = tl.where(higher == float("-inf"), 0.0, higher)
        shift = tl.maximum(high - anchor, -1e4)
        below = logit - anchor
        power = tl.exp(below)
        total_ez = tl.exp(shift) * (total_ez + total_e * shift) + tl.sum(
            tl.where(power > 0.0, power * below, 0.0), axis=0
        )
        total_e = tl.exp(shift) * total_e + tl.sum(power, axis=0)
        high = higher
    logarithm = tl.log(total_e)
    some = count > 0
    tl.store(largest + t, tl.where(some, high, 0.0))
    tl.store(log_sum + t, tl.where(some, logarithm, 0.0))
    tl.store(target + t, found)
    tl.store(entropy + t, tl.where(total_e > 0.0, logarithm - total_ez / total_e, 0.0))


@triton.jit
def weigh_sets(
    weight, ids, offsets, token_ids, temperature, outside, working, rows, z, log_total, entropy, of_sum, of_target,
    of_entropy, changes, of_hidden, first_id, d,
):  # fmt: skip
    """The gradient in one token's logits, and its bag Σ_e g_e W_{id(e)}: that in `WIDTH` of its hidden state."""
    t = tl.program_id(0).to(tl.int64)
    wide: tl.constexpr = z.dtype.element_ty
    begin, places, count, sampled = _entries(ids, offsets, token_ids, outside, working, t)
    tau = tl.load(temperature + t)
    g_sum, g_target, g_entropy = tl.load(of_sum + t), tl.load(of_target + t), tl.load(of_entropy + t)
    count = tl.where(tl.abs(g_sum) + tl.abs(g_target) + tl.abs(g_entropy) != 0.0, count, 0)
    column = tl.program_id(1) * WIDTH + tl.arange(0, WIDTH)
    bag = tl.zeros([WIDTH], dtype=wide)
    for start in range(0, places, ENTRIES):
        e = start + tl.arange(0, ENTRIES)
        place = begin + t + e
        row = tl.load(rows + place, mask=e < places, other=-1)
        own = (row >= 0) & (e < count)
        log_p = tl.load(z + place, mask=own, other=float("-inf")) - tl.load(log_total + t)
        p = tl.exp(log_p)
        surprise = tl.where(p > 0.0, log_p + tl.load(entropy + t), 0.0)
        change = p * g_sum - p * surprise * g_entropy + tl.where(row == sampled - first_id, g_target, 0.0)
        change = tl.where(own, change / tau, 0.0)
        w = tl.load(weight + row[:, None] * d + column[None, :], mask=own[:, None] & (column < d)[None, :], other=0.0)
        bag += tl.sum(w.to(wide) * change[:, None], axis=0)
        if tl.program_id(1) == 0:
            tl.store(changes + place, change, mask=e < places)
    tl.store(of_hidden + t * d + column, bag.to(of_hidden.dtype.element_ty), mask=column < d)


@triton.jit
def add_rows(sorted_rows, tokens, changes, hidden, gradient, places, d):
    """Row v of the head's gradient += Σ_{e: row(e) = v} g_e h_{t(e)}: by the first place of those sorted by row.

    One program adds a row, in the order of the tokens, so equal inputs give equal bits.
    """
    first = tl.program_id(0).to(tl.int64)
    row = tl.load(sorted_rows + first)
    before = tl.load(sorted_rows + first - 1, mask=first > 0, other=-1)
    if row > before:  # they are sorted, and −1 comes first
        wide: tl.constexpr = changes.dtype.element_ty
        column = tl.program_id(1) * WIDTH + tl.arange(0, WIDTH)
        bag = tl.zeros([WIDTH], dtype=wide)
        at = first
        while at < places:
            e = at + tl.arange(0, ENTRIES)
            same = tl.load(sorted_rows + e, mask=e < places, other=-1) == row
            change = tl.load(changes + e, mask=same, other=0.0)
            token = tl.load(tokens + e, mask=same, other=0)
            inside = same[:, None] & (column < d)[None, :]
            h = tl.load(hidden + token[:, None] * d + column[None, :], mask=inside, other=0.0)
            bag += tl.sum(h.to(wide) * change[:, None], axis=0)
            at = tl.where(tl.min(same.to(tl.int32), axis=0) == 1, at + ENTRIES, places)
        place = gradient + row * d + column
        present = tl.load(place, mask=column < d, other=0.0).to(wide)
        tl.store(place, (present + bag).to(gradient.dtype.element_ty), mask=column < d)
