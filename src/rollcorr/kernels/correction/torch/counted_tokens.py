"""The tokens of a block that count, brought together: where they lie in it, and how many each sequence has.

Nothing that is computed of them needs a mask, and padding costs nothing. This reads the mask's values, so it is for
host memory alone. It works in numpy: on a few thousand numbers that costs a fraction of what torch asks, and leaves the
interpreter to the other threads.
"""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from rollcorr.kernels.correction.torch.table import Block

SHORT = 512
"""Tokens: runs that are shorter than this on average are not copied one by one, because each costs an operation."""

Place = tuple[int, slice]
"""Where a run of tokens is in its block: row, columns."""


class CountedTokens:
    """Tokens of a block, and their order: by sequence, and in it by place.

    Attributes:
        at: the sequences of the block.
        counts: how many tokens each of these has.
        number: how many all of them have, n.
    """

    def __init__(
        self,
        at: slice,
        counts: list[int],
        whether: np.ndarray,
        runs: list[Place] | None = None,
        index: np.ndarray | None = None,
    ) -> None:
        """Take the mask, and where they lie: runs in order, or places in the flat block, (n,). Neither: everywhere."""
        self.at, self.counts, self.number = at, counts, sum(counts)
        self._whether, self._runs, self._index = whether, runs, index
        lengths = np.array(counts)
        self._present = lengths > 0
        self._starts = (np.cumsum(lengths) - lengths)[self._present]

    def take(self, source: Tensor, out: np.ndarray, spare: np.ndarray) -> None:
        """Widen the tokens of a block, (rows, T) or (tokens,), into (n,); `spare` is overwritten."""
        narrow = source.detach()
        block = (narrow if narrow.dtype in (torch.float32, torch.float64) else narrow.float()).numpy()
        if self._index is not None:
            # Told to clip, numpy writes to `out` at once; no place is out of bounds.
            found = spare.view(block.dtype)[: self.number]
            out[:] = block.reshape(-1).take(self._index, out=found, mode="clip")
        elif self._runs is None:
            out.reshape(block.shape)[:] = block
        else:
            start = 0
            for place in self._runs:
                run = block[place]
                out[start : (start := start + len(run))] = run

    def put(self, values: np.ndarray, out: Tensor, spare: np.ndarray) -> None:
        """Narrow (n,) into a contiguous block, which is 0 elsewhere; `spare` is overwritten."""
        block = out.detach().numpy()
        if self._index is not None:
            narrow = spare.view(block.dtype)[: self.number]
            narrow[:] = values
            block.fill(0)
            block.reshape(-1)[self._index] = narrow
        elif self._runs is None:
            block[:] = values.reshape(block.shape)
        else:
            block.fill(0)
            start = 0
            for place in self._runs:
                run = block[place]
                run[:] = values[start : (start := start + len(run))]

    def mark(self, out: Tensor) -> None:
        """True where a token counts, False elsewhere, in a contiguous bool block."""
        np.not_equal(self._whether, 0, out=out.numpy())

    def sums(self, values: np.ndarray) -> np.ndarray:
        """Σ over each sequence: (..., n) → (..., sequences)."""
        return self._reduced(np.add, values, 0.0)

    def extremes(self, values: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """The smallest and the largest of each sequence, (n,) → (sequences,); (inf, −inf) of one without tokens."""
        return self._reduced(np.minimum, values, np.inf), self._reduced(np.maximum, values, -np.inf)

    def _reduced(self, how: np.ufunc, values: np.ndarray, nothing: float) -> np.ndarray:
        found = np.full((*values.shape[:-1], len(self.counts)), nothing)
        found[..., self._present] = how.reduceat(values, self._starts, axis=-1)
        return found


def row_counts(mask: Tensor) -> list[int]:
    """How many tokens of each row count, (B, T) → B numbers."""
    whether = _bytes(mask)
    if whether.shape[1] < SHORT:
        return np.count_nonzero(whether, axis=1).tolist()  # slower for a token, but one operation
    return [int(np.count_nonzero(row)) for row in whether]


def counted_tokens(mask: Tensor, block: Block) -> CountedTokens | None:
    """The tokens of a block that count; None where there is none."""
    whether = _bytes(mask)
    if block.lengths is not None:
        return _packed(whether, block.lengths)

    T = whether.shape[1]
    counts = row_counts(mask) if block.counts is None else block.counts
    number = sum(counts)
    if number in (0, whether.size):
        return CountedTokens(block.at, counts, whether) if number else None
    runs = None if T < SHORT else _runs(whether, counts)
    index = None if runs is not None else np.flatnonzero(whether)
    return CountedTokens(block.at, counts, whether, runs, index)


def _bytes(mask: Tensor) -> np.ndarray:
    """A bool mask as numbers: its true may be any byte but 0."""
    whether: np.ndarray = mask.view(torch.uint8).numpy()
    return whether


def _packed(whether: np.ndarray, lengths: Tensor) -> CountedTokens | None:
    """As `counted_tokens`, of a packed block."""
    number = int(np.count_nonzero(whether))
    if not number:
        return None
    inside = np.flatnonzero(lengths.numpy())
    first, last = int(inside[0]), int(inside[-1]) + 1
    counts, at = lengths[first:last].tolist(), slice(first, last)
    if number == whether.size:
        return CountedTokens(at, counts, whether)
    index = np.flatnonzero(whether)
    counts = np.diff(np.searchsorted(index, np.cumsum([0, *counts]))).tolist()
    return CountedTokens(at, counts, whether, index=index)


def _runs(whether: np.ndarray, counts: list[int]) -> list[Place] | None:
    """The runs of tokens in each row; None if they are short on average."""
    runs: list[Place] = []
    for i, (row, count) in enumerate(zip(whether, counts, strict=True)):
        if np.count_nonzero(row[:count]) == count:  # padded on the right, as most are
            runs.append((i, slice(0, count)))
            continue
        valid = row != 0
        edges = (np.flatnonzero(valid[1:] != valid[:-1]) + 1).tolist()
        ends = [*([0] if valid[0] else []), *edges, len(row)]
        runs += [(i, slice(start, stop)) for start, stop in zip(ends[::2], ends[1::2], strict=False)]
        if len(runs) * SHORT > whether.size:
            return None
    return runs
