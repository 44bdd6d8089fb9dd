"""Mismatch profile: distribution of d = log π − log μ over probability, position, length, row and token id.

A profile contains only sums, so profiles of parts merge exactly. Merged in the order of the log, they are bitwise equal
for every reader. Its size depends on neither the log nor the vocabulary (`token_share.MOST_IDS`).

Bins are octaves, read from the exponent of a float32: bin b covers [2^(b − offset), 2^(b − offset + 1)).
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace

import numpy as np
from numpy.typing import NDArray

from rollcorr.diagnostics.null.token_ratios import TokenRatios
from rollcorr.diagnostics.null.token_share import MOST_IDS, STEP_IDS, TokenShare, TokenSums

Floats = NDArray[np.float64]

SURPRISE_BINS, SURPRISE_OFFSET = 16, 11
"""Bins of −log μ: below 2^−10 nats (almost certain) to 16 nats and more."""
POSITION_BINS = 18
"""Bins of the position in the response, counted from 1: 1, 2–3, 4–7, … 131,072 and more."""
LENGTH_BINS = 18
"""Bins of the number of valid tokens of a row, with the edges of the position bins."""
SIZE_OCTAVES, SIZE_OFFSET = 32, 25
"""Octaves of |d|: 2^−25, below float32 rounding, to 64 nats."""
FINE, COARSE = 8, 4
"""Bins per octave: in the histogram of d, and in the histograms of rows."""
CELL = ("tokens", "sum_d", "sum_d2", "sum_k3")
LENGTH = ("rows", "tokens", "sum_d", "sum_d2", "sum_k3", "sum_mean2")
"""Sums of each length bin; the last is Σ over rows of (mean d)²."""
ROW_STATISTICS = ("k3", "mean", "std")
"""Row statistics with a histogram: k3 per token, mean d and standard deviation of d, nats."""
ROWS = 4096
"""Approximate number of rows in the table; at most twice this number."""
FIELDS = ("tokens", "sum_d", "sum_d2", "sum_k3", "min_d", "max_d", "prompt")
"""Columns of the table: number of valid tokens of a row; Σ d, Σ d², Σ k3, minimum and maximum of d over them, nats;
number of prompt tokens, −1 if not recorded."""


@dataclass(frozen=True, eq=False)
class RowTable:
    """Every k-th row of a log; k is the smallest power of 2 that bounds the table.

    The merged tables of all parts therefore equal the table of the complete log, at any split.

    Attributes:
        stride: k; default 1.
        index: positions of the rows in the log, (r,) int64; default empty.
        values: columns `FIELDS`, (r, 7) float64; default empty.
    """

    stride: int = 1
    index: NDArray[np.int64] = field(default_factory=lambda: np.zeros(0, dtype=np.int64))
    values: NDArray[np.float64] = field(default_factory=lambda: np.zeros((0, len(FIELDS))))

    @classmethod
    def of(cls, values: NDArray[np.float64], index: NDArray[np.int64]) -> RowTable:
        """Return the table of rows with values (r, 7) and rising positions in the log (r,)."""
        return _thinned(1, index, values)

    def merge(self, later: RowTable) -> RowTable:
        """Return the table of both parts of the log; `later` comes second."""
        stride = max(self.stride, later.stride)
        return _thinned(stride, np.concatenate([self.index, later.index]), np.concatenate([self.values, later.values]))

    def without(self, part: RowTable) -> RowTable:
        """Return the table without the rows of `part`."""
        rest = ~np.isin(self.index, part.index)
        return RowTable(self.stride, self.index[rest], self.values[rest])

    def __len__(self) -> int:
        return len(self.index)

    def column(self, name: str) -> NDArray[np.float64]:
        """Return one column of `FIELDS`, (r,)."""
        return self.values[:, FIELDS.index(name)]


def _thinned(stride: int, index: NDArray[np.int64], values: NDArray[np.float64]) -> RowTable:
    while True:
        kept = index % stride == 0
        if int(kept.sum()) <= 2 * ROWS:
            return RowTable(stride, index[kept], values[kept])
        stride *= 2


@dataclass(frozen=True, eq=False)
class MismatchProfile:
    """Distribution of the log-ratio of two policies, as float64 sums; the default is empty.

    Attributes:
        cells: sums `CELL` over tokens, (4, surprise bin, position bin).
        lengths: sums `LENGTH` over rows, (6, length bin).
        sizes: token counts by sign (negative first) and size of d, (2, bins).
        row_sizes: row counts by sign and size of each of `ROW_STATISTICS`, (3, 2, bins).
        ids: sums of each token id; empty if the log has no ids.
        rows: bounded table of rows.
        missing: tokens of the response mask without both log-probs.
    """

    cells: Floats = field(default_factory=lambda: np.zeros((len(CELL), SURPRISE_BINS, POSITION_BINS)))
    lengths: Floats = field(default_factory=lambda: np.zeros((len(LENGTH), LENGTH_BINS)))
    sizes: Floats = field(default_factory=lambda: np.zeros((2, SIZE_OCTAVES * FINE)))
    row_sizes: Floats = field(default_factory=lambda: np.zeros((len(ROW_STATISTICS), 2, SIZE_OCTAVES * COARSE)))
    ids: TokenSums = field(default_factory=TokenSums.empty)
    rows: RowTable = field(default_factory=RowTable)
    missing: int = 0

    @classmethod
    def of(
        cls,
        train: NDArray[np.float32],
        rollout: NDArray[np.float32],
        mask: NDArray[np.bool_],
        lengths: NDArray[np.int64],
        *,
        ids: NDArray[np.integer] | None = None,
        prompts: NDArray[np.int64] | None = None,
        index: NDArray[np.int64] | None = None,
        id_limit: int = MOST_IDS,
    ) -> MismatchProfile:
        """Compute the profile of a packed batch.

        Args:
            train: log π, nats, (N,) float32.
            rollout: log μ, nats, (N,) float32. A token with a non-finite value on either side is missing.
            mask: True on sampled tokens, (N,).
            lengths: tokens of each row, masked ones included, (B,), summing to N.
            ids: token ids, (N,); defaults to None, not recorded.
            prompts: tokens of each prompt, (B,); defaults to None, not recorded.
            index: position of each row in the log, (B,), rising; defaults to 0, 1, ….
            id_limit: number of ids with separate sums.
        """
        ratios = TokenRatios.of(train, rollout, mask, lengths, index=index, ids=ids, prompts=prompts)
        return cls.of_ratios(ratios, id_limit=id_limit)

    @classmethod
    def of_ratios(cls, ratios: TokenRatios, *, id_limit: int = MOST_IDS) -> MismatchProfile:
        """Compute the profile of token ratios, with separate sums for `id_limit` ids."""
        table = np.empty((len(ratios.lengths), len(FIELDS)))
        table[:, :-1] = ratios.by_row()
        table[:, -1] = -1 if ratios.prompts is None else ratios.prompts
        measured = table[:, 0] > 0
        count, total, square, k3 = table[measured, :4].T
        mean = total / count
        deviation = np.sqrt(np.maximum(square / count - mean * mean, 0.0))
        length = np.minimum(_exponent(count), LENGTH_BINS - 1)

        # Invalid tokens have d = 0, so subtract them from that bin.
        sizes = _size_histogram(ratios.d, FINE)
        sizes[1, 0] -= len(ratios.d) - ratios.count
        return cls(
            cells=_cells_of(ratios),
            lengths=np.stack([np.bincount(length, x, LENGTH_BINS) for x in (None, count, total, square, k3, mean**2)]),
            sizes=sizes,
            row_sizes=np.stack([_size_histogram(x, COARSE) for x in (k3 / count, mean, deviation)]),
            ids=TokenSums.of_ratios(ratios, limit=id_limit),
            rows=RowTable.of(table[measured], ratios.index[measured]),
            missing=ratios.missing,
        )

    def merge(self, later: MismatchProfile) -> MismatchProfile:
        """Return the profile of both parts of the log; `later` comes second."""
        return MismatchProfile(
            cells=self.cells + later.cells,
            lengths=self.lengths + later.lengths,
            sizes=self.sizes + later.sizes,
            row_sizes=self.row_sizes + later.row_sizes,
            ids=self.ids.merge(later.ids),
            rows=self.rows.merge(later.rows),
            missing=self.missing + later.missing,
        )

    def folded(self, limit: int = STEP_IDS) -> MismatchProfile:
        """Return this profile with sums for `limit` ids, small enough to keep one per step."""
        return replace(self, ids=self.ids.with_limit(limit))

    def counted(self) -> MismatchProfile:
        """Return this profile with all queued tokens counted, ready to be sent to a different process."""
        return replace(self, ids=self.ids.counted())

    def scaled(self, factor: float) -> MismatchProfile:
        """Return this profile with each token weighted by `factor` <= 1 and only the latest rows of the table."""
        first = len(self.rows) - int(factor * len(self.rows))
        rows = replace(self.rows, index=self.rows.index[first:], values=self.rows.values[first:])
        sums = {name: getattr(self, name) * factor for name in ("cells", "lengths", "sizes", "row_sizes")}
        return replace(self, **sums, ids=self.ids.scaled(factor), rows=rows, missing=int(factor * self.missing))

    def without(self, part: MismatchProfile) -> MismatchProfile:
        """Return the profile of the remaining rows; `part` is the profile of some rows of this one."""
        own = self.ids if self.ids.limit == part.ids.limit else self.ids.folded(part.ids.limit)
        return MismatchProfile(
            cells=self.cells - part.cells,
            lengths=self.lengths - part.lengths,
            sizes=self.sizes - part.sizes,
            row_sizes=self.row_sizes - part.row_sizes,
            ids=own.without(part.ids),
            rows=self.rows.without(part.rows),
            missing=self.missing - part.missing,
        )

    @property
    def tokens(self) -> int:
        """Return the number of valid tokens with both log-probs."""
        return int(self.cells[0].sum())

    @property
    def row_count(self) -> int:
        """Return the number of rows with such a token."""
        return int(self.lengths[0].sum())

    @property
    def k3(self) -> float:
        """Return mean k3 per token, nats; NaN without tokens."""
        return _ratio(self.cells[3].sum(), self.tokens)

    @property
    def mean(self) -> float:
        """Return mean d, nats; NaN without tokens."""
        return _ratio(self.cells[1].sum(), self.tokens)

    @property
    def std(self) -> float:
        """Return the standard deviation of d, nats; NaN without tokens."""
        return (
            float(np.sqrt(max(_ratio(self.cells[2].sum(), self.tokens) - self.mean**2, 0.0))) if self.tokens else np.nan
        )

    @property
    def share(self) -> TokenShare:
        """Compute the share of Var(d) explained by the token id."""
        return self.ids.share()

    def by(self, what: str) -> Floats:
        """Return the sums `CELL` by "surprise" (4, 16) or "position" (4, 18), or `LENGTH` by "length" (6, 18)."""
        if what == "length":
            return self.lengths
        return self.cells.sum({"surprise": 2, "position": 1}[what])

    def quantile(self, q: float, of: str = "d") -> float:
        """Return a quantile of d over tokens, or of a row statistic over rows, nats; NaN without any.

        It is read from a histogram with a resolution of a part of an octave: 9 % for d and 19 % for rows.

        Args:
            q: in [0, 1].
            of: "d", or one of `ROW_STATISTICS`; default "d".
        """
        counts, parts = (self.sizes, FINE) if of == "d" else (self.row_sizes[ROW_STATISTICS.index(of)], COARSE)
        values = size_edges(parts)
        middle = np.sqrt(values[:-1] * values[1:])
        order = np.concatenate([-middle[::-1], middle])
        cumulated = np.concatenate([counts[0, ::-1], counts[1]]).cumsum()
        if not cumulated[-1]:
            return np.nan
        return float(order[np.searchsorted(cumulated, q * cumulated[-1], side="left")])


def size_edges(parts: int) -> Floats:
    """Return the rising edges of the bins of |x|: `parts` evenly spaced bins per octave, (32 · parts + 1,)."""
    within = 1 + np.arange(parts) / parts
    octaves = np.exp2(np.arange(-SIZE_OFFSET, SIZE_OCTAVES - SIZE_OFFSET, dtype=np.float64))
    return np.append((octaves[:, None] * within).ravel(), 2.0 ** (SIZE_OCTAVES - SIZE_OFFSET))


def surprise_bins(surprise: NDArray[np.float32]) -> NDArray[np.int64]:
    """Return the bin of −log μ of each token, same shape."""
    return np.clip(_exponent(surprise) + SURPRISE_OFFSET, 0, SURPRISE_BINS - 1)


def _exponent(values: NDArray[np.generic]) -> NDArray[np.int32]:
    """Return ⌊log2 x⌋ of positive numbers, from the bits of their float32; −127 for zero and negative numbers."""
    exponents: NDArray[np.int32] = np.maximum(values, np.float32(0), dtype=np.float32).view(np.int32)
    exponents >>= 23
    exponents -= 127
    return exponents


def _cells_of(ratios: TokenRatios) -> Floats:
    """Return the sums `CELL` by surprise and position. Positions include masked tokens, which the models saw too."""
    bins = SURPRISE_BINS * POSITION_BINS
    cell = surprise_bins(ratios.surprise).astype(np.int64)
    cell *= POSITION_BINS
    position = np.arange(1, int(ratios.lengths.max(initial=0)) + 1)
    by_position = np.minimum(_exponent(position), POSITION_BINS - 1)
    cell += np.concatenate([by_position[:0], *(by_position[:length] for length in ratios.lengths.tolist())])

    # Invalid tokens go to an extra cell, which is dropped.
    if ratios.count < len(cell):
        np.copyto(cell, bins, where=~ratios.valid)
    weights = (None, ratios.d, ratios.d * ratios.d, ratios.k3)
    sums = np.stack([np.bincount(cell, weight, bins + 1)[:bins] for weight in weights])
    return sums.astype(np.float64).reshape(len(CELL), SURPRISE_BINS, POSITION_BINS)


def _size_histogram(values: Floats, parts: int) -> Floats:
    """Return the number of values in each bin of sign and size, (2, bins)."""
    bits = values.astype(np.float32).view(np.int32)
    within = 23 - int(np.log2(parts))
    bins = SIZE_OCTAVES * parts
    size = bits & 0x7FFFFFFF
    size >>= within
    size -= (127 - SIZE_OFFSET) * parts
    np.clip(size, 0, bins - 1, out=size)
    size += ((bits >> 31) + 1) * bins  # negative values first
    return np.bincount(size, minlength=2 * bins).reshape(2, bins).astype(np.float64)


def _ratio(numerator: float, denominator: float) -> float:
    return float(numerator / denominator) if denominator else np.nan
