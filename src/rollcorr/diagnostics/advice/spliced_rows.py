"""Sequences of a wanted length, made of the rows of a null: whole rows, cut rows, or rows put end to end.

A row is known by sums over its tokens (`RowTable`). Sums of rows that are put end to end are the sums of the parts, so
a splice needs no tokens. Rows are the sampling unit: tokens of one row depend on each other, rows count as independent.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

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
        cluster: number of the row that a stretch was cut from, (r,).
    """

    tokens: Floats
    sums: Floats
    lowest: Floats
    highest: Floats
    cluster: NDArray[np.int64]

    @classmethod
    def of_table(cls, rows: RowTable) -> UnitRows:
        """Whole rows."""
        sums = np.stack([rows.column("sum_d"), rows.column("sum_d2") / 2, rows.column("sum_k3")])
        return cls(rows.column("tokens"), sums, rows.column("min_d"), rows.column("max_d"), np.arange(len(rows)))

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


def splices(rows: UnitRows, length: int, count: int, random: np.random.Generator, means: Floats) -> Floats:
    """The sums of sequences of rows put end to end, drawn with replacement: (3, count).

    A splice ends at the row with which it comes nearest to the length, and is brought to it.
    """
    average = float(rows.tokens.mean())
    spread = float(rows.tokens.std())
    parts = length / average
    most = math.ceil(parts + 4 * spread * math.sqrt(parts) / average) + 1
    drawn = random.integers(len(rows), size=(count, most))
    if spread == 0:
        drawn = drawn[:, : max(round(parts), 1)]
        return at_length(rows.tokens[drawn].sum(1), rows.sums[:, drawn].sum(2), length, means)

    cumulated = rows.tokens[drawn].cumsum(1)
    last = np.abs(cumulated - length).argmin(1)
    used = np.arange(drawn.shape[1]) <= last[:, None]
    sums = np.stack([np.where(used, column[drawn], 0.0).sum(1) for column in rows.sums])
    return at_length(cumulated[np.arange(count), last], sums, length, means)
