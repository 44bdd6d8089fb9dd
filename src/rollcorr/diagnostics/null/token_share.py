"""Share of Var(d) explained by the token id: mergeable sums per id, and an estimate without bias for rare ids.

Rounding noise depends on the context and hardly on the sampled id. Different weights move the logit of an id in every
context, and a different output head does little else. So the share separates the two where their size does not.

    Var(d) = Var(E[d | id]) + E[Var(d | id)],    share = Var(E[d | id]) / Var(d)

The plain ratio of sums of squares grows with the number of rare ids: an id seen once explains itself. Products of two
different tokens of one id have the expectation E[d | id]², for any spread within each id, so

    E[E[d | id]²] ≈ Σ_i (S_i² − Q_i) / (n_i − 1) / Σ_i n_i    over the ids seen at least twice,

with n_i tokens, S_i their sum and Q_i their sum of squares. Tokens of one row count as independent.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from rollcorr.diagnostics.null.token_ratios import TokenRatios
from rollcorr.diagnostics.provenance.pair_sample import FEW_IDS

MOST_IDS = 1 << 18
"""Number of ids with separate sums; larger ids share them (id modulo this). Three float64 per id: 6 MB at most."""
STEP_IDS = 1 << 10
"""The same limit within one training step."""
FIRST_IDS = 1 << 15
"""The same limit for the first steps of a log, which serve as its null: shared sums of unlike ids explain less."""
AT_ONCE = 1 << 19
"""Queued tokens that are counted at once: allocating sums of all ids per batch would cost more than counting."""

Tokens = tuple[NDArray[np.integer], NDArray[np.float64]]
"""Ids and d in nats of some tokens, (n,) each."""


class TokenShare(NamedTuple):
    """Share of Var(d) explained by the token id.

    Attributes:
        share: between / variance; slightly below 0 if the id explains nothing. NaN without variance or repeated ids.
        error: standard error of the share, for normal d within an id.
        between: Var(E[d | id]), nats².
        variance: Var(d) over the same tokens, nats².
        tokens: number of tokens whose id was seen at least twice.
        ids: number of different ids seen at least twice.
    """

    share: float
    error: float
    between: float
    variance: float
    tokens: int
    ids: int


@dataclass(frozen=True, eq=False)
class TokenSums:
    """Token count, Σ d and Σ d² of each id.

    Attributes:
        known: sums of the counted tokens, (3, ids) float64; counts are exact up to 2^53.
        largest: largest id; default −1, if there is no id.
        limit: number of ids with separate sums, a power of 2; id i has column i modulo this.
        waiting: queue of ids and d of tokens that are not counted yet, in order of arrival; default empty.
    """

    known: NDArray[np.float64]
    largest: int = -1
    limit: int = MOST_IDS
    waiting: tuple[Tokens, ...] = ()

    @classmethod
    def empty(cls, limit: int = MOST_IDS) -> TokenSums:
        """Return the sums of no token."""
        return cls(np.zeros((3, 0)), -1, limit)

    @classmethod
    def of(cls, ids: NDArray[np.integer], log_ratio: NDArray[np.float64], *, limit: int = MOST_IDS) -> TokenSums:
        """Return the sums of tokens with ids (n,) and finite d (n,), nats. Negative ids are padding, and are dropped.

        With a `limit` above `STEP_IDS` the arrays are queued, and must not change until they are counted.
        """
        if len(ids) and ids.min() < 0:
            ids, log_ratio = ids[ids >= 0], log_ratio[ids >= 0]
        if not len(ids):
            return cls.empty(limit)
        largest = int(ids.max())
        if limit > STEP_IDS:
            return cls(np.zeros((3, 0)), largest, limit, ((ids, log_ratio),))
        return cls(_count([(ids, log_ratio)], largest, limit), largest, limit)

    @classmethod
    def of_ratios(cls, ratios: TokenRatios, *, limit: int = MOST_IDS) -> TokenSums:
        """Return the sums of the valid tokens; empty if their ids are not recorded."""
        if ratios.ids is None:
            return cls.empty(limit)
        if ratios.count == len(ratios.d):
            return cls.of(ratios.ids, ratios.d, limit=limit)
        return cls.of(ratios.ids[ratios.valid], ratios.d[ratios.valid], limit=limit)

    @cached_property
    def sums(self) -> NDArray[np.float64]:
        """Return the sums of all tokens, queued ones included, (3, ids)."""
        return _add_padded(self.known, _count(self.waiting, self.largest, self.limit)) if self.waiting else self.known

    def counted(self) -> TokenSums:
        """Return these sums with an empty queue."""
        return TokenSums(self.sums, self.largest, self.limit)

    def with_limit(self, limit: int) -> TokenSums:
        """Return the same tokens with sums for fewer ids; does not count a queue without counted tokens."""
        queued = TokenSums(self.known, self.largest, limit, self.waiting)
        return self.folded(limit) if self.known.size else queued

    def merge(self, other: TokenSums) -> TokenSums:
        """Return the sums of both; they have the same limit."""
        known, waiting = _add_padded(self.known, other.known), (*self.waiting, *other.waiting)
        merged = TokenSums(known, max(self.largest, other.largest), self.limit, waiting)
        return merged.counted() if sum(len(ids) for ids, _ in waiting) >= AT_ONCE else merged

    def without(self, part: TokenSums) -> TokenSums:
        """Return the sums of the remaining tokens after `part`, some of these tokens, is removed."""
        rest = self.sums.copy()
        rest[:, : part.sums.shape[1]] -= part.sums
        return TokenSums(rest, self.largest, self.limit)

    def scaled(self, factor: float) -> TokenSums:
        """Return the sums with each token weighted by `factor`."""
        return TokenSums(self.sums * factor, self.largest, self.limit)

    def folded(self, limit: int = STEP_IDS) -> TokenSums:
        """Return the same tokens with sums for `limit` ids, as if they had been counted with that limit."""
        width = -(-self.sums.shape[1] // limit) * limit
        padded = np.zeros((3, width))
        padded[:, : self.sums.shape[1]] = self.sums
        total = padded.reshape(3, -1, limit).sum(1) if width else padded
        return TokenSums(total[:, : _column_count(self.largest, limit)], self.largest, limit)

    @property
    def effective(self) -> float:
        """Return the effective number of ids, (Σ n)² / Σ n²: 1 if all tokens are equal; NaN without tokens."""
        count = self.sums[0]
        square = float(count @ count)
        return float(count.sum()) ** 2 / square if square else np.nan

    @property
    def repeats(self) -> bool:
        """Return whether the responses have so few different tokens that neither id nor position identifies a cause.

        The same contexts then recur. Rounding, a function of the context, looks like a property of the id, and a
        response is uncertain only at its beginning.
        """
        return self.effective < FEW_IDS

    def share(self) -> TokenShare:
        """Compute the share of Var(d) explained by the id."""
        count, total, square = self.sums[:, self.sums[0] >= 2] if self.sums.size else np.zeros((3, 0))
        tokens = float(count.sum())
        if not tokens:
            return TokenShare(np.nan, np.nan, np.nan, np.nan, 0, 0)

        # Both expectations use products of different tokens, so neither includes the spread within an id.
        squared_mean = (total.sum() ** 2 - square.sum()) / (tokens * (tokens - 1))
        between = float(((total * total - square) / (count - 1)).sum() / tokens - squared_mean)
        variance = float(square.sum() / tokens - squared_mean)
        if variance <= 0:
            return TokenShare(np.nan, np.nan, between, variance, int(tokens), len(count))

        # For normal d, Σ over pairs of one id has the variance 2 n (n − 1) σ⁴.
        spread = square / count
        error = float(np.sqrt((2 * spread * spread * count / (count - 1)).sum()) / tokens / variance)
        return TokenShare(between / variance, error, between, variance, int(tokens), len(count))


def _count(tokens: Sequence[Tokens], largest: int, limit: int) -> NDArray[np.float64]:
    """Compute the token count, Σ d and Σ d² of each id, (3, ids)."""
    column = np.concatenate([ids for ids, _ in tokens], dtype=np.int64)
    if largest >= limit:
        column &= limit - 1
    log_ratio = np.concatenate([d for _, d in tokens])
    size = _column_count(largest, limit)
    sums = np.empty((3, size))
    sums[0] = np.bincount(column, minlength=size)
    sums[1] = np.bincount(column, log_ratio, size)
    np.square(log_ratio, out=log_ratio)
    sums[2] = np.bincount(column, log_ratio, size)
    return sums


def _add_padded(one: NDArray[np.float64], two: NDArray[np.float64]) -> NDArray[np.float64]:
    """Return the sum of two tables, with the narrower one zero-padded."""
    large, small = (one, two) if one.shape[1] >= two.shape[1] else (two, one)
    if not small.shape[1]:
        return large
    total = large.copy()
    total[:, : small.shape[1]] += small
    return total


def _column_count(largest: int, limit: int) -> int:
    """Return the number of columns for ids up to the largest: a power of 2, so that few merges resize."""
    return min(1 << max(largest, 0).bit_length(), limit)
