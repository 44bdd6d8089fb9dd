"""Mismatch profile: distribution of d = log π − log μ over probability, size, row and token id.

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
SIZE_OCTAVES, SIZE_OFFSET = 32, 25
"""Octaves of |d|: 2^−25, below float32 rounding, to 64 nats."""
FINE = 8
"""Bins per octave in the histogram of d."""
CELL = ("tokens", "sum_d", "sum_d2", "sum_k3")
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
        cells: sums `CELL` over tokens, (4, surprise bin).
        sizes: token counts by sign (negative first) and size of d, (2, bins).
        row_count: number of rows with a valid token.
        ids: sums of each token id; empty if the log has no ids.
        rows: bounded table of rows.
        missing: tokens of the response mask without both log-probs.
    """

    cells: Floats = field(default_factory=lambda: np.zeros((len(CELL), SURPRISE_BINS)))
    sizes: Floats = field(default_factory=lambda: np.zeros((2, SIZE_OCTAVES * FINE)))
    row_count: int = 0
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

        # Invalid tokens go to an extra cell, which is dropped.
        cell = surprise_bins(ratios.surprise)
        if ratios.count < len(cell):
            cell = np.where(ratios.valid, cell, SURPRISE_BINS)
        weights = (None, ratios.d, ratios.d * ratios.d, ratios.k3)
        sums = [np.bincount(cell, weight, SURPRISE_BINS + 1)[:SURPRISE_BINS] for weight in weights]

        # Invalid tokens have d = 0, so subtract them from that bin.
        sizes = _size_histogram(ratios.d, FINE)
        sizes[1, 0] -= len(ratios.d) - ratios.count
        return cls(
            cells=np.stack(sums).astype(np.float64),
            sizes=sizes,
            row_count=int(measured.sum()),
            ids=TokenSums.of_ratios(ratios, limit=id_limit),
            rows=RowTable.of(table[measured], ratios.index[measured]),
            missing=ratios.missing,
        )

    def merge(self, later: MismatchProfile) -> MismatchProfile:
        """Return the profile of both parts of the log; `later` comes second."""
        return MismatchProfile(
            cells=self.cells + later.cells,
            sizes=self.sizes + later.sizes,
            row_count=self.row_count + later.row_count,
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
        return MismatchProfile(
            cells=self.cells * factor,
            sizes=self.sizes * factor,
            row_count=int(factor * self.row_count),
            ids=self.ids.scaled(factor),
            rows=rows,
            missing=int(factor * self.missing),
        )

    def without(self, part: MismatchProfile) -> MismatchProfile:
        """Return this profile without the rows of `part`, which must be among its rows."""
        # Fold to the same limit, so that sums can be subtracted.
        ids = self.ids if self.ids.limit == part.ids.limit else self.ids.folded(part.ids.limit)
        return MismatchProfile(
            cells=self.cells - part.cells,
            sizes=self.sizes - part.sizes,
            row_count=self.row_count - part.row_count,
            ids=ids.without(part.ids),
            rows=self.rows.without(part.rows),
            missing=self.missing - part.missing,
        )

    @property
    def tokens(self) -> int:
        """Return the number of valid tokens with both log-probs."""
        return int(self.cells[0].sum())

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


def size_edges(parts: int) -> Floats:
    """Return the rising edges of the bins of |x|: `parts` evenly spaced bins per octave, (32 · parts + 1,)."""
    within = 1 + np.arange(parts) / parts
    octaves = np.exp2(np.arange(-SIZE_OFFSET, SIZE_OCTAVES - SIZE_OFFSET, dtype=np.float64))
    return np.append((octaves[:, None] * within).ravel(), 2.0 ** (SIZE_OCTAVES - SIZE_OFFSET))


def surprise_bins(surprise: NDArray[np.float32]) -> NDArray[np.int32]:
    """Return the bin of −log μ of each token, same shape: ⌊log2 x⌋, from the bits of its float32."""
    bins: NDArray[np.int32] = np.maximum(surprise, np.float32(0), dtype=np.float32).view(np.int32)
    bins >>= 23
    bins -= 127 - SURPRISE_OFFSET
    return np.clip(bins, 0, SURPRISE_BINS - 1, out=bins)


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
