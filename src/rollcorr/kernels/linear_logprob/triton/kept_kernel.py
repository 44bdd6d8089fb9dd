"""Kept sets: the logits of entries, and the gradients of one token's hidden state and of one row of the head."""

from __future__ import annotations

import triton
import triton.language as tl

ENTRIES = tl.constexpr(16)
WIDTH = tl.constexpr(128)


@triton.jit
def dots(hidden, weight, ids, tokens, z, entries, d):
    """Compute z_e = h_{t(e)} · W_{id(e)} of a block of entries; adjacent entries share a token: its state is cached."""
    wide: tl.constexpr = z.dtype.element_ty
    e = tl.program_id(0).to(tl.int64) * ENTRIES + tl.arange(0, ENTRIES)
    row = tl.load(ids + e, mask=e < entries, other=0)
    token = tl.load(tokens + e, mask=e < entries, other=0)
    dot = tl.zeros([ENTRIES], dtype=wide)
    for at in range(0, d, WIDTH):
        column = at + tl.arange(0, WIDTH)
        inside = (e < entries)[:, None] & (column < d)[None, :]
        h = tl.load(hidden + token[:, None] * d + column[None, :], mask=inside, other=0.0).to(wide)
        w = tl.load(weight + row[:, None] * d + column[None, :], mask=inside, other=0.0).to(wide)
        dot += tl.sum(w * h, axis=1)
    tl.store(z + e, dot, mask=e < entries)


@triton.jit
def add_up(weight, ids, offsets, changes, bags, d):
    """Compute Σ_e g_e W_{id(e)} of one token: `WIDTH` columns of the gradient in its hidden state."""
    t = tl.program_id(0).to(tl.int64)
    wide: tl.constexpr = changes.dtype.element_ty
    begin = tl.load(offsets + t)
    places = tl.load(offsets + t + 1) - begin
    column = tl.program_id(1) * WIDTH + tl.arange(0, WIDTH)
    bag = tl.zeros([WIDTH], dtype=wide)
    for start in range(0, places, ENTRIES):
        e = start + tl.arange(0, ENTRIES)
        change = tl.load(changes + begin + e, mask=e < places, other=0.0)
        row = tl.load(ids + begin + e, mask=e < places, other=0)
        inside = (change != 0.0)[:, None] & (column < d)[None, :]
        w = tl.load(weight + row[:, None] * d + column[None, :], mask=inside, other=0.0)
        bag += tl.sum(w.to(wide) * change[:, None], axis=0)
    tl.store(bags + t * d + column, bag, mask=column < d)


@triton.jit
def add_rows(sorted_rows, tokens, changes, hidden, gradient, places, d):
    """Add Σ_{e: row(e) = v} g_e h_{t(e)} to row v of the head's gradient, in the row's first program.

    One program adds each row, in the order of the tokens, so equal inputs give equal bits.
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
