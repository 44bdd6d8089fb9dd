"""d = log π − log μ of each token of a packed batch, computed once for everything that is summed over it.

Tokens that do not count keep their place and hold 0, so that sums by row are sums over slices, and no array has to be
packed anew.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray

Floats = NDArray[np.float64]

CAP = 20.0
"""Nats to which d is cut for k3, as the metrics do."""


@dataclass(frozen=True, eq=False)
class TokenRatios:
    """The log-ratio of each token.

    Attributes:
        d: log π − log μ, nats, (N,); 0 where the token does not count.
        k3: exp(d) − 1 − d with d cut to ±`CAP`, nats, (N,); 0 likewise.
        surprise: −log μ, nats, (N,) float32; anything where the token does not count.
        valid: (N,), true on tokens that count: they were sampled, and both sides are finite.
        lengths: (B,) tokens of each row, others included, summing to N.
        mask: (N,), true on tokens that were sampled.
        count: tokens that count.
        index: (B,) position of each row in the log, rising.
        ids: (N,) token ids; None where a row lacks them.
        prompts: (B,) tokens of each prompt; None where they are not recorded.
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
        """The ratios of a packed batch.

        Args:
            train: log π, (N,) float32.
            rollout: log μ, (N,) float32. What is not finite on either side is missing.
            mask: true on sampled tokens, (N,).
            lengths: tokens of each row, masked ones included, (B,), summing to N.
            index: position of each row in the log, (B,), rising; None counts from 0.
            ids: token ids, (N,); None where they are not recorded.
            prompts: tokens of each prompt, (B,); None where they are not recorded.
        """
        d = train.astype(np.float64)
        with np.errstate(invalid="ignore"):  # −inf − (−inf)
            d -= rollout
        valid = np.isfinite(d)
        valid &= mask
        count = int(np.count_nonzero(valid))
        if count < len(d):
            np.copyto(d, 0.0, where=~valid)

        index = np.arange(len(lengths)) if index is None else index
        return cls(d, k3_of(d), -rollout, valid, lengths, mask, count, index, ids, prompts)

    def of_rows(self, rows: NDArray[np.bool_]) -> TokenRatios:
        """The ratios of some rows, which (B,) is true for."""
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
        """Sampled tokens without both log-probs."""
        return int(np.count_nonzero(self.mask)) - self.count

    def by_row(self) -> Floats:
        """Of each row the tokens that count, Σ d, Σ d², Σ k3, and the smallest and largest d: (B, 6)."""
        table = np.zeros((len(self.lengths), 6))
        whole = self.count == len(self.d)
        table[:, 0] = self.lengths if whole else slice_sums(self.valid, self.lengths)
        for column, values in enumerate((self.d, self.d * self.d, self.k3), start=1):
            table[:, column] = slice_sums(values, self.lengths)

        # Zeros in place of tokens that do not count would hide an extreme on their other side.
        filled = self.lengths > 0
        starts = (self.lengths.cumsum() - self.lengths)[filled]
        if len(starts):
            least, most = (self.d, self.d) if whole else (np.where(self.valid, self.d, x) for x in (np.inf, -np.inf))
            table[filled, 4] = np.minimum.reduceat(least, starts)
            table[filled, 5] = np.maximum.reduceat(most, starts)
        table[table[:, 0] == 0, 4:] = 0.0
        return table


def k3_of(d: Floats | float) -> Floats:
    """Compute k3 = exp(d) − 1 − d, nats, with d cut to ±`CAP`: beyond it one token decides every sum. Same shape."""
    cut = torch.from_numpy(np.asarray(d, dtype=np.float64)).clamp(-CAP, CAP)
    k3: Floats = cut.expm1().sub_(cut).numpy()
    return k3


def slice_sums(values: NDArray[np.generic], lengths: NDArray[np.int64]) -> Floats:
    """Sums over consecutive slices of the given lengths, which may be 0: (slices,)."""
    sums = np.zeros(len(lengths))
    filled = lengths > 0
    starts = (lengths.cumsum() - lengths)[filled]
    if len(starts):
        sums[filled] = np.add.reduceat(values, starts, dtype=np.float64 if values.dtype != np.bool_ else np.int64)
    return sums
