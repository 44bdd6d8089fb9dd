"""Log-ratio d = log π − log μ of each token of a packed batch, computed once for all sums.

Invalid tokens keep their place with value 0, so that sums by row are sums over slices, and no array is packed again.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray

Floats = NDArray[np.float64]

CAP = 20.0
"""Nats to which d is clipped for k3, as in the metrics."""


@dataclass(frozen=True, eq=False)
class TokenRatios:
    """Log-ratios of a packed batch.

    Attributes:
        d: log π − log μ, nats, (N,); 0 on invalid tokens.
        k3: exp(d) − 1 − d with d clipped to ±`CAP`, nats, (N,); 0 on invalid tokens.
        surprise: −log μ, nats, (N,) float32; arbitrary on invalid tokens.
        valid: True on sampled tokens with finite values on both sides, (N,).
        lengths: tokens of each row, invalid ones included, (B,), summing to N.
        mask: True on sampled tokens, (N,).
        count: number of valid tokens.
        index: position of each row in the log, rising, (B,).
        ids: token ids, (N,); None if a row lacks them, the default.
        prompts: tokens of each prompt, (B,); default None, not recorded.
    """

    d: Floats
    k3: Floats
    surprise: NDArray[np.float32]
    valid: NDArray[np.bool_]
    lengths: NDArray[np.int64]
    mask: NDArray[np.bool_]
    count: int
    index: NDArray[np.int64]
    ids: NDArray[np.integer] | None = None
    prompts: NDArray[np.int64] | None = None

    @classmethod
    def of(
        cls,
        train: NDArray[np.float32],
        rollout: NDArray[np.float32],
        mask: NDArray[np.bool_],
        lengths: NDArray[np.int64],
        *,
        index: NDArray[np.int64] | None = None,
        ids: NDArray[np.integer] | None = None,
        prompts: NDArray[np.int64] | None = None,
    ) -> TokenRatios:
        """Compute the log-ratios of a packed batch.

        Args:
            train: log π, nats, (N,) float32.
            rollout: log μ, nats, (N,) float32. A token with a non-finite value on either side is missing.
            mask: True on sampled tokens, (N,).
            lengths: tokens of each row, masked ones included, (B,), summing to N.
            index: position of each row in the log, rising, (B,); defaults to 0, 1, ….
            ids: token ids, (N,); defaults to None, not recorded.
            prompts: tokens of each prompt, (B,); defaults to None, not recorded.
        """
        d = train.astype(np.float64)
        with np.errstate(invalid="ignore"):  # −inf − (−inf) is NaN: invalid
            d -= rollout
        valid = np.isfinite(d)
        valid &= mask
        count = int(np.count_nonzero(valid))
        if count < len(d):
            np.copyto(d, 0.0, where=~valid)

        index = np.arange(len(lengths)) if index is None else index
        return cls(d, k3_of(d), -rollout, valid, lengths, mask, count, index, ids, prompts)

    def of_rows(self, rows: NDArray[np.bool_]) -> TokenRatios:
        """Return the log-ratios of the rows where `rows`, (B,), is True."""
        tokens = np.repeat(rows, self.lengths)
        valid = self.valid[tokens]
        return TokenRatios(
            self.d[tokens],
            self.k3[tokens],
            self.surprise[tokens],
            valid,
            self.lengths[rows],
            self.mask[tokens],
            int(np.count_nonzero(valid)),
            self.index[rows],
            None if self.ids is None else self.ids[tokens],
            None if self.prompts is None else self.prompts[rows],
        )

    @property
    def missing(self) -> int:
        """Return the number of sampled tokens without both log-probs."""
        return int(np.count_nonzero(self.mask)) - self.count

    def by_row(self) -> Floats:
        """Compute the valid tokens, Σ d, Σ d², Σ k3, and minimum and maximum of d of each row: (B, 6)."""
        table = np.zeros((len(self.lengths), 6))
        whole = self.count == len(self.d)
        table[:, 0] = self.lengths if whole else slice_sums(self.valid, self.lengths)
        for column, values in enumerate((self.d, self.d * self.d, self.k3), start=1):
            table[:, column] = slice_sums(values, self.lengths)

        # The zeros of invalid tokens would hide a positive minimum or a negative maximum.
        filled = self.lengths > 0
        starts = (self.lengths.cumsum() - self.lengths)[filled]
        if len(starts):
            least, most = (self.d, self.d) if whole else (np.where(self.valid, self.d, x) for x in (np.inf, -np.inf))
            table[filled, 4] = np.minimum.reduceat(least, starts)
            table[filled, 5] = np.maximum.reduceat(most, starts)
        table[table[:, 0] == 0, 4:] = 0.0
        return table


def k3_of(d: Floats | float) -> Floats:
    """Compute k3 = exp(d) − 1 − d, nats, same shape; d is clipped to ±`CAP`, beyond it one token decides every sum."""
    cut = torch.from_numpy(np.asarray(d, dtype=np.float64)).clamp(-CAP, CAP)
    k3: Floats = cut.expm1().sub_(cut).numpy()
    return k3


def turn_begins(mask: NDArray[np.bool_], lengths: NDArray[np.int64]) -> NDArray[np.bool_]:
    """Return the first token of each turn of a packed batch: a gap in the mask ends a turn, (N,)."""
    begins = mask & ~np.append(False, mask[:-1])
    first = (lengths.cumsum() - lengths)[lengths > 0]
    begins[first] = mask[first]
    return begins


def turns_of(mask: NDArray[np.bool_], lengths: NDArray[np.int64]) -> NDArray[np.int64]:
    """Return the turn of each token of a packed batch, counted from 1, (N,)."""
    turn, first = turn_begins(mask, lengths).cumsum(), (lengths.cumsum() - lengths)[lengths > 0]
    turn -= np.repeat(turn[first] - mask[first], lengths[lengths > 0])
    return turn


def slice_sums(values: NDArray[np.generic], lengths: NDArray[np.int64]) -> Floats:
    """Return sums over consecutive slices of the given lengths, which may be 0: (slices,)."""
    sums = np.zeros(len(lengths))
    filled = lengths > 0
    starts = (lengths.cumsum() - lengths)[filled]
    if len(starts):
        sums[filled] = np.add.reduceat(values, starts, dtype=np.float64 if values.dtype != np.bool_ else np.int64)
    return sums
