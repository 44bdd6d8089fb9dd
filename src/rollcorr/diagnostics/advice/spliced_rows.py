"""Build sequences of a requested length from the rows of a null: entire rows, cut rows, or concatenated rows.

A row is represented by sums over its tokens (`RowTable`). Sums of concatenated rows add up, so a splice needs no
tokens. Rows differ persistently in noise and mean. Concatenating independent rows would average these differences away,
so a splice combines rows of similar level. A row's measured level contains token noise, so each splice draws the level
from its posterior (multiple imputation). Comparing the halves of rows separates levels from noise.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, NamedTuple

import numpy as np
from numpy.typing import NDArray

from rollcorr.diagnostics.null.mismatch_profile import RowTable
from rollcorr.diagnostics.null.token_ratios import k3_of

Floats = NDArray[np.float64]
Source = Literal["recorded", "cut", "spliced"]

SUMS = ("k1", "k2", "k3")
"""Sums of a sequence: S = Σ d, Σ d²/2 and Σ k3, nats."""
NEAR = 1.25
"""Maximum ratio between a row's length and the requested length for the row to count as that length."""
SEQUENCES = 100
"""Minimum number of spliced sequences per sorting of the rows."""
FEWEST = 200
"""Minimum number of sequences of a length for it to be used."""


@dataclass(frozen=True, eq=False)
class UnitRows:
    """Sums of independent stretches of tokens.

    Attributes:
        tokens: number of tokens of each stretch, (r,).
        sums: `SUMS` of each stretch, nats, (3, r).
        lowest: smallest d of each stretch, nats, (r,).
        highest: largest d of each stretch, nats, (r,).
        cluster: number of the row's prompt, or of the row that a stretch was cut from, (r,).
    """

    tokens: Floats
    sums: Floats
    lowest: Floats
    highest: Floats
    cluster: NDArray[np.int64]

    @classmethod
    def of_table(cls, rows: RowTable) -> UnitRows:
        """Return the rows of a table. Consecutive rows with equal prompt lengths count as one prompt."""
        prompt = rows.column("prompt")
        is_new = (np.diff(prompt) != 0) | (prompt[1:] < 0)
        cluster = np.concatenate([[0], is_new.cumsum()])[: len(rows)].astype(np.int64)
        sums = np.stack([rows.column("sum_d"), rows.column("sum_d2") / 2, rows.column("sum_k3")])
        return cls(rows.column("tokens"), sums, rows.column("min_d"), rows.column("max_d"), cluster)

    @classmethod
    def of_windows(cls, sample: Sequence[Floats], length: int) -> UnitRows:
        """Cut each sampled row into consecutive windows of `length` tokens, and drop the remainder."""
        windows = [row[: len(row) // length * length].reshape(-1, length) for row in sample]
        cluster = np.repeat(np.arange(len(windows)), [len(part) for part in windows])
        d = np.concatenate([np.zeros((0, length)), *windows])
        sums = np.stack([d.sum(1), (d * d).sum(1) / 2, k3_of(d).sum(1)])
        return cls(np.full(len(d), float(length)), sums, d.min(1), d.max(1), cluster)

    def __len__(self) -> int:
        return len(self.tokens)

    def taken(self, rows: NDArray[np.generic]) -> UnitRows:
        """Return a subset of the stretches, by index or Boolean mask."""
        return UnitRows(
            self.tokens[rows], self.sums[:, rows], self.lowest[rows], self.highest[rows], self.cluster[rows]
        )


def rows_for(length: int, rows: UnitRows, sample: Sequence[Floats]) -> tuple[Source, UnitRows]:
    """Return the source of sequences of a length, and the stretches to build them from.

    Args:
        length: requested tokens per sequence.
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

        # Without tokens to cut, rescale the sums of entire rows to the length.
        return "cut", windows if len(windows) >= FEWEST else rows
    return "spliced", rows.taken(rows.tokens <= length * NEAR)


def at_length(tokens: Floats, sums: Floats, length: int, means: Floats) -> Floats:
    """Rescale the sums of sequences to a length: means grow as T, deviations as √T.

    Args:
        tokens: number of tokens of each sequence, (r,).
        sums: `SUMS` of each sequence, nats, (3, r).
        length: T.
        means: means of `SUMS` per token, nats, (3,).

    Returns:
        Rescaled sums, (3, r); k2 and k3 are at least 0.
    """
    deviation = (sums - means[:, None] * tokens) * np.sqrt(length / tokens)
    brought: Floats = means[:, None] * length + deviation
    brought[1:] = np.maximum(brought[1:], 0.0)
    return brought


def token_means(rows: UnitRows) -> Floats:
    """Compute the mean of `SUMS` per token, (3,) nats."""
    return np.asarray(rows.sums.sum(1) / rows.tokens.sum())


class RowLevels(NamedTuple):
    """Persistent differences between rows: log of k2 per token, and mean of d plus k2.

    Attributes:
        between: variance between rows of each level, without token noise; (2,).
        noise: variance of log k2 times tokens, and variance of the mean times tokens / (2 k2); (2,).
    """

    between: Floats
    noise: Floats

    def drawn(self, rows: UnitRows, random: np.random.Generator) -> Floats:
        """Draw row levels from their posterior, (2, r), assuming normal levels and normal noise."""
        largest = np.maximum(np.abs(rows.lowest), np.abs(rows.highest))
        measured, scale = _measured_levels(rows.tokens, rows.sums, largest)
        noise = self.noise[:, None] * scale
        reliable = self.between[:, None] / (self.between[:, None] + noise + 1e-300)
        center = measured.mean(1, keepdims=True)
        levels: Floats = reliable * (measured - center) + np.sqrt(reliable * noise) * random.normal(size=measured.shape)
        return levels


def halves_of(sample: Sequence[Floats]) -> Floats:
    """Measure the levels of the two halves of each row, and the scales of their noise variance.

    Args:
        sample: d of the tokens of some rows, nats.

    Returns:
        Levels of first and second halves, then their noise scales: (4, 2, rows).
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
    """Estimate persistent variance from the covariance between halves of rows; 0 below two standard errors.

    Args:
        halves: result of `halves_of`; with fewer than `FEWEST` rows, all variances are 0.

    Returns:
        The variances between rows, and of the noise.
    """
    one, other, scale_one, scale_other = halves
    if one.shape[1] < FEWEST:
        return RowLevels(np.zeros(2), np.zeros(2))
    # Weight rows by precision: the mean of a noisy row is a poor estimate of its level.
    weight = 1 / np.sqrt(scale_one * scale_other)
    weight /= weight.mean(1, keepdims=True)
    products = (one - (weight * one).mean(1, keepdims=True)) * (other - (weight * other).mean(1, keepdims=True))
    covariance = (weight * products).mean(1)
    error = (weight * (products - covariance[:, None])).std(1) / math.sqrt(one.shape[1])
    noise = ((one - other) ** 2).mean(1) / (scale_one + scale_other).mean(1)
    return RowLevels(np.where(covariance > 2 * error, covariance, 0.0), noise)


def _measured_levels(tokens: Floats, sums: Floats, largest: Floats) -> tuple[Floats, Floats]:
    """Compute the measured levels of rows, and the scales of their noise variance: (2, r) each.

    Args:
        tokens: number of tokens of each row, (r,).
        sums: Σ d and Σ d²/2 of each row, nats, (2, r); additional sums are ignored.
        largest: largest |d| of each row, nats, (r,).
    """
    mean, k2 = sums[0] / tokens, np.maximum(sums[1] / tokens, 1e-30)

    # Exclude the largest token: an outlier would raise its row's level, and sorting would then collect all outliers in
    # few splices.
    others = np.maximum(sums[1] - largest**2 / 2, k2) / np.maximum(tokens - 1, 1)
    return np.stack([np.log(others), mean + k2]), np.stack([1 / tokens, 2 * k2 / tokens])


def splices(rows: UnitRows, length: int, count: int, random: np.random.Generator, levels: RowLevels) -> Floats:
    """Concatenate rows of similar level to sequences of a length; each row is used equally often.

    Rows are sorted by their noise level, and consecutive rows form a sequence. It ends at the row that brings it
    closest to the length, and is then rescaled to it. The mean level of its first row replaces the mean levels of its
    rows.

    Args:
        rows: rows to draw from.
        length: T.
        count: minimum number of sequences.
        random: random generator for levels and order.
        levels: persistent differences between rows.

    Returns:
        `SUMS`, the lowest and the highest d of each sequence, nats: (5, sequences).
    """
    means = token_means(rows)
    parts = max(length / float(rows.tokens.mean()), 1.0)

    # A few long sequences of all levels have no tail, so reuse rows, each time with a newly drawn level.
    copies = math.ceil(SEQUENCES * parts / len(rows))
    rows = rows.taken(np.tile(np.arange(len(rows)), copies))
    sequences = max(int(len(rows) / parts), 1)
    found = []
    for _ in range(math.ceil(count / sequences)):
        # Without persistent levels all rows are at 0, so break ties randomly.
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
        # Drop the last sequence if the remaining rows are short of the length.
        whole = tokens > 0.5 * length if len(tokens) > 1 else tokens > 0
        found.append(np.concatenate([sums, ends])[:, whole])
    return np.concatenate(found, axis=1)
