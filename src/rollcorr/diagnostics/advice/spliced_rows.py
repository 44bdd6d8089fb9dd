"""Sequences of a wanted length, made of the rows of a null: whole rows, cut rows, or rows put end to end.

A row is known by sums over its tokens (`RowTable`). Sums of rows that are put end to end are the sums of the parts, so
a splice needs no tokens. Rows differ persistently, in their noise and in their mean, which independent rows put end to
end would average away. So a splice has rows of one level. The level of a row is known up to the noise of its tokens: it
is drawn anew for each splice, given what was measured. The halves of rows tell levels from noise (multiple imputation).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, NamedTuple

import numpy as np
from numpy.typing import NDArray

from rollcorr.diagnostics.null.row_table import RowTable
from rollcorr.diagnostics.null.token_ratios import k3_of

Floats = NDArray[np.float64]
Source = Literal["recorded", "cut", "spliced"]

SUMS = ("k1", "k2", "k3")
"""Sums of a sequence: S = Σ d, Σ d²/2 and Σ k3, nats."""
NEAR = 1.25
"""Rows whose length is within this factor of a wanted one count as having it."""
SEQUENCES = 100
"""Fewest spliced sequences that rows are sorted into."""
FEWEST = 200
"""Fewer sequences of a length are not used for it."""


@dataclass(frozen=True, eq=False)
class UnitRows:
    """What is known of independent stretches of tokens.

    Attributes:
        tokens: of each stretch, (r,).
        sums: `SUMS` of each stretch, (3, r).
        lowest: smallest d of each stretch, (r,).
        highest: largest d of each stretch, (r,).
        cluster: number of the prompt of a row, or of the row that a stretch was cut from, (r,).
    """

    tokens: Floats
    sums: Floats
    lowest: Floats
    highest: Floats
    cluster: NDArray[np.int64]

    @classmethod
    def of_table(cls, rows: RowTable) -> UnitRows:
        """Whole rows. Consecutive rows are of one prompt if their prompts have equal numbers of tokens."""
        prompt = rows.column("prompt")
        is_new = (np.diff(prompt) != 0) | (prompt[1:] < 0)
        cluster = np.concatenate([[0], is_new.cumsum()])[: len(rows)].astype(np.int64)
        sums = np.stack([rows.column("sum_d"), rows.column("sum_d2") / 2, rows.column("sum_k3")])
        return cls(rows.column("tokens"), sums, rows.column("min_d"), rows.column("max_d"), cluster)

    @classmethod
    def of_windows(cls, sample: Sequence[Floats], length: int) -> UnitRows:
        """Windows of `length` tokens, side by side in each row of a sample; what is left of a row is not used."""
        windows = [row[: len(row) // length * length].reshape(-1, length) for row in sample]
        cluster = np.repeat(np.arange(len(windows)), [len(part) for part in windows])
        d = np.concatenate([np.zeros((0, length)), *windows])
        sums = np.stack([d.sum(1), (d * d).sum(1) / 2, k3_of(d).sum(1)])
        return cls(np.full(len(d), float(length)), sums, d.min(1), d.max(1), cluster)

    def __len__(self) -> int:
        return len(self.tokens)

    def taken(self, rows: NDArray[np.generic]) -> UnitRows:
        """Some of the stretches, by index or by flag."""
        return UnitRows(
            self.tokens[rows], self.sums[:, rows], self.lowest[rows], self.highest[rows], self.cluster[rows]
        )


def rows_for(length: int, rows: UnitRows, sample: Sequence[Floats]) -> tuple[Source, UnitRows]:
    """The stretches that sequences of a length are made of, and how.

    Args:
        length: tokens of the wanted sequences.
        rows: all rows of the null.
        sample: d of the tokens of some rows.

    Returns:
        "recorded" with the rows of about this length; "cut" with windows of longer rows; else "spliced" with the rows
        that are not longer.
    """
    near = (rows.tokens >= length / NEAR) & (rows.tokens <= length * NEAR)
    if near.sum() >= FEWEST:
        return "recorded", rows.taken(near)
    if (rows.tokens > length).mean() >= 0.5:
        windows = UnitRows.of_windows(sample, length)
        if len(windows) >= FEWEST:
            return "cut", windows

        # Without tokens to cut, whole rows are brought to the length by their sums.
        return "cut", rows
    return "spliced", rows.taken(rows.tokens <= length * NEAR)


def at_length(tokens: Floats, sums: Floats, length: int, means: Floats) -> Floats:
    """The sums of sequences that are nearly of a length, brought to it: means grow as T, deviations as √T.

    Args:
        tokens: of each sequence, (r,).
        sums: `SUMS` of each sequence, (3, r).
        length: T.
        means: of `SUMS` per token, (3,).
    """
    deviation = (sums - means[:, None] * tokens) * np.sqrt(length / tokens)
    brought: Floats = means[:, None] * length + deviation
    brought[1:] = np.maximum(brought[1:], 0.0)
    return brought


def token_means(rows: UnitRows) -> Floats:
    """`SUMS` per token, (3,)."""
    means: Floats = rows.sums.sum(1) / rows.tokens.sum()
    return means


class RowLevels(NamedTuple):
    """What persists in a row: log of k2 per token, and the mean of d beyond −k2.

    Attributes:
        between: variance of each over rows, without the noise of tokens; (2,).
        noise: variance of the log of k2 times the tokens, and that of the mean times tokens / (2 k2); (2,).
    """

    between: Floats
    noise: Floats

    def drawn(self, rows: UnitRows, random: np.random.Generator) -> Floats:
        """Levels of rows, given what was measured: (2, r). Normal levels and normal noise are assumed."""
        largest = np.maximum(np.abs(rows.lowest), np.abs(rows.highest))
        measured, scale = _measured_levels(rows.tokens, rows.sums, largest)
        noise = self.noise[:, None] * scale
        reliable = self.between[:, None] / (self.between[:, None] + noise + 1e-300)
        center = measured.mean(1, keepdims=True)
        levels: Floats = reliable * (measured - center) + np.sqrt(reliable * noise) * random.normal(size=measured.shape)
        return levels


def halves_of(sample: Sequence[Floats]) -> Floats:
    """Measure the levels of the halves of rows, and what the variance of their noise is proportional to.

    Args:
        sample: d of the tokens of some rows.

    Returns:
        First and second halves' levels, then their scales of noise: (4, 2, rows).
    """
    halves = [(row[: len(row) // 2], row[len(row) // 2 :]) for row in sample if len(row) > 1]
    sides = []
    for side in (0, 1):
        parts = [pair[side] for pair in halves]
        tokens = np.array([len(d) for d in parts], dtype=np.float64)
        sums = np.array([[d.sum(), (d * d).sum() / 2, np.abs(d).max()] for d in parts]).reshape(-1, 3).T
        sides.append(_measured_levels(tokens, sums[:2], sums[2]))
    (one, scale_one), (other, scale_other) = sides
    return np.stack([one, other, scale_one, scale_other])


def row_levels(halves: Floats) -> RowLevels:
    """Estimate what persists from the covariance of the halves of rows; nothing below two standard errors of it.

    Args:
        halves: as `halves_of` returns them; fewer than `FEWEST` rows show nothing.
    """
    one, other, scale_one, scale_other = halves
    if one.shape[1] < FEWEST:
        return RowLevels(np.zeros(2), np.zeros(2))
    # A row counts by what it tells: the mean of a noisy row tells little of what persists in it.
    weight = 1 / np.sqrt(scale_one * scale_other)
    weight /= weight.mean(1, keepdims=True)
    products = (one - (weight * one).mean(1, keepdims=True)) * (other - (weight * other).mean(1, keepdims=True))
    covariance = (weight * products).mean(1)
    error = (weight * (products - covariance[:, None])).std(1) / math.sqrt(one.shape[1])
    noise = ((one - other) ** 2).mean(1) / (scale_one + scale_other).mean(1)
    return RowLevels(np.where(covariance > 2 * error, covariance, 0.0), noise)


def _measured_levels(tokens: Floats, sums: Floats, largest: Floats) -> tuple[Floats, Floats]:
    """The measured levels of rows, and what the variance of their noise is proportional to: (2, r) each.

    Args:
        tokens: of each row, (r,).
        sums: Σ d and Σ d²/2 of each row; more rows are not read. (2, r).
        largest: largest |d| of each row, (r,).
    """
    mean, k2 = sums[0] / tokens, np.maximum(sums[1] / tokens, 1e-30)

    # One outlier would raise the level of its row. The outliers then meet in few splices, and the others lack them.
    others = np.maximum(sums[1] - largest**2 / 2, k2) / np.maximum(tokens - 1, 1)
    return np.stack([np.log(others), mean + k2]), np.stack([1 / tokens, 2 * k2 / tokens])


def splices(rows: UnitRows, length: int, count: int, random: np.random.Generator, levels: RowLevels) -> Floats:
    """Sequences of a length: rows of one level put end to end, each as often as any other.

    Rows are sorted by the level of their noise, and consecutive ones make a sequence. It ends at the row with which it
    comes nearest to the length, and is brought to it. The means of its rows give way to that of its first row.

    Args:
        rows: to draw from.
        length: T.
        count: at least so many sequences.
        random: of the levels.
        levels: what persists in a row.

    Returns:
        `SUMS`, the lowest and the highest d of each sequence: (5, sequences).
    """
    means = token_means(rows)
    parts = max(length / float(rows.tokens.mean()), 1.0)

    # A few long sequences of all levels have no tail: rows are used again, each time with another level.
    copies = math.ceil(SEQUENCES * parts / len(rows))
    rows = rows.taken(np.tile(np.arange(len(rows)), copies))
    sequences = max(int(len(rows) / parts), 1)
    found = []
    for _ in range(math.ceil(count / sequences)):
        # Rows without a level of their own are all at 0: their order is random.
        level, shift = levels.drawn(rows, random)
        order = np.lexsort([random.random(len(rows)), level])
        total = rows.tokens[order].cumsum()
        own = ((total - rows.tokens[order] / 2) / length).astype(np.int64)
        first = np.concatenate([[0], np.flatnonzero(np.diff(own)) + 1])
        tokens = np.add.reduceat(rows.tokens[order], first)
        sums = np.add.reduceat(rows.sums[:, order], first, axis=1)
        sums[0] += shift[order][first] * tokens - np.add.reduceat((shift * rows.tokens)[order], first)
        sums = at_length(tokens, sums, length, means)
        ends = np.minimum.reduceat(rows.lowest[order], first), np.maximum.reduceat(rows.highest[order], first)
        # The rest of the rows makes a sequence that is too short.
        whole = tokens > 0.5 * length if len(tokens) > 1 else tokens > 0
        found.append(np.concatenate([sums, ends])[:, whole])
    return np.concatenate(found, axis=1)
