"""The profile of a mismatch: how d = log π − log μ spreads by probability, position, length, row and token id.

Everything in it is a sum, so profiles of parts merge exactly, and profiles merged in the order of a log are the same to
the last bit whoever read it. Its size depends on neither the log nor the vocabulary (`token_share.MOST_IDS`).

Bins are octaves, read off the exponent of a float32: bin b holds [2^(b − offset), 2^(b − offset + 1)).
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace

import numpy as np
from numpy.typing import NDArray

from rollcorr.diagnostics.null.row_table import FIELDS, RowTable
from rollcorr.diagnostics.null.token_ratios import TokenRatios
from rollcorr.diagnostics.null.token_share import MOST_IDS, STEP_IDS, TokenShare, TokenSums

Floats = NDArray[np.float64]

SURPRISE_BINS, SURPRISE_OFFSET = 16, 11
"""Bins of −log μ: below 2^−10 nats (almost certain) to 16 nats and more."""
POSITION_BINS = 18
"""Bins of the position in the response, counted from 1: 1, 2–3, 4–7, … 131,072 and more."""
LENGTH_BINS = 18
"""Bins of the valid tokens of a row, as for positions."""
SIZE_OCTAVES, SIZE_OFFSET = 32, 25
"""Octaves of |d|: 2^−25, below float32 rounding, to 64 nats."""
FINE, COARSE = 8, 4
"""Parts of an octave: in the histogram of d, and in those of rows."""
CELL = ("tokens", "sum_d", "sum_d2", "sum_k3")
LENGTH = ("rows", "tokens", "sum_d", "sum_d2", "sum_k3", "sum_mean2")
"""Sums of each bin of lengths; the last is Σ over rows of (mean d)²."""
ROW_STATISTICS = ("k3", "mean", "std")
"""Statistics of a row whose distribution is kept: k3 per token, mean d and the standard deviation of d, nats."""


def _cells() -> Floats:
    return np.zeros((len(CELL), SURPRISE_BINS, POSITION_BINS))


def _sizes() -> Floats:
    return np.zeros((2, SIZE_OCTAVES * FINE))


def _row_sizes() -> Floats:
    return np.zeros((len(ROW_STATISTICS), 2, SIZE_OCTAVES * COARSE))


@dataclass(frozen=True, eq=False)
class MismatchProfile:
    """How the log-ratio of two policies spreads.

    Attributes:
        cells: (4, surprise bin, position bin), the sums `CELL` over tokens.
        lengths: (6, length bin), the sums `LENGTH`.
        sizes: (2, bins) tokens by the sign (negative first) and the size of d.
        row_sizes: (3, 2, bins) rows by sign and size of each of `ROW_STATISTICS`.
        ids: sums for each token id; empty where the log has no ids.
        rows: a bounded table of rows.
        missing: tokens of the response mask without both log-probs.
    """

    cells: Floats = field(default_factory=_cells)
    lengths: Floats = field(default_factory=lambda: np.zeros((len(LENGTH), LENGTH_BINS)))
    sizes: Floats = field(default_factory=_sizes)
    row_sizes: Floats = field(default_factory=_row_sizes)
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
        """The profile of a packed batch.

        Args:
            train: log π, (N,) float32.
            rollout: log μ, (N,) float32. What is not finite on either side is missing.
            mask: true on sampled tokens, (N,).
            lengths: tokens of each row, masked ones included, (B,), summing to N.
            ids: token ids, (N,); None where they are not recorded.
            prompts: tokens of each prompt, (B,); None where they are not recorded.
            index: position of each row in the log, (B,), rising; None counts from 0.
            id_limit: ids with sums of their own.
        """
        ratios = TokenRatios.of(train, rollout, mask, lengths, index=index, ids=ids, prompts=prompts)
        return cls.of_ratios(ratios, id_limit=id_limit)

    @classmethod
    def of_ratios(cls, ratios: TokenRatios, *, id_limit: int = MOST_IDS) -> MismatchProfile:
        """The profile of ratios; `id_limit`: ids with sums of their own."""
        table = np.empty((len(ratios.lengths), len(FIELDS)))
        table[:, :-1] = ratios.by_row()
        table[:, -1] = -1 if ratios.prompts is None else ratios.prompts
        measured = table[:, 0] > 0
        return cls(
            cells=_cells_of(ratios),
            lengths=_by_length(table[measured]),
            sizes=_sizes_of(ratios),
            row_sizes=np.stack([_by_size(x, COARSE) for x in _row_statistics(table[measured])]),
            ids=TokenSums.of_ratios(ratios, limit=id_limit),
            rows=RowTable.of(table[measured], ratios.index[measured]),
            missing=ratios.missing,
        )

    def merge(self, later: MismatchProfile) -> MismatchProfile:
        """The profile of both stretches of the log together; `later` comes after."""
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
        """The same with sums for fewer ids, to be held for several steps."""
        return replace(self, ids=self.ids.with_limit(limit))

    def counted(self) -> MismatchProfile:
        """The same with every token counted, to be sent elsewhere."""
        return replace(self, ids=self.ids.counted())

    def scaled(self, factor: float) -> MismatchProfile:
        """The same with a smaller weight of each token, and the latest rows of the table."""
        first = len(self.rows) - int(factor * len(self.rows))
        rows = replace(self.rows, index=self.rows.index[first:], values=self.rows.values[first:])
        sums = {name: getattr(self, name) * factor for name in ("cells", "lengths", "sizes", "row_sizes")}
        return replace(self, **sums, ids=self.ids.scaled(factor), rows=rows, missing=int(factor * self.missing))

    def without(self, part: MismatchProfile) -> MismatchProfile:
        """The profile of the other rows, `part` being some of these."""
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
        """Valid tokens with both log-probs."""
        return int(self.cells[0].sum())

    @property
    def row_count(self) -> int:
        """Rows with such a token."""
        return int(self.lengths[0].sum())

    @property
    def k3(self) -> float:
        """Mean k3 per token, nats; NaN without tokens."""
        return _ratio(self.cells[3].sum(), self.tokens)

    @property
    def mean(self) -> float:
        """Mean d, nats; NaN without tokens."""
        return _ratio(self.cells[1].sum(), self.tokens)

    @property
    def std(self) -> float:
        """Standard deviation of d, nats; NaN without tokens."""
        return (
            float(np.sqrt(max(_ratio(self.cells[2].sum(), self.tokens) - self.mean**2, 0.0))) if self.tokens else np.nan
        )

    @property
    def share(self) -> TokenShare:
        """How much of Var(d) the token id explains."""
        return self.ids.share()

    def by(self, what: str) -> Floats:
        """The sums `CELL` by "surprise" (4, 16) or by "position" (4, 18); by "length" the sums `LENGTH` (6, 18)."""
        if what == "length":
            return self.lengths
        return self.cells.sum({"surprise": 2, "position": 1}[what])

    def quantile(self, q: float, of: str = "d") -> float:
        """A quantile of d over tokens, or of a row statistic: "k3", "mean", "std". Nats.

        It is read off a histogram: right to a part of an octave, 9 % for d and 19 % for rows.

        Args:
            q: in [0, 1].
            of: what it is a quantile of.
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
    """Edges of the bins of |x|, rising: `parts` for each octave, evenly spaced within it."""
    within = 1 + np.arange(parts) / parts
    octaves = np.exp2(np.arange(-SIZE_OFFSET, SIZE_OCTAVES - SIZE_OFFSET, dtype=np.float64))
    return np.append((octaves[:, None] * within).ravel(), 2.0 ** (SIZE_OCTAVES - SIZE_OFFSET))


def surprise_bins(surprise: NDArray[np.float32]) -> NDArray[np.int64]:
    """The bin of −log μ of each token."""
    return np.clip(_exponent(surprise) + SURPRISE_OFFSET, 0, SURPRISE_BINS - 1)


def _exponent(values: NDArray[np.generic]) -> NDArray[np.int32]:
    """⌊log2 x⌋ of positive numbers, from the bits of their float32; −127 for 0 and what is negative."""
    exponents: NDArray[np.int32] = np.maximum(values, np.float32(0), dtype=np.float32).view(np.int32)
    exponents >>= 23
    exponents -= 127
    return exponents


def _cells_of(ratios: TokenRatios) -> Floats:
    """The sums `CELL` by surprise and position. Positions count masked tokens too: they are what the models saw."""
    bins = SURPRISE_BINS * POSITION_BINS
    cell = surprise_bins(ratios.surprise).astype(np.int64)
    cell *= POSITION_BINS
    position = np.arange(1, int(ratios.lengths.max(initial=0)) + 1)
    by_position = np.minimum(_exponent(position), POSITION_BINS - 1)
    cell += np.concatenate([by_position[:0], *(by_position[:length] for length in ratios.lengths.tolist())])

    # Tokens that do not count go to a cell of their own, which is cut off.
    if ratios.count < len(cell):
        np.copyto(cell, bins, where=~ratios.valid)
    weights = (None, ratios.d, ratios.d * ratios.d, ratios.k3)
    sums = np.stack([np.bincount(cell, weight, bins + 1)[:bins] for weight in weights])
    return sums.astype(np.float64).reshape(len(CELL), SURPRISE_BINS, POSITION_BINS)


def _sizes_of(ratios: TokenRatios) -> Floats:
    """How many tokens fall in each bin of sign and size of d. Those that do not count hold 0, and are taken out."""
    sizes = _by_size(ratios.d, FINE)
    sizes[1, 0] -= len(ratios.d) - ratios.count
    return sizes


def _by_size(values: Floats, parts: int) -> Floats:
    """How many values fall in each bin of sign and size: (2, bins)."""
    bits = values.astype(np.float32).view(np.int32)
    within = 23 - int(np.log2(parts))
    bins = SIZE_OCTAVES * parts
    size = bits & 0x7FFFFFFF
    size >>= within
    size -= (127 - SIZE_OFFSET) * parts
    np.clip(size, 0, bins - 1, out=size)
    size += ((bits >> 31) + 1) * bins  # positive ones after the negative ones
    return np.bincount(size, minlength=2 * bins).reshape(2, bins).astype(np.float64)


def _row_statistics(table: Floats) -> tuple[Floats, Floats, Floats]:
    """k3 per token, mean d and std d of each row of a table."""
    count, total, square, k3 = table[:, :4].T
    mean = total / count
    return k3 / count, mean, np.sqrt(np.maximum(square / count - mean * mean, 0.0))


def _by_length(table: Floats) -> Floats:
    """The sums `LENGTH` of each bin of lengths."""
    count, total, square, k3 = table[:, :4].T
    bins = np.minimum(_exponent(count), LENGTH_BINS - 1)
    sums = (None, count, total, square, k3, (total / count) ** 2)
    return np.stack([np.bincount(bins, weight, LENGTH_BINS) for weight in sums])


def _ratio(numerator: float, denominator: float) -> float:
    return float(numerator / denominator) if denominator else np.nan
