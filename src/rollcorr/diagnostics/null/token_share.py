"""How much of Var(d) the token id explains: sums per id that merge, and an estimate without bias for rare ids.

Rounding noise depends on the context and hardly on the sampled id. Other weights move the logit of an id wherever it is
sampled, and another output head does little else. So the share tells the two apart where their size does not.

    Var(d) = Var(E[d | id]) + E[Var(d | id)],    share = Var(E[d | id]) / Var(d)

The plain ratio of sums of squares grows with the number of rare ids: an id seen once explains itself. Products of two
different tokens of one id have the expectation E[d | id]², whatever the spread within each id, so

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
"""Ids that have sums of their own; larger ones share them (id modulo this). Three float64 for each: 6 MB at most."""
STEP_IDS = 1 << 10
"""Ids that have sums of their own within one training step; the others share them."""
FIRST_IDS = 1 << 15
"""The same for the first steps of a log, which serve as its null: where unlike ids share sums, less is explained."""
AT_ONCE = 1 << 19
"""Tokens that are counted at once: new sums of many ids, for each batch, would cost more than the counting."""

Tokens = tuple[NDArray[np.integer], NDArray[np.float64]]
"""Ids and d of some tokens, (n,) each."""


class TokenShare(NamedTuple):
    """What the token id explains.

    Attributes:
        share: between / variance; slightly below 0 where the id explains nothing. NaN without spread or repeated ids.
        error: its standard error, from normal tails within an id.
        between: Var(E[d | id]), nats².
        variance: Var(d) over the same tokens, nats².
        tokens: tokens whose id was seen at least twice.
        ids: different ids seen at least twice.
    """

    share: float
    error: float
    between: float
    variance: float
    tokens: int
    ids: int


@dataclass(frozen=True, eq=False)
class TokenSums:
    """Tokens, Σ d and Σ d² of each id.

    Attributes:
        known: (3, ids) float64, of the tokens that have been counted; counts are exact up to 2^53.
        largest: largest id seen; −1 without any.
        limit: ids with sums of their own, a power of 2; id i has column i modulo this.
        waiting: ids and d of tokens that are not counted yet, in the order in which they came.
    """

    known: NDArray[np.float64]
    largest: int = -1
    limit: int = MOST_IDS
    waiting: tuple[Tokens, ...] = ()

    @classmethod
    def empty(cls, limit: int = MOST_IDS) -> TokenSums:
        """No token yet."""
        return cls(np.zeros((3, 0)), -1, limit)

    @classmethod
    def of(cls, ids: NDArray[np.integer], log_ratio: NDArray[np.float64], *, limit: int = MOST_IDS) -> TokenSums:
        """The sums of some tokens: ids (n,) and d (n,), finite. Negative ids are padding and left out.

        Where the limit is high the arrays are held until they are counted, and must not change.
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
        """The sums of the tokens that count; empty where their ids are not recorded."""
        if ratios.ids is None:
            return cls.empty(limit)
        if ratios.count == len(ratios.d):
            return cls.of(ratios.ids, ratios.d, limit=limit)
        return cls.of(ratios.ids[ratios.valid], ratios.d[ratios.valid], limit=limit)

    @cached_property
    def sums(self) -> NDArray[np.float64]:
        """(3, ids) of all tokens."""
        return _added(self.known, _count(self.waiting, self.largest, self.limit)) if self.waiting else self.known

    def counted(self) -> TokenSums:
        """The same with nothing waiting."""
        return TokenSums(self.sums, self.largest, self.limit)

    def with_limit(self, limit: int) -> TokenSums:
        """The same tokens with sums for fewer ids; those that wait are not counted for it."""
        if self.known.size:
            return self.folded(limit)
        return TokenSums(self.known, self.largest, limit, self.waiting)

    def merge(self, other: TokenSums) -> TokenSums:
        """The sums of both together; both have the same limit."""
        known, waiting = _added(self.known, other.known), (*self.waiting, *other.waiting)
        merged = TokenSums(known, max(self.largest, other.largest), self.limit, waiting)
        return merged.counted() if sum(len(ids) for ids, _ in waiting) >= AT_ONCE else merged

    def without(self, part: TokenSums) -> TokenSums:
        """The sums of the rest, after a part that is in them was taken out."""
        rest = self.sums.copy()
        rest[:, : part.sums.shape[1]] -= part.sums
        return TokenSums(rest, self.largest, self.limit)

    def folded(self, limit: int = STEP_IDS) -> TokenSums:
        """The same tokens with sums for fewer ids; as if they had been counted with that limit."""
        width = -(-self.sums.shape[1] // limit) * limit
        padded = np.zeros((3, width))
        padded[:, : self.sums.shape[1]] = self.sums
        total = padded.reshape(3, -1, limit).sum(1) if width else padded
        return TokenSums(total[:, : _size(self.largest, limit)], self.largest, limit)

    @property
    def effective(self) -> float:
        """How many ids there are in effect, (Σ n)² / Σ n²: 1 if every token is the same; NaN without a token."""
        count = self.sums[0]
        square = float(count @ count)
        return float(count.sum()) ** 2 / square if square else np.nan

    @property
    def repeats(self) -> bool:
        """Whether the policy says so few different tokens that which one it is, and where, tells nothing.

        The same contexts then come again and again. Rounding, which is a function of the context, looks like a property
        of the id, and a response is unsure at its beginning alone.
        """
        return self.effective < FEW_IDS

    def share(self) -> TokenShare:
        """How much of Var(d) the id explains."""
        count, total, square = self.sums[:, self.sums[0] >= 2] if self.sums.size else np.zeros((3, 0))
        tokens = float(count.sum())
        if not tokens:
            return TokenShare(np.nan, np.nan, np.nan, np.nan, 0, 0)

        # Both expectations are of products of different tokens, so neither holds the spread within an id.
        squared_mean = (total.sum() ** 2 - square.sum()) / (tokens * (tokens - 1))
        between = float(((total * total - square) / (count - 1)).sum() / tokens - squared_mean)
        variance = float(square.sum() / tokens - squared_mean)
        if variance <= 0:
            return TokenShare(np.nan, np.nan, between, variance, int(tokens), len(count))

        # Of normal values, Σ over pairs of an id has the variance 2 n (n − 1) σ⁴.
        spread = square / count
        error = float(np.sqrt((2 * spread * spread * count / (count - 1)).sum()) / tokens / variance)
        return TokenShare(between / variance, error, between, variance, int(tokens), len(count))


def _count(tokens: Sequence[Tokens], largest: int, limit: int) -> NDArray[np.float64]:
    """Tokens, Σ d and Σ d² of each id: (3, ids)."""
    column = np.concatenate([ids for ids, _ in tokens], dtype=np.int64)
    if largest >= limit:
        column &= limit - 1
    log_ratio = np.concatenate([d for _, d in tokens])
    size = _size(largest, limit)
    sums = np.empty((3, size))
    sums[0] = np.bincount(column, minlength=size)
    sums[1] = np.bincount(column, log_ratio, size)
    np.square(log_ratio, out=log_ratio)
    sums[2] = np.bincount(column, log_ratio, size)
    return sums


def _added(one: NDArray[np.float64], two: NDArray[np.float64]) -> NDArray[np.float64]:
    """The sum of two tables of sums, the narrower one filled up with zeros."""
    large, small = (one, two) if one.shape[1] >= two.shape[1] else (two, one)
    if not small.shape[1]:
        return large
    total = large.copy()
    total[:, : small.shape[1]] += small
    return total


def _size(largest: int, limit: int) -> int:
    """Columns for ids up to the largest: a power of 2, so that few merges have to grow."""
    return min(1 << max(largest, 0).bit_length(), limit)
